"""Events, chunks and lines: exactly the bytes that browsers and HTTP clients read."""

from hypothesis import given
from hypothesis import strategies as st

from protocols.rest.streams.streaming import Lines, chunk, event, heartbeat, retry


def test_an_event_has_its_position_and_its_data() -> None:
    assert event(b'{"a":1}', "0:3,1:4") == b'id: 0:3,1:4\ndata: {"a":1}\n\n'
    assert event(b"{}", kind="gap") == b"event: gap\ndata: {}\n\n"
    assert heartbeat("0:3") == b": nothing new\nid: 0:3\n\n"
    assert heartbeat("") == b": nothing new\n\n"
    assert retry(2000) == b"retry: 2000\n\n"


@given(st.binary(min_size=1, max_size=300))
def test_a_chunk_says_how_long_it_is(data: bytes) -> None:
    head, _, rest = chunk(data).partition(b"\r\n")
    assert int(head, 16) == len(data)
    assert rest == data + b"\r\n"


@given(st.lists(st.integers(0, 40)), st.integers(0, 100))
def test_lines_end_before_they_are_too_long_and_the_first_is_let_in(sizes: list[int], limit: int) -> None:
    lines = Lines(limit)
    taken = 0
    for size in sizes:
        if not lines.add(b"x" * size):
            break
        taken += 1
    body = lines.finish()
    assert body == b"".join(b"x" * size + b"\n" for size in sizes[:taken])
    assert lines.count == taken == (0 if not sizes else max(1, taken))
    assert taken <= 1 or len(body) <= limit
    assert taken == len(sizes) or len(body) + sizes[taken] + 1 > limit
