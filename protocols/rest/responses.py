"""Bodies of answers: results of a produce request, errors, and pages of records of limited size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from protocols.rest.errors import RestError

_ENCODER: Final = msgspec.json.Encoder()
_BLOCK: Final = 64  # records that are encoded in one call; at the end of a page they may be encoded twice


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A record that every in-sync replica has."""

    partition: int
    offset: int


class ErrorBody(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The error of a request or of one of its records; the code is an HTTP status."""

    error_code: int
    message: str
    validation_errors: tuple[str, ...] = ()


class RecordHeader(msgspec.Struct, frozen=True, gc=False):
    """A header of a record in an answer: base64 text, or null."""

    key: str
    value: bytes | None


class RecordItem(msgspec.Struct, frozen=True, gc=False):
    """A record in an answer; `timestamp` is in milliseconds since the epoch. Without headers the field is left out."""

    topic: str
    key: Any  # msgspec.Raw, text, bytes (written as base64) or None
    value: Any
    partition: int
    offset: int
    timestamp: int
    headers: tuple[RecordHeader, ...] | msgspec.UnsetType = msgspec.UNSET


def encode(value: Any) -> bytes:
    """Encode one of our structs as compact JSON."""
    return _ENCODER.encode(value)


def encode_results(results: Sequence[Stored | ErrorBody]) -> bytes:
    """Encode the answer to a produce request: one entry for each record, in the order of the request."""
    return _ENCODER.encode({"offsets": results})


def error_body(error: RestError) -> ErrorBody:
    """Return what an error says. It may be kept; the error would keep the frames that it came through."""
    return ErrorBody(error.status, error.message, error.validation_errors)


def encode_error(error: RestError) -> bytes:
    """Encode the body of an error answer."""
    return _ENCODER.encode(error_body(error))


class Page:
    """A JSON list of at most `max_bytes`. A single larger record is accepted, else it could never be delivered."""

    __slots__ = ("_body", "_limit", "count")

    def __init__(self, max_bytes: int) -> None:
        self._body = bytearray(b"[")
        self._limit = max_bytes - 1  # the closing bracket
        self.count = 0

    def add(self, item: RecordItem) -> bool:
        """Append a record. Returns False and changes nothing if it does not fit."""
        body = self._body
        before = len(body)
        if self.count:
            body += b","
        _ENCODER.encode_into(item, body, -1)
        if self.count and len(body) > self._limit:
            del body[before:]
            return False
        self.count += 1
        return True

    def extend(self, items: Sequence[RecordItem]) -> int:
        """Append records in order, like `add`. Returns how many fit."""
        body = self._body
        for start in range(0, len(items), _BLOCK):
            block = items[start : start + _BLOCK]
            text = _ENCODER.encode(block)
            if len(body) + len(text) - 1 > self._limit:  # minus two brackets, plus a comma
                for count, item in enumerate(block, start):
                    if not self.add(item):
                        return count
                continue
            if self.count:
                body += b","
            body += memoryview(text)[1:-1]
            self.count += len(block)
        return len(items)

    def finish(self) -> bytes:
        """Return the body of the answer. The page must not be used any more."""
        body, self._body = self._body, bytearray()
        body += b"]"
        return bytes(body)
