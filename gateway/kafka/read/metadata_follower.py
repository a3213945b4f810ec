"""Follows Kafka's metadata of watched partitions: new ones, missing ones, new leaders, and recreated topics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any, Final

import msgspec
import structlog
from aiokafka import TopicPartition

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.brokers import Brokers
from gateway.kafka.read.watched_topics import WatchedPartition, WatchedTopic
from gateway.runtime.spawn import Spawn

log = structlog.get_logger(__name__)

RECHECK_S: Final = 2.0  # the pause between two checks while something is missing
GONE_S: Final = 30.0  # a partition missing for this time counts as deleted: its catch-ups end


class MetadataFollower(msgspec.Struct, eq=False):
    """Follows the metadata of all topics, from `start` on, and updates the partitions that the live reader may read."""

    _lookup: Lookup
    _spawn: Spawn
    _topics: Mapping[str, WatchedTopic]  # that are watched
    _read: MutableMapping[
        TopicPartition, WatchedPartition
    ]  # their readable partitions; the live reader changes some too
    _changed: Callable[[], None]  # called when `_read` has changed
    _deleted: Callable[[WatchedPartition], None]  # called for a partition that has been missing for `GONE_S`
    _recreated: Callable[[WatchedTopic], None]  # called for a recreated topic, before its partitions are checked
    # called for a partition that is read from now on and had no leader when its watch started
    _leader_found: Callable[[TopicPartition], None]
    _suspected_at: float = float("-inf")
    _leading: asyncio.Task[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _stopped: bool = False  # metadata may arrive until its sources are closed

    def start(self) -> None:
        """Follow the metadata."""
        self._lookup.add_listener(self._check)

    async def stop(self) -> None:
        """Stop requesting metadata."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._leading is not None:
            self._leading.cancel()
            await asyncio.gather(self._leading, return_exceptions=True)

    def await_leaders(self, partitions: Collection[TopicPartition], since_ms: int) -> None:
        """Start reading partitions that have no leader at the start of a watch as soon as they have one.

        Records older than the watch (`since_ms`, epoch) are not read.
        """
        for tp in partitions:
            topic = self._topics[tp.topic]
            if tp not in topic.partitions:
                topic.leaderless.setdefault(tp, since_ms)
        topic, number = next(iter(partitions))
        log.warning(
            "live reader: partitions have no leader; they are read as soon as they have one",
            count=len(partitions),
            such_as=f"{topic}-{number}",
        )
        self._recheck()

    def check_consumer_metadata(self, cluster: Any) -> None:
        """Request the metadata of all topics, which is decisive, if the consumer's own metadata lacks one."""
        if any(cluster.partitions_for_topic(topic) is None for topic in {tp.topic for tp in self._read}):
            self._refresh()

    def suspect_deletion(self) -> None:
        """Request metadata: a fetch response said that a broker does not have a topic, which may have been recreated.

        The next fetch may continue in the new log unnoticed. So ask immediately, and once more soon, since the brokers
        learn of the change one after the other; but not more often, however many fetches fail.
        """
        now = asyncio.get_running_loop().time()
        if self._stopped:
            return
        if now - self._suspected_at >= RECHECK_S:
            self._suspected_at = now
            self._refresh()
        self._recheck()

    def _refresh(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._stopped:
            self._spawn(self._lookup.refresh())  # refreshes at the same time are one

    def _recheck(self) -> None:
        if self._timer is None and not self._stopped:
            self._timer = asyncio.get_running_loop().call_later(RECHECK_S, self._refresh)

    def _check(self, cluster: Brokers) -> None:
        """Update the readable partitions from new metadata of all topics.

        A broker that has just started may not know a topic yet, so positions outlive the absence. A recreated topic has
        another id; where brokers report no ids, it shows by a position beyond the log's end.
        """
        now = asyncio.get_running_loop().time()
        missing = False
        led: dict[TopicPartition, int] = {}
        for topic in self._topics.values():
            if topic.identity.becomes(self._lookup.identity(topic.name)):
                self._recreated(topic)
            partitions = cluster.partitions_for_topic(topic.name) or ()
            for tp, part in topic.partitions.items():
                if tp.partition in partitions:
                    part.missing_since = None
                    if tp not in self._read:
                        self._include(tp, part)
                    continue
                missing = True
                if part.missing_since is None:
                    log.warning("live reader: a partition has disappeared", topic=tp.topic, partition=tp.partition)
                    part.missing_since = now
                    self._read.pop(tp, None)
                    self._changed()
                elif now - part.missing_since > GONE_S:
                    self._deleted(part)
            for number in partitions:
                tp = TopicPartition(topic.name, number)
                if tp in topic.leaderless:
                    missing = True
                    if cluster.leader(*tp) is not None:
                        led[tp] = topic.leaderless[tp]
                elif tp not in topic.partitions:
                    # It appeared after the watch started, and so did its first record.
                    self._include(tp, WatchedPartition(topic, 0))
        if missing:
            self._recheck()
        if led and not self._stopped and (self._leading is None or self._leading.done()):
            self._leading = self._spawn(self._include_led(led))

    def _include(self, tp: TopicPartition, part: WatchedPartition) -> None:
        part.topic.partitions[tp] = self._read[tp] = part
        self._changed()

    async def _include_led(self, led: Mapping[TopicPartition, int]) -> None:
        """Read partitions that have a leader now and had none when their watch started, from that time on."""
        try:
            offsets = await self._lookup.since_leaderless(led)
        except Refused as refused:
            log.warning("live reader: partitions that have a leader again cannot be read yet", reason=refused.reason)
            return
        for tp, offset in offsets.items():
            topic = self._topics.get(tp.topic)
            if topic is not None and topic.leaderless.pop(tp, None) is not None:
                self._include(tp, WatchedPartition(topic, offset))
                self._leader_found(tp)
