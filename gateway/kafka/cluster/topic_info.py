"""What must be known of a topic, made of Kafka's answers: its partitions, their leaders, and its limits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from gateway.kafka.driver import wire

DEFAULT_MAX_MESSAGE_BYTES: Final = 1_048_588
"""Kafka's own default of `max.message.bytes`; assumed where we may not read a topic's configuration."""

CONFIG_NAMES: Final = [
    "max.message.bytes",
    "cleanup.policy",
    "min.insync.replicas",
    "message.timestamp.type",
    "message.timestamp.before.max.ms",
    "message.timestamp.after.max.ms",
]
_FOREVER: Final = 2**63 - 1


class TopicInfo(msgspec.Struct, frozen=True, gc=False):
    """What must be known of a topic before a record is handed over."""

    name: str  # the topic
    partitions: int  # how many it has; they are numbered from 0
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES  # largest record batch that its broker takes
    available: tuple[int, ...] = ()  # the partitions that have a leader now
    needs_key: bool = False  # compacted: a record without a key would be refused, and the batch around it
    cleanup: str | None = None  # its `cleanup.policy`; None when we may not read it
    before_ms: int = _FOREVER  # how far in the past a record's own timestamp may be
    after_ms: int = _FOREVER  # how far in the future it may be
    copies: int = 1  # of each record: the fewest that a partition has
    min_in_sync: int | None = None  # `min.insync.replicas`; None when we may not read it


class InternalTopic(msgspec.Struct, frozen=True):
    """One of our own topics, which no client can see, read or write, and how it is created when it is missing."""

    name: str  # begins with `INTERNAL_TOPIC_PREFIX`, unless it is `readable`
    partitions: int  # how many it is created with
    configs: tuple[tuple[str, str], ...] = ()  # Kafka's names and values
    readable: bool = False  # clients read it as any topic; they cannot write it either


def led_now(topic: wire.Topic) -> tuple[int, ...]:
    """The partitions that have a leader."""
    return tuple(number for number, leader in enumerate(topic.leaders) if leader != wire.NO_LEADER)


def available_of(partitions: Iterable[tuple[Any, ...]]) -> tuple[int, ...]:
    """As `led_now`, of an answer that aiokafka has decoded."""
    return tuple(sorted(number for _, number, leader, *_ in partitions if leader >= 0))


def copies_of(partitions: Iterable[tuple[Any, ...]]) -> int:
    """How many copies the partition has that has the fewest, by such an answer."""
    return min((len(replicas) for _, _, _, replicas, *_ in partitions), default=0)


def info_of(name: str, partitions: list[tuple[Any, ...]]) -> TopicInfo:
    """What such an answer says of a topic; its limits are Kafka's defaults."""
    return TopicInfo(
        name=name, partitions=len(partitions), available=available_of(partitions), copies=copies_of(partitions)
    )


def configured(info: TopicInfo, configs: dict[str, str]) -> TopicInfo:
    """The same topic, with the limits that its configuration sets."""
    in_sync = configs.get("min.insync.replicas")
    own_time = configs.get("message.timestamp.type") != "LogAppendTime"
    return msgspec.structs.replace(
        info,
        max_message_bytes=int(configs.get("max.message.bytes", DEFAULT_MAX_MESSAGE_BYTES)),
        needs_key="compact" in configs.get("cleanup.policy", ""),
        cleanup=configs.get("cleanup.policy"),
        min_in_sync=None if in_sync is None else int(in_sync),
        before_ms=int(configs.get("message.timestamp.before.max.ms", _FOREVER)) if own_time else _FOREVER,
        after_ms=int(configs.get("message.timestamp.after.max.ms", _FOREVER)) if own_time else _FOREVER,
    )


class TopicIdentity:
    """The id of a topic as of the last metadata that told one. Offsets count only in the topic that they are of."""

    __slots__ = ("_former", "current")

    def __init__(self, found: bytes) -> None:
        """`found`: see `Lookup.identity`."""
        self.current = found
        self._former = b""

    def becomes(self, found: bytes) -> bool:
        """Whether the topic was made again since the last look; remembers the id.

        Nothing is told by b"", nor by the id before this one: a broker may be behind the others.
        """
        if not found or found in {self.current, self._former}:
            return False
        self._former, self.current = self.current, found
        return bool(self._former)
