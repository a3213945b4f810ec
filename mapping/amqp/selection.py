"""JMS selectors on records: the meaning of a selector's names (docs/amqp.md lists them for users).

There are three sets of names: the JMS headers that a selector may use (3.8.1.1), `amqp.` with a field of the message's
header or properties (with underscores, as in Qpid), and `amqp.annotation.` with a message annotation. Every other name
is an application property. A record from MQTT, HTTP or a Kafka client has the same names; its headers are application
properties without types.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from typing import Any, Final

from mapping.amqp.fields import DEFAULT_PRIORITY
from mapping.amqp.values import BINARY_ID, ID_PREFIX, STRING_ID, ULONG_ID, header_name, property_name
from mapping.record import (
    AMQP_DURABLE,
    AMQP_PRIORITY,
    AMQP_SECTIONS,
    AMQP_TYPES,
    CONTENT_ENCODING,
    CONTENT_TYPE,
    CORRELATION_ID,
    CREATION_TIME,
    EXPIRY,
    GROUP_ID,
    GROUP_SEQUENCE,
    GW_PROTOCOL,
    MESSAGE_ID,
    REPLY_TO,
    REPLY_TO_GROUP_ID,
    SUBJECT,
    TO,
    USER_ID,
    Received,
    text_of,
)
from protocols.amqp.primitives import DecodeError, Described, Pairs, decode
from protocols.amqp.sections import MESSAGE_ANNOTATIONS, scan
from protocols.amqp.selectors.logic import Untyped, Value
from protocols.amqp.selectors.parser import compile_selector

AMQP_PREFIX: Final = "amqp."
ANNOTATION_PREFIX: Final = "amqp.annotation."
_CACHED_CHARACTERS: Final = 1000  # of all header names together; the types of longer ones are not cached
_NUMBER_LIMIT: Final = 20  # digits: no 64-bit integer has more
_INTEGERS: Final = frozenset("BHILghilt")  # letters of `amqp.types`
_FLOATS: Final = frozenset("fd")


class _SelectedMessage:
    """A record during one evaluation, with its headers as a dict."""

    __slots__ = ("_annotations", "_fields", "_types", "record")

    def __init__(self, record: Received) -> None:
        self.record = record
        self._fields: dict[str, bytes | None] | None = None
        self._types: dict[str, str] | None = None
        self._annotations: Pairs | None = None

    def field(self, name: str) -> bytes | None:
        """Return the value of a header; the first one counts if the name repeats, as in delivered messages."""
        if self._fields is None:
            self._fields = dict(reversed(self.record.headers))
        return self._fields.get(name)

    def property(self, stored: str) -> Value:
        """Return an application property by the name of its header."""
        raw = self.field(stored)
        if raw is None:
            return None
        types = self.field(AMQP_TYPES)
        if types is not None:
            if self._types is None:
                names = tuple([name for name, _ in self.record.headers])
                find = _cached_letters if sum(map(len, names)) <= _CACHED_CHARACTERS else _letters
                self._types = find(names, types)
            letter = self._types.get(stored)
            if letter is not None:
                return _typed(raw, letter)
        text = text_of(raw)
        if text is None:
            return raw
        return text if types is not None or self.field(GW_PROTOCOL) == b"amqp10" else Untyped(text)

    def annotation(self, name: str) -> Value:
        """Return a message annotation of the sender."""
        if self._annotations is None:
            self._annotations = _annotations(self.field(AMQP_SECTIONS) or b"")
        return _simple(self._annotations.get(name))


def _annotations(stored: bytes) -> Pairs:
    """Decode the message annotations in a sections header (`amqp.sections`)."""
    try:
        for code, _, at, end in scan(stored):
            if code == MESSAGE_ANNOTATIONS:
                annotations = decode(stored, at, end)[0]
                return annotations if isinstance(annotations, Pairs) else Pairs()
    except DecodeError:
        pass  # not written by the gateway
    return Pairs()


def _letters(names: tuple[str, ...], types: bytes) -> dict[str, str]:
    """Return type letters by header name; an empty dict if their number does not match."""
    own = [name for name in names if property_name(name) is not None]
    letters = types.decode("ascii", "replace")
    return dict(zip(reversed(own), reversed(letters), strict=True)) if len(letters) == len(own) else {}


_cached_letters: Final = functools.lru_cache(maxsize=128)(_letters)  # shapes repeat


_Read = Callable[[_SelectedMessage], Value]


def selector(text: str) -> Callable[[Received], bool]:
    """Compile a selector into a function that returns whether a record is selected. Raises SelectorError."""
    condition = compile_selector(text, _resolve)
    return lambda record: condition(_SelectedMessage(record))


def _resolve(name: str) -> _Read:
    """Return the function that reads the value of a name. Raises ValueError."""
    known = _NAMES.get(name)
    if known is not None:
        return known
    if name.startswith(ANNOTATION_PREFIX):
        annotation = name[len(ANNOTATION_PREFIX) :]
        return _COORDINATES.get(annotation) or (lambda message: message.annotation(annotation))
    if name.startswith(AMQP_PREFIX):
        raise ValueError(f"{name!r} is no field that a selector can use")
    if name.startswith("JMS") and name[3:4].isupper() and not name.startswith("JMSX"):
        raise ValueError(f"{name!r} is no header that a selector can use")
    stored = header_name(name)
    return lambda message: message.property(stored)


# Values.


def _integer(raw: bytes | None) -> int | None:
    if raw is None or len(raw) > _NUMBER_LIMIT or not raw.removeprefix(b"-").isdigit():
        return None
    return int(raw)


def _typed(raw: bytes, letter: str) -> Value:
    """Convert a header's value to its application property's type; a value that does not fit stays a text."""
    if letter in _INTEGERS:
        number = _integer(raw)
        if number is not None:
            return number
    elif letter in _FLOATS:
        try:
            return float(raw)
        except ValueError:
            pass
    elif letter == "b" and raw in (b"true", b"false"):
        return raw == b"true"
    elif letter == "x":
        return raw
    text = text_of(raw)
    return raw if text is None else text


def _simple(value: Any) -> Value:
    """Convert a decoded AMQP value to a selector's value."""
    if isinstance(value, Described):
        value = value.value
    if isinstance(value, bool | int | float | str | bytes):
        return value
    return str(value) if isinstance(value, uuid.UUID) else None


