import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.rest.errors import RestError
from protocols.rest.media import Format
from protocols.rest.requests import decode_json, decode_text

LIMIT = 10


def refused(body: bytes, embedded: Format = Format.JSON) -> RestError:
    with pytest.raises(RestError) as caught:
        decode(body, embedded)
    return caught.value


def decode(body: bytes, embedded: Format) -> object:
    return decode_json(body, LIMIT) if embedded is Format.JSON else decode_text(body, LIMIT, embedded)


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"records":[{"key":"a"}]}', "missing required field `value` - at `$.records[0]`"),
        (b'{"records":[{"value":1,"foo":1}]}', "unknown field `foo` - at `$.records[0]`"),
        (b'{"records":[],"foo":1}', "unknown field `foo`"),
        (
            b'{"records":[{"value":1,"partition":"0"}]}',
            "Expected `number | null`, got `str` - at `$.records[0].partition`",
        ),
        (b'{"records":[{"value":1,"timestamp":true}]}', "$.records[0].timestamp"),
        (b'{"records":[{"value":1,"headers":[{"key":"a"}]}]}', "missing required field `value`"),
        (b'{"records":[{"value":1,"headers":{"a":"b"}}]}', "$.records[0].headers"),
        (b'{"records":{}}', "$.records"),
        (b'{"records":null}', "$.records"),
        (b"[]", "Expected `object`, got `array`"),
        (b'"records"', "Expected `object`, got `str`"),
    ],
)
def test_a_violation_of_the_contract_is_a_400_that_names_the_place(body: bytes, detail: str) -> None:
    error = refused(body)
    assert error.status == 400
    assert error.message == "Validation error on: Schema validation error"
    assert detail in error.validation_errors[0]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"records":[{"value":1}]} trailing',
        b'{"records":[{"value":"\xff"}]}',
        b'{"records":[{"value":NaN}]}',
        b'{"records":[{"value":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        '{"records":[]}'.encode("utf-16"),
    ],
)
@pytest.mark.parametrize("embedded", list(Format))
def test_malformed_json_is_a_400(body: bytes, embedded: Format) -> None:
    error = refused(body, embedded)
    assert error.status in (400, 422)
    assert error.message


def test_a_body_without_records_is_a_422_and_an_empty_list_is_fine() -> None:
    assert refused(b"{}").status == 422
    assert decode_json(b'{"records":[]}', LIMIT) == []


def test_more_records_than_the_limit_are_a_413() -> None:
    body = json.dumps({"records": [{"value": 1}] * (LIMIT + 1)}).encode()
    assert refused(body).status == 413
    assert len(decode_json(json.dumps({"records": [{"value": 1}] * LIMIT}).encode(), LIMIT)) == LIMIT


@pytest.mark.parametrize("embedded", [Format.TEXT, Format.BINARY])
@pytest.mark.parametrize("field", ["key", "value"])
def test_text_and_binary_take_strings_only(embedded: Format, field: str) -> None:
    record: dict[str, Any] = {"value": "a", field: {"b": 1}}
    error = refused(json.dumps({"records": [record]}).encode(), embedded)
    assert error.status == 422
    assert error.message == f"Because the embedded format is '{embedded.value}', the {field} must be a string"


def test_a_header_that_is_no_string_is_still_a_400_in_text() -> None:
    error = refused(b'{"records":[{"value":"a","headers":[{"key":"h","value":1}]}]}', Format.TEXT)
    assert error.status == 400


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: b'{"records":[{"value":' + text.encode()))
def test_random_bytes_are_refused_and_never_raise_anything_else(body: bytes) -> None:
    for embedded in Format:
        try:
            decode(body, embedded)
        except RestError as error:
            assert error.status in (400, 413, 422)  # noqa: PT017 - nothing else may come out


jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(jsons)
def test_every_json_value_is_kept_as_written(value: Any) -> None:
    try:
        text = json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate is not text
        return
    (record,) = decode_json(b'{"records":[{"value":' + text + b"}]}", LIMIT)
    assert bytes(record.value) == text


@pytest.mark.parametrize("embedded", Format)
@pytest.mark.parametrize("text", [r"\ud800", r"a\uDfffb", r"\ud83d\ude00\ud83d", r"\ud83dx"])
def test_half_of_a_surrogate_pair_is_named(text: str, embedded: Format) -> None:
    body = b'{"records":[{"key":"k","value":"%s"}]}' % text.encode()
    assert str(refused(body, embedded)).endswith("the body is not JSON: a string has half of a surrogate pair")
