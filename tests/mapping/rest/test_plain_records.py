"""Plain records, which msgspec decodes to what is stored, are mapped as any others."""

from __future__ import annotations

import base64
import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mapping.record import Record
from mapping.rest.incoming import RUN, Target, from_lines
from protocols.rest.media import Format
from tests.support.http_mutated import agrees, compare

HEADERS = (("content-type", b"application/json"), ("gw.client", b"me"))
SPACES = st.text(" \t\r\n", max_size=2)
WORD = st.text(max_size=6) | st.sampled_from(
    ["null", "a b", '"', "\\", "\n", "kitchen/temp", "k\u00fcche", "\U0001f600"]
)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORD, inner, max_size=3),
    max_leaves=6,
)
BASE64 = st.binary(max_size=12).map(lambda data: base64.b64encode(data).decode())
DAMAGED = st.text("ABab01+/=-_ \u00fc", max_size=9)
MORE: dict[str, st.SearchStrategy[Any]] = {
    "partition": st.none() | st.integers(0, 3),
    "timestamp": st.none() | st.integers(0, 2**41),
    "headers": st.lists(st.fixed_dictionaries({"key": WORD, "value": st.none() | BASE64}), max_size=1),
}
FORMATS: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(
    ("key_format", "value_format"), st.sampled_from(["json", "text"])
)


def entries_of(
    content: st.SearchStrategy[Any], others: dict[str, st.SearchStrategy[Any]] | None = None
) -> st.SearchStrategy[list[Any]]:
    """Lists of entries, few of which have more than a key and a value."""
    usual = st.fixed_dictionaries({"value": content}, optional={"key": content})
    more = st.fixed_dictionaries({"value": content}, optional={"key": content, **MORE, **(others or {})})
    return st.lists(usual | usual | usual | more, max_size=4)


@given(entries_of(VALUE, FORMATS), SPACES, SPACES, st.booleans())
@example([{"key": None, "value": None}, {"value": "null"}, {"key": [], "value": {}}], " ", "\n", True)
@example([{"key": "a\\", "value": ' \\" '}, {"key": "", "value": ""}, {"key": 12, "value": "\\\\ "}], " ", "", False)
def test_json_has_the_same_fate(entries: list[Any], before: str, behind: str, ascii_only: bool) -> None:
    separators = (f"{before},{behind}", f"{behind}:{before}")
    body = json.dumps({"records": entries}, separators=separators, ensure_ascii=ascii_only).encode()
    agrees(Target("topic", 2, HEADERS, (), Format.JSON), body)


@given(entries_of(st.none() | WORD | BASE64 | DAMAGED), st.booleans())
@example([{"key": "YQ==", "value": "YWI="}, {"key": "", "value": "YWJj"}], True)
@example([{"value": "YR=="}, {"value": "YWJ="}], True)  # unused bits that are not zero
@example([{"key": "YQ", "value": "YWI"}], True)
@example([{"value": "===="}], True)
@example([{"value": "="}], True)
def test_text_and_base64_have_the_same_fate(entries: list[Any], binary: bool) -> None:
    embedded = Format.BINARY if binary else Format.TEXT
    agrees(Target("topic", 2, HEADERS, (), embedded), json.dumps({"records": entries}).encode())


@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize(
    "body", [b"{}", b'{"records":[]}', b'{"records":[{"value":null},{"value":null}]}', b"[", b"\xff"]
)
def test_bodies_as_a_whole_have_the_same_fate(form: Format, body: bytes) -> None:
    agrees(Target("topic", None, HEADERS, (), form), body, 1)


def test_thousands_of_mutations_have_the_same_fate() -> None:
    """A million have, by `python -m tests.support.http_mutated`."""
    plain, records = compare(4_000, seed=2)
    assert 1_000 < plain < records


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_usual_bodies_are_plain(separators: tuple[str, str]) -> None:
    entries: list[Any] = [{"key": f"sensor-{n}", "value": {"n": n, "text": "a b"}} for n in range(3)]
    target = Target("topic", 2, HEADERS, (), Format.JSON)
    assert target.plain_records(json.dumps({"records": entries}, separators=separators).encode(), 9) == [
        Record("topic", b"sensor-%d" % n, b'{"n":%d,"text":"a b"}' % n, HEADERS, None, 2) for n in range(3)
    ]
    entries[1]["timestamp"] = 5
    assert target.plain_records(json.dumps({"records": entries}, separators=separators).encode(), 9) is None


GOOD = b'{"value":1}'


@given(entries_of(VALUE, FORMATS), SPACES.map(lambda text: text.replace("\n", "")))
def test_lines_have_the_same_fate_together_and_alone(entries: list[Any], space: str) -> None:
    lines = [json.dumps(entry, separators=(f"{space},", f":{space}")).encode() + b"\n" for entry in entries]
    runs = list(from_lines(b"".join(lines), "topic", "me"))
    alone = [run for line in lines for run in from_lines(line + b"\n", "topic", "me")]  # a blank line: not plain
    assert list(itertools.chain(*runs)) == list(itertools.chain(*alone))


@given(st.lists(st.sampled_from([b"1", b"{", b"", GOOD, b'{"value":1,"timestamp":-1}', b"\xff"]), max_size=300))
def test_a_bad_line_is_reported_in_its_place(lines: list[bytes]) -> None:
    """Also those beside others of a large block, which come in short runs."""
    runs = list(from_lines(b"\n".join(lines), "topic", "me"))
    found = list(itertools.chain(*runs))
    assert [isinstance(one, Record) for one in found] == [line == GOOD for line in lines if line]
    assert all(len(run) <= RUN or all(isinstance(one, Record) for one in run) for run in runs)