def _id(raw: bytes | None) -> Value:
    """Convert a stored id to its original type."""
    if raw is None or not raw.startswith(ID_PREFIX):
        return text_of(raw)
    if raw.startswith(BINARY_ID):
        try:
            return bytes.fromhex(raw[len(BINARY_ID) :].decode())
        except ValueError:
            return text_of(raw)
    if raw.startswith(ULONG_ID):
        return _integer(raw[len(ULONG_ID) :])
    kind, _, rest = raw.partition(b":")
    return text_of(rest if kind in (b"AMQP_UUID", b"AMQP_STRING") else raw)


def _jms_id(raw: bytes | None) -> str | None:
    """Return an id as JMS clients see it: `ID:` before the prefixes of the AMQP binding of JMS."""
    text = text_of(raw)
    if text is None or text.startswith("ID:"):
        return text
    return "ID:" + text if text.startswith(ID_PREFIX.decode()) else None


def _message_id(message: _SelectedMessage) -> Value:
    raw = message.field(MESSAGE_ID)
    return _jms_id(raw) or (None if raw is None else f"ID:AMQP_NO_PREFIX:{text_of(raw)}")


def _correlation_id(message: _SelectedMessage) -> Value:
    raw = message.field(CORRELATION_ID)
    if raw is not None and raw.startswith(STRING_ID):
        return text_of(raw[len(STRING_ID) :])
    return _jms_id(raw) or text_of(raw)  # a correlation id that the application chose has no prefix


def _sent_at(message: _SelectedMessage) -> Value:
    created = _integer(message.field(CREATION_TIME))
    return message.record.timestamp if created is None else created


def _priority(message: _SelectedMessage) -> Value:
    priority = _integer(message.field(AMQP_PRIORITY))
    return DEFAULT_PRIORITY if priority is None else priority


def _durable(message: _SelectedMessage) -> bool:
    """Whether the message is delivered as durable: one without a header section of its own is, since it is in a log."""
    return message.field(AMQP_SECTIONS) is None or message.field(AMQP_DURABLE) is not None


def _offset(message: _SelectedMessage) -> Value:
    return message.record.offset


def _texts(name: str) -> _Read:
    return lambda message: text_of(message.field(name))


def _numbers(name: str) -> _Read:
    return lambda message: _integer(message.field(name))


def _ids(name: str) -> _Read:
    return lambda message: _id(message.field(name))


_NAMES: Final[dict[str, _Read]] = {
    "JMSMessageID": _message_id,
    "JMSCorrelationID": _correlation_id,
    "JMSType": _texts(SUBJECT),
    "JMSTimestamp": _sent_at,
    "JMSPriority": _priority,
    "JMSDeliveryMode": lambda message: "PERSISTENT" if _durable(message) else "NON_PERSISTENT",
    "JMSXGroupID": _texts(GROUP_ID),
    "JMSXGroupSeq": _numbers(GROUP_SEQUENCE),
    "JMSXUserID": _texts(USER_ID),
    "amqp.durable": _durable,
    "amqp.priority": _priority,
    "amqp.message_id": _ids(MESSAGE_ID),
    "amqp.user_id": _texts(USER_ID),
    "amqp.to": _texts(TO),
    "amqp.subject": _texts(SUBJECT),
    "amqp.reply_to": _texts(REPLY_TO),
    "amqp.correlation_id": _ids(CORRELATION_ID),
    "amqp.content_type": _texts(CONTENT_TYPE),
    "amqp.content_encoding": _texts(CONTENT_ENCODING),
    "amqp.absolute_expiry_time": _numbers(EXPIRY),
    "amqp.creation_time": _sent_at,
    "amqp.group_id": _texts(GROUP_ID),
    "amqp.group_sequence": _numbers(GROUP_SEQUENCE),
    "amqp.reply_to_group_id": _texts(REPLY_TO_GROUP_ID),
}


def _key(message: _SelectedMessage) -> Value:
    key = message.record.key
    text = text_of(key)
    return key if text is None else text


_COORDINATES: Final[dict[str, _Read]] = {
    "x-opt-bridge.topic": lambda message: message.record.topic,
    "x-opt-bridge.partition": lambda message: message.record.partition,
    "x-opt-bridge.key": _key,
    "x-opt-bridge.offset": _offset,
    "x-opt-sequence-number": _offset,
    "x-opt-offset": lambda message: Untyped(message.record.offset),
    "x-opt-enqueued-time": lambda message: message.record.timestamp,
}
"""Annotations that the gateway sets on every message."""
