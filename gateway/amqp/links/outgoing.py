"""A link on which the peer receives: a subscriber of the end of a topic, or of a consumer group.

The link's credit is its demand. An accepted record is done; a released or modified one returns to the group; one that
is rejected, or fails too often, becomes a dead letter. One that is too large for the link, or undeliverable here, is
left to other receivers. A link at the end of the log has no group that could offer a
record again, so there every outcome ends the record.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Final, cast

import msgspec
import structlog
from aiokafka import TopicPartition

from flowcontrol.budget import UNCOUNTED, Budget, ReceiverBudget
from gateway.amqp.counters import Counts
from gateway.amqp.links.dead_letters import DeadLetters
from gateway.amqp.links.draining import until_read
from gateway.amqp.links.peer import Peer
from gateway.amqp.links.subscriptions import LinkSubscriptions
from gateway.amqp.nodes import NodeConsumer
from gateway.amqp.sources import LinkSource
from gateway.kafka.contracts import Fanout, Refused, Subscriber
from gateway.kafka.groups.delivery.assignment import AssignedPartition
from gateway.kafka.groups.membership import Membership
from gateway.kafka.groups.reader import GroupReader
from gateway.kafka.read.live_reader import LiveReader
from gateway.runtime.failures import failures
from gateway.security.rights.authorization import Grant
from gateway.security.rights.group_names import GroupNames
from gateway.views.flow import FlowWindow, shown
from gateway.views.pauses import NO_CREDIT, OUTGOING_BUDGET, OUTGOING_RATES, SLOW_READER, UNSETTLED, Pause, pauses
from mapping.amqp._native import from_records
from mapping.dead_letters import CONDITION_ATTEMPTS, CONDITION_REJECTED, CONDITION_UNDELIVERABLE, Cause
from mapping.record import Received
from protocols.amqp import outcomes
from protocols.amqp.links import SETTLED, Link
from protocols.amqp.outcomes import MESSAGE_SIZE_EXCEEDED, STATE_ACCEPTED, STATE_FAILED, DeliveryState, Error

log = structlog.get_logger(__name__)

DEAD_LETTER_S: Final = 5.0
"""How long an ended link waits for its dead letters to be stored; then their records return to the group, too."""

BURST: Final = 64
"""Records sent before credit, session window, the receiver's share of the budget and the clock are read again."""
BYTES_PER_RECORD: Final = 1024
"""This many bytes of messages count as one more record of a burst."""
UNSETTLED_COST: Final = 512
"""Bytes of memory for an unsettled delivery besides its message, in proton and here."""


class Egress(msgspec.Struct, frozen=True):
    """The services and settings that all outgoing links of the process share."""

    live_reader: LiveReader  # for links without a group
    dead_letters: DeadLetters
    subscriptions: LinkSubscriptions
    names: GroupNames  # the owners of consumer groups
    counts: Counts
    max_unsettled: int  # unsettled deliveries per link
    outgoing: Budget  # all receivers' unsettled deliveries share it


