"""Messages of one link that are laid out alike: the layout is learnt, and then only what differs is read.

Senders write the same fields in the same order: here an id, there a reading is new, and all between is the same. A
layout is a list of steps: bytes that have to be there, the headers that they stand for, and behind them one field that
is each message's own. It is learnt from messages that `mapping.amqp` has mapped. What it makes of a message is what
`to_record` makes (a test compares them), or None: then the message is laid out in another way, or is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from mapping.amqp import creation_timestamp
from mapping.amqp_fields import (
    KEY_ALONE,
    PROPERTY_NAMES,
    Destination,
    annotation_fields,
    application_properties,
    header_fields,
    properties,
)
from mapping.amqp_values import FIXED, ID_PREFIX, STRING_ID, STRING_TYPE, checked_text, header_name
from mapping.record import (
    AMQP_SECTIONS,
    AMQP_TYPES,
    CORRELATION_ID,
    CREATION_TIME,
    GROUP_ID,
    MESSAGE_ID,
    TO,
    Header,
    Headers,
    Record,
)
from protocols.amqp import primitives
from protocols.amqp.primitives import DecodeError, compound, decode, skip
from protocols.amqp.sections import APPLICATION_PROPERTIES, DATA, HEADER, MESSAGE_ANNOTATIONS, PROPERTIES, scan

FIELDS_LIMIT: Final = 64  # of a message that is worth learning
_SHORT_LIMIT: Final = 256  # bytes of a value whose length takes one byte

# What a part of a message is.
_WHOLE, _OPEN, _COUNT, _KEY, _PROPERTY, _ENTRY, _CLOSE, _BODY = range(8)

# What is read behind a step's bytes: a text, which may be a key or have to be looked at; a value of a fixed width; the
# creation-time; or, where a section begins, its size, in one byte or four, or the value, to the end.
_READ_TEXT, _READ_ID, _READ_TO, _READ_GROUP, _READ_KEY, _READ_FIXED, _READ_TIME = range(7)
_READ_SIZE, _READ_WIDE_SIZE, _READ_VALUE = range(7, 10)

_TEXT_READERS: Final = {MESSAGE_ID: _READ_ID, CORRELATION_ID: _READ_ID, TO: _READ_TO, GROUP_ID: _READ_GROUP}


Convert = Callable[[bytes], bytes]


class _Part(NamedTuple):
    """One part of a message, so many bytes; `name` and `code` (of its encoding) are the same in messages alike."""

    role: int
    name: str | bytes
    code: int
    encoded: bytes


class _Step(NamedTuple):
    before: bytes
    length: int  # of `before`
    headers: Headers  # that `before` stands for
    reads: int
    name: str
    width: int
    convert: Convert | None
    rest: int  # where a section begins: bytes of `before` that belong to the section before it


class Layout(NamedTuple):
    """A layout that was learnt; see the module."""

    destination: Destination
    key: bytes | None
    partition: int | None
    steps: tuple[_Step, ...]

    def record(self, data: bytes, now_ms: int) -> Record | None:
        """The record of a message; None when it is laid out in another way or has a fault: ask `to_record`."""
        destination, key, partition, steps = self
        headers: list[Header] = [*destination.headers]
        append = headers.append
        size = len(data)
        place = stop = 0
        created: int | None = None
        timestamp: int | None = None
        try:
            for before, length, given, reads, name, width, convert, rest in steps:
                at = place + length
                if data[place:at] != before:
                    return None
                if given:
                    headers += given
                if reads <= _READ_KEY:
                    start = at + 1
                    place = start + data[at]  # beyond the end: the section's end will not be there
                    text = data[start:place]
                    if not text.isascii():
                        checked_text(text)
                    if reads == _READ_TEXT:
                        append((name, text))
                    elif reads == _READ_ID:
                        append((name, STRING_ID + text if text.startswith(ID_PREFIX) else text))
                    elif reads == _READ_KEY:
                        key = text
                    elif reads == _READ_GROUP:
                        key = text
                        append((name, text))
                    elif text != destination.address_bytes:
                        append((name, text))
                elif reads == _READ_FIXED:
                    place = at + width
                    if place > size or convert is None:
                        return None
                    append((name, convert(data[at:place])))
                elif reads == _READ_TIME:
                    place = at + 8
                    created = int.from_bytes(data[at:place], "big", signed=True)
                else:
                    front = place + rest
                    if front != stop:
                        return None
                    if created is not None:
                        timestamp = creation_timestamp(created, headers, destination, now_ms)
                        created = None
                    place = at + width
                    if reads == _READ_SIZE:
                        stop = place + data[at]
                    elif reads == _READ_WIDE_SIZE:
                        stop = place + int.from_bytes(data[at:place], "big")
                    else:
                        value = data[place:]
                        if int.from_bytes(data[at:place], "big") != len(value):
                            return None
                        if width > 1 and len(value) < _SHORT_LIMIT:
                            return None
                        append((AMQP_SECTIONS, data[:front]))
                        return Record(destination.topic, key, value, tuple(headers), timestamp, partition)
        except (IndexError, DecodeError):
            pass
        return None


class Layouts:
    """What is known of how the messages of one link are laid out.

    Attributes:
        layout: that of the last ones; None while it is not known.
    """

    __slots__ = ("_encoded", "_own", "_shape", "layout")

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self._shape: tuple[tuple[int, str | bytes, int], ...] = ()
        self._encoded: list[bytes] = []  # of the last message's parts
        self._own: set[int] = set()  # parts that were different

    def learn(self, data: bytes, destination: Destination) -> None:
        """Look at a message that was mapped for `destination` in the general way."""
        parts = _parts(data)
        shape = tuple((part.role, part.name, part.code) for part in parts)
        encoded = [part.encoded for part in parts]
        if shape != self._shape:
            self.layout = None  # one message alone does not tell what will differ
            self._shape, self._encoded, self._own = shape, encoded, set()
            return
        self._own.update(
            number for number, (now, before) in enumerate(zip(encoded, self._encoded, strict=True)) if now != before
        )
        self._encoded = encoded
        self.layout = _Builder(destination).build(parts, self._own) if parts else None


def _parts(data: bytes) -> list[_Part]:
    """A message taken apart; empty when it has no layout that can be learnt."""
    parts: list[_Part] = []
    worth = False
    for code, start, at, end in scan(data):
        form = data[at]
        if data[start:at] != bytes((0, 0x53, code)):
            return []
        if code == HEADER or (code == MESSAGE_ANNOTATIONS and data[at + 2 : at + 22] != KEY_ALONE):
            parts.append(_Part(_WHOLE, "", code, data[start:end]))
        elif code == DATA and end == len(data):
            parts.append(_Part(_BODY, "", form, data[start : at + 1]))
        elif code in (MESSAGE_ANNOTATIONS, PROPERTIES, APPLICATION_PROPERTIES) and form >= 0xC0:
            count, place, _ = compound(data, at, end)
            if count > FIELDS_LIMIT:
                return []
            worth = worth or code != MESSAGE_ANNOTATIONS
            parts.append(_Part(_OPEN, "", form, data[start : at + 1]))
            parts.append(_Part(_COUNT, "", code, data[at + (2 if form < 0xD0 else 5) : place]))
            parts += _fields(data, code, count, place, end)
            parts.append(_Part(_CLOSE, "", code, b""))
        else:
            return []
    return parts if worth and parts[-1].role == _BODY else []


def _fields(data: bytes, section: int, count: int, place: int, end: int) -> list[_Part]:
    """The fields of one section."""
    if section == MESSAGE_ANNOTATIONS:  # as KEY_ALONE says
        start = place + len(KEY_ALONE) - 2
        return [
            _Part(_COUNT, "", section, data[place:start]),
            _Part(_KEY, "", data[start], data[start:end]),
        ]
    parts: list[_Part] = []
    for index in range(count if section == PROPERTIES else count // 2):
        name: str | bytes = PROPERTY_NAMES[index] if section == PROPERTIES else b""
        if section == APPLICATION_PROPERTIES:
            start, place = place, skip(data, place, end)
            name = data[start:place]
        start, place = place, skip(data, place, end)
        role = _PROPERTY if section == PROPERTIES else _ENTRY
        parts.append(_Part(role, name, data[start], data[start:place]))
    return parts


class _Unlearnable(Exception):  # noqa: N818 - it is no error
    """A part differs from message to message that is read in the general way only."""


class _Builder:
    """Makes the steps."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._key = destination.key
        self._partition = destination.partition
        self._own_key = False
        self._steps: list[_Step] = []
        self._before = b""
        self._headers: list[Header] = []
        self._rest = 0
        self._letters = ""
        self._plain = True  # all application properties are strings

    def build(self, parts: Sequence[_Part], own: set[int]) -> Layout | None:
        """The layout of messages with these parts, of which those numbered in `own` differ."""
        try:
            for number, part in enumerate(parts):
                self._add(part, own=number in own)
        except _Unlearnable:
            return None
        return Layout(self._destination, self._key, self._partition, tuple(self._steps))

    def _add(self, part: _Part, *, own: bool) -> None:
        role, name, code, encoded = part
        if role == _PROPERTY:
            self._property(str(name), code, encoded, own=own)
        elif role == _ENTRY:
            assert isinstance(name, bytes)
            self._entry(name, code, encoded, own=own)
        elif role == _OPEN:
            self._before += encoded
            if code < 0xD0:
                self._step(_READ_SIZE, width=1)
            else:
                self._step(_READ_WIDE_SIZE, width=4)
        elif role == _KEY:
            self._own_key = True
            self._own(_READ_KEY, "", code, encoded)
        elif role == _CLOSE:
            if code == APPLICATION_PROPERTIES and not self._plain:
                self._headers.append((AMQP_TYPES, self._letters.encode()))
            self._rest = len(self._before)
        elif own:
            raise _Unlearnable
        elif role == _BODY:
            self._before += encoded
            self._step(_READ_VALUE, width=1 if code == 0xA0 else 4)
        else:
            self._before += encoded
            if role == _WHOLE:
                self._whole(code, encoded[3:])

    def _step(
        self, reads: int, name: str = "", width: int = 0, convert: Callable[[bytes], bytes] | None = None
    ) -> None:
        before = self._before
        self._steps.append(_Step(before, len(before), tuple(self._headers), reads, name, width, convert, self._rest))
        self._before = b""
        self._rest = 0
        self._headers.clear()

    def _own(self, reads: int, name: str, code: int, encoded: bytes) -> None:
        """A short text that is each message's own."""
        if code not in (0xA1, 0xA3):
            raise _Unlearnable
        self._before += encoded[:1]
        self._step(reads, name)

    def _whole(self, section: int, value: bytes) -> None:
        """A section that is the same in all messages."""
        if section == HEADER:
            headers, ttl = header_fields(value)
            if ttl is not None:
                raise _Unlearnable
            self._headers += headers
            return
        key, partition, _ = annotation_fields(value)
        if key is not None:
            self._key, self._own_key = key, True
        if partition is not None:
            self._partition = partition

    def _property(self, name: str, code: int, encoded: bytes, *, own: bool) -> None:
        if name == CREATION_TIME and code == 0x83:  # what it means depends on the time
            self._before += encoded[:1]
            self._step(_READ_TIME)
            return
        if own:
            reads = _TEXT_READERS.get(name, _READ_TEXT)
            self._own(_READ_TEXT if reads == _READ_GROUP and self._own_key else reads, name, code, encoded)
            return
        self._before += encoded
        alone = primitives.list_of([primitives.NULL] * PROPERTY_NAMES.index(name) + [encoded])
        group, absolute, _ = properties(alone, 0, len(alone), self._headers, self._destination)
        if absolute is not None:
            raise _Unlearnable
        if group is not None and not self._own_key:
            self._key = group

    def _entry(self, key: bytes, code: int, encoded: bytes, *, own: bool) -> None:
        self._before += key
        if not own:
            self._before += encoded
            alone = primitives.map_of([key, encoded])
            found: list[Header] = []
            application_properties(alone, 0, len(alone), found)
            letter = STRING_TYPE
            if found and found[-1][0] == AMQP_TYPES:
                letter = (found.pop()[1] or b"").decode()
                self._plain = False
            self._headers += found
            self._letters += letter
            return
        raw = str(decode(key, 0, len(key))[0]).encode()
        if code in FIXED:
            letter, width, convert = FIXED[code]
            self._plain = False
            self._before += encoded[:1]
            self._step(_READ_FIXED, header_name(raw), width, convert)
        else:
            letter = STRING_TYPE
            if code != 0xA1:
                raise _Unlearnable
            self._own(_READ_TEXT, header_name(raw), code, encoded)
        self._letters += letter
