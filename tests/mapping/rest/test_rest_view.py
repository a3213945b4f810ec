"""Records in HTTP answers: every record can be shown, and filters match stored bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapping.record import Received
from mapping.rest.outgoing import RecordFilter, view_line
from protocols.rest.errors import RestError
from protocols.rest.media import Format

BAD = b"\xff\xfe"


def received(key: bytes | None, value: bytes | None, *headers: tuple[str, bytes | None]) -> Received:
    return Received("t", key, value, headers, 5, 1, 7)


@given(st.none() | st.binary(max_size=20), st.none() | st.binary(max_size=20), st.sampled_from(Format))
def test_every_record_is_one_line_of_json(key: bytes | None, value: bytes | None, embedded: Format) -> None:
    line = view_line(received(key, value), embedded)
    assert b"\n" not in line
    assert b"\r" not in line
    shown = json.loads(line)
    assert (shown["topic"], shown["partition"], shown["offset"], shown["timestamp"]) == ("t", 1, 7, 5)


def test_a_part_that_the_format_cannot_represent_is_marked() -> None:
    both = json.loads(view_line(received(BAD, BAD), Format.JSON))
    assert (both["key"], both["key_format"], both["value"], both["value_format"]) == (
        "//4=",
        "binary",
        "//4=",
        "binary",
    )
    value = json.loads(view_line(received(b"k", BAD, ("h", b"1")), Format.TEXT))
    assert (value["key"], value["value"], value["value_format"]) == ("k", "//4=", "binary")
    assert "key_format" not in value
    assert value["headers"] == [{"key": "h", "value": "MQ=="}]
    key = json.loads(view_line(received(BAD, b'{"a":1}'), Format.JSON))
    assert (key["key_format"], key["value"]) == ("binary", {"a": 1})
    assert "value_format" not in key
    plain = json.loads(view_line(received(BAD, BAD), Format.BINARY))
    assert "key_format" not in plain


def test_line_feeds_of_stored_json_do_not_break_the_line() -> None:
    line = view_line(received(None, b'{\r\n  "a": [1,\n2]}'), Format.JSON)
    assert b"\n" not in line
    assert json.loads(line)["value"] == {"a": [1, 2]}


def test_keys_are_alternatives_and_headers_are_all_needed() -> None:
    everything = RecordFilter()
    assert everything.everything
    assert everything.matches(received(None, None))
    keys = RecordFilter(keys=("a", "é"))
    assert keys.matches(received("é".encode(), None))
    assert not keys.matches(received(b"b", None))
    assert not keys.matches(received(None, None))
    headers = RecordFilter(headers=("h:1", "i:x:y"))
    assert headers.matches(received(None, None, ("i", b"x:y"), ("h", b"2"), ("h", b"1")))
    assert not headers.matches(received(None, None, ("h", b"1")))
    for text in ("novalue", ":1"):
        with pytest.raises(RestError):
            RecordFilter(headers=(text,))