class OutgoingLink(Fanout, Subscriber):
    """One link on which a peer receives: a `contracts.Subscriber` and, for the live reader, its own `Fanout`."""

    __slots__ = (
        "_burst", "_condition", "_dead_letters_done", "_dead_letters_pending", "_draining", "_egress",
        "_ended", "_engine", "_holding", "_membership", "_names", "_now_ms", "_partition", "_peer", "_reader_waits",
        "_selected", "_settled", "_source", "_told_size", "_transactions_done", "link", "retiring",
        "topic", "unsettled",
    )  # fmt: skip

    def __init__(self, egress: Egress, peer: Peer, link: Link, source: LinkSource) -> None:
        self._egress = egress
        self._peer = peer
        self._engine = peer.engine
        self._names = peer.grant.names
        self._settled = link.settle_mode == SETTLED
        self._source = source
        self._condition = source.condition if source.group is None else None  # a group applies it itself
        self._partition = source.partition
        self._membership: Membership | NodeConsumer | None = None
        self._selected: tuple[tuple[OutgoingLink, None], ...] = ((self, None),)
        self._draining: asyncio.Task[None] | None = None
        self._holding: ReceiverBudget | None = None  # unsettled bytes in the shared budget; None until they are many
        self._ended = False
        self._dead_letters_pending = 0  # in-flight dead letters
        # Only after the link's end: set when no dead letter is in flight, and when no transaction holds its records.
        self._dead_letters_done: asyncio.Event | None = None
        self._transactions_done: asyncio.Event | None = None
        self._burst = 0  # records that may be sent before demand and clock are read again
        self._now_ms = 0
        self._reader_waits = True  # the reader waits for `wake`
        self._told_size = False  # a message above the peer's max-message-size was logged
        self.link = link  # the engine's
        self.topic = source.topic  # the Kafka topic
        self.unsettled = 0  # deliveries sent and not settled
        self.retiring = 0  # deliveries among them with an outcome in a transaction that is not discharged

    def is_refused_by(self, grant: Grant) -> bool:
        """Whether these rights do not allow this link; a link of a dynamic node is always allowed to its owner."""
        if isinstance(self._membership, NodeConsumer):
            return False
        group = self._source.group
        return not grant.subscribe.whole_topic(self.topic) or (
            group is not None and grant.group("read", group) is False
        )

    def joined(self, membership: Membership | NodeConsumer) -> None:
        """Set the membership in the consumer group or the dynamic node from which this link receives."""
        self._membership = membership
        if self._ended:
            self._peer.pump.spawn(membership.leave())

    # Subscriber and Fanout

    @property
    def demand(self) -> int:
        """The credit, up to the limit of unsettled deliveries; 0 while the socket, the budget or a rate blocks it."""
        peer, holding = self._peer, self._holding
        shut = holding is not None and not holding.gate.is_open
        if self._ended or shut or not self.link.accepted or peer.pump.closed or not peer.can_send:
            return 0
        return max(0, min(self._engine.credit_of(self.link), self._egress.max_unsettled - self.unsettled))

    def flow(self) -> FlowWindow:
        """Return the link's credit and its number of unsettled deliveries."""
        credit = self._engine.credit_of(self.link)
        return FlowWindow(
            shown(self.link.name), False, self.topic, credit + self.unsettled, credit, self.unsettled, self._paused()
        )

    def _paused(self) -> Pause | None:
        """Return why there is no demand now, or None."""
        if self.demand > 0 or self._ended:
            return None
        if not self._peer.can_send:
            return self._peer.paused
        if self._holding is not None and not self._holding.gate.is_open:
            return pauses.since(OUTGOING_BUDGET, self)
        reason = UNSETTLED if self._is_full else NO_CREDIT
        return pauses.since(reason, self) or Pause(reason)

    def pause_reason(self) -> tuple[str, str] | None:
        """Return why there is no demand, and the client (`gateway.kafka.contracts.Subscriber`)."""
        paused = self._paused()
        if paused is None or paused.reason in (SLOW_READER, OUTGOING_BUDGET, *OUTGOING_RATES):
            return None
        return paused.reason, self._peer.subject

    def select(self, records: Sequence[Received], at: int) -> tuple[Collection[tuple[OutgoingLink, None]], int]:
        """Select every record of the topic, or of the one partition that this link reads."""
        is_selected = self._partition is None or records[at].partition == self._partition
        return self._selected if is_selected else (), len(records) - at

    def wants(self, record: Received) -> bool:
        """Whether the link's filters select the record."""
        return self._condition is None or self._condition(record)

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """Send the record if there is credit; see `Subscriber`."""
        if self._ended:
            return True
        membership = self._membership
        if self._condition is not None and not self._condition(record):
            if membership is not None:
                membership.done(record)  # of a temporary topic, where each receiver gets its own copy
            return True
        attempts = membership.attempts(record) if membership is not None else 0
        if (
            attempts
            and membership is not None
            and membership.failures(record) >= self._egress.dead_letters.max_attempts
        ):
            if self._capacity() <= 0:
                return False
            cause = Cause(self._source.group or "", attempts, CONDITION_ATTEMPTS, "receivers failed or were lost")
            if self._dead_letter(record, cause):
                return True
        return self._offer((record,), attempts) > 0

    def offer_run(self, records: Sequence[Received], context: object = None) -> int:
        """Send records without failed attempts; see `contracts.RunSubscriber`."""
        return self._offer(records, 0)

    def _offer(self, records: Sequence[Received], attempts: int) -> int:
        """Send records while there is credit, and return how many; each has had `attempts` failed attempts before."""
        if self._ended:
            return len(records)
        taken = 0
        while taken < len(records) and (capacity := self._capacity()) > 0:
            taken += self._send(records[taken : taken + capacity], attempts)
        return taken

    def _capacity(self) -> int:
        """Return how many records may be sent now; the limits are checked again in each turn that sends something."""
        pump = self._peer.pump
        if self._burst <= 0 or not pump.flushing or not pump.writable:
            self._burst = self._next_burst()
            if self._burst <= 0:
                self._reader_waits = True
                return 0
            self._now_ms = self._peer.now_ms()
        return self._burst

    def _send(self, records: Sequence[Received], attempts: int) -> int:
        """Send the first of the records, up to the burst, and return how many; this includes the unsendable ones."""
        packed = from_records(self._names.shown_all(records), self._now_ms, attempts, self._burst * BYTES_PER_RECORD)
        messages = cast("list[bytes]", packed)
        count = len(messages)
        records = records[:count]
        self._burst -= count
        limit = self.link.peer_max_message_bytes
        if None in packed or (limit and max(map(len, messages)) > limit):
            records, messages = self._sendable(records, packed, limit)
        if messages:
            self._egress.counts.sent += len(messages)
            if self._settled:
                size = self._engine.send(self.link, messages, None)
                if self._membership is not None:
                    self._membership.done_all(records)
            else:
                self.unsettled += len(messages)
                size = self._engine.send(self.link, messages, records)
            self._burst -= size // BYTES_PER_RECORD
            if self._peer.sending is not None:
                self._peer.sending.spend(len(messages), size)
            self._peer.wrote(size)
        return count

    def _sendable(
        self, records: Sequence[Received], messages: Sequence[bytes | None], limit: int
    ) -> tuple[list[Received], list[bytes]]:
        """Return the records that are neither expired nor above the peer's limit; finish or pass on the others."""
        counts = self._egress.counts
        fit: list[Received] = []
        sendable: list[bytes] = []
        for record, data in zip(records, messages, strict=True):
            if data is not None and not (limit and len(data) > limit):
                fit.append(record)
                sendable.append(data)
                continue
            if data is not None:
                self._too_large(record, len(data), limit)
                continue
            counts.expired += 1
            if self._membership is not None:
                self._membership.done(record)
        return fit, sendable

    def _too_large(self, record: Received, size: int, limit: int) -> None:
        """Leave a record above the peer's max-message-size to others (part 2.7.3: it must not be sent here)."""
        counts = self._egress.counts
        if not self._told_size:
            self._told_size = True
            log.warning("messages are larger than a receiver's max-message-size", topic=self.topic, link=self.link.name,
                        client=self._peer.subject, size=size, limit=limit)  # fmt: skip
        counts.too_large_for_peer += 1
        membership = self._membership
        if membership is not None:
            reason = f"{size} bytes, the receiver takes {limit}"
            cause = Cause(self._source.group or "", membership.attempts(record), MESSAGE_SIZE_EXCEEDED, reason)
            self._pass_on(membership, record, cause)

    def _next_burst(self) -> int:
        """Return how many records may be sent before the limits are checked again."""
        link = self.link
        if link.held_bytes + link.held * UNSETTLED_COST >= UNCOUNTED:
            self._count()
        burst = min(self.demand, BURST)
        if burst > 0 and self._holding is not None:
            burst = min(burst, 1 + self._holding.more // BYTES_PER_RECORD)
        return burst

    def _count(self) -> None:
        """Report the unsettled bytes to the budget of all receivers."""
        holding = self._holding
        if holding is None:
            holding = self._holding = ReceiverBudget(self._egress.outgoing)
            holding.gate.subscribe(self._share_changed)
        holding.hold(self.link.held_bytes + self.link.held * UNSETTLED_COST)

    def _share_changed(self, is_open: bool) -> None:
        """Start or end the pause when the peer's unsettled bytes exceed its share of the budget, or no longer do."""
        self._burst = 0
        if is_open:
            pauses.end(OUTGOING_BUDGET, self)
            self.wake()
        else:
            pauses.begin(OUTGOING_BUDGET, self, self._peer.subject)

    # flow and disposition

    def credit_changed(self, drain: bool) -> None:
        """Handle a flow of the peer: it changed the credit, or set drain."""
        self._burst = 0
        if drain and self._draining is None:
            self._draining = self._peer.pump.spawn(self._drain())
        self.wake()

    def accepted(self, records: Sequence[Received]) -> None:
        """Finish records that the peer has accepted."""
        was_full = self._is_full
        self.unsettled -= len(records)
        if self._holding is not None:
            self._count()
        if self._membership is not None:
            self._membership.done_all(records)
        if self._reader_waits or was_full:
            self.wake()

    def disposition(self, record: Received, state: DeliveryState | None, *, at_once: bool = False) -> None:
        """Handle a record's other outcomes, and any outcome that a transaction has applied.

        `at_once`: a record that has failed is offered again without a back-off.
        """
        if state == STATE_ACCEPTED:
            self.accepted((record,))
            return
        was_full = self._is_full
        self.unsettled -= 1
        if self._holding is not None:
            self._count()
        if state is not None and state.code == outcomes.REJECTED:
            self._egress.counts.rejected_by_peer += 1
        else:
            self._egress.counts.returned_by_peer += 1
        if self._membership is not None:
            if state is None or state.code == outcomes.RELEASED:
                self._membership.requeue(record, failed=False, at_once=True)
            else:
                self._refused(self._membership, record, state, at_once=at_once)
        if self._reader_waits or was_full:
            self.wake()

    @property
    def _is_full(self) -> bool:
        """Whether the limit of unsettled deliveries is reached."""
        return self.unsettled >= self._egress.max_unsettled

    @property
    def in_group(self) -> bool:
        """Whether settled records are committed for a consumer group."""
        return self._source.group is not None

    def place(self, record: Received) -> tuple[GroupReader, AssignedPartition] | None:
        """Return the reader and partition that a record of a group came from; None if it has moved."""
        membership = self._membership
        return membership.locate(record) if isinstance(membership, Membership) else None

    def revert(self, record: Received) -> None:
        """Undo the peer's settlement of a record in a transaction that was rolled back: one failed attempt.

        It is offered again immediately and in its place, to keep the order of the transaction's records.
        """
        if self._ended:
            self.unsettled -= 1  # the group gets it back together with the link's other records
        else:
            self.disposition(record, STATE_FAILED, at_once=True)

    def retirement_ended(self) -> None:
        """Count down: a transaction that had retired one of the deliveries has ended."""
        self.retiring -= 1
        if self._transactions_done is not None and not self.retiring:
            self._transactions_done.set()

    def _refused(
        self, membership: Membership | NodeConsumer, record: Received, state: DeliveryState, *, at_once: bool
    ) -> None:
        """Handle a rejected or modified record: dead letter, another receiver, or another attempt."""
        failed = state.code == outcomes.REJECTED or state.delivery_failed
        attempts = membership.attempts(record) + failed
        group = self._source.group or ""
        if state.code == outcomes.REJECTED:
            error = state.error or Error(CONDITION_REJECTED)
            cause = Cause(group, attempts, error.condition, error.description)
        elif state.undeliverable_here:
            cause = Cause(group, attempts, CONDITION_UNDELIVERABLE, "there is no other receiver")
            self._pass_on(membership, record, cause, failed=failed)
            return
        else:
            cause = Cause(group, attempts, CONDITION_ATTEMPTS, "the last receiver answered modified(delivery-failed)")
            is_last = failed and membership.failures(record) + 1 >= self._egress.dead_letters.max_attempts
            if not (is_last and self._dead_letter(record, cause)):
                membership.requeue(record, failed=failed, at_once=at_once or not failed)
            return
        if not self._dead_letter(record, cause):
            membership.done(record)

    def _pass_on(
        self, membership: Membership | NodeConsumer, record: Received, cause: Cause, *, failed: bool = False
    ) -> None:
        """Leave a record that this link must not have to other receivers.

        Without another one it becomes a dead letter, or stays in the log for those that join later.
        """
        if membership.has_other(record) or not self._dead_letter(record, cause):
            membership.decline(record, failed=failed, keep=True)

    def _dead_letter(self, record: Received, cause: Cause) -> bool:
        """Store a dead letter; return False when there is no topic for it."""
        store = self._egress.dead_letters.store
        if self._source.group is None or not store(record, cause, self._dead_letter_answered, self._names):
            return False
        self._dead_letters_pending += 1
        self._burst = 0
        self.unsettled += 1  # counts against the limit like an unsettled delivery
        return True

    def _dead_letter_answered(self, record: Received, stored: bool) -> None:
        """Finish the record whose dead letter was stored, or return it to the group if that failed."""
        self._dead_letters_pending -= 1
        self.unsettled -= 1
        if self._membership is not None:
            if stored:
                self._membership.done(record)
            else:
                self._membership.requeue(record, failed=False)
        if self._dead_letters_done is not None and not self._dead_letters_pending:
            self._dead_letters_done.set()
        self.wake()

    def wake(self) -> None:
        """Resume the reader if there is demand."""
        if self.demand <= 0:
            return
        self._reader_waits = False
        if self._membership is not None:
            self._membership.wake()
        else:
            self._egress.live_reader.resume(self)

    def steal(self) -> None:
        """Detach this link: another one has attached to its subscription (part 2.6.1: link stealing)."""
        self._peer.detach(self.link, Error(outcomes.STOLEN, "another link has attached to the subscription"))
        self.leave()

    def leave(self, *, unsubscribe: bool = False, failed: bool = False) -> None:
        """Release the link after its end, and return its unsettled records to the group.

        `unsubscribe`: the peer has closed the terminus, which deletes its subscription. `failed`: the connection was
        lost, which counts as a failed attempt of each record.
        """
        if self._ended:
            return
        self._ended = True
        self._selected = ()  # it refers to this link: break the cycle
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
        group = source.group or ""  # a dynamic node has none
        egress.subscriptions.release(group, self.steal)
        ends = source.subscription and (unsubscribe or source.volatile)
        departure = self._peer.pump.spawn(self._depart(group, ends=ends, failed=failed))
        if ends:
            egress.subscriptions.deleting(group, departure)

    async def _depart(self, group: str, *, ends: bool, failed: bool) -> None:
        if self.retiring:  # wait for transactions, which outlive the links that take part in them
            self._transactions_done = asyncio.Event()
            await self._transactions_done.wait()
        if self._dead_letters_pending:
            self._dead_letters_done = asyncio.Event()
            with contextlib.suppress(TimeoutError):  # wait, or the records rejected last would be offered again
                await asyncio.wait_for(self._dead_letters_done.wait(), DEAD_LETTER_S)
        try:
            if self._membership is not None:
                await self._membership.leave(failed=failed)
            if ends and not await self._egress.names.end(self._peer.grant, group, self.topic):
                log.info("subscription kept: not owned, in use, or it covers other topics", group=group)
        except Refused as refused:
            log.warning("subscription not deleted", group=group, reason=refused.reason)
        except Exception as error:  # a bug here ends only this membership: the connection has other links
            failures.report("group", error, group)

    async def _drain(self) -> None:
        """Send the records stored until now, if Kafka makes progress; then give up the credit."""
        reader = self._membership if self._membership is not None else self._egress.live_reader
        try:
            ends: Mapping[TopicPartition, int] = {}
            with contextlib.suppress(Refused):
                ends = await reader.ends(self.topic)
            if self._partition is not None:
                ends = {place: end for place, end in ends.items() if place.partition == self._partition}
            await until_read(lambda: self._unread(ends))
        finally:
            self._draining = None
        if not self._ended:
            self._burst = 0
            self._engine.drained(self.link)
            self._peer.flush_soon()

    def _unread(self, ends: Mapping[TopicPartition, int]) -> int:
        """Return how many records below `ends` were not offered to this link yet; 0 when it cannot send more."""
        if self._ended or (self.demand <= 0 and self._peer.can_send):
            return 0  # no credit is left, or the limit of unsettled deliveries is reached
        if self._membership is not None:
            return self._membership.unread(ends)
        return self._egress.live_reader.unread(self, ends)
