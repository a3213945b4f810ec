import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapping.record import Headers, Received, Record
from mapping.rest.incoming import standard_headers, to_records, trace_headers
from mapping.rest.outgoing import UndecodableError, from_record
from protocols.rest.errors import RestError
from protocols.rest.media import Format
from protocols.rest.responses import encode

STANDARD = standard_headers(Format.JSON, "anonymous")


def records_of(
    body: Any, embedded: Format = Format.JSON, partition: int | None = None, trace: Headers = ()
) -> list[Record]:
    raw = body if isinstance(body, bytes) else json.dumps({"records": body}).encode()
    return to_records(raw, embedded, topic="t", partition=partition, limit=1000, principal="anonymous", trace=trace)


def received(record: Record, **changes: Any) -> Received:
    fields: dict[str, Any] = {
        "topic": "t", "key": record.key, "value": record.value, "headers": record.headers, "timestamp": 1,
        "partition": 0, "offset": 9,
    }  # fmt: skip
    return Received(**{**fields, **changes})


def shown(record: Record, embedded: Format = Format.JSON) -> dict[str, Any]:
    item: dict[str, Any] = json.loads(encode(from_record(received(record), embedded)))
    return item


def test_json_values_are_compact_and_keep_every_digit_and_repeated_name() -> None:
    body = b'{"records": [{"value": {"a": 1.10, "a": 12345678901234567890, "b c": [ 1e5 , -0 ]} }]}'
    assert records_of(body)[0].value == b'{"a":1.10,"a":12345678901234567890,"b c":[1e5,-0]}'


@pytest.mark.parametrize("embedded", list(Format))
def test_null_is_a_tombstone_in_every_format(embedded: Format) -> None:
    (record,) = records_of([{"value": None, "key": "aw=="}], embedded)
    assert record.value is None
    assert shown(record, embedded)["value"] is None


@pytest.mark.parametrize("value", [0, False, True, 1.5, "", {}, []])
def test_numbers_booleans_and_empty_values_are_values(value: Any) -> None:
    (record,) = records_of([{"value": value}])
    assert record.value == json.dumps(value).encode()
    assert shown(record)["value"] == value


@pytest.mark.parametrize(
    ("key", "stored", "back"),
    [
        ("kitchen/temp", b"kitchen/temp", "kitchen/temp"),
        ("42", b"42", "42"),
        ('a"b\\', b'a"b\\', 'a"b\\'),
        ("ü", "ü".encode(), "ü"),
        ("", b"", ""),
        ({"a": [1, 2]}, b'{"a":[1,2]}', {"a": [1, 2]}),
        ([1], b"[1]", [1]),
        (42, b"42", "42"),  # the text of a number: its type is not kept
        (None, None, None),
    ],
)
def test_a_string_key_is_its_bare_text(key: Any, stored: bytes | None, back: Any) -> None:
    (record,) = records_of([{"key": key, "value": 1}])
    assert record.key == stored
    assert shown(record)["key"] == back


def test_a_key_that_another_bridge_wrote_with_quotes_is_read_as_its_text() -> None:
    assert shown(Record("t", b'"abc"', b"1"))["key"] == "abc"
    assert shown(Record("t", b"{not json", b"1"))["key"] == "{not json"


@given(st.binary(), st.binary() | st.none())
def test_binary_records_round_trip(value: bytes, key: bytes | None) -> None:
    entry = {"value": base64.b64encode(value).decode()}
    if key is not None:
        entry["key"] = base64.b64encode(key).decode()
    (record,) = records_of([entry], Format.BINARY)
    assert (record.value, record.key) == (value, key)
    item = shown(record, Format.BINARY)
    assert base64.b64decode(item["value"]) == value
    assert item["key"] == entry.get("key")


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_text_records_round_trip(text: str) -> None:
    (record,) = records_of([{"value": text, "key": text}], Format.TEXT)
    assert record.value == record.key == text.encode()
    item = shown(record, Format.TEXT)
    assert item["value"] == item["key"] == text


jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
).filter(lambda value: not any(0xD800 <= ord(char) <= 0xDFFF for char in json.dumps(value, ensure_ascii=False)))


@given(jsons, st.sampled_from([None, 0, 3]))
def test_json_records_round_trip_however_they_are_written(value: Any, indent: int | None) -> None:
    body = json.dumps({"records": [{"value": value}]}, indent=indent, ensure_ascii=False).encode()
    (record,) = records_of(body)
    assert record.value == (
        None if value is None else json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    )
    assert shown(record)["value"] == value


@pytest.mark.parametrize("padded", ["YQ==", "YQ=", "YQ"])
def test_base64_may_lack_its_padding(padded: str) -> None:
    (record,) = records_of([{"value": padded}], Format.BINARY)
    assert record.value == b"a"


@pytest.mark.parametrize("wrong", ["!!", "a", "Y Q==", "YQ==YQ==", "ü", "YQ==="])
def test_malformed_base64_is_a_422_for_the_request(wrong: str) -> None:
    with pytest.raises(RestError) as caught:
        records_of([{"value": "YQ=="}, {"value": wrong}], Format.BINARY)
    assert caught.value.status == 422
    assert caught.value.message.startswith(f"{wrong!r} is not base64")  # as it was sent


