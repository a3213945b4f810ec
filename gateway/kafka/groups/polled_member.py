"""A plain consumer group member that a client polls: its position moves only when records were really delivered.

aiokafka moves its own position when records are fetched. Here records are held until `MemberProgress.deliver` confirms
that they were written, so a poll that ends early, for whatever reason, loses nothing: the next one starts there.

A while after the last poll all partitions are paused. A waiting poll that finds nothing for a while sleeps too, until
the process's one reader at the end of the log wakes it (`arrivals`).

`progress` keeps up to which record was written to the client, and up to which it is known to have arrived. Only the
latter is committed on the client's behalf.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import msgspec
import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import (
    ConsumerStoppedError,
    IllegalStateError,
    KafkaError,
    OffsetMetadataTooLargeError,
    UnknownMemberIdError,
)
from aiokafka.structs import OffsetAndMetadata

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.fetch.fetching import fetch, position, without_leader
from gateway.kafka.driver.kafka_consumer import (
    ASSIGNORS,
    close_consumer,
    committed_positions,
    follow_missing,
    next_offset,
    rejoin,
    until_assigned,
)
from gateway.kafka.driver.lifecycle import start_consumer
from gateway.kafka.groups.member_starts import MemberStarts
from gateway.kafka.groups.progress import MemberProgress
from gateway.kafka.groups.recreated_topics import RecreatedTopics
from gateway.kafka.groups.refusals import NotAssignedError, answering, not_read
from gateway.kafka.read.arrivals import Arrivals
from gateway.runtime.spawn import Spawn
from mapping.outcomes import Outcome

log = structlog.get_logger(__name__)

CHUNK: Final = 1000  # the most records per fetch
QUIET_S: Final = 1.0  # fetching is paused after this time without a record, or without a poll
RECHECK_S: Final = 30.0
"""A sleeping poll checks for records after this time, or up to twice as long: records of open transactions do not wake
it. It asks Kafka only where the live reader cannot say that there is nothing."""
FETCHER_PAUSE_S: Final = 60.0  # how often aiokafka's fetcher checks for work that no call, such as `fetch`, signals
RETRY_S: Final = 0.5  # until positions are set again
LEAST_REQUEST_TIMEOUT_MS: Final = 1000  # a shorter one expires on a busy machine without need
START_S: Final = 8.0  # to connect: most clients wait ten seconds or more for an answer
JOIN_S: Final = 5.0  # how long a subscription waits for its partitions; a broker holds new groups for 3 s
LONGEST_STRING: Final = 2**15 - 1  # bytes, in a request to Kafka
POLL_INTERVAL_MARGIN_S: Final = 60.0


class MemberSettings(msgspec.Struct, frozen=True):
    """The settings of one member."""

    group: str
    client_id: str
    auto_offset_reset: str  # `earliest`, `latest` or `none`
    fetch_min_bytes: int
    fetch_bytes: int  # prefetched from a broker in one request; bounds the broker's share of memory
    isolation_level: str  # `read_committed` or `read_uncommitted`
    session_timeout_s: float  # how long Kafka keeps its partitions without a heartbeat
    heartbeat_s: float  # the longest time until a rebalance is noticed
    request_timeout_ms: int | None  # of single requests to Kafka; None: the gateway's own
    idle_s: float  # how long the client may stay silent before it is removed; Kafka must not remove it sooner


class PolledMember(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """One consumer of one client."""

    def __init__(
        self,
        settings: MemberSettings,
        kafka: dict[str, Any],
        arrivals: Arrivals,
        lookup: Lookup,
        *,
        starts: MemberStarts,
        auto_commit: bool,
        spawn: Spawn,
        clock: Callable[[], float],
    ) -> None:
        """Prepare the consumer; nothing is sent yet. `kafka` has the connection arguments of an aiokafka consumer.

        `starts` is shared by the members of the group in this process. `auto_commit`: commit confirmed records when
        their partitions are revoked, and where a new group starts.
        """
        options = kafka | {"client_id": settings.client_id}
        if settings.request_timeout_ms is not None:
            options["request_timeout_ms"] = max(settings.request_timeout_ms, LEAST_REQUEST_TIMEOUT_MS)
        self.auto_commit = auto_commit
        self._starts = starts if settings.auto_offset_reset == "latest" else None
        self._left: dict[TopicPartition, int] = {}  # positions before a rebalance, not committed
        self._placing = False  # positions are being set: nothing may be fetched
        self._spawn = spawn
        self._clock = clock
        self._arrivals = arrivals
        self._lookup = lookup
        self._recreated = RecreatedTopics(lookup)
        self.progress = MemberProgress()  # of the client
        self._consumer = AIOKafkaConsumer(
            **options,
            group_id=settings.group,
            enable_auto_commit=False,
            auto_offset_reset=settings.auto_offset_reset,
            fetch_min_bytes=settings.fetch_min_bytes,
            fetch_max_bytes=settings.fetch_bytes,
            isolation_level=settings.isolation_level,
            partition_assignment_strategy=ASSIGNORS,
            heartbeat_interval_ms=round(settings.heartbeat_s * 1000),
            session_timeout_ms=round(settings.session_timeout_s * 1000),
            consumer_timeout_ms=round(FETCHER_PAUSE_S * 1000),
            max_poll_interval_ms=round((settings.idle_s + POLL_INTERVAL_MARGIN_S) * 1000),
        )
        self.topics: tuple[str, ...] = ()  # the subscription; empty when a pattern matches no topic yet
        self.is_subscribed = False
        self.is_manual = False  # has partitions of its own choice, and has not joined the group
        self._joined = asyncio.Event()
        self._waiting: asyncio.Timeout | None = None
        self._arrival = asyncio.Event()
        self._pause_timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._paused = False
        self._checked_at = clock()  # when fetching last started, or was last known to have nothing to fetch
        # Spread out: polls that went to sleep together check again at different times.
        self._recheck_s = RECHECK_S * (1 + zlib.crc32(f"{settings.group}/{settings.client_id}".encode()) % 64 / 64)

    async def start(self) -> None:
        """Connect within `START_S`. Raises Refused BUSY when Kafka does not answer."""
        try:
            async with asyncio.timeout(START_S):
                await start_consumer(self._consumer, self._spawn)
                follow_missing(self._consumer, lambda: self._spawn(self._lookup.refresh()))
        except (TimeoutError, KafkaError) as error:
            raise Refused(Outcome.BUSY, f"Kafka does not answer ({type(error).__name__})") from error

    async def stop(self, timeout: float) -> None:
        """Leave the group and disconnect within `timeout` seconds; a running `wait` ends."""
        self.interrupt()
        self._stopped = True
        self._cancel_pause()
        self._arrivals.forget(self._arrival)
        await close_consumer(self._consumer, timeout)

    # Which partitions

    @property
    def is_assigned(self) -> bool:
        """Whether it has a subscription or manually assigned partitions."""
        return self.is_subscribed or self.is_manual

    def assignment(self) -> list[TopicPartition]:
        """Return its current partitions, in order."""
        return sorted(self._consumer.assignment())

    async def subscribe(self, topics: Sequence[str]) -> None:
        """Join the group for `topics` and wait until partitions and positions are fixed, at most `JOIN_S`.

        Records stored after this returns are delivered, also with `auto.offset.reset` latest. A rebalance that takes
        longer goes on in the background.

        Raises:
            Refused: the group has no position that Kafka tells, or rejects the member.
        """
        had = self.topics
        self.topics = tuple(topics)
        self._recreated.watch(self.topics)
        self.is_subscribed = True
        self._joined.clear()
        self._forget()
        if not topics:  # of a pattern: matching topics may appear later
            if had:
                self._consumer.unsubscribe()
            return
        if self._starts is not None:
            try:
                async with answering():
                    await self._starts.fix(self._consumer, topics)
            except Refused:
                self.unsubscribe()
                raise
            if self.topics != tuple(topics):
                return  # another request has changed the subscription meanwhile
        self._consumer.subscribe(topics=list(topics), listener=self)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_S):
                try:
                    await until_assigned(self._consumer)
                except KafkaError as error:
                    self.unsubscribe()
                    raise not_read(error) from error
                await self._joined.wait()
                await self._positions(self._consumer.assignment())

    async def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read exactly `partitions`, without a rebalance; their positions are fixed as in `subscribe`."""
        self.is_manual = True
        self._recreated.watch({partition.topic for partition in partitions})
        kept = await self._without_commit(partitions)
        self.progress.forget()
        self._consumer.assign(list(partitions))
        self.seek(kept)
        self._start_fetching()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_S):
                await self._positions(partitions)
                for partition in partitions:
                    if (at := await position(self._consumer, partition)) is not None:
                        self.progress.starts[partition] = at

    async def _without_commit(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the positions that would be reset to the end, if these partitions were assigned again."""
        reached = self.progress.reached
        kept = {} if self._starts is None else {tp: reached[tp] for tp in partitions if tp in reached}
        committed = await self.committed(kept) if kept else {}
        return {partition: offset for partition, offset in kept.items() if partition not in committed}

    def unsubscribe(self) -> None:
        """Give up all partitions; the group rebalances."""
        if self.topics or self.is_manual:
            self._consumer.unsubscribe()
        self.topics = ()
        self.is_subscribed = False
        self.is_manual = False
        self._joined.clear()
        self.progress.forget()

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Start fetching the partitions that the group has assigned."""
        if self._starts is not None and not await self._place(self._starts, set(assigned)):
            return  # another assignment follows
        for partition, offset in self.progress.restarted(self._consumer.assignment()):
            self._consumer.seek(partition, offset)
        self._joined.set()
        self._start_fetching()

    async def _place(self, starts: MemberStarts, partitions: set[TopicPartition]) -> bool:
        """Set the positions without a commit; False when they could not be set, and another assignment follows."""
        consumer, left = self._consumer, self._left
        self._left = {}
        self._placing = True
        consumer.pause(*partitions)
        try:
            async with answering():
                offsets = await starts.seek(consumer, partitions, left, commit=self.auto_commit)
        except Refused as refused:  # aiokafka is the caller, and would go on at the end
            log.warning("positions not set after a rebalance", reason=refused.reason)
            self._left = left
            await asyncio.sleep(RETRY_S)
            rejoin(consumer)
            return False
        finally:
            self._placing = False
        if offsets is None:
            self._left = left
            return False
        self.progress.starts |= offsets
        consumer.resume(*partitions)
        return True

    def _start_fetching(self) -> None:
        """Fetch new partitions for the poll that waits for them; without one, fetch for a while."""
        self._paused = False
        self._checked_at = self._clock()
        self._arrival.set()
        if self._waiting is None:
            self._pause_later()

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """Commit before the group rebalances, which is still allowed."""
        if self.auto_commit:
            try:
                await self.commit_confirmed()
            except (Refused, NotAssignedError) as error:
                log.warning("positions not committed before a rebalance", reason=str(error))
        self._forget()

    def _forget(self) -> None:
        """Forget all positions but those that the group will not know, because nothing is committed for the client."""
        if not self.auto_commit:
            self._left |= self.progress.reached
        self.progress.forget()

    async def _positions(self, partitions: Collection[TopicPartition]) -> None:
        for partition in tuple(partitions):
            try:
                await position(self._consumer, partition)
            except IllegalStateError:  # a rebalance has intervened
                return
            except KafkaError as error:
                raise not_read(error) from error

    # Reading

    @property
    def leaderless(self) -> int:
        """How many of its partitions have no leader."""
        return len(without_leader(self._consumer, self._consumer.assignment()))

    async def wait(self, timeout_s: float, stuck: Collection[TopicPartition] = ()) -> None:
        """Wait until a record is held, at most `timeout_s`, or until `interrupt`.

        Held records of `stuck` partitions cannot be delivered to this client and do not count.

        Raises:
            Refused: Kafka has refused or is unreachable; no records are lost.
        """
        self._restart_recreated()
        held = self.progress.held
        if any(partition not in stuck for partition in held):
            return
        deadline = self._clock() + timeout_s
        self._cancel_pause()
        sleeps = self._paused and timeout_s > QUIET_S and self._clock() < self._checked_at + self._recheck_s
        if not sleeps:
            self._resume_fetching()
        try:
            async with asyncio.timeout_at(deadline) as scope:
                self._waiting = scope
                if sleeps:  # still paused: compare with the end of the log before fetching
                    await self._sleep(tuple(self._consumer.assignment()))
                while True:
                    # A partition with held records is not fetched: they stay within one chunk.
                    wanted = [tp for tp in self._consumer.assignment() if tp not in held]
                    if wanted or (not held and (self.topics or self.is_manual)):
                        left = max(0.0, min(QUIET_S, deadline - self._clock()))
                        await self._fetch(wanted, 0.0 if held else left)
                    if held or self._clock() >= deadline:
                        return
                    await self._sleep(wanted)
        except (TimeoutError, ConsumerStoppedError):
            return  # ended by the time limit, `interrupt` or `stop`
        finally:
            self._waiting = None
            self._arrivals.forget(self._arrival)
            self._pause_later()

    async def _sleep(self, partitions: Sequence[TopicPartition]) -> None:
        """Stop fetching, since nothing came for a while, until a record is stored or the partitions change."""
        self._arrival.clear()
        positions: dict[TopicPartition, int] = {}
        lacking = without_leader(self._consumer, partitions)
        if partitions:
            try:
                for partition in partitions:
                    offset = await position(self._consumer, partition)
                    if offset is not None:
                        positions[partition] = offset
                if not await self._arrivals.wait_for(self._arrival, positions):
                    self._resume_fetching()
                    return
            except IllegalStateError:  # a rebalance has intervened
                self._resume_fetching()
                return
            except KafkaError as error:
                raise not_read(error) from error
            except Refused:  # Kafka is unreachable: fetching continues when it is back
                positions = {}
        self._pause()
        while True:
            until = self._checked_at + self._recheck_s if positions and not lacking else self._clock() + QUIET_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._arrival.wait()
            if self._arrival.is_set() or not positions or without_leader(self._consumer, partitions) != lacking:
                break
            if self._arrivals.may_have_more({tp: positions[tp] for tp in positions.keys() - lacking}):
                break
            self._checked_at = self._clock()
        self._arrivals.forget(self._arrival)
        self._resume_fetching()

    def _pause(self) -> None:
        self._paused = True
        self._consumer.pause(*self._consumer.assignment())

    def _resume_fetching(self) -> None:
        self._paused = False
        self._checked_at = self._clock()
        if not self._placing:
            self._consumer.resume(*self._consumer.assignment())

    def _cancel_pause(self) -> None:
        if self._pause_timer is not None:
            self._pause_timer.cancel()
            self._pause_timer = None

    def _pause_later(self) -> None:
        """Pause fetching in a while, as no poll waits; records fetched until then are ready for the next poll."""
        self._cancel_pause()
        if not self._stopped and not self._paused:
            self._pause_timer = asyncio.get_running_loop().call_later(QUIET_S, self._pause)

    async def _fetch(self, partitions: Sequence[TopicPartition], timeout_s: float) -> None:
        before = {partition: next_offset(self._consumer, partition) for partition in partitions}
        try:
            fetched = await fetch(self._consumer, partitions, timeout_s=timeout_s, most=CHUNK)
        except KafkaError as error:
            raise not_read(error) from error
        self.progress.hold(fetched)
        for partition, offset in before.items():
            self.progress.pass_markers(partition, offset, next_offset(self._consumer, partition))
        self._restart_recreated()

    def _restart_recreated(self) -> None:
        """Read recreated topics from their beginning, whatever the reset policy is."""
        for topic in self._recreated.check():
            log.warning("topic was recreated; reading it from its beginning", topic=topic)
            self.progress.restart_topic(topic)
            self.seek({partition: 0 for partition in self._consumer.assignment() if partition.topic == topic})

    def interrupt(self) -> None:
        """End a running `wait` now."""
        scope = self._waiting
        if scope is not None and not scope.expired():
            scope.reschedule(self._clock())

    # Positions

    async def commit(self, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        """Commit exactly `offsets`; does nothing when there are none.

        Raises:
            NotAssignedError: for a partition that is not assigned to this member.
            Refused: BUSY when Kafka does not answer or the group rebalances, UNFIT for metadata that are too large; see
                `not_read`.
        """
        if not offsets:
            return
        foreign = offsets.keys() - self._consumer.assignment()
        if foreign:
            raise NotAssignedError(foreign)
        if any(len(offset.metadata.encode()) > LONGEST_STRING for offset in offsets.values()):
            raise not_read(OffsetMetadataTooLargeError())  # as Kafka would, which accepts less
        async with answering("Kafka did not answer the commit in time"):
            try:
                await self._consumer.commit(offsets)
            except IllegalStateError as error:
                raise NotAssignedError(offsets) from error
            except UnknownMemberIdError as error:
                if not self.is_manual:
                    raise
                raise Refused(Outcome.UNFIT, "The group has active members; only they may commit") from error
        self.progress.commit(offsets)

    async def commit_delivered(self) -> None:
        """Commit all positions, as Java's `commitSync`, also where nothing was delivered; raises like `commit`."""
        await self.commit(self.progress.uncommitted(self.progress.reached, self._consumer.assignment()))

    async def commit_confirmed(self) -> None:
        """Commit what the client is known to have received; raises like `commit`."""
        await self.commit(self.progress.uncommitted(self.progress.confirmed, self._consumer.assignment()))

    async def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the group's committed offsets, for any partitions; those without one are left out.

        Raises:
            Refused: access is denied, or Kafka does not answer.
        """
        async with answering():
            return await committed_positions(self._consumer, partitions)

    @property
    def has_uncommitted(self) -> bool:
        """Whether `commit_confirmed` would commit anything."""
        confirmed = self.progress.confirmed
        return bool(self.progress.uncommitted(confirmed, confirmed))

    def seek(self, offsets: dict[TopicPartition, int]) -> None:
        """Continue at `offsets`. Raises NotAssignedError, and moves nothing, if a partition is not assigned."""
        self._check_assigned(offsets)
        for partition, offset in offsets.items():
            self._consumer.seek(partition, offset)
            self.progress.move(partition, offset)

    async def seek_to_edge(self, partitions: Sequence[TopicPartition], *, end: bool) -> None:
        """Continue at the first record that still exists, or (`end`) behind the last one.

        Raises:
            NotAssignedError: a partition is not assigned to this member.
            Refused: Kafka does not answer.
        """
        self._check_assigned(partitions)
        if not partitions:
            return
        find = self._consumer.end_offsets if end else self._consumer.beginning_offsets
        async with answering():
            offsets = await find(list(partitions))
        self.seek({partition: offsets[partition] for partition in partitions})

    def _check_assigned(self, partitions: Collection[TopicPartition]) -> None:
        foreign = set(partitions) - self._consumer.assignment()
        if foreign:
            raise NotAssignedError(foreign)
