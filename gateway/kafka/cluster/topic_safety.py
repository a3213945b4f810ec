"""Check whether a topic's acknowledged records survive the loss of a broker, and warn once if they may not.

When Kafka acknowledges a record, `min.insync.replicas` brokers have it, if there are that many replicas. With one, the
loss of that broker's disk loses acknowledged records. A topic is safe when both numbers are at least two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import structlog

from gateway.kafka.cluster.topic_info import TopicInfo, info_of
from gateway.kafka.cluster.topic_queries import TopicQueries
from gateway.kafka.contracts import Refused
from gateway.kafka.driver import wire
from mapping.outcomes import Outcome
from mapping.record import INTERNAL_TOPIC_PREFIX, is_topic_name
from telemetry.statistics import gauge

log = structlog.get_logger(__name__)

SAFE_COPIES: Final = 2
"""Brokers that must have a record when it is acknowledged."""


ROUND: Final = 500  # topics in one request
KAFKA_TOPICS: Final = ("__consumer_offsets", "__transaction_state")
"""Kafka's own topics that clients rely on: groups' offsets and transactions."""
OWN: Final = f"{INTERNAL_TOPIC_PREFIX}trivium_"


class TopicSafetyStatistics(msgspec.Struct, frozen=True):
    """Statistics of the topics that this gateway has written to."""

    unsafe_topics: Annotated[
        int, gauge("topics written to, including the gateway's own, whose records may be on one broker only")
    ]


def why_unsafe(info: TopicInfo) -> str | None:
    """Return why the loss of one broker may lose acknowledged records of a topic; None when it is safe."""
    if info.copies < SAFE_COPIES:
        return f"topic {info.name} has a replication factor of {info.copies}"
    if info.min_in_sync is None:
        return f"the min.insync.replicas of topic {info.name} cannot be read: DescribeConfigs is denied"
    if info.min_in_sync < SAFE_COPIES:
        return f"topic {info.name} has min.insync.replicas={info.min_in_sync}: a record may be on one broker only"
    return None


class TopicReport(msgspec.Struct, frozen=True):
    """One topic in the answer of `/topics`."""

    name: str
    partitions: int
    copies: int  # replication factor: the smallest of the partitions'
    min_insync_replicas: int | None  # None when we may not read it
    safe: bool
    reason: str | None  # why it is not safe


class TopicsReport(msgspec.Struct, frozen=True):
    """The answer of `/topics`."""

    brokers: int  # number of brokers in the cluster
    required: bool  # `kafka.require_safe_topics`
    topics: list[TopicReport]  # Kafka's and the gateway's own first, then those of clients, by name


def topics_to_check(metadata: wire.Metadata) -> tuple[list[str], list[str], list[str]]:
    """Return the topics whose safety matters: Kafka's own, the gateway's own, those of clients."""
    names = sorted(metadata.topics)
    own = [name for name in names if name.startswith(OWN)]
    of_clients = [name for name in names if is_topic_name(name) and not name.startswith(INTERNAL_TOPIC_PREFIX)]
    return [name for name in KAFKA_TOPICS if name in metadata.topics], own, of_clients


async def describe_topics(queries: TopicQueries, names: Sequence[str]) -> list[TopicInfo]:
    """Describe these topics, without those deleted meanwhile. Raises Refused when Kafka does not answer."""
    complete: list[TopicInfo] = []
    for at in range(0, len(names), ROUND):
        described = await queries.describe(names[at : at + ROUND])
        infos = [info_of(name, topic) for name, topic in described.items() if not isinstance(topic, Refused)]
        complete += await queries.configured(infos)
    return complete


async def report(queries: TopicQueries, *, required: bool) -> TopicsReport:
    """Report which topics are safe. Raises Refused when Kafka does not answer."""
    metadata = await queries.all_topics()
    infos = await describe_topics(queries, [name for names in topics_to_check(metadata) for name in names])
    reasons = [why_unsafe(info) for info in infos]
    topics = [
        TopicReport(info.name, info.partitions, info.copies, info.min_in_sync, why is None, why)
        for info, why in zip(infos, reasons, strict=True)
    ]
    return TopicsReport(len(metadata.brokers), required, topics)


class TopicSafety:
    """Checks a topic when it is first written to, and whenever its `TopicInfo` changes."""

    def __init__(self, *, required: bool) -> None:
        """With `required`, unsafe topics are not written to."""
        self.brokers = 0  # the largest number of brokers seen in the cluster
        self._required = required
        self._unsafe: dict[str, str] = {}
        self._warned: set[str] = set()

    def check(self, info: TopicInfo) -> Refused | None:
        """Check a topic that is written to and warn once if it is unsafe. Returns why it must not be written to."""
        why = why_unsafe(info)
        if why is None:
            self.forget(info.name)
            return None
        self._unsafe[info.name] = why
        if self._required:
            self._warn_once(info.name, "nothing is stored (kafka.require_safe_topics)", why)
            return Refused(Outcome.UNSAFE, f"{why}, and kafka.require_safe_topics is set")
        if self.brokers >= SAFE_COPIES:  # a single broker can never be safe, and its administrator knows that
            self._warn_once(info.name, "acknowledged records may be lost with one broker", why)
        return None

    def forget(self, name: str) -> None:
        """Forget a topic that is safe or deleted; it is warned about again if need be."""
        self._unsafe.pop(name, None)
        self._warned.discard(name)

    def _warn_once(self, name: str, text: str, why: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning(text, topic=name, reason=why)

    def statistics(self) -> TopicSafetyStatistics:
        """Return the current statistics."""
        return TopicSafetyStatistics(len(self._unsafe))
