"""The C code maps every HTTP body to the same records as the Python code. `make sanitize` runs this, too."""

from __future__ import annotations

import base64
import gc
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadtest.bench.http_mutated import compare, in_python
from loadtest.bench.http_mutated import fate as fate_of
from mapping.record import Record
from mapping.rest import _native
from mapping.rest.incoming import Target
from protocols.rest.errors import RestError
from protocols.rest.media import Format
from protocols.rest.requests import decode_json, decode_text

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

Outcome = tuple[list[Record], list[tuple[int, Any]]] | tuple[int, str]


def entries_of(
    content: st.SearchStrategy[Any], others: dict[str, st.SearchStrategy[Any]] | None = None
) -> st.SearchStrategy[list[Any]]:
    """Lists of entries, few of which have more than a key and a value."""
    usual = st.fixed_dictionaries({"value": content}, optional={"key": content})
    more = st.fixed_dictionaries({"value": content}, optional={"key": content, **MORE, **(others or {})})
    return st.lists(usual | usual | usual | more, max_size=4)


def fate(records: Callable[..., list[Record]], entries: Sequence[Any], *last: bool) -> Outcome:
    """Return the records and the entries that were left to `more`; or the error."""
    left: list[tuple[int, Any]] = []

    def more(index: int, entry: Any) -> Record:
        left.append((index, entry))
        return Record("more", b"%d" % index, None)

    try:
        return records(entries, "topic", 2, HEADERS, more, *last), left
    except RestError as error:
        return error.status, str(error)


@given(entries_of(VALUE, FORMATS), SPACES, SPACES, st.booleans())
@example([{"key": None, "value": None}, {"value": "null"}, {"key": [], "value": {}}], " ", "\n", True)
@example([{"key": "a\\", "value": ' \\" '}, {"key": "", "value": ""}, {"key": 12, "value": "\\\\ "}], " ", "", False)
def test_json_has_the_same_fate(entries: list[Any], before: str, behind: str, ascii_only: bool) -> None:
    separators = (f"{before},{behind}", f"{behind}:{before}")
    body = json.dumps({"records": entries}, separators=separators, ensure_ascii=ascii_only).encode()
    decoded = decode_json(body, 100)
    target = Target("topic", 2, HEADERS, (), Format.JSON)
    made = fate_of(_native.json_records, decoded, "topic", 2, HEADERS, target.json_record)
    assert made == fate_of(in_python, target.json_record, decoded)


@given(entries_of(st.none() | WORD | BASE64 | DAMAGED), st.booleans())
@example([{"key": "YQ==", "value": "YWI="}, {"key": "", "value": "YWJj"}], True)
@example([{"value": "YR=="}, {"value": "YWJ="}], True)  # unused bits that are not zero
@example([{"key": "YQ", "value": "YWI"}], True)
@example([{"value": "===="}], True)
@example([{"value": "="}], True)
def test_text_and_base64_have_the_same_fate(entries: list[Any], binary: bool) -> None:
    embedded = Format.BINARY if binary else Format.TEXT
    decoded = decode_text(json.dumps({"records": entries}).encode(), 100, embedded)
    target = Target("topic", 2, HEADERS, (), embedded)
    made = fate_of(_native.text_records, decoded, "topic", 2, HEADERS, target.text_record, binary)
    assert made == fate_of(in_python, target.text_record, decoded)


def test_thousands_of_mutations_have_the_same_fate() -> None:
    """A million have, by `python -m loadtest.bench.http_mutated`."""
    decoded, records = compare(4_000, seed=2)
    assert 1_000 < decoded < records


def test_usual_bodies_are_not_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compact or with spaces; only entries with further fields are left to Python."""
    entries: list[Any] = [{"key": f"sensor-{n}", "value": {"n": n, "text": "a b"}} for n in range(3)]
    monkeypatch.setattr(msgspec.json, "format", None)  # the function that the Python code calls for each value
    for separators in ((",", ":"), (", ", ": ")):
        body = json.dumps({"records": entries}, separators=separators).encode()
        records, left = fate(_native.json_records, decode_json(body, 9))
        assert not left
        assert records == [
            Record("topic", b"sensor-%d" % n, b'{"n":%d,"text":"a b"}' % n, HEADERS, None, 2) for n in range(3)
        ]
    entries[1]["timestamp"] = 5
    decoded = decode_json(json.dumps({"records": entries}).encode(), 9)
    assert fate(_native.json_records, decoded)[1] == [(1, decoded[1])]


def test_an_error_of_more_is_raised() -> None:
    def more(index: int, entry: Any) -> Record:
        entries.clear()
        raise RestError(422, "no")

    entries = decode_json(b'{"records":[{"value":1},{"value":1,"timestamp":1},{"value":2}]}', 9)
    with pytest.raises(RestError):
        _native.json_records(entries, "topic", None, HEADERS, more)
    assert not entries


@pytest.mark.parametrize("entries", [[None], [1, "x"], ()])
def test_objects_that_are_no_entries_raise_and_do_not_crash(entries: Any) -> None:
    for records, last in ((_native.json_records, ()), (_native.text_records, (True,))):
        with pytest.raises((AttributeError, TypeError)):
            records(entries, "topic", None, HEADERS, None, *last)  # type: ignore[operator]


def test_nothing_is_kept() -> None:
    """Thousands of bodies of all kinds leak no references."""
    good = decode_json(
        b'{"records":[{"key":"a\\u00fc","value":{"a": 1}},{"value":1,"timestamp":1},{"key":null,"value":2}]}', 9
    )
    texts = decode_text(b'{"records":[{"key":"YQ==","value":"YWI"},{"value":"YQ=="}]}', 9, Format.BINARY)
    bad = decode_text(b'{"records":[{"key":"YQ==","value":"Y"}]}', 9, Format.BINARY)

    def run(times: int) -> int:
        for _ in range(times):
            fate(_native.json_records, good)
            fate(_native.text_records, texts, True)
            fate(_native.text_records, bad, True)
        gc.collect()
        return sys.getallocatedblocks()

    run(200)
    before = run(10)
    assert run(2_000) < before + 200
