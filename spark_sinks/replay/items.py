"""A record to replay, and the headers that name its origin. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from mapping.record import (
    CREATION_TIME,
    DEAD_LETTER_OFFSET,
    DEAD_LETTER_PARTITION,
    DEAD_LETTER_PREFIX,
    DEAD_LETTER_TOPIC,
    is_topic_name,
)
from spark_sinks.read.headers import (
    ERROR,
    ORIGIN_LENGTH,
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    ORIGIN_REPLAY,
    ORIGIN_TIMESTAMP,
    ORIGIN_TOPIC,
)

_MARKS: Final = frozenset({ORIGIN_TOPIC, ORIGIN_PARTITION, ORIGIN_OFFSET, ORIGIN_TIMESTAMP, ORIGIN_REPLAY})
_APPENDED: Final = frozenset({ORIGIN_TOPIC, ORIGIN_PARTITION, ORIGIN_OFFSET, ORIGIN_TIMESTAMP, ORIGIN_LENGTH})

Header = tuple[str, bytes | None]


class Place(NamedTuple):
    """A partition."""

    topic: str
    partition: int


class Item(msgspec.Struct, frozen=True, gc=False):
    """A record as it was first stored."""

    topic: str  # its original topic
    partition: int
    offset: int
    timestamp: int | None  # epoch ms; None if unknown
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]

    @property
    def place(self) -> Place:
        """The record's original partition."""
        return Place(self.topic, self.partition)

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} at {self.offset}"


class NotReplayableError(ValueError):
    """The record cannot be replayed; the message says why."""


def item_of(record: Any) -> Item:
    """Convert a record of aiokafka, unchanged."""
    return Item(
        record.topic, record.partition, record.offset, record.timestamp, record.key, record.value, record.headers
    )


def marked(item: Item, replay: str) -> list[Header]:
    """Return the headers of a replayed record: its own, without those of an earlier replay, and its origin."""
    kept = item.headers
    if any(name == ORIGIN_REPLAY for name, _ in kept):
        kept = tuple(header for header in kept if header[0] not in _MARKS)
    origin: list[Header] = [
        (ORIGIN_TOPIC, item.topic.encode()),
        (ORIGIN_PARTITION, b"%d" % item.partition),
        (ORIGIN_OFFSET, b"%d" % item.offset),
    ]
    if item.timestamp is not None:
        origin.append((ORIGIN_TIMESTAMP, b"%d" % item.timestamp))
    return [*kept, *origin, (ORIGIN_REPLAY, replay.encode())]


def of_letter(record: Any, *, anywhere: bool) -> Item:
    """Restore the record that became a dead letter.

    Args:
        record: aiokafka's record: a dead letter of a Spark job (`error` and `origin.*` after the record's own headers)
            or of the gateway (`dead-letter.*`).
        anywhere: whether a dead letter without an origin may use its own topic, partition and offset instead.

    Raises:
        NotReplayableError: not a dead letter, or its value was truncated.
    """
    headers: tuple[Header, ...] = record.headers
    rest, origin = _split_off(headers)
    names = (ORIGIN_TOPIC, ORIGIN_PARTITION, ORIGIN_OFFSET)
    if not origin:
        origin = {name: value for name, value in headers if name.startswith(DEAD_LETTER_PREFIX)}
        rest = tuple(header for header in headers if not header[0].startswith(DEAD_LETTER_PREFIX))
        names = (DEAD_LETTER_TOPIC, DEAD_LETTER_PARTITION, DEAD_LETTER_OFFSET)
    if ORIGIN_LENGTH in origin:
        raise NotReplayableError(f"its value of {_text(origin[ORIGIN_LENGTH])} bytes was truncated")
    created = next((_number(value) for name, value in rest if name == CREATION_TIME), None)
    if created is not None:  # a fast clock's record arrived before its dead letter
        created = min(created, record.timestamp)
    timestamp = _number(origin.get(ORIGIN_TIMESTAMP))
    timestamp = created if timestamp is None else timestamp
    topic, partition, offset = _text(origin.get(names[0])), _number(origin.get(names[1])), _number(origin.get(names[2]))
    if partition is not None and offset is not None and is_topic_name(topic):
        return Item(topic, partition, offset, timestamp, record.key, record.value, rest)
    if not anywhere:
        raise NotReplayableError("its origin is unknown: no headers origin.topic, origin.partition, origin.offset")
    timestamp = record.timestamp if timestamp is None else timestamp
    return Item(record.topic, record.partition, record.offset, timestamp, record.key, record.value, rest)


def _split_off(headers: Sequence[Header]) -> tuple[tuple[Header, ...], dict[str, bytes | None]]:
    """Split off the headers that a Spark job appended; the record itself may have had headers with these names."""
    origin: dict[str, bytes | None] = {}
    for index in range(len(headers) - 1, -1, -1):
        name, value = headers[index]
        if name == ERROR and ORIGIN_TOPIC in origin:
            return tuple(headers[:index]), origin
        if name not in _APPENDED or name in origin:
            break
        origin[name] = value
    return tuple(headers), {}


def _text(raw: bytes | None) -> str:
    return "" if raw is None else raw.decode("utf-8", "replace")


def _number(raw: bytes | None) -> int | None:
    text = _text(raw)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None
