"""CloudEvents in the three modes of HTTP; examples after the specification's own."""

import json
from typing import Any

import pytest

from protocols.rest.cloud_events import from_batch, from_fields, from_json
from protocols.rest.errors import RestError

LEAST: dict[str, Any] = {"id": "1", "source": "/s", "specversion": "1.0", "type": "t"}
FIELDS = [("ce-" + name, value) for name, value in LEAST.items()]


def event(**more: Any) -> bytes:
    return json.dumps(LEAST | more).encode()


@pytest.mark.parametrize(
    ("more", "data", "content_type"),
    [
        ({}, b"", None),
        ({"data": {"a": [1, 2]}}, b'{"a":[1,2]}', "application/json"),
        ({"data": None}, b"null", "application/json"),
        ({"data": "text"}, b'"text"', "application/json"),
        (
            {"data": 1.50, "datacontenttype": "application/vnd.x+json; charset=utf-8"},
            b"1.5",
            "application/vnd.x+json; charset=utf-8",
        ),
        ({"data": "<a/>", "datacontenttype": "text/xml"}, b"<a/>", "text/xml"),
        ({"data_base64": "/wA=", "datacontenttype": "image/png"}, b"\xff\x00", "image/png"),
        ({"data_base64": "MQ=="}, b"1", None),
    ],
)
def test_data_of_structured_events(more: dict[str, Any], data: bytes, content_type: str | None) -> None:
    found = from_json(event(**more))
    assert (found.attributes, found.data, found.content_type) == (LEAST, data, content_type)


def test_attributes_are_canonical_strings() -> None:
    found = from_json(event(time="2026-11-21T20:00:00.5+01:00", partitionkey="ü", flag=True, number=-7, none=None))
    assert found.attributes == LEAST | {
        "time": "2026-11-21T20:00:00.5+01:00",
        "partitionkey": "ü",
        "flag": "true",
        "number": "-7",
    }


@pytest.mark.parametrize(
    ("more", "told"),
    [
        *[({name: None}, f"no `{name}`") for name in LEAST],
        *[({name: ""}, f"`{name}` is empty") for name in ("id", "source", "type", "subject")],
        ({"specversion": "0.3"}, "version 1.0"),
        ({"Upper": "x"}, "lower-case"),
        ({"with-dash": "x"}, "lower-case"),
        ({"time": "yesterday"}, "RFC 3339"),
        ({"time": "2026-13-01T00:00:00Z"}, "RFC 3339"),
        ({"time": "٢٠٢٦-11-21T20:00:00Z"}, "RFC 3339"),
        ({"number": 2**31}, "32 bits"),
        ({"number": 1.5}, "$.number"),
        ({"object": {}}, "$.object"),
        ({"data": 1, "data_base64": "MQ=="}, "not both"),
        ({"data": 1, "datacontenttype": "text/plain"}, "must be a string"),
        ({"data_base64": "%"}, "$.data_base64"),
    ],
)
def test_an_invalid_event_is_a_400_that_names_the_place(more: dict[str, Any], told: str) -> None:
    with pytest.raises(RestError) as caught:
        from_json(event(**more))
    assert caught.value.status == 400
    assert told in caught.value.validation_errors[0]


def test_a_batch_names_the_event_that_is_none() -> None:
    assert len(from_batch(b"[%b,%b]" % (event(), event(id="2")), 2)) == 2
    assert from_batch(b"[]", 2) == []
    with pytest.raises(RestError) as caught:
        from_batch(b"[%b,{}]" % event(), 2)
    assert "$[1]" in caught.value.validation_errors[0]
    with pytest.raises(RestError) as caught:
        from_batch(b"[%b]" % b",".join([event()] * 3), 2)
    assert caught.value.status == 413


def test_binary_events() -> None:
    fields = [*FIELDS, ("CE-Subject", '"a%20\\"b\\""'), ("ce-name", "Euro %E2%82%AC %F0%9F%98%80"), ("Host", "h")]
    found = from_fields(fields, "image/png", b"\xff")
    assert found.attributes == LEAST | {"subject": 'a "b"', "name": "Euro € 😀"}
    assert (found.data, found.content_type) == (b"\xff", "image/png")


@pytest.mark.parametrize(
    "fields",
    [
        *[[field for field in FIELDS if field[0] != f"ce-{name}"] for name in LEAST],
        [*FIELDS, FIELDS[0]],
        [*FIELDS, ("ce-x", "%FF")],
        [*FIELDS, ("ce-x", "\udcff")],
        [*FIELDS, ("ce-datacontenttype", "text/plain")],
        [*FIELDS, ("ce-a_b", "x")],
    ],
)
def test_binary_events_that_are_none(fields: list[tuple[str, str]]) -> None:
    with pytest.raises(RestError) as caught:
        from_fields(fields, None, b"")
    assert caught.value.status == 400
