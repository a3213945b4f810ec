"""Whether what is acknowledged for a topic outlives the loss of a broker; told once where it does not.

A record is on as many brokers as `min.insync.replicas` says when Kafka acknowledges it, if there are so many copies:
with one, whoever loses that broker's disk loses what was acknowledged. A topic is safe when both are two at least.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from gateway.kafka.cluster.topic_info import TopicInfo, info_of
from gateway.kafka.cluster.topic_queries import TopicQueries
from gateway.kafka.contracts import Refused
from gateway.kafka.driver import wire
from gateway.statistics import gauge
from mapping.outcomes import Outcome
from mapping.record import INTERNAL_TOPIC_PREFIX, is_topic_name

log = logging.getLogger(__name__)

LEAST: Final = 2
"""Brokers that have a record when it is acknowledged."""


ROUND: Final = 500  # topics in one question
KAFKAS: Final = ("__consumer_offsets", "__transaction_state")
"""Kafka's own topics that clients rely on: positions of groups, and transactions."""
OWN: Final = f"{INTERNAL_TOPIC_PREFIX}trivium_"


class Statistics(msgspec.Struct, frozen=True):
    """Of the topics that this gateway has written to."""

    unsafe_topics: Annotated[
        int, gauge("topics written to, the gateway's own included, whose records one broker alone may hold")
    ]


def why_unsafe(info: TopicInfo) -> str | None:
    """Why the loss of one broker may lose what was acknowledged for a topic; None where it may not."""
    if info.copies < LEAST:
        return f"topic {info.name} has {info.copies} copy of each record (replication factor)"
    if info.min_in_sync is None:
        return f"the min.insync.replicas of topic {info.name} cannot be seen: DescribeConfigs is denied"
    if info.min_in_sync < LEAST:
        return f"topic {info.name} has min.insync.replicas={info.min_in_sync}: one broker may be all that has a record"
    return None


class TopicReport(msgspec.Struct, frozen=True):
    """One topic, as `/topics` tells it."""

    name: str
    partitions: int
    copies: int  # of each record; the fewest that a partition has
    min_insync_replicas: int | None  # None: it may not be read
    safe: bool
    reason: str | None  # why it is not


class TopicsReport(msgspec.Struct, frozen=True):
    """The answer of `/topics`."""

    brokers: int  # of the cluster
    required: bool  # `kafka.require_safe_topics`
    topics: list[TopicReport]  # the gateway's own and Kafka's first, then those of clients, by name


def judged(metadata: wire.Metadata) -> tuple[list[str], list[str], list[str]]:
    """The topics whose safety matters: Kafka's, the gateway's own, those of clients."""
    names = sorted(metadata.topics)
    own = [name for name in names if name.startswith(OWN)]
    theirs = [name for name in names if is_topic_name(name) and not name.startswith(INTERNAL_TOPIC_PREFIX)]
    return [name for name in KAFKAS if name in metadata.topics], own, theirs


async def look_at(queries: TopicQueries, names: Sequence[str]) -> list[TopicInfo]:
    """These topics as Kafka has them now, without those that are gone meanwhile. Raises Refused: Kafka is silent."""
    found: list[TopicInfo] = []
    for at in range(0, len(names), ROUND):
        described = await queries.describe(names[at : at + ROUND])
        infos = [info_of(name, parts) for name, parts in described.items() if not isinstance(parts, Refused)]
        found += await queries.configured(infos)
    return found


async def report(queries: TopicQueries, *, required: bool) -> TopicsReport:
    """Ask Kafka which topics are safe. Raises Refused: it does not answer."""
    metadata = await queries.everything()
    infos = await look_at(queries, [name for names in judged(metadata) for name in names])
    reasons = [why_unsafe(info) for info in infos]
    topics = [
        TopicReport(info.name, info.partitions, info.copies, info.min_in_sync, why is None, why)
        for info, why in zip(infos, reasons, strict=True)
    ]
    return TopicsReport(len(metadata.brokers), required, topics)


class TopicSafety:
    """Looks at what is known of a topic when it is first written to, and when that changes."""

    def __init__(self, *, required: bool) -> None:
        """`required`: what is not safe is not written to."""
        self.brokers = 0  # of the cluster, the most that were seen
        self._required = required
        self._unsafe: dict[str, str] = {}
        self._told: set[str] = set()

    def judge(self, info: TopicInfo) -> Refused | None:
        """Note a topic that is written to, warn of it once if it is not safe; why it may not be written to, if so."""
        why = why_unsafe(info)
        if why is None:
            self._unsafe.pop(info.name, None)
            self._told.discard(info.name)
            return None
        self._unsafe[info.name] = why
        if self._required:
            self._tell(info.name, "nothing is stored (kafka.require_safe_topics): %s", why)
            return Refused(Outcome.UNSAFE, f"{why}, and kafka.require_safe_topics is set")
        if self.brokers >= LEAST:  # one alone can be no safer, and whoever runs it knows
            self._tell(info.name, "what is acknowledged may be lost with one broker: %s", why)
        return None

    def forget(self, name: str) -> None:
        """A topic is gone."""
        self._unsafe.pop(name, None)

    def _tell(self, name: str, text: str, why: str) -> None:
        if name not in self._told:
            self._told.add(name)
            log.warning(text, why)

    def statistics(self) -> Statistics:
        """As of now."""
        return Statistics(len(self._unsafe))
