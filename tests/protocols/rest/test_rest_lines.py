"""Bodies of lines, split in any way."""

from hypothesis import given
from hypothesis import strategies as st

from protocols.rest.splitters import LineSplitter

LIMIT = 8


def expected(body: bytes) -> list[bytes | None]:
    """One entry for each line: its bytes, or None if it is too long."""
    lines = body.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [line if len(line) <= LIMIT else None for line in lines]


def split(parts: list[bytes]) -> list[bytes | None]:
    splitter = LineSplitter(LIMIT)
    found: list[bytes | None] = []
    for part in parts:
        found += splitter.feed(part)
    found += splitter.finish()
    lines: list[bytes | None] = []
    for block in found:
        if block is None:
            lines.append(None)
        else:
            lines += block.removesuffix(b"\n").split(b"\n")
    return lines


@given(body=st.lists(st.sampled_from([b"a", b"\n", b"\r", b"12345678", b"\n\n", b"xyz"])).map(b"".join), data=st.data())
def test_lines_are_the_same_however_the_body_comes(body: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)))))
    parts = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    assert split(parts) == expected(body)
    assert split([body[at : at + 1] for at in range(len(body))]) == expected(body)


def test_nothing_is_kept_of_a_line_that_is_too_long() -> None:
    splitter = LineSplitter(4)
    assert splitter.feed(b"12345") == [None]
    assert splitter.feed(b"6" * 1000) == []
    assert splitter.feed(b"7\nok\n") == [b"ok\n"]
    assert splitter.finish() == []
