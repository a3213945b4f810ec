"""What the gateway needs to know of a topic, from Kafka's answers: partitions, leaders and limits."""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.kafka.driver import wire

DEFAULT_MAX_MESSAGE_BYTES: Final = 1_048_588
"""Kafka's default of `max.message.bytes`; assumed when we may not read a topic's configuration."""

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
    """What the publisher needs to know of a topic."""

    name: str
    partitions: int  # their number
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES  # largest record batch that the broker accepts
    available: tuple[int, ...] = ()  # the partitions that have a leader now
    needs_key: bool = False  # compacted: a record without a key would be refused with its whole batch
    cleanup: str | None = None  # `cleanup.policy`; None when we may not read it
    before_ms: int = _FOREVER  # how far in the past a record's own timestamp may be
    after_ms: int = _FOREVER  # how far in the future it may be
    copies: int = 1  # replication factor: the smallest of the partitions'
    min_in_sync: int | None = None  # `min.insync.replicas`; None when we may not read it

    def timestamps(self, now_ms: int) -> tuple[int, int]:
        """Return the earliest and the latest timestamp that a record may have now, in epoch milliseconds."""
        return max(0, now_ms - self.before_ms), now_ms + self.after_ms


class InternalTopic(msgspec.Struct, frozen=True):
    """One of the gateway's own topics, which clients cannot see, read or write, and how to create it."""

    name: str  # starts with `INTERNAL_TOPIC_PREFIX` unless `readable`
    partitions: int  # number of partitions to create it with
    configs: tuple[tuple[str, str], ...] = ()  # topic configuration to create it with
    readable: bool = False  # clients can see and read it, but still not write it


def info_of(name: str, topic: wire.Topic, known: TopicInfo | None = None) -> TopicInfo:
    """Make a `TopicInfo` from a topic's metadata, with the limits of `known`, or else Kafka's default limits."""
    return msgspec.structs.replace(
        TopicInfo(name, 0) if known is None else known,
        partitions=len(topic.leaders),
        available=tuple(number for number, leader in enumerate(topic.leaders) if leader != wire.NO_LEADER),
        copies=topic.copies,
    )


def configured(info: TopicInfo, configs: dict[str, str]) -> TopicInfo:
    """Return `info` with the limits of the topic's configuration."""
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
    """Detects that a topic was re-created, by its id in the metadata. Offsets of the former topic are then void."""

    __slots__ = ("_former", "current")

    def __init__(self, topic_id: bytes) -> None:
        """`topic_id` is what `Lookup.identity` returns."""
        self.current = topic_id
        self._former = b""

    def becomes(self, topic_id: bytes) -> bool:
        """Remember `topic_id`, and return whether it shows that the topic was re-created.

        b"" is ignored, and so is the id before the current one, which a broker with older metadata may still return.
        """
        if not topic_id or topic_id in {self.current, self._former}:
            return False
        self._former, self.current = self.current, topic_id
        return bool(self._former)
