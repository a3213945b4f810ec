"""A link on which the peer receives: a subscriber of the end of a topic, or of a consumer group.

Credit is demand. What the peer accepts is done; what it releases or modifies goes back to the group; what it rejects,
or fails on too often, becomes a dead letter. A link at the end of the log has nobody to give a record back to: whatever
its outcome, it is done with.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Final, cast

import msgspec
import structlog
from aiokafka import TopicPartition

from flowcontrol.budget import UNCOUNTED, Budget, Holding
from gateway.amqp.counters import Counts
from gateway.amqp.links.dead_letters import DeadLetters
from gateway.amqp.links.peer import Peer
from gateway.amqp.links.subscriptions import Subscriptions
from gateway.amqp.nodes import NodeConsumer
from gateway.amqp.sources import Source
from gateway.failures import failures
from gateway.flow import Window, shown
from gateway.kafka.contracts import Refused
from gateway.kafka.groups.assignment import AssignedPartition
from gateway.kafka.groups.membership import Membership
from gateway.kafka.groups.reader import GroupReader
from gateway.kafka.read.live_reader import LiveReader
from gateway.pauses import NO_CREDIT, OUTGOING_BUDGET, OUTGOING_RATES, SLOW_READER, UNSETTLED, Pause, pauses
from gateway.security.authorization import Grant
from gateway.security.group_names import GroupNames
from mapping.amqp.mapper import from_records
from mapping.dead_letters import CONDITION_ATTEMPTS, CONDITION_REJECTED, CONDITION_UNDELIVERABLE, Cause
from mapping.record import Received
from protocols.amqp import outcomes
from protocols.amqp.links import Link
from protocols.amqp.outcomes import STATE_FAILED, Error, State

log = structlog.get_logger(__name__)

DEAD_LETTER_S: Final = 5.0
"""How long a link that has ended waits for its dead letters; afterwards their records go back to the group too."""

BURST: Final = 64
"""Records sent between two looks at the credit, the session's window, the receiver's share and the clock."""
LARGE: Final = 1024
"""So many bytes of a message count as one more record of a burst."""
UNSETTLED_COST: Final = 512
"""Bytes that a delivery takes beside its message, in proton and here, until it is settled."""

DRAIN_S: Final = 8.0
"""So long a drain (part 2.6.7) waits while nothing is read, before it is answered all the same: as others for Kafka."""
DRAIN_LOOKS_S: Final = (0.01, 0.2)
"""First and longest pause between two looks at what is left: thousands of links may wait for one busy Kafka."""


class Egress(msgspec.Struct, frozen=True):
    """What all outgoing links of the process share."""

    live_reader: LiveReader  # the live reader, for links without a group
    dead_letters: DeadLetters  # what receivers cannot take
    subscriptions: Subscriptions  # who has them
    names: GroupNames  # whose the groups are
    counts: Counts  # what became of the records
    max_unsettled: int  # records that one link may have sent and not settled
    outgoing: Budget  # of all receivers, for what is unsettled


class OutgoingLink:
    """One link of a receiving peer: a `contracts.Subscriber` and, for the live reader, `Fanout` of itself."""

    __slots__ = (
        "_burst", "_condition", "_dead_letters", "_draining", "_egress", "_engine", "_holding", "_left",
        "_membership", "_names", "_none_pending", "_now_ms", "_partition", "_peer", "_pending",
        "_released", "_selected", "_settled", "_source", "_waits", "link", "lossy", "retiring", "topic", "unsettled",
    )  # fmt: skip

    def __init__(self, egress: Egress, peer: Peer, link: Link, source: Source, *, settled: bool) -> None:
        self._egress = egress
        self._peer = peer
        self._engine = peer.engine
        self._names = peer.grant.names
        self._settled = settled
        self._source = source
        self._condition = source.condition if source.group is None else None  # a group knows it itself
        self._partition = source.partition
        self._membership: Membership | NodeConsumer | None = None
        self._selected: tuple[tuple[OutgoingLink, None], ...] = ((self, None),)
        self._draining: asyncio.Task[None] | None = None
        self._holding: Holding | None = None  # what is unsettled, from the first time on that it is much
        self._left = False
        self._dead_letters = egress.dead_letters
        self._pending = 0  # dead letters on their way to Kafka
        self._none_pending: asyncio.Event | None = None  # after the link's end: set when there are none
        self._released: asyncio.Event | None = None  # after the link's end: set when no transaction has any of it
        self._burst = 0  # that may be sent before demand and time are looked at again
        self._now_ms = 0
        self._waits = True  # said "no capacity", or has not been asked yet
        self.link = link  # the engine's
        self.topic = source.topic  # the Kafka topic
        self.lossy = False  # a record is kept until it was sent
        self.unsettled = 0  # sent and without an outcome
        self.retiring = 0  # of these, how many have one in a transaction that is not discharged

    def is_refused_by(self, grant: Grant) -> bool:
        """Whether a peer with these rights would not get this link; a temporary node's is for the one that made it."""
        if isinstance(self._membership, NodeConsumer):
            return False
        group = self._source.group
        return not grant.subscribe.whole_topic(self.topic) or (
            group is not None and grant.group("read", group) is False
        )

    def joined(self, membership: Membership | NodeConsumer) -> None:
        """The group, or the temporary node, that this link receives for."""
        self._membership = membership
        if self._left:
            self._peer.pump.spawn(membership.leave())

    # Subscriber and Fanout

    @property
    def demand(self) -> int:
        """Credit, bounded by what may be unsettled; 0 while the socket is slow, or the peer holds or owes too much."""
        peer, holding = self._peer, self._holding
        shut = holding is not None and not holding.gate.is_open
        if self._left or shut or not self.link.accepted or peer.gone or not peer.takes_more:
            return 0
        return max(0, min(self._engine.credit_of(self.link), self._egress.max_unsettled - self.unsettled))

    def flow(self) -> Window:
        """The peer's credit, and what it has not settled."""
        credit = self._engine.credit_of(self.link)
        return Window(
            shown(self.link.name), False, self.topic, credit + self.unsettled, credit, self.unsettled, self._paused()
        )

    def _paused(self) -> Pause | None:
        """Why no record would be taken now."""
        if self.demand > 0 or self._left:
            return None
        if not self._peer.takes_more:
            return self._peer.paused
        if self._holding is not None and not self._holding.gate.is_open:
            return pauses.since(OUTGOING_BUDGET, self)
        reason = UNSETTLED if self._is_full else NO_CREDIT
        return pauses.since(reason, self) or Pause(reason)

    def lacks(self) -> tuple[str, str] | None:
        """Why there is no demand, and whose it is (`gateway.kafka.contracts.Subscriber`)."""
        paused = self._paused()
        if paused is None or paused.reason in (SLOW_READER, OUTGOING_BUDGET, *OUTGOING_RATES):
            return None
        return paused.reason, self._peer.subject

    def select(self, record: Received) -> Collection[tuple[OutgoingLink, None]]:
        """Every record of the topic is for this link, or of the one partition that it reads."""
        return self._selected if self._partition is None or record.partition == self._partition else ()

    def wants(self, record: Received) -> bool:
        """Whether the link's filters select the record."""
        return self._condition is None or self._condition(record)

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """Send the record if there is credit; see `Subscriber`."""
        if self._left:
            return True
        membership = self._membership
        if self._condition is not None and not self._condition(record):
            if membership is not None:
                membership.done(record)  # of a temporary topic: it is nobody else's
            return True
        attempts = membership.attempts(record) if membership is not None else 0
        if (
            attempts >= self._dead_letters.max_attempts
            and membership is not None
            and membership.failures(record) >= self._dead_letters.max_attempts
        ):
            if self._room() <= 0:
                return False
            cause = Cause(self._source.group or "", attempts, CONDITION_ATTEMPTS, "receivers failed or were lost")
            if self._dead_letter(record, cause):
                return True
        return self._offer((record,), attempts) > 0

    def offer_run(self, records: Sequence[Received], context: object = None) -> int:
        """Send records that were given to nobody before; see `contracts.RunSubscriber`."""
        return self._offer(records, 0)

    def _offer(self, records: Sequence[Received], attempts: int) -> int:
        """Send records while there is credit: how many were taken. `attempts` were made with each before."""
        if self._left:
            return len(records)
        taken = 0
        while taken < len(records) and (room := self._room()) > 0:
            taken += self._send(records[taken : taken + room], attempts)
        return taken

    def _room(self) -> int:
        """How many records may be sent now: looked at anew in each turn of the loop in which something is sent."""
        pump = self._peer.pump
        if self._burst <= 0 or not pump.flushing or not pump.writable:
            self._burst = self._next_burst()
            if self._burst <= 0:
                self._waits = True
                return 0
            self._now_ms = self._peer.now_ms()
        return self._burst

    def _send(self, records: Sequence[Received], attempts: int) -> int:
        """Send the first of the records, as many as a burst allows: how many, those that cannot be sent included."""
        found = from_records(self._names.shown_all(records), self._now_ms, attempts, self._burst * LARGE)
        messages = cast("list[bytes]", found)
        count = len(messages)
        records = records[:count]
        self._burst -= count
        limit = self.link.peer_max_message_bytes
        if None in found or (limit and max(map(len, messages)) > limit):
            records, messages = self._sendable(records, found, limit)
        if messages:
            self._egress.counts.sent += len(messages)
            if self._settled:
                size = self._engine.send(self.link, messages, None)
                if self._membership is not None:
                    self._membership.done_all(records)
            else:
                self.unsettled += len(messages)
                size = self._engine.send(self.link, messages, records)
            self._burst -= size // LARGE
            if self._peer.sending is not None:
                self._peer.sending.spend(len(messages), size)
            self._peer.wrote(size)
        return count

    def _sendable(
        self, records: Sequence[Received], messages: Sequence[bytes | None], limit: int
    ) -> tuple[list[Received], list[bytes]]:
        """Those that have not expired and are not above the peer's limit; the others are done with."""
        counts = self._egress.counts
        fit: list[Received] = []
        found: list[bytes] = []
        for record, data in zip(records, messages, strict=True):
            if data is not None and not (limit and len(data) > limit):
                fit.append(record)
                found.append(data)
                continue
            if data is None:
                counts.expired += 1
            else:
                counts.too_large_for_peer += 1
            if self._membership is not None:
                self._membership.done(record)
        return fit, found

    def _next_burst(self) -> int:
        """How many records may be sent before this is asked again."""
        link = self.link
        if link.held_bytes + link.held * UNSETTLED_COST >= UNCOUNTED:
            self._count()
        burst = min(self.demand, BURST)
        if burst > 0 and self._holding is not None:
            burst = min(burst, 1 + self._holding.more // LARGE)
        return burst

    def _count(self) -> None:
        """Tell the budget of all receivers what is unsettled."""
        holding = self._holding
        if holding is None:
            holding = self._holding = Holding(self._egress.outgoing)
            holding.gate.subscribe(self._share_changed)
        holding.hold(self.link.held_bytes + self.link.held * UNSETTLED_COST)

    def _share_changed(self, is_open: bool) -> None:
        """The peer holds more than its share of what all receivers may hold, or no longer."""
        self._burst = 0
        if is_open:
            pauses.end(OUTGOING_BUDGET, self)
            self.wake()
        else:
            pauses.begin(OUTGOING_BUDGET, self, self._peer.subject)

    # the peer's words

    def credit_changed(self, credit: int, drain: bool) -> None:
        """The peer granted credit, took it back, or wants it drained."""
        self._burst = 0
        if drain and self._draining is None:
            self._draining = self._peer.pump.spawn(self._drain())
        if credit > 0:
            self.wake()

    def accepted(self, records: Sequence[Received]) -> None:
        """The peer has accepted records that were sent unsettled."""
        was_full = self._is_full
        self.unsettled -= len(records)
        if self._holding is not None:
            self._count()
        if self._membership is not None:
            self._membership.done_all(records)
        if self._waits or was_full:
            self.wake()

    def disposition(self, record: Received, state: State | None) -> None:
        """Another outcome of a record that was sent unsettled, or one that a transaction has applied."""
        counts = self._egress.counts
        was_full = self._is_full
        self.unsettled -= 1
        if self._holding is not None:
            self._count()
        membership = self._membership
        code = outcomes.RELEASED if state is None else state.code
        if code == outcomes.REJECTED:
            counts.rejected_by_peer += 1
        elif code != outcomes.ACCEPTED:
            counts.returned_by_peer += 1
        if membership is not None:
            if code == outcomes.ACCEPTED:
                membership.done(record)
            elif state is None or code == outcomes.RELEASED:
                membership.again(record, failed=False)
            else:
                self._refused(membership, record, state)
        if self._waits or was_full:
            self.wake()

    @property
    def _is_full(self) -> bool:
        """Whether so much is unsettled that nobody asks any more."""
        return self.unsettled >= self._egress.max_unsettled

    @property
    def in_group(self) -> bool:
        """Whether what it settles is committed for a consumer group."""
        return self._source.group is not None

    def place(self, record: Received) -> tuple[GroupReader, AssignedPartition] | None:
        """See `Membership.place`; `in_group` only."""
        membership = self._membership
        return membership.place(record) if isinstance(membership, Membership) else None

    def revert(self, record: Received) -> None:
        """A transaction in which the peer had settled a record is rolled back: an attempt has failed.

        After the first one it comes at once and before others, so that the peer finds what it had in the same order.
        """
        membership = self._membership
        again = self._dead_letters.max_attempts > 1
        if self._left:
            self.unsettled -= 1  # with the rest of what the link has, the group is about to get it back
        elif again and isinstance(membership, Membership) and not membership.attempts(record):
            self.unsettled -= 1
            self._egress.counts.returned_by_peer += 1
            membership.again(record, at_once=True)
        else:
            self.disposition(record, STATE_FAILED)

    def unretire(self) -> None:
        """A transaction has ended in which a delivery had an outcome."""
        self.retiring -= 1
        if self._released is not None and not self.retiring:
            self._released.set()

    def _refused(self, membership: Membership | NodeConsumer, record: Received, state: State) -> None:
        """The peer has rejected or modified a record of a group."""
        failed = state.code == outcomes.REJECTED or state.delivery_failed
        attempts = membership.attempts(record) + failed
        group = self._source.group or ""
        if state.code == outcomes.REJECTED:
            error = state.error or Error(CONDITION_REJECTED)
            cause = Cause(group, attempts, error.condition, error.description)
        elif state.undeliverable_here:
            if membership.has_other(record):
                membership.decline(record, failed=failed, keep=True)
                return
            cause = Cause(group, attempts, CONDITION_UNDELIVERABLE, "no other receiver is there")
        elif failed and membership.failures(record) + 1 >= self._dead_letters.max_attempts:
            cause = Cause(group, attempts, CONDITION_ATTEMPTS, "the last receiver said modified(delivery-failed)")
            if not self._dead_letter(record, cause):
                membership.again(record)
            return
        else:
            membership.again(record, failed=failed)
            return
        if not self._dead_letter(record, cause):
            membership.done(record)

    def _dead_letter(self, record: Received, cause: Cause) -> bool:
        """Store a dead letter; False when there are none for this record."""
        if self._source.group is None or not self._dead_letters.take(record, cause, self._dead_lettered, self._names):
            return False
        self._pending += 1
        self._burst = 0
        self.unsettled += 1  # it is bounded as what the peer holds is
        return True

    def _dead_lettered(self, record: Received, stored: bool) -> None:
        """The fate of a dead letter is known: only now the record is done with, or it goes back to the group."""
        self._pending -= 1
        self.unsettled -= 1
        if self._membership is not None:
            if stored:
                self._membership.done(record)
            else:
                self._membership.again(record, failed=False)
        if self._none_pending is not None and not self._pending:
            self._none_pending.set()
        self.wake()

    def wake(self) -> None:
        """Tell the reader that there is capacity, if there is."""
        if self.demand <= 0:
            return
        self._waits = False
        if self._membership is not None:
            self._membership.wake()
        else:
            self._egress.live_reader.resume(self)

    def steal(self) -> None:
        """Another link has attached to this one's subscription (part 2.6.1: the link has moved there)."""
        self._peer.detach(self.link, Error(outcomes.STOLEN, "the subscription was attached elsewhere"))
        self.leave()

    def leave(self, *, unsubscribe: bool = False, failed: bool = False) -> None:
        """The link is gone: what is unsettled goes back to the group.

        `unsubscribe`: the peer has closed the terminus, so that a subscription of its own ends. `failed`: it was lost,
        not ended in peace: that counts as a failed attempt.
        """
        if self._left:
            return
        self._left = True
        self._selected = ()  # which holds this link
        if self._holding is not None:
            self._holding.gate.unsubscribe(self._share_changed)
            self._holding.hold(0)
            self._holding = None
            pauses.end(OUTGOING_BUDGET, self)
        if self._draining is not None:
            self._draining.cancel()
        source, egress = self._source, self._egress
        if source.group is None and self._membership is None:
            egress.live_reader.unwatch(self.topic, self)
            egress.live_reader.forget(self)
            return
        group = source.group or ""  # of a temporary node there is none
        egress.subscriptions.release(group, self)
        ends = source.subscription and (unsubscribe or source.volatile)
        departure = self._peer.pump.spawn(self._depart(group, ends=ends, failed=failed))
        if ends:
            egress.subscriptions.ends(group, departure)

    async def _depart(self, group: str, *, ends: bool, failed: bool) -> None:
        if self.retiring:  # a transaction outlives the links that take part in it
            self._released = asyncio.Event()
            await self._released.wait()
        if self._pending:
            self._none_pending = asyncio.Event()
            with contextlib.suppress(TimeoutError):  # else what was rejected last would be offered to others
                await asyncio.wait_for(self._none_pending.wait(), DEAD_LETTER_S)
        try:
            if self._membership is not None:
                await self._membership.leave(failed=failed)
            if ends and not await self._egress.names.end(self._peer.grant, group, self.topic):
                log.info("subscription left as it is", group=group)
        except Refused as refused:
            log.warning("subscription not deleted", group=group, reason=refused.reason)
        except Exception as error:  # our bug, in one group: the connection has other links
            failures.tell("group", error, group)

    async def _drain(self) -> None:
        """Use up the credit when all that was stored as the peer asked is sent, or Kafka has fallen silent."""
        loop = asyncio.get_running_loop()
        reader = self._membership if self._membership is not None else self._egress.live_reader
        try:
            try:
                ends = await reader.ends(self.topic)
            except Refused:
                ends = {}
            if self._partition is not None:
                ends = {place: end for place, end in ends.items() if place.partition == self._partition}
            left, until = -1, 0.0
            pause, longest = DRAIN_LOOKS_S
            while (now := self._unread(ends)) and not self._left:
                if now != left:
                    left, until = now, loop.time() + DRAIN_S
                elif loop.time() > until:
                    break
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)
        finally:
            self._draining = None
        if not self._left:
            self._burst = 0
            self._engine.drained(self.link)
            self._peer.flush_soon()

    def _unread(self, ends: Mapping[TopicPartition, int]) -> int:
        """How much of the log has yet to be offered to this link, while it could be sent."""
        if self.demand <= 0 and self._peer.takes_more:
            return 0  # no credit is left, or as much is unsettled as may be
        if self._membership is not None:
            return self._membership.unread(ends)
        return self._egress.live_reader.unread(self, ends)
