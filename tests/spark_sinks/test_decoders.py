"""The Python decoders, with bytes from other encoders, examples from RFCs, and arbitrary bytes."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import cbor2
import fastavro
import msgspec
import pytest
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spark_sinks.decoders import avro, protobuf
from spark_sinks.decoders.cbor import Cbor
from spark_sinks.decoders.protobuf import Protobuf
from spark_sinks.decoders.senml import MOST_READINGS, Senml
from spark_sinks.decoders.values import Decoder, Wanted, decoded

SENT_MS = 1_700_000_000_000
ALL = (
    Wanted("load", "double", "at.load", False), Wanted("n", "long", "n", True),
    Wanted("on", "boolean", "on", True), Wanted("who", "string", "who", True),
)  # fmt: skip
PACK = (
    Wanted("name", "string", "n", False), Wanted("unit", "string", "u", True), Wanted("v", "double", "v", True),
    Wanted("text", "string", "vs", True), Wanted("on", "boolean", "vb", True), Wanted("data", "string", "vd", True),
    Wanted("sum", "double", "s", True),
)  # fmt: skip

# RFC 8428, 6: the pack of 5.1.2's third example in CBOR.
RFC_CBOR = bytes.fromhex(
    "87a721781b75726e3a6465763a6f773a3130653230373361303130383030363a22fb41d303a15b0010622361412005006776"
    "6f6c7461676501615602fb405e066666666666a3006763757272656e74062402fb3ff3333333333333a3006763757272656e"
    "74062302fb3ff4cccccccccccda3006763757272656e74062202fb3ff6666666666666a3006763757272656e74062102f93e"
    "00a3006763757272656e74062002fb3ff999999999999aa3006763757272656e74060002fb3ffb333333333333"
)


def read(decoder: Decoder, value: bytes | None) -> list[tuple[Any, ...]]:
    error, rows = decoded(decoder, value, SENT_MS)
    assert error is None
    return list(rows)


def fault(decoder: Decoder, value: bytes | None) -> str:
    error, rows = decoded(decoder, value, SENT_MS)
    assert error
    assert not rows
    return error


def test_maps_of_cbor() -> None:
    decoder = pickle.loads(pickle.dumps(Cbor(ALL, "when")))  # it is sent to other processes
    at = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    good = {
        (21.5, 7, True, "Küche"): {"at": {"load": 21.5}, "n": 7, "on": True, "who": "Küche"},
        (273.15, None, None, None): {"at": {"load": Decimal("273.15")}, "n": 2**63, "on": 1, "who": 5},
        (-3.0, -(2**63), False, None): {"at": {"load": -3}, "n": -(2**63), "on": False, "who": None},
    }
    for row, value in good.items():
        assert read(decoder, cbor2.dumps(value)) == [(*row, None)]
    times = {SENT_MS: str(SENT_MS), 1.5: "1.5", "noon": "noon", at: "2023-11-14T22:13:20Z", True: "bool"}
    for said, read_as in times.items():
        assert read(decoder, cbor2.dumps({"at": {"load": 1}, "when": said}))[0][-1] == read_as
    [row] = read(decoder, cbor2.dumps({"at": {"load": 1}, "when": at}, datetime_as_timestamp=True))
    assert row[-1] == str(SENT_MS)
    by_number = Cbor((Wanted("v", "double", "2.1", False),), None)
    assert read(by_number, cbor2.dumps({2: {1: 4.5}})) == read(by_number, cbor2.dumps({"2": {"1": 4.5}}))
    assert fault(decoder, cbor2.dumps({"at": {"load": float("nan")}})) == "load is missing or not a finite number"
    assert fault(decoder, cbor2.dumps({"at": 5})) == "load is missing or not a finite number"
    assert fault(decoder, cbor2.dumps([1])) == "the value is not a CBOR map"
    assert fault(decoder, cbor2.dumps({}) + b"\x00").startswith("the value is not CBOR: bytes follow")
    assert fault(decoder, b"\x81" * 1000 + b"\x01") == "the value is not CBOR"
    assert fault(decoder, b"\xa1") == "the value is not CBOR"
    assert fault(decoder, None) == "the value is null"


@pytest.mark.parametrize(
    ("value", "expected"),  # RFC 8949, appendix A
    [
        ("f93e00", 1.5), ("fa47c35000", 100000.0), ("fb3ff199999999999a", 1.1),
        ("1bffffffffffffffff", float(2**64 - 1)),
        ("3bffffffffffffffff", -float(2**64)), ("f90001", 5.960464477539063e-8), ("f97c00", None), ("f97e00", None),
        ("c249010000000000000000", None), ("f4", None), ("f6", None), ("f7", None), ("6161", None), ("80", None),
        ("c48221196ab3", 273.15), ("c074323031332d30332d32315432303a30343a30305a", None),
        ("c11a514b67b0", 1363896240000.0),
    ],
)  # fmt: skip
def test_numbers_of_cbor(value: str, expected: float | None) -> None:
    decoder = Cbor((Wanted("v", "double", "a", True),), None)
    assert read(decoder, b"\xa1\x61a" + bytes.fromhex(value)) == [(expected, None)]


def test_the_packs_of_the_rfc() -> None:
    decoder = pickle.loads(pickle.dumps(Senml(PACK)))
    base, at = "urn:dev:ow:10e2073a0108006:", 1_276_020_076_001
    rows = [(f"{base}voltage", "V", 120.1, at)]
    rows += [(f"{base}current", "A", (12 + n) / 10, at - 5_000 + 1_000 * n) for n in range(6)]
    expected = [(name, unit, value, None, None, None, None, str(time)) for name, unit, value, time in rows]
    assert read(decoder, RFC_CBOR) == expected
    in_json = [
        {"bn": base, "bt": 1.276020076001e09, "bu": "A", "bver": 5, "n": "voltage", "u": "V", "v": 120.1},
        *({"n": "current", "t": n - 5, "v": (12 + n) / 10} for n in range(6)),
    ]
    assert read(decoder, json.dumps(in_json).encode()) == expected
    # 5.1.3, and its resolved form in 5.1.4
    place = "urn:dev:ow:10e2073a01080063"
    told = [
        {"bn": place, "bt": 1.320067464e09, "bu": "%RH", "v": 20}, {"u": "lon", "v": 24.30621},
        {"u": "lat", "v": 60.07965}, {"t": 60, "v": 20.3}, {"u": "%EL", "t": 150, "v": 98},
    ]  # fmt: skip
    found = read(decoder, json.dumps(told).encode())
    assert [(row[0], row[1], row[2], row[-1]) for row in found] == [
        (place, "%RH", 20.0, "1320067464000"), (place, "lon", 24.30621, "1320067464000"),
        (place, "lat", 60.07965, "1320067464000"), (place, "%RH", 20.3, "1320067524000"),
        (place, "%EL", 98.0, "1320067614000"),
    ]  # fmt: skip
    # 5.1.5 and 5.1.6: non-numeric values, sums
    told = [
        {"bn": "dev:", "n": "temp", "u": "Cel", "v": 23.1}, {"n": "label", "vs": "Machine Room"},
        {"n": "open", "vb": False}, {"n": "nfc-reader", "vd": "aGkgCg"}, {"n": "m", "bs": 5, "s": 2.5},
        {"n": "total"}, {"n": "base", "bv": 100, "v": 1},
    ]  # fmt: skip
    found = read(decoder, json.dumps(told).encode())
    assert [(row[0][4:], *row[2:-1]) for row in found] == [
        ("temp", 23.1, None, None, None, None), ("label", None, "Machine Room", None, None, None),
        ("open", None, None, False, None, None), ("nfc-reader", None, None, None, "aGkgCg", None),
        ("m", None, None, None, None, 7.5), ("total", None, None, None, None, 5.0),
        ("base", 101.0, None, None, None, 5.0),
    ]  # fmt: skip
    assert {row[-1] for row in found} == {str(SENT_MS)}
    [row] = read(decoder, cbor2.dumps([{0: "a", 8: b"hi \n", 6: -2.5}]))
    assert (row[5], row[-1]) == ("aGkgCg", str(SENT_MS - 2_500))


@pytest.mark.parametrize(
    ("pack", "said"),
    [
        ([{"n": "a", "v": 1, "must_": 1}], "record 0 of the pack: must_ is not supported"),
        ([{"n": "a", "v": 1}, {"n": "b", "v": 1, "bver": 11}], "an unknown version"),
        ([{"n": "a", "v": 1, "bver": 5}, {"n": "b", "v": 1, "bver": 6}], "record 1 of the pack: another version"),
        ([{"v": 1}], "record 0 of the pack: no name"), ([{"n": "-a", "v": 1}], "record 0 of the pack: no name"),
        ([{"n": "a" * 2000, "v": 1}], "record 0 of the pack: no name"),
        ([{"n": "a"}], "record 0 of the pack: a record must have one of"),
        ([{"n": "a", "v": 1, "vb": True}], "record 0 of the pack: a record must have one of"),
        ([{"n": "a", "v": "1"}], "v is not a finite number"), ([{"n": 1, "v": 1}], "n is not a text"),
        ([{"n": "a", "v": 1, "t": 1e300}], "a time out of range"), ([{"n": "a", "v": 1, "t": -1e10}], "out of range"),
        ([1], "record 0 of the pack: not an object"), ({"n": "a", "v": 1}, "it is not an array"),
        ([], "the pack has no measurement"), ([{"bn": "a"}], "the pack has no measurement"),
        ([{"n": "a", "v": 1}] * (MOST_READINGS + 1), f"at most {MOST_READINGS} are allowed"),
    ],
)  # fmt: skip
def test_a_pack_is_good_as_a_whole_or_not_at_all(pack: Any, said: str) -> None:
    assert said in fault(Senml(PACK), json.dumps(pack).encode())


def test_a_column_that_a_measurement_must_have() -> None:
    decoder = Senml((Wanted("v", "double", "v", False),))
    assert len(read(decoder, b'[{"n":"a","v":1},{"n":"b","v":2}]')) == 2
    said = fault(decoder, b'[{"n":"a","v":1},{"n":"b","vb":true}]')
    assert said == "record 1 of the pack: v is missing or not a finite number"


@pytest.fixture(scope="module")
def descriptors() -> bytes:
    return descriptor_set()


def descriptor_set() -> bytes:
    """A descriptor set with `plant.Reading`, as protoc would write it."""
    file = descriptor_pb2.FileDescriptorProto(
        name="plant.proto", package="plant", syntax="proto3", dependency=["google/protobuf/timestamp.proto"]
    )
    place, reading = file.message_type.add(name="Place"), file.message_type.add(name="Reading")
    mode = file.enum_type.add(name="Mode")
    for number, name in enumerate(("OFF", "HEATING")):
        mode.value.add(name=name, number=number)

    def add(of: Any, name: str, kind: Any, **told: Any) -> None:
        label = told.pop("label", Field.LABEL_OPTIONAL)
        of.field.add(name=name, number=len(of.field) + 1, type=kind, label=label, **told)

    add(place, "load", Field.TYPE_FLOAT)
    add(place, "floor", Field.TYPE_SINT32)
    add(reading, "at", Field.TYPE_MESSAGE, type_name=".plant.Place")
    add(reading, "n", Field.TYPE_UINT64)
    add(reading, "on", Field.TYPE_BOOL, proto3_optional=True, oneof_index=0)
    reading.oneof_decl.add(name="_on")
    add(reading, "who", Field.TYPE_STRING)
    add(reading, "mode", Field.TYPE_ENUM, type_name=".plant.Mode")
    add(reading, "when", Field.TYPE_MESSAGE, type_name=".google.protobuf.Timestamp")
    add(reading, "many", Field.TYPE_INT32, label=Field.LABEL_REPEATED)
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()


def message_class(descriptors: bytes) -> Any:
    return message_factory.GetMessageClass(protobuf._descriptor(descriptors, "plant.Reading"))


def test_protobuf_with_a_descriptor_file(descriptors: bytes) -> None:
    columns = (*ALL, Wanted("mode", "string", "mode", True))
    decoder = pickle.loads(pickle.dumps(Protobuf(columns, "when", descriptors, "plant.Reading")))
    message = message_class(descriptors)(n=7, on=False, who="Küche", mode=1)
    message.at.load = 21.5
    message.when.FromMilliseconds(SENT_MS + 7)
    assert read(decoder, message.SerializeToString()) == [(21.5, 7, False, "Küche", "HEATING", str(SENT_MS + 7))]
    without = message_class(descriptors)(n=2**64 - 1, mode=9)
    without.at.floor = -1
    assert read(decoder, without.SerializeToString()) == [(0.0, None, None, "", "9", None)]
    assert fault(decoder, b"") == "load is missing or not a finite number"
    assert fault(decoder, b"\xff\xff") == "the value is not a plant.Reading"
    framed = Protobuf(columns, None, descriptors, "plant.Reading", framed=True, schema_id=7)
    for indexes in (b"\x00", b"\x02\x02", b"\x04\x02\x06"):
        value = b"\x00\x00\x00\x00\x07" + indexes + message.SerializeToString()
        assert read(framed, value)[0][:2] == (21.5, 7)
    assert fault(framed, b"\x00\x00\x00\x00\x08\x00") == "the value was written with schema 8, not 7"
    for value in (b"", b"\x01\x00\x00\x00\x07\x00", b"\x00\x00\x00\x00\x07", b"\x00\x00\x00\x00\x07\xff\xff"):
        assert fault(framed, value) == "the value has no Confluent header"


@pytest.mark.parametrize(
    ("message", "column", "time", "said"),
    [
        ("plant.Readin", ALL[0], None, "message: no plant.Readin in the file (did you mean plant.Reading?)"),
        ("plant.Reading", Wanted("x", "double", "at.lod", True), None, "columns.x: plant.Place has no field lod"),
        ("plant.Reading", Wanted("x", "double", "n.load", True), None, "columns.x: n is not a single message in"),
        ("plant.Reading", Wanted("x", "long", "many", True), None, "columns.x: many is repeated in plant.Reading"),
        ("plant.Reading", Wanted("x", "long", "at.load", True), None, "columns.x: at.load is not a whole number "),
        ("plant.Reading", ALL[0], "at", "time: at is not a number, text or google.protobuf.Timestamp in plant.Reading"),
        ("plant.Reading", ALL[0], "at.t", "time: plant.Place has no field t, only load, floor"),
    ],
)  # fmt: skip
def test_incomplete_descriptor_files_are_refused(
    descriptors: bytes, message: str, column: Wanted, time: str | None, said: str
) -> None:
    [lack] = protobuf.lacks(descriptors, message, [column], time)
    assert lack.startswith(said)
    assert list(protobuf.lacks(descriptors, "plant.Reading", ALL, "when")) == []
    [lack] = protobuf.lacks(b"no descriptors", message, [column], time)
    assert lack.startswith("schema_file: no complete messages")


AVRO: dict[str, Any] = {
    "type": "record", "name": "Reading", "namespace": "plant",
    "fields": [
        {"name": "from", "type": {"type": "record", "name": "Place", "fields": [
            {"name": "load", "type": "float"}, {"name": "floor", "type": "int"}]}},
        {"name": "to", "type": ["null", "Place"]},
        {"name": "mode", "type": {"type": "enum", "name": "Mode", "symbols": ["OFF", "HEATING"]}},
        {"name": "before", "type": "plant.Mode"},
        {"name": "who", "type": ["string", "null"]},
        {"name": "either", "type": ["string", "long"]},
        {"name": "many", "type": {"type": "array", "items": "Place"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}  # fmt: skip


def test_the_avro_reader_schema_has_only_the_needed_fields() -> None:
    schema = avro.AvroSchema(json.dumps(AVRO))
    reader = json.loads(schema.reader(["from.load", "to.floor", "before", "mode", "at"]))
    record = {
        "from": {"load": 1.5, "floor": 2}, "to": {"load": 2.5, "floor": -3}, "mode": "OFF", "before": "HEATING",
        "who": "a", "either": 5, "many": [{"load": 0, "floor": 0}], "at": SENT_MS * 1000,
    }  # fmt: skip
    written = io.BytesIO()
    fastavro.schemaless_writer(written, AVRO, record)
    written.seek(0)
    assert fastavro.schemaless_reader(written, AVRO, reader) == {
        "from": {"load": 1.5, "floor": 2}, "to": {"load": 2.5, "floor": -3}, "mode": "OFF", "before": "HEATING",
        "at": datetime.fromtimestamp(SENT_MS / 1000, UTC), avro.READ: True,
    }  # fmt: skip
    assert schema.milliseconds("at") == 1_000
    good = (Wanted("f", "double", "to.load", True), Wanted("m", "string", "mode", True))
    assert list(schema.lacks(good, "at")) == []


@pytest.mark.parametrize(
    ("column", "time", "said"),
    [
        (Wanted("x", "double", "load", True), None, "columns.x: plant.Reading has no field load, only from,"),
        (Wanted("x", "double", "who.load", True), None, "columns.x: who.load is not in the schema: string"),
        (Wanted("x", "long", "from.load", True), None, "columns.x: from.load is float in the schema, not a whole"),
        (Wanted("x", "string", "either", True), None, "columns.x: either is a union of several types in the schema"),
        (Wanted("x", "double", "to", True), None, "columns.x: to is record in the schema, not a finite number"),
        (Wanted("x", "string", "who", True), "from", "time: from is record in the schema, not a number or text"),
    ],
)  # fmt: skip
def test_incomplete_avro_schemas_are_refused(column: Wanted, time: str | None, said: str) -> None:
    [lack] = avro.AvroSchema(json.dumps(AVRO)).lacks([column], time)
    assert lack.startswith(said)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("{", "not JSON"), ('"long"', "a schema of long; it must be a record"), ("[]", "a schema of several"),
        ('{"type": "record", "name": "A", "fields": [{"name": "a", "type": ["null", "A"]}]}', "the record A contains"),
        ('{"type": "record", "name": "A", "fields": [{"name": "a", "type": "B"}]}', "unknown type B"),
        ('{"type": "record", "fields": []}', "record without a name"),
        ('{"type": "record", "name": "A"}', "A has no fields"),
        ("7", "not an Avro schema"), ('{"type": 7}', "not an Avro schema"),
    ],
)  # fmt: skip
def test_unusable_schemas_are_refused(schema: str, said: str) -> None:
    with pytest.raises(avro.SchemaError, match=said):
        avro.AvroSchema(schema)


JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.binary(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["at", "load", "n", "on", "who", "v", "bn", "t", 2, 0, -2]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


def mutated(value: bytes, rng: random.Random) -> bytes:
    made = bytearray(value)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(made) + 1)
        match rng.randrange(3):
            case 0:
                made[place : place + 1] = rng.randbytes(1)
            case 1:
                del made[place : place + rng.randint(1, 4)]
            case _:
                made[place:place] = rng.randbytes(rng.randint(1, 9))
    return bytes(made)


def decoders() -> Iterator[Decoder]:
    descriptors = descriptor_set()
    yield Cbor(ALL, "when")
    yield Senml(PACK)
    yield Protobuf(ALL, "when", descriptors, "plant.Reading")
    yield Protobuf(ALL, "when", descriptors, "plant.Reading", framed=True)


DECODERS = tuple(decoders())


def written(data: JSON_VALUES, rng: random.Random) -> list[bytes]:  # type: ignore[valid-type]
    message = message_class(descriptor_set())(n=7, on=True, who="a", mode=1)
    message.at.load = 1.5
    pack = [{"bn": "a:", "bt": 1.7e9, "n": "b", "v": 1, "u": "V"}, {"n": "c", "vs": "x", "t": -1}, {"vb": True, "s": 1}]
    whole = [cbor2.dumps(data), RFC_CBOR, json.dumps(pack).encode(), message.SerializeToString()]
    whole.append(cbor2.dumps({"at": {"load": 1.5}, "n": 7, "on": True, "who": "a", "when": 1}))
    return [*whole, *(mutated(value, rng) for value in whole), b"\x00\x00\x00\x00\x01\x00" + whole[3]]


@settings(max_examples=150, deadline=None)
@given(data=JSON_VALUES, rng=st.randoms(use_true_random=False), noise=st.binary(max_size=40))
@example(data={}, rng=random.Random(0), noise=b"\x9b\x7f" + b"\xff" * 7)
@example(data={}, rng=random.Random(0), noise=b"\xd8\x1d" * 20)
@example(data={}, rng=random.Random(0), noise=b"\xc4\x82\x1b" + b"\x7f" * 8 + b"\x01")
@example(data={}, rng=random.Random(0), noise=b"[" * 40)
def test_any_bytes_give_readings_of_the_declared_types_or_an_error(data: Any, rng: random.Random, noise: bytes) -> None:
    kinds = {"double": float, "long": int, "boolean": bool, "string": str}
    for decoder in DECODERS:
        columns = decoder.columns  # type: ignore[attr-defined]
        for value in (noise, *written(data, rng)):
            error, rows = decoded(decoder, value, SENT_MS)
            assert (error is None) == bool(rows)
            assert error is None or error.encode()
            for row in rows:
                *found, time = row
                assert time is None or (time.encode() and len(time) <= 64)
                for one, column in zip(found, columns, strict=True):
                    assert one is not None or column.optional
                    assert one is None or type(one) is kinds[column.type]
                    assert column.type != "double" or one is None or struct.pack(">d", one)
                    assert column.type != "long" or one is None or struct.pack(">q", one)
                    assert column.type != "string" or one is None or one.encode() is not None


def test_decoders_raise_no_library_errors() -> None:
    def broken(value: bytes, sent_ms: int) -> Any:
        raise msgspec.ValidationError

    assert fault(broken, b"1") == "the value cannot be read: ValidationError"