@pytest.mark.parametrize(
    "entry",
    [
        {"value": 1, "partition": -1},
        {"value": 1, "partition": 2**31},
        {"value": 1, "timestamp": -1},
        {"value": 1, "timestamp": 2**63},
        {"value": 1, "timestamp": 253_402_300_800_000},
        {"value": 1, "timestamp": 1_767_225_600_000_000},
        {"value": 1, "headers": [{"key": "a", "value": "!!"}]},
    ],
)
def test_numbers_out_of_range_are_a_422(entry: dict[str, Any]) -> None:
    with pytest.raises(RestError) as caught:
        records_of([entry])
    assert caught.value.status == 422


def test_the_last_millisecond_of_the_year_9999_is_a_timestamp() -> None:
    assert records_of([{"value": 1, "timestamp": 253_402_300_799_999}])[0].timestamp == 253_402_300_799_999


def test_a_partition_stands_in_the_path_or_in_the_record() -> None:
    assert records_of([{"value": 1, "partition": 2}])[0].partition == 2
    assert records_of([{"value": 1}], partition=1)[0].partition == 1
    with pytest.raises(RestError) as caught:
        records_of([{"value": 1}, {"value": 1, "partition": 2}], partition=1)
    assert caught.value.status == 400
    assert "`partition` - at `$.records[1]`" in caught.value.validation_errors[0]


def test_every_record_says_where_it_came_from() -> None:
    (record,) = records_of([{"value": 1, "timestamp": 5}])
    assert record.headers == (
        ("content-type", b"application/json"),
        ("gw.protocol", b"http"),
        ("gw.client", b"anonymous"),
    )
    assert record.timestamp == 5


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_headers_keep_order_duplicates_and_nulls_and_cannot_forge_ours() -> None:
    fields = [
        {"key": "a", "value": b64("1")},
        {"key": "correlation-id", "value": b64("c")},
        {"key": "a", "value": None},
        {"key": "gw.client", "value": b64("root")},
        {"key": "mqtt.topic", "value": b64("x/y")},
        {"key": "content-type", "value": b64("text/csv")},
    ]
    (record,) = records_of([{"value": 1, "headers": fields}])
    assert record.headers == (
        ("a", b"1"),
        ("correlation-id", b"c"),
        ("a", None),
        ("user.gw.client", b"root"),
        ("user.mqtt.topic", b"x/y"),
        ("content-type", b"text/csv"),
        ("gw.protocol", b"http"),
        ("gw.client", b"anonymous"),
    )


def test_the_trace_context_becomes_headers_unless_the_record_has_its_own() -> None:
    trace = trace_headers("00-aa-bb-01", "v=1")
    plain, own = records_of(
        [{"value": 1}, {"value": 1, "headers": [{"key": "traceparent", "value": b64("mine")}]}], trace=trace
    )
    assert plain.headers[-2:] == (("traceparent", b"00-aa-bb-01"), ("tracestate", b"v=1"))
    assert [name for name, _ in own.headers].count("traceparent") == 1
    assert ("tracestate", b"v=1") not in own.headers
    assert trace_headers(None, "v=1") == ()


def test_headers_are_shown_raw_and_left_out_when_there_are_none() -> None:
    item = shown(Record("t", None, b"1", (("a", b"\x00"), ("a", None))))
    assert item["headers"] == [{"key": "a", "value": "AA=="}, {"key": "a", "value": None}]
    assert "headers" not in shown(Record("t", None, b"1"))


@pytest.mark.parametrize(
    ("record", "embedded", "part"),
    [
        (Record("t", None, b"hello"), Format.JSON, "value"),
        (Record("t", None, b""), Format.JSON, "value"),
        (Record("t", None, b'"\xff"'), Format.JSON, "value"),
        (Record("t", None, b"[" * 100_000 + b"]" * 100_000), Format.JSON, "value"),
        (Record("t", b"\xff", b"1"), Format.JSON, "key"),
        (Record("t", b"{\xff", b"1"), Format.JSON, "key"),
        (Record("t", None, b"\xff"), Format.TEXT, "value"),
        (Record("t", b"\xff", b"a"), Format.TEXT, "key"),
    ],
)
def test_the_error_of_an_undecodable_record_names_it(record: Record, embedded: Format, part: str) -> None:
    with pytest.raises(
        UndecodableError, match=f"^Failed to decode: the {part} of the record at offset 9 of t, partition 0"
    ):
        from_record(received(record), embedded)


@given(st.binary(), st.binary() | st.none())
def test_any_stored_bytes_can_be_shown_as_binary(value: bytes, key: bytes | None) -> None:
    item = shown(Record("t", key, value), Format.BINARY)
    assert base64.b64decode(item["value"]) == value


@given(st.binary())
def test_no_stored_bytes_raise_anything_but_undecodable(value: bytes) -> None:
    for embedded in (Format.JSON, Format.TEXT):
        for key in (None, value):
            try:
                encoded = encode(from_record(received(Record("t", key, value)), embedded))
            except UndecodableError:
                continue
            json.loads(encoded)


def test_an_integer_may_be_written_as_a_number_with_nothing_behind_the_point() -> None:
    (record,) = records_of([{"value": 1, "partition": 1.0, "timestamp": 1.7e12}])
    assert (record.partition, record.timestamp) == (1, 1_700_000_000_000)
    for field in ("partition", "timestamp"):
        with pytest.raises(RestError) as caught:
            records_of([{"value": 1, field: 1.5}])
        assert caught.value.status == 400
        assert f"$.records[0].{field}" in caught.value.validation_errors[0]
