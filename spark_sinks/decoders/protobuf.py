"""Decodes Protobuf with a descriptor set file, written by `protoc --include_imports --descriptor_set_out=FILE`."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from spark_sinks.decoders import framing
from spark_sinks.decoders.values import ReadingFault, Row, Wanted, row
from spark_sinks.spec.values import TYPE_NAMES

TIMESTAMP: Final = "google.protobuf.Timestamp"
_WHOLE: Final = {
    FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64,
}  # fmt: skip
_TYPES: Final[dict[str, set[int]]] = {
    "double": {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT, *_WHOLE},
    "long": _WHOLE,
    "boolean": {FieldDescriptor.CPPTYPE_BOOL},
    "string": {FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_ENUM},
}


@dataclass(frozen=True)
class Protobuf:
    """Decodes messages.

    Attributes:
        columns: the declared columns.
        time: path of the field with the time, or None.
        descriptors: the content of the descriptor set file.
        message: the full name of the message.
        framed: whether a Confluent header precedes it.
        schema_id: the schema id required in the header. None accepts any.
    """

    columns: tuple[Wanted, ...]
    time: str | None
    descriptors: bytes
    message: str
    framed: bool = False
    schema_id: int | None = None

    def __call__(self, value: bytes, sent_ms: int) -> Sequence[Row]:
        """Decode a message. A missing field without presence (proto3 without `optional`) is zero or empty."""
        if self.framed:
            value = framing.unframed(value, self.schema_id, indexes=True)
        made = message_factory.GetMessageClass(_descriptor(self.descriptors, self.message))()
        try:
            made.ParseFromString(value)
        except DecodeError as error:
            raise ReadingFault(f"the value is not a {self.message}") from error
        return [row(self.columns, functools.partial(_at, made), self.time and _at(made, self.time))]


def lacks(descriptors: bytes, message: str, columns: Sequence[Wanted], time: str | None) -> Iterator[str]:
    """Yield one sentence, with the source's key, for each field that is missing or has another type."""
    try:
        names = _messages(descriptors)
        descriptor = _descriptor(descriptors, message) if names else None
    except KeyError:
        descriptor = None
    except (DecodeError, TypeError):
        names, descriptor = [], None
    if not names:
        yield "schema_file: no complete messages; use protoc --include_imports --descriptor_set_out=FILE"
        return
    if descriptor is None:
        near = difflib.get_close_matches(message, names, n=1)
        yield f"message: no {message} in the file{f' (did you mean {near[0]}?)' if near else ''}"
        return
    for column in columns:
        key = f"columns.{column.name}"
        field = _field(descriptor, column.path)
        if isinstance(field, str):
            yield f"{key}: {field}"
        elif field.cpp_type not in _TYPES[column.type]:
            yield f"{key}: {column.path} is not a {TYPE_NAMES[column.type]} in {message}"
    if time is not None:
        field = _field(descriptor, time)
        if isinstance(field, str):
            yield f"time: {field}"
        elif field.cpp_type not in _TYPES["double"] | _TYPES["string"] and not _is_timestamp(field):
            yield f"time: {time} is not a number, text or {TIMESTAMP} in {message}"


def _field(of: Descriptor, path: str) -> FieldDescriptor | str:
    """Return the field at a dotted path, or why there is none."""
    *objects, last = path.split(".")
    for name in objects:
        inner = of.fields_by_name.get(name)
        if inner is None or inner.message_type is None or inner.is_repeated:
            return f"{name} is not a single message in {of.full_name}"
        of = inner.message_type
    field = of.fields_by_name.get(last)
    if field is None:
        return f"{of.full_name} has no field {last}, only {', '.join(of.fields_by_name)}"
    return f"{last} is repeated in {of.full_name}" if field.is_repeated else field


def _at(message: Any, path: str) -> Any:
    """Return a message's value at a path; None if a field with presence is not set."""
    current: Any = message
    for name in path.split("."):
        field = current.DESCRIPTOR.fields_by_name[name]
        if field.has_presence and not current.HasField(name):
            return None
        current = getattr(current, name)
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        value = field.enum_type.values_by_number.get(current)
        return str(current) if value is None else value.name
    if _is_timestamp(field):
        return current.seconds * 1000 + current.nanos // 1_000_000
    return current


def _is_timestamp(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.full_name == TIMESTAMP


@functools.lru_cache(maxsize=8)
def _descriptor(descriptors: bytes, message: str) -> Descriptor:
    """Return a message's descriptor; KeyError, TypeError or DecodeError if the descriptor set lacks or breaks it."""
    pool = descriptor_pool.DescriptorPool()
    files = {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file}
    of_timestamp = descriptor_pb2.FileDescriptorProto()  # for descriptor sets without their imports
    Timestamp.DESCRIPTOR.file.CopyToProto(of_timestamp)
    files.setdefault(of_timestamp.name, of_timestamp)
    message_factory.GetMessages(list(files.values()), pool)  # adds each file after those that it imports
    return pool.FindMessageTypeByName(message)


def _messages(descriptors: bytes) -> list[str]:
    """Return the full names of the top-level messages."""
    files = descriptor_pb2.FileDescriptorSet.FromString(descriptors).file
    return [
        f"{file.package}.{message.name}" if file.package else message.name
        for file in files
        for message in file.message_type
    ]
