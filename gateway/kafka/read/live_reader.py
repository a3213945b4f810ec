"""The reader at the end of the log: one per process, for every watched topic.

One consumer (`live_consumer`) serves all topics, and each record is offered to the subscribers that the watching
fan-outs select. The live reader never waits for a subscriber. One without capacity falls behind in that partition: the
catch-up reader brings it the records from there on. It rejoins here when the catch-up has reached this reader's
position, between two records, so that the order per partition is kept and no record is lost or duplicated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

import structlog
from aiokafka import TopicPartition

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.cluster.topic_info import TopicIdentity
from gateway.kafka.contracts import Fanout, Subscriber
from gateway.kafka.driver.kafka_consumer import ConsumerOptions
from gateway.kafka.read.catch_up_reader import CatchUpReader, Reading
from gateway.kafka.read.distributor import Distributor
from gateway.kafka.read.live_consumer import LiveConsumer
from gateway.kafka.read.metadata_follower import MetadataFollower
from gateway.kafka.read.start_positions import Start, starting_offsets
from gateway.kafka.read.watched_topics import LiveStatistics, PendingCatchUp, Watch, WatchedPartition, WatchedTopic
from gateway.runtime.spawn import Spawn

log = structlog.get_logger(__name__)


class LiveReader:
    """Reads watched topics at the end of the log. A subscriber, hashable by identity, belongs to one fan-out."""

    def __init__(
        self,
        kafka: ConsumerOptions,
        spawn: Spawn,
        lookup: Lookup,
        catch_up_reader: CatchUpReader,
    ) -> None:
        """Open nothing before the first `watch`; `lookup` and `catch_up_reader` are stopped by their owner."""
        self._lookup = lookup
        self._catch_up_reader = catch_up_reader
        self._topics: dict[str, WatchedTopic] = {}
        self._partitions: dict[TopicPartition, WatchedPartition] = {}
        self._pending: dict[TopicPartition, dict[Subscriber, PendingCatchUp]] = {}  # catch-ups that wait for a leader
        self.distributor = Distributor(self._partitions, self._fall_behind)
        self._consumer = LiveConsumer(kafka, spawn, lookup, self._partitions, self.distributor.hand_over)
        self._metadata = MetadataFollower(
            lookup,
            spawn,
            self._topics,
            self._partitions,
            self._consumer.change_assignment,
            self._cancel_readings,
            self._restart_topic,
            self._catch_up_waiting,
        )
        self._fell_behind = 0

    async def start(self) -> None:
        """Start to read; Kafka need not be reachable yet."""
        self._metadata.start()
        self._consumer.start(self._metadata.suspect_deletion, self._metadata.check_consumer_metadata)

    async def stop(self) -> None:
        """Stop reading and close the consumer."""
        await self._metadata.stop()
        await self._consumer.stop()

    async def watch(self, topic: str, fanout: Fanout) -> None:
        """Offer the records of a topic to the subscribers that `fanout` selects.

        Returns when the position at the end of the log is fixed: records stored afterwards are offered, and records
        stored before the call are not. Watching twice changes nothing.

        Raises:
            Refused: the topic is unknown or hidden from clients, or Kafka does not answer.
        """
        partitions = await self._lookup.partitions(topic)
        await self._watch_partitions(partitions, fanout)

    async def watch_all(self, topics: Collection[str], fanout: Fanout, *, beginning: bool = False) -> set[str]:
        """Watch many topics like `watch`, with one request to Kafka and one assignment.

        `beginning`: the topics are new, and all of their records are wanted.

        Returns:
            The topics that exist; the others are not watched.

        Raises:
            Refused: Kafka does not answer.
        """
        if beginning:
            await self._lookup.refresh()  # cached metadata may be of deleted topics with these names
        topic_metadata = await self._lookup.existing(topics)
        partitions = [partition for numbers in topic_metadata.values() for partition in numbers]
        return topic_metadata.keys() - await self._watch_partitions(partitions, fanout, beginning=beginning)

    async def _watch_partitions(
        self, partitions: Collection[TopicPartition], fanout: Fanout, *, beginning: bool = False
    ) -> set[str]:
        """Let a fan-out watch partitions, or await their leader; return the topics that no longer exist."""
        called = 0 if beginning else round(time.time() * 1000)
        ask = self._lookup.beginnings if beginning else self._lookup.ends
        offsets = await ask(partitions, led=True) if partitions else {}
        lacking = [tp for tp in partitions if tp not in offsets]
        gone = {tp.topic for tp in lacking if not self._lookup.has(tp)}  # deleted during the request
        self._add(fanout, {tp: offset for tp, offset in offsets.items() if tp.topic not in gone}, beginning)
        waiting = [tp for tp in lacking if tp.topic not in gone]
        for topic in {tp.topic for tp in waiting}:
            if fanout not in self._topic(topic).watching:
                self._topic(topic).add(fanout, {})
        if waiting:
            self._metadata.await_leaders(waiting, called)
        return gone

    def _topic(self, name: str) -> WatchedTopic:
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = WatchedTopic(name, TopicIdentity(self._lookup.identity(name)))
        return topic

    def _add(self, fanout: Fanout, offsets: Mapping[TopicPartition, int], beginning: bool = False) -> None:
        """Let a fan-out watch from these offsets on, in topics that it does not watch yet."""
        by_topic: dict[str, list[TopicPartition]] = {}
        for partition in offsets:
            by_topic.setdefault(partition.topic, []).append(partition)
        changed = False
        for name, partitions in by_topic.items():
            topic = self._topic(name)
            if fanout in topic.watching:
                continue
            since: dict[int, int] = {}
            for partition in partitions:
                offset, known = offsets[partition], topic.partitions.get(partition)
                if known is None and partition in topic.leaderless:
                    since[partition.partition] = offset  # fan-outs that wait for its leader may want earlier records
                elif known is None:
                    topic.partitions[partition] = self._partitions[partition] = WatchedPartition(topic, offset)
                    changed = True
                elif offset > known.position:
                    since[partition.partition] = offset
                elif beginning and offset < known.position:
                    changed = self._rewind(partition, known, offset) or changed
            topic.add(fanout, since)
        if changed:
            self._consumer.change_assignment()

    def _rewind(self, partition: TopicPartition, part: WatchedPartition, offset: int) -> bool:
        """Re-read a new topic's partition from its beginning for a new watch; existing watches skip the repetition.

        Not while a subscriber is behind: its catch-up ends at the live reader's position, which must not move back.
        Then the new watch starts at that position. Returns whether the partition is re-read.
        """
        if part.behind:
            log.warning(
                "live reader: a partition cannot be re-read now; a new subscription starts at the live position",
                topic=partition.topic,
                partition=partition.partition,
                position=part.position,
            )
            return False
        for watch in part.topic.watches:
            watch.since[partition.partition] = max(part.position, watch.since.get(partition.partition, 0))
        # A new object: records that were fetched for the former one are not fanned out any more.
        part.topic.partitions[partition] = WatchedPartition(part.topic, offset)
        if partition in self._partitions:
            self._partitions[partition] = part.topic.partitions[partition]
        self._consumer.seek(partition, offset)
        return True

    async def watch_from(
        self, topic: str, fanout: Fanout, subscriber: Subscriber, start: Start, partition: int | None = None
    ) -> None:
        """Watch like `watch`, but first offer the fan-out's one subscriber everything from `start` on.

        `partition`: catch up only in this one; for later records, `fanout` selects.

        Raises:
            BeyondEnd: the log does not have the offset.
            Refused: as in `watch`, or the partition is unknown.
        """
        offsets = await starting_offsets(self._lookup, topic, start, partition)
        await self.watch(topic, fanout)
        for number, offset in offsets.items():
            self.catch_up(topic, fanout, subscriber, number, offset)

    def unwatch(self, topic: str, fanout: Fanout) -> None:
        """Stop offering; subscribers of this fan-out that are behind in the topic get no more of it either."""
        state = self._topics.get(topic)
        if state is None:
            return
        watch = state.remove(fanout)
        if watch is not None:
            self._cancel(watch.readings)
        for tp in self._pending.keys() & state.leaderless.keys():
            waiting = self._pending.pop(tp)
            if left := {one: wanted for one, wanted in waiting.items() if wanted.fanout is not fanout}:
                self._pending[tp] = left
        if not state.watching:
            del self._topics[topic]
            self._remove(state, list(state.partitions))

    def resume(self, subscriber: Subscriber) -> None:
        """Continue for a subscriber that had no capacity and now has some."""
        self._catch_up_reader.resume(subscriber)

    def forget(self, subscriber: Subscriber) -> None:
        """Offer nothing more from the catch-up reader to a subscriber that is gone."""
        for reading in self._catch_up_reader.forget(subscriber):
            reading.finished(reading)
        for waiting in self._pending.values():
            waiting.pop(subscriber, None)

    def catch_up(  # noqa: PLR0917 - a position and its subscriber
        self,
        topic: str,
        fanout: Fanout,
        subscriber: Subscriber,
        partition: int,
        offset: int,
        gap: Callable[[int], None] | None = None,
    ) -> bool:
        """Offer a subscriber everything from `offset` on first, as if it had fallen behind there (a session resumes).

        Call it after `watch` in the same event loop iteration, so that the live reader offers nothing before. Records
        that are caught up on are offered even if the fan-out would not select the subscriber. `gap` receives the number
        of records that retention had deleted.

        Returns:
            Whether the partition is being read, or will be when it has a leader; False when the topic no longer has it.
        """
        state, tp = self._topics.get(topic), TopicPartition(topic, partition)
        part = self._partitions.get(tp)
        watch = state.watching.get(fanout) if state else None
        if part is None and state is not None and watch is not None and tp in state.leaderless:
            self._pending.setdefault(tp, {})[subscriber] = PendingCatchUp(fanout, offset, gap)
            return True
        if part is None or watch is None:
            return False
        since = watch.since.get(partition, 0)
        if subscriber not in part.behind and offset < max(part.position, since):
            self._fall_behind(part, watch, subscriber, tp, offset, gap, since)
        return True

    def _catch_up_waiting(self, tp: TopicPartition) -> None:
        """Start the waiting catch-ups of a partition that has a leader again, before any of it was fanned out."""
        for subscriber, wanted in self._pending.pop(tp, {}).items():
            self.catch_up(tp.topic, wanted.fanout, subscriber, tp.partition, wanted.offset, wanted.gap)

    def leaderless(self, topic: str) -> list[int]:
        """Return the partitions of a watched topic that are not read until they have a leader."""
        state = self._topics.get(topic)
        return [] if state is None else [tp.partition for tp in state.leaderless]

    def positions(self, topic: str, subscriber: Subscriber) -> dict[int, int]:
        """Return a subscriber's position in each partition of a watched topic: all below was offered to it."""
        state = self._topics.get(topic)
        if state is None:
            return {}
        waiting = {
            tp.partition: self._pending[tp][subscriber].offset
            for tp in state.leaderless
            if subscriber in self._pending.get(tp, ())
        }
        return waiting | {
            partition.partition: part.behind[subscriber].position if subscriber in part.behind else part.position
            for partition, part in state.partitions.items()
        }

    def position(self, topic: str, partition: int) -> int | None:
        """The offset of the next record to fan out; None when the partition is missing or not watched."""
        part = self._partitions.get(TopicPartition(topic, partition))
        return None if part is None else part.position

    def end(self, partition: TopicPartition) -> int | None:
        """The end of the log in the last fetch, including open transactions; None before the first fetch."""
        return self._consumer.end(partition)

    def identity(self, topic: str) -> bytes:
        """The id of a watched topic, which differs from other topics of the same name; b"" when it is not known."""
        state = self._topics.get(topic)
        return b"" if state is None else state.identity.current

    def is_behind(self, topic: str, subscriber: Subscriber) -> bool:
        """Whether the catch-up reader has yet to bring a subscriber records of a topic."""
        state = self._topics.get(topic)
        if state is None:
            return False
        if any(subscriber in self._pending.get(tp, ()) for tp in state.leaderless):
            return True
        return any(subscriber in part.behind for part in state.partitions.values())

    async def ends(self, topic: str) -> dict[TopicPartition, int]:
        """Return the current end of each of a watched topic's partitions that has a leader.

        Raises:
            Refused: Kafka does not answer.
        """
        state = self._topics.get(topic)
        return {} if state is None else await self._lookup.ends(list(state.partitions), led=True)

    def unread(self, subscriber: Subscriber, ends: Mapping[TopicPartition, int]) -> int:
        """How many offsets below `ends` are still to be offered to a subscriber."""
        left = 0
        for tp, end in ends.items():
            part = self._partitions.get(tp)
            if part is None:
                continue
            if subscriber in part.behind:
                left += max(1, end - part.behind[subscriber].position)
            elif part.position < part.fetched or (self._consumer.next_offset(tp) or part.position) < end:
                left += max(1, end - part.position)
        return left

    def note_stored(self, topic: str, partition: int, end: int) -> None:
        """Note that this process has stored records, so that a partition's log ends at `end` or further on."""
        tp = TopicPartition(topic, partition)
        part = self._partitions.get(tp)
        if part is not None and end > part.position:
            part.stored = end
            self._consumer.note_stored(tp)

    async def ahead(self, topics: Collection[str]) -> dict[tuple[str, int], int]:
        """Find partitions of watched topics with records that were not fanned out yet.

        Kafka is asked only about partitions that have such records, or may have them. Records that others stored a
        moment ago, which the next fetch will report, may be missing; records of this process are not.

        Returns:
            Topic and partition -> the current end of the log, where it is ahead of the fan-out.

        Raises:
            Refused: Kafka does not answer.
        """
        suspects = self._consumer.possibly_ahead(topics)
        stored = {tp: part.stored for tp in suspects if (part := self._partitions.get(tp)) is not None}
        ends = await self._lookup.ends(suspects, led=True) if suspects else {}
        offsets: dict[tuple[str, int], int] = {}
        for tp in suspects:
            part = self._partitions.get(tp)
            if part is None:
                continue
            if tp in ends and part.stored == stored.get(tp):  # nothing was stored during the request
                part.stored = min(part.stored, ends[tp])  # the topic may have been recreated
            end = ends.get(tp, self._known_end(tp, part))  # without a leader nothing is stored
            if end > part.position:
                offsets[tp.topic, tp.partition] = end
        return offsets

    def known_ahead(self, topics: Collection[str]) -> dict[tuple[str, int], int]:
        """Like `ahead`, without a request: from the last fetch and from what this process has stored."""
        return {
            (tp.topic, tp.partition): end
            for topic in topics
            if topic in self._topics
            for tp, part in self._topics[topic].partitions.items()
            if (end := self._known_end(tp, part)) > part.position
        }

    def _known_end(self, tp: TopicPartition, part: WatchedPartition) -> int:
        return max(part.stored, self.end(tp) or 0)

    def statistics(self) -> LiveStatistics:
        """Return the counts so far."""
        lag: dict[str, int] = {}
        for partition, part in self._partitions.items():
            lag[partition.topic] = lag.get(partition.topic, 0) + max(0, (self.end(partition) or 0) - part.position)
        return LiveStatistics(
            positions={
                name: {partition.partition: part.position for partition, part in topic.partitions.items()}
                for name, topic in self._topics.items()
            },
            lag=lag,
            records=self.distributor.records,
            offers=self.distributor.offers,
            dropped=self.distributor.dropped,
            fell_behind=self._fell_behind,
            behind=sum(len(part.behind) for part in self._partitions.values()),
            gaps=self._consumer.gaps,
            leaderless=sum(len(topic.leaderless) for topic in self._topics.values()) + self._consumer.leaderless,
            assignments=self._consumer.assignments,
            fetches=self._consumer.fetches,
            named=self._consumer.named,
            catch_up=self._catch_up_reader.statistics(),
        )

    def _fall_behind(  # noqa: PLR0917 - as `catch_up`
        self,
        part: WatchedPartition,
        watch: Watch,
        subscriber: Subscriber,
        partition: TopicPartition,
        offset: int,
        gap: Callable[[int], None] | None = None,
        since: int = 0,  # the first offset that the watch wants
    ) -> None:
        def goal() -> int:
            return max(part.position, since)

        def finished(reading: Reading) -> None:
            del part.behind[reading.subscriber]
            del watch.readings[reading]

        reading = Reading(subscriber, partition, offset, goal=goal, finished=finished, gap=gap)
        part.behind[subscriber] = reading
        watch.readings[reading] = None
        self._fell_behind += 1
        self._catch_up_reader.start(reading)

    def _remove(self, topic: WatchedTopic, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            part = topic.partitions.pop(partition)
            self._partitions.pop(partition, None)
            self._cancel_readings(part)
        self._consumer.change_assignment()

    def _restart_topic(self, topic: WatchedTopic) -> None:
        """Read a recreated topic from its beginning: all of its records are newer than the watches."""
        log.warning("live reader: a topic was recreated; reading it from its beginning", topic=topic.name)
        for part in topic.partitions.values():
            self._cancel_readings(part)
        for tp in topic.leaderless:
            self._pending.pop(tp, None)
        topic.reset()
        for partition, part in topic.partitions.items():
            if partition in self._partitions:
                self._partitions[partition] = part
            self._consumer.seek(partition, 0)

    def _cancel_readings(self, part: WatchedPartition) -> None:
        self._cancel(part.behind.values())

    def _cancel(self, readings: Iterable[Reading]) -> None:
        """End catch-ups before their goal."""
        for reading in tuple(readings):
            self._catch_up_reader.cancel(reading)
            reading.finished(reading)
