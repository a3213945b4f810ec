"""Inbound QoS 2 messages from PUBLISH to PUBCOMP: each is stored exactly once, despite retries and crashes.

A kept session needs no transactions for this: **the log is the proof**. The record of each message has the session's
id, the packet identifier and a sequence number in a header. The session's in-flight record states which sequences are
finished (`low_water_mark`, `open`, `released`) and from which offsets the others can be found in the log (`scan_from`).
PUBREC is sent when the record is stored, PUBCOMP when an in-flight record without the identifier is stored. After a
crash `gateway.mqtt.registry.crash_recovery` finds records that were stored but are in no in-flight record. The start
offsets of a topic are in a stored in-flight record before its first record is submitted.

Other sessions end with their connection, together with the state of their messages: nothing is written for them.

The states of one message are the table in `gateway.mqtt.session.qos2_states`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

import msgspec

from flowcontrol.budget import ConnectionBudget
from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Owner, Refused, Result
from gateway.kafka.publish.publisher import Publisher
from gateway.mqtt.routing.retained import Retained
from gateway.mqtt.session.acks import Slot
from gateway.mqtt.session.client_port import ClientPort
from gateway.mqtt.session.journal import Journal
from gateway.mqtt.session.qos2_states import TABLE, Qos2Action, Qos2Event, Qos2State
from gateway.mqtt.session.self_delivery import OwnCopies, SelfDelivery
from gateway.mqtt.state.records import InflightRecord, Offsets
from gateway.runtime.failures import failures
from mapping.outcomes import Outcome
from mapping.record import MQTT_EXCHANGE, Record

HELD_OVERHEAD: Final = 64  # bytes counted for a held record, beside its key and value
_STORED: Final = Result(Outcome.STORED)
_HAS_RECORD: Final = frozenset({Qos2State.STORED, Qos2State.COPYING})  # the client may still send PUBLISH again
# Looked up once: Python 3.11 takes 0.2 us for a member of an enumeration.
_PUBLISH, _PUBREL, _COPIED, _PERSISTED = Qos2Event.PUBLISH, Qos2Event.PUBREL, Qos2Event.COPIED, Qos2Event.PERSISTED
_STORED_NOW, _REFUSED_NOW = Qos2Event.STORED, Qos2Event.REFUSED
_SEND_PUBREC, _REFUSE, _AWAIT_COPY = Qos2Action.PUBREC, Qos2Action.REFUSE, Qos2Action.AWAIT_COPY
_PUBREC_AWAIT_COPY, _PERSIST, _PUBCOMP = Qos2Action.PUBREC_AWAIT_COPY, Qos2Action.PERSIST, Qos2Action.PUBCOMP
_ENDED: Final = Qos2State.ENDED
_STORING: Final = TABLE[Qos2State.ENDED][Qos2Event.PUBLISH][1]


class Qos2Offsets:
    """Offsets, per partition of the known topics, at or above which all future records are stored."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._ends: Offsets = {}

    def __contains__(self, topic: str) -> bool:
        """Whether the topic's offsets are known."""
        return topic in self._ends

    async def fetch(self, topic: str) -> None:
        """Get a topic's end offsets from Kafka; raise Refused if it does not exist or Kafka does not answer."""
        partitions = await self._lookup.partitions(topic)
        ends = await self._lookup.ends(partitions, led=True)
        known = self._ends.setdefault(topic, {})
        for partition in partitions:  # a partition without a leader has no known end: 0
            known[partition.partition] = max(ends.get(partition, 0), known.get(partition.partition, 0))

    def of(self, topics: Iterable[str]) -> Offsets:
        """Return the current offsets of those topics that are known."""
        return {topic: dict(self._ends[topic]) for topic in topics if topic in self._ends}

    def forget(self, topic: str) -> None:
        """Drop the offsets of a deleted topic; a new topic of that name has others."""
        self._ends.pop(topic, None)

    def advance(self, topic: str, partition: int, offset: int) -> None:
        """Advance a partition: a record was stored at `offset`."""
        known = self._ends.get(topic)
        if known is not None and partition in known:
            known[partition] = max(known[partition], offset)


class InboundMessage(msgspec.Struct, eq=False):
    """One inbound QoS 2 message."""

    packet_id: int
    sequence: int  # number of the QoS 2 message within the session
    topic: str = ""  # Kafka topic
    state: Qos2State = _ENDED  # changed only by `on`
    retained: str = ""  # MQTT topic of a message to be retained
    slots: list[Slot] = []  # one for each PUBLISH; it may be repeated before Kafka answers
    self_delivered: bool = False  # the session itself gets a copy, before PUBCOMP; see `self_delivery`
    place: tuple[int, int] | None = None  # partition and offset, if `self_delivered`
    connection: ClientPort | None = None  # the one that sent PUBREL last

    def on(self, event: Qos2Event) -> Qos2Action:
        """Change the state by the table, and return the action for the caller to do."""
        action, self.state = TABLE[self.state][event]
        return action


class Qos2Parts(msgspec.Struct, frozen=True):
    """Shared by the QoS 2 messages of all sessions."""

    publisher: Publisher
    retained: Retained  # publishes messages to be retained
    start_offsets: Qos2Offsets
    spawn: Callable[[Coroutine[Any, Any, None]], object]  # starts a task of the application
    self_delivery: SelfDelivery | None = None  # delays PUBCOMP until the session's own copy is sent, if configured


class InboundQos2(Owner):
    """The unfinished inbound QoS 2 messages of one session; owns their records."""

    protocol = "mqtt"

    def __init__(
        self,
        session_id: str,  # for the record header
        principal: str,  # the session's; see `Publisher.submit`
        parts: Qos2Parts,
        *,
        budget: ConnectionBudget,  # counts the client's records in flight
        journal: Journal | None,  # writes the in-flight record; None: the session ends with its connection
        connection: Callable[[], ClientPort | None],  # returns the session's current connection
        copies: OwnCopies | None = None,  # notes own copies that come before PUBREC; with `Qos2Parts.self_delivery`
    ) -> None:
        self.budget: ConnectionBudget = budget
        self.session_id = session_id
        self.principal = principal
        self._parts = parts
        self._start_offsets = parts.start_offsets
        self._journal = journal
        self._connection = connection
        self._copies = copies
        self._known: dict[int, InboundMessage] = {}
        self._completing: dict[int, InboundMessage] = {}  # PUBCOMP waits for the journal
        self._next = 0
        self._unanswered: dict[int, None] = {}  # sequences, ascending
        self._released: set[int] = set()
        self.scan_from: Offsets = {}
        self._fresh: tuple[int, Offsets] | None = None  # start offsets that are valid from this sequence on
        self._persisted_topics: set[str] = set()  # topics whose start offsets are in a stored in-flight record
        self._held: list[tuple[Record, InboundMessage, int]] = []  # with the size counted in the budget
        self._fetching_offsets = False
        self._idle = False
        self._uncertain: dict[int, int] = {}  # packet identifier -> sequence of records whose fate is unknown
        self._when_idle: Callable[[], None] | None = None

    def restore(self, record: InflightRecord) -> None:
        """Start with the contents of an in-flight record; recovery must have scanned the log already."""
        self._known = {
            packet_id: InboundMessage(packet_id, sequence, state=Qos2State.STORED)
            for packet_id, sequence in record.open.items()
        }
        self._next = max((record.low_water_mark, *(sequence + 1 for sequence in record.released)))

    def confirm(self, messages: Iterable[tuple[int, int]]) -> None:
        """Resolve uncertain messages: those in `messages` (packet identifier, sequence) are stored."""
        uncertain, self._uncertain = self._uncertain, {}
        for packet_id, sequence in messages:
            if uncertain.get(packet_id) == sequence and packet_id not in self._known:
                self._known[packet_id] = InboundMessage(packet_id, sequence, state=Qos2State.STORED)

    def describe(self, *, leaving: bool) -> dict[str, Any]:
        """Return this state's fields of the in-flight record; `leaving`: the session has no connection."""
        if leaving and not (self._unanswered or self._held or self._uncertain):
            self.scan_from, self._fresh = {}, None
            self._persisted_topics.clear()
        low_water_mark = next(iter(self._unanswered), self._next)
        self._released = {sequence for sequence in self._released if sequence >= low_water_mark}
        if not self._unanswered and not self._uncertain:
            self.scan_from = self._start_offsets.of(self.scan_from)
            self._fresh = None
        elif self._fresh is None:
            self._fresh = (self._next, self._start_offsets.of(self.scan_from))
        elif low_water_mark >= self._fresh[0] and not self._uncertain:
            self.scan_from = self.scan_from | self._fresh[1]
            self._fresh = None
        return {
            "low_water_mark": low_water_mark,
            "open": {
                message.packet_id: message.sequence
                for message in self._known.values()
                if message.state in _HAS_RECORD and message.sequence < low_water_mark
            },
            "released": tuple(self._released),
            "scan_from": self.scan_from,
            "uncertain": self._uncertain,
        }

    @property
    def open_ids(self) -> list[int]:
        """Packet identifiers of messages between PUBLISH and PUBREL."""
        return list(self._known)

    @property
    def has_uncertain(self) -> bool:
        """Whether the log must be searched before the client sends its last messages again."""
        return bool(self._uncertain)

    @property
    def busy(self) -> bool:
        """Whether a record is held or in flight to Kafka."""
        return bool(self._unanswered)

    def when_idle(self, then: Callable[[], None]) -> None:
        """Drop held records of a session that moves away; call `then` when Kafka has answered for the rest."""
        held, self._held = self._held, []
        for _, message, size in held:
            self._unanswered.pop(message.sequence, None)
            if self._known.get(message.packet_id) is message:
                del self._known[message.packet_id]
            self.budget.give(size)
        if self._unanswered:
            self._parts.publisher.withdraw(self)
            self._when_idle = then
        else:
            then()

    # from the client

    def publish(
        self, record: Record, packet_id: int, slot: Slot, retained: str = "", *, self_delivered: bool = False
    ) -> None:
        """Store a PUBLISH, unless it repeats one that is known [MQTT-4.3.3-10].

        `slot` gets its result when PUBREC may be sent, immediately or later. `retained` is the MQTT topic of a message
        to be retained. `self_delivered`: the session's own subscriptions match it.
        """
        message = self._known.get(packet_id)
        if message is not None:
            if message.on(_PUBLISH) is _SEND_PUBREC:
                slot.result = _STORED
            else:
                message.slots.append(slot)
            return
        self._idle = False
        message = self._known[packet_id] = InboundMessage(packet_id, self._next, record.topic, _STORING)
        message.slots.append(slot)
        message.retained = retained
        if self_delivered and self._copies is not None:
            message.self_delivered = True
            self._copies.published()
        self._next += 1
        self._unanswered[message.sequence] = None
        if self._journal is None:
            self._submit(record, message)
            return
        header = (MQTT_EXCHANGE, f"{self.session_id}/{packet_id}/{message.sequence}".encode())
        record = msgspec.structs.replace(record, headers=(*record.headers, header))
        if record.topic in self._persisted_topics and not self._held:
            self._submit(record, message)
            return
        size = HELD_OVERHEAD + len(record.key or b"") + len(record.value or b"")
        self.budget.take(size)
        self._held.append((record, message, size))
        if not self._fetching_offsets:
            self._fetching_offsets = True
            self._parts.spawn(self._persist_start_offsets())

    def _submit(self, record: Record, message: InboundMessage) -> None:
        if message.retained:
            self._parts.retained.put(record, message.retained, self, message)
        else:
            self._parts.publisher.submit(record, self, message)

    def release(self, packet_id: int) -> bool:
        """Handle PUBREL; PUBCOMP follows. False if the identifier is unknown: the caller answers [MQTT-4.3.3-11]."""
        message = self._known.get(packet_id) or self._completing.get(packet_id)
        if message is None:
            return False
        action = message.on(_PUBREL)
        if action is _AWAIT_COPY:
            self._await_copy(message)
        elif action is _PERSIST:
            self._persist(message)
        return True

    def _await_copy(self, message: InboundMessage) -> None:
        """Finish the message when the client was sent its copy, or now if it gets none before PUBCOMP."""
        if message.place is not None and self._parts.self_delivery is not None:
            self._parts.self_delivery.after(message.topic, *message.place, (self._copied, message))
        else:
            self._copied(message)

    def _copied(self, message: InboundMessage) -> None:
        _, message.state = TABLE[message.state][_COPIED]
        del self._known[message.packet_id]
        if message.packet_id in self._completing:  # the client reused the identifier before PUBCOMP
            self._completing[message.packet_id].state = _ENDED
        self._completing[message.packet_id] = message
        if self._journal is not None:
            self._released.add(message.sequence)
        self._persist(message)

    def _persist(self, message: InboundMessage) -> None:
        message.connection = self._connection()
        if self._journal is None:
            self._persisted(message)
        else:
            self._journal.save((self._persisted, message))

    def _persisted(self, message: InboundMessage) -> None:
        """Send PUBCOMP once, to the connection that sent PUBREL; a new connection repeats PUBREL."""
        if message.on(_PERSISTED) is _PUBCOMP:
            del self._completing[message.packet_id]
            connection = message.connection
            if connection is not None and connection is self._connection():
                connection.complete(message.packet_id)

    # from Kafka

    def settle(self, tokens: Sequence[InboundMessage], offsets: Sequence[int], result: Result) -> None:
        """Take Kafka's result for some messages (contract: `gateway.kafka.contracts.Owner`)."""
        stored = result.outcome is Outcome.STORED
        if stored:
            self._start_offsets.advance(tokens[0].topic, result.partition, offsets[-1])
            if self._copies is not None:
                for message, offset in zip(tokens, offsets, strict=True):
                    message.place = (result.partition, offset) if message.self_delivered else None
        connection = self._connection()
        for message in tokens:
            self._answer(message, result, stored, connection)
        if connection is not None:
            connection.answered()
        if self._copies is not None:
            self._note_copies(tokens, offsets, result, connection)
        if self._when_idle is not None and not self._unanswered:
            then, self._when_idle = self._when_idle, None
            then()

    def _answer(self, message: InboundMessage, result: Result, stored: bool, connection: ClientPort | None) -> None:
        self._unanswered.pop(message.sequence, None)
        action, message.state = TABLE[message.state][_STORED_NOW if stored else _REFUSED_NOW]
        for slot in message.slots:
            slot.result = result
        message.slots.clear()
        if action is _REFUSE:
            # PUBREC with an error, or closing the connection, ends the exchange [MQTT-4.3.3-9].
            if self._known.get(message.packet_id) is message:
                del self._known[message.packet_id]
                if result.outcome is Outcome.BUSY and self._journal is not None:
                    # It may be stored after all. A client that gets an error reuses the identifier for another
                    # message; a client that gets no answer sends this one again.
                    if connection is None or not connection.reports_failures:
                        self._uncertain[message.packet_id] = message.sequence
                    self._journal.save()
        elif action is _PUBREC_AWAIT_COPY:
            self._await_copy(message)

    def _note_copies(
        self, tokens: Sequence[InboundMessage], offsets: Sequence[int], result: Result, connection: ClientPort | None
    ) -> None:
        assert self._copies is not None
        count = sum(message.self_delivered for message in tokens)
        may_leave = count and self._copies.answered(count, tokens[0].topic, result.partition, offsets)
        if may_leave and connection is not None:
            connection.release_messages()

    # a topic's start offsets are stored before its first record

    async def _persist_start_offsets(self) -> None:
        for topic in dict.fromkeys(record.topic for record, _, _ in self._held):
            if topic in self._persisted_topics:
                continue
            try:
                if topic not in self._start_offsets:
                    await self._parts.publisher.topic(topic, principal=self.principal)
                    await self._start_offsets.fetch(topic)
            except Refused as refused:
                self._refuse(topic, Result(refused.outcome, reason=refused.reason))
                continue
            except Exception as error:  # contained: the held records get a definite outcome
                failures.report("session", error)
                self._refuse(topic, Result(Outcome.BUSY, reason="internal error"))
                continue
            self.scan_from |= self._start_offsets.of((topic,))
        assert self._journal is not None
        self._journal.save((self._submit_held, frozenset(self.scan_from)))

    def _refuse(self, topic: str, result: Result) -> None:
        refused = [held for held in self._held if held[0].topic == topic]
        self._held = [held for held in self._held if held[0].topic != topic]
        for _, _, size in refused:
            self.budget.give(size)
        if refused:
            self.settle([message for _, message, _ in refused], (), result)
            for _, message, _ in refused:
                self._uncertain.pop(message.packet_id, None)  # it was never submitted

    def _submit_held(self, persisted: frozenset[str]) -> None:
        self._fetching_offsets = False
        self._persisted_topics |= persisted
        submitted = 0
        for record, message, _ in self._held:
            if record.topic not in self._persisted_topics:
                self._fetching_offsets = True
                self._parts.spawn(self._persist_start_offsets())
                break
            self._submit(record, message)
            submitted += 1
        done = self._held[:submitted]
        del self._held[:submitted]
        for _, _, size in done:  # after `submit` has taken it again, so that the gate does not flap
            self.budget.give(size)

    def forget_topic(self, topic: str) -> None:
        """Reset a deleted Kafka topic: records in flight may land anywhere in a new topic of that name."""
        self._persisted_topics.discard(topic)
        if topic in self.scan_from:
            self.scan_from = self.scan_from | {topic: dict.fromkeys(self.scan_from[topic], 0)}
            self._fresh = None
            if self._journal is not None:
                self._journal.save()

    def drop_idle_offsets(self) -> bool:
        """Drop the start offsets if the session was idle since the last call, so that they do not become stale.

        Returns:
            Whether the in-flight record should be written.
        """
        if self._unanswered or self._held or self._uncertain or not self.scan_from:
            return False
        if not self._idle:
            self._idle = True
            return False
        self.scan_from = {}
        self._persisted_topics.clear()
        return True
