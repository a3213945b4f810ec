"""The client's QoS 2 messages, from PUBLISH to PUBREL: each is stored once, whatever is repeated or killed.

A session that is kept needs no transaction for it: **the log is the proof**. Every record of such a message carries
its exchange (session, packet identifier, sequence) in a header. The session's flight record says which sequences are
accounted for (`mark`, `open`, `released`), and from which offsets the others can be found in the log (`scan`). So
PUBREC leaves when the record is stored, PUBCOMP when a flight record without the identifier is stored, and after a
crash `gateway.mqtt.registry.qos2_scan` finds what was stored and not yet accounted for. The offsets are in a stored
flight record before the first record goes to a topic.

The other sessions end with their connection, and with them every exchange: nothing is written for them.

What happens to one message is the table in `gateway.mqtt.session.qos2_states`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

import msgspec

from flowcontrol.budget import Budget
from gateway.failures import failures
from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused, Result
from gateway.kafka.publish.publisher import Publisher
from gateway.mqtt.routing.retained import Retained
from gateway.mqtt.session.acks import Slot
from gateway.mqtt.session.client_port import ClientPort
from gateway.mqtt.session.journal import Journal
from gateway.mqtt.session.qos2_states import TABLE, Action, Event, State
from gateway.mqtt.session.self_delivery import Echoes, OwnCopies
from gateway.mqtt.state.records import FlightRecord, Places
from mapping.outcomes import Outcome
from mapping.record import MQTT_EXCHANGE, Record

HELD_OVERHEAD: Final = 64  # what a held record is counted for beside its key and value
_STORED: Final = Result(Outcome.STORED)
_HAS_RECORD: Final = frozenset({State.STORED, State.COPYING})  # and the client may send PUBLISH again
# Looked up once: Python 3.11 takes 0.2 us for a member of an enumeration.
_PUBLISH, _PUBREL, _COPIED, _PERSISTED = Event.PUBLISH, Event.PUBREL, Event.COPIED, Event.PERSISTED
_STORED_NOW, _REFUSED_NOW = Event.STORED, Event.REFUSED
_SAY_PUBREC, _REFUSE, _AWAIT_COPY = Action.PUBREC, Action.REFUSE, Action.AWAIT_COPY
_PUBREC_AWAIT_COPY, _PERSIST, _PUBCOMP = Action.PUBREC_AWAIT_COPY, Action.PERSIST, Action.PUBCOMP
_ENDED: Final = State.ENDED
_BEGUN: Final = TABLE[State.ENDED][Event.PUBLISH][1]


class Floors:
    """Offsets at or above which everything lies that is stored from now on, of the topics that were asked for."""

    def __init__(self, lookup: Lookup) -> None:
        """`lookup` is asked once per topic."""
        self._lookup = lookup
        self._ends: Places = {}

    def __contains__(self, topic: str) -> bool:
        """Whether they are known."""
        return topic in self._ends

    async def learn(self, topic: str) -> None:
        """Ask for them; Refused when there is no such topic or Kafka does not answer."""
        ends = await self._lookup.ends(await self._lookup.partitions(topic))
        known = self._ends.setdefault(topic, {})
        for partition, end in ends.items():
            known[partition.partition] = max(end, known.get(partition.partition, 0))

    def of(self, topics: Iterable[str]) -> Places:
        """As they are now."""
        return {topic: dict(self._ends[topic]) for topic in topics if topic in self._ends}

    def forget(self, topic: str) -> None:
        """It was deleted: of another one of its name they are to be learned anew."""
        self._ends.pop(topic, None)

    def passed(self, topic: str, partition: int, offset: int) -> None:
        """A record was stored at `offset`."""
        known = self._ends.get(topic)
        if known is not None and partition in known:
            known[partition] = max(known[partition], offset)


class Exchange:
    """One QoS 2 message of the client.

    Attributes:
        packet_id: the client's.
        sequence: counts the exchanges of the session.
        topic: where it is stored.
        retained: its MQTT topic, if it is to be retained.
        slots: the places of its PUBLISHes in the line of acknowledgements; it may come again before Kafka answers.
        state: changed by `on` alone.
        echoed: the session is sent a copy, which is to come before PUBCOMP (`gateway.mqtt.session.self_delivery`).
        place: partition and offset of one that is echoed.
        connection: which sent PUBREL last.
    """

    __slots__ = ("connection", "echoed", "packet_id", "place", "retained", "sequence", "slots", "state", "topic")

    def __init__(self, packet_id: int, sequence: int, topic: str = "", state: State = _ENDED) -> None:
        self.packet_id = packet_id
        self.sequence = sequence
        self.topic = topic
        self.retained = ""
        self.slots: list[Slot] = []
        self.state = state
        self.echoed = False
        self.place: tuple[int, int] | None = None
        self.connection: ClientPort | None = None

    def on(self, event: Event) -> Action:
        """Take the step of the table; the caller does what it says."""
        action, self.state = TABLE[self.state][event]
        return action


class Qos2Parts(msgspec.Struct, frozen=True):
    """What the QoS 2 messages of all sessions need.

    Attributes:
        publisher: the way into Kafka.
        retained: the way into Kafka of a message that is to be retained.
        floors: of the process.
        spawn: starts a task of the application.
        echoes: PUBCOMP waits there for the session's own copy, where that is asked for.
    """

    publisher: Publisher
    retained: Retained
    floors: Floors
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    echoes: Echoes | None = None


class Exchanges:
    """All open exchanges of one session; the publisher's owner of their records."""

    def __init__(
        self,
        nonce: str,
        principal: str,
        parts: Qos2Parts,
        *,
        budget: Budget,
        journal: Journal | None,
        connection: Callable[[], ClientPort | None],
        copies: OwnCopies | None = None,
    ) -> None:
        """Nothing is open.

        Args:
            nonce: names the session's life in the header.
            principal: whose session it is; see `Publisher.submit`.
            parts: of the process.
            budget: what the client has on the way.
            journal: writes the flight record; None: the session ends with its connection.
            connection: gives the one that the session has now.
            copies: notes which own copies come before PUBREC; goes with `Qos2Parts.echoes`.
        """
        self.budget = budget
        self.nonce = nonce
        self.principal = principal
        self._parts = parts
        self._floors = parts.floors
        self._journal = journal
        self._connection = connection
        self._copies = copies
        self._known: dict[int, Exchange] = {}
        self._completing: dict[int, Exchange] = {}  # PUBCOMP waits for the journal
        self._next = 0
        self._unanswered: dict[int, None] = {}  # sequences, ascending
        self._released: set[int] = set()
        self.scan: Places = {}
        self._fresh: tuple[int, Places] | None = None  # right from this sequence on
        self._covered: set[str] = set()  # topics whose floor is in a stored flight record
        self._held: list[tuple[Record, Exchange, int]] = []  # each with what it is counted for
        self._learning = False
        self._quiet = False
        self._doubts: dict[int, int] = {}  # packet identifier -> sequence of records whose fate is unknown
        self._when_idle: Callable[[], None] | None = None

    def restore(self, record: FlightRecord) -> None:
        """Begin with what a flight record says; nothing of it is left to be scanned."""
        self._known = {
            packet_id: Exchange(packet_id, sequence, state=State.STORED) for packet_id, sequence in record.open.items()
        }
        self._next = max((record.mark, *(sequence + 1 for sequence in record.released)))

    def confirm(self, found: Iterable[tuple[int, int]]) -> None:
        """Settle the doubts: what is found of them (packet identifier, sequence) is stored."""
        doubts, self._doubts = self._doubts, {}
        for packet_id, sequence in found:
            if doubts.get(packet_id) == sequence and packet_id not in self._known:
                self._known[packet_id] = Exchange(packet_id, sequence, state=State.STORED)

    def describe(self, *, leaving: bool) -> dict[str, Any]:
        """The exchanges' part of the flight record, as of now; `leaving`: the session has no connection."""
        if leaving and not (self._unanswered or self._held or self._doubts):
            self.scan, self._fresh = {}, None
            self._covered.clear()
        mark = next(iter(self._unanswered), self._next)
        self._released = {sequence for sequence in self._released if sequence >= mark}
        if not self._unanswered and not self._doubts:
            self.scan = self._floors.of(self.scan)
            self._fresh = None
        elif self._fresh is None:
            self._fresh = (self._next, self._floors.of(self.scan))
        elif mark >= self._fresh[0] and not self._doubts:
            self.scan = self.scan | self._fresh[1]
            self._fresh = None
        return {
            "mark": mark,
            "open": {
                one.packet_id: one.sequence
                for one in self._known.values()
                if one.state in _HAS_RECORD and one.sequence < mark
            },
            "released": tuple(self._released),
            "scan": self.scan,
            "doubts": self._doubts,
        }

    @property
    def open_ids(self) -> list[int]:
        """Packet identifiers between PUBLISH and PUBREL."""
        return list(self._known)

    @property
    def doubtful(self) -> bool:
        """Whether the log must be looked into before the client sends its last messages again."""
        return bool(self._doubts)

    @property
    def busy(self) -> bool:
        """Whether a record is on its way to Kafka."""
        return bool(self._unanswered)

    def when_idle(self, then: Callable[[], None]) -> None:
        """The session goes elsewhere: forget what is held, and call `then` when Kafka has answered for the rest."""
        for _, exchange, _ in self._held:
            self._unanswered.pop(exchange.sequence, None)
            if self._known.get(exchange.packet_id) is exchange:
                del self._known[exchange.packet_id]
        self._let_go(len(self._held))
        if self._unanswered:
            self._when_idle = then
        else:
            then()

    # from the client

    def publish(self, record: Record, packet_id: int, slot: Slot, retained: str = "", *, echoed: bool = False) -> None:
        """A PUBLISH came: store it, unless it is one that came before [MQTT-4.3.3-10].

        Args:
            record: of the message.
            packet_id: the client's.
            slot: gets its result when PUBREC may be sent, at once or later.
            retained: the MQTT topic, if the message is to be retained.
            echoed: the session will be sent it.
        """
        exchange = self._known.get(packet_id)
        if exchange is not None:
            if exchange.on(_PUBLISH) is _SAY_PUBREC:
                slot.result = _STORED
            else:
                exchange.slots.append(slot)
            return
        self._quiet = False
        exchange = self._known[packet_id] = Exchange(packet_id, self._next, record.topic, _BEGUN)
        exchange.slots.append(slot)
        exchange.retained = retained
        if echoed and self._copies is not None:
            exchange.echoed = True
            self._copies.published()
        self._next += 1
        self._unanswered[exchange.sequence] = None
        if self._journal is None:
            self._submit(record, exchange)
            return
        header = (MQTT_EXCHANGE, f"{self.nonce}/{packet_id}/{exchange.sequence}".encode())
        record = msgspec.structs.replace(record, headers=(*record.headers, header))
        if record.topic in self._covered and not self._held:
            self._submit(record, exchange)
            return
        size = HELD_OVERHEAD + len(record.key or b"") + len(record.value or b"")
        self.budget.take(size)
        self._held.append((record, exchange, size))
        if not self._learning:
            self._learning = True
            self._parts.spawn(self._cover())

    def _submit(self, record: Record, exchange: Exchange) -> None:
        if exchange.retained:
            self._parts.retained.put(record, exchange.retained, self, exchange)
        else:
            self._parts.publisher.submit(record, self, exchange)

    def release(self, packet_id: int) -> bool:
        """PUBREL came; PUBCOMP follows.

        Returns:
            False when the identifier is not known: the caller answers [MQTT-4.3.3-11].
        """
        exchange = self._known.get(packet_id) or self._completing.get(packet_id)
        if exchange is None:
            return False
        action = exchange.on(_PUBREL)
        if action is _AWAIT_COPY:
            self._await_copy(exchange)
        elif action is _PERSIST:
            self._persist(exchange)
        return True

    def _await_copy(self, exchange: Exchange) -> None:
        """The exchange ends when the client was sent its own message; at once where that is not asked for."""
        if exchange.place is not None and self._parts.echoes is not None:
            self._parts.echoes.after(exchange.topic, *exchange.place, (self._copied, exchange))
        else:
            self._copied(exchange)

    def _copied(self, exchange: Exchange) -> None:
        _, exchange.state = TABLE[exchange.state][_COPIED]
        del self._known[exchange.packet_id]
        if exchange.packet_id in self._completing:  # the client has taken its identifier again before PUBCOMP
            self._completing[exchange.packet_id].state = _ENDED
        self._completing[exchange.packet_id] = exchange
        if self._journal is not None:
            self._released.add(exchange.sequence)
        self._persist(exchange)

    def _persist(self, exchange: Exchange) -> None:
        exchange.connection = self._connection()
        if self._journal is None:
            self._persisted(exchange)
        else:
            self._journal.save((self._persisted, exchange))

    def _persisted(self, exchange: Exchange) -> None:
        """Say PUBCOMP, once, to the connection that sent PUBREL; another one sends it again, and is answered then."""
        if exchange.on(_PERSISTED) is _PUBCOMP:
            del self._completing[exchange.packet_id]
            connection = exchange.connection
            if connection is not None and connection is self._connection():
                connection.complete(exchange.packet_id)

    # from Kafka

    def settle(self, tokens: Sequence[Exchange], offsets: Sequence[int], result: Result) -> None:
        """Kafka answered (contract: `gateway.kafka.contracts.Owner`)."""
        stored = result.outcome is Outcome.STORED
        if stored:
            self._floors.passed(tokens[0].topic, result.partition, offsets[-1])
            if self._copies is not None:
                for exchange, offset in zip(tokens, offsets, strict=True):
                    exchange.place = (result.partition, offset) if exchange.echoed else None
        connection = self._connection()
        for exchange in tokens:
            self._answer(exchange, result, stored, connection)
        if connection is not None:
            connection.answered()
        if self._copies is not None:
            self._note_copies(tokens, offsets, result, connection)
        if self._when_idle is not None and not self._unanswered:
            then, self._when_idle = self._when_idle, None
            then()

    def _answer(self, exchange: Exchange, result: Result, stored: bool, connection: ClientPort | None) -> None:
        self._unanswered.pop(exchange.sequence, None)
        action, exchange.state = TABLE[exchange.state][_STORED_NOW if stored else _REFUSED_NOW]
        for slot in exchange.slots:
            slot.result = result
        exchange.slots.clear()
        if action is _REFUSE:
            # The exchange is over, by PUBREC with an error or by the end of the connection [MQTT-4.3.3-9].
            if self._known.get(exchange.packet_id) is exchange:
                del self._known[exchange.packet_id]
                if result.outcome is Outcome.BUSY and self._journal is not None:
                    # It may be stored after all. A client that is told that it failed takes the identifier for
                    # another message; one that is not told sends this one again.
                    if connection is None or not connection.tells_failures:
                        self._doubts[exchange.packet_id] = exchange.sequence
                    self._journal.save()
        elif action is _PUBREC_AWAIT_COPY:
            self._await_copy(exchange)

    def _note_copies(
        self, tokens: Sequence[Exchange], offsets: Sequence[int], result: Result, connection: ClientPort | None
    ) -> None:
        assert self._copies is not None
        count = sum(exchange.echoed for exchange in tokens)
        may_leave = count and self._copies.answered(count, tokens[0].topic, result.partition, offsets)
        if may_leave and connection is not None:
            connection.let_out()

    # the floors of a topic are stored before its first record

    async def _cover(self) -> None:
        for topic in dict.fromkeys(record.topic for record, _, _ in self._held):
            if topic in self._covered:
                continue
            try:
                if topic not in self._floors:
                    await self._parts.publisher.topic(topic, principal=self.principal)
                    await self._floors.learn(topic)
            except Refused as refused:
                self._refuse(topic, Result(refused.outcome, reason=refused.reason))
                continue
            except Exception as error:  # contained: what waits for the topic has a clear outcome
                failures.tell("session", error)
                self._refuse(topic, Result(Outcome.BUSY, reason="internal error"))
                continue
            self.scan |= self._floors.of((topic,))
        assert self._journal is not None
        self._journal.save((self._submit_held, frozenset(self.scan)))

    def _refuse(self, topic: str, result: Result) -> None:
        refused = [held for held in self._held if held[0].topic == topic]
        self._held = [held for held in self._held if held[0].topic != topic] + refused
        self._let_go(len(refused))
        if refused:
            self.settle([exchange for _, exchange, _ in refused], (), result)
            for _, exchange, _ in refused:
                self._doubts.pop(exchange.packet_id, None)  # Kafka was not given it

    def _let_go(self, count: int) -> None:
        """The last `count` held records are held no longer."""
        for _ in range(count):
            self.budget.give(self._held.pop()[2])

    def _submit_held(self, covered: frozenset[str]) -> None:
        self._learning = False
        self._covered |= covered
        submitted = 0
        for record, exchange, _ in self._held:
            if record.topic not in self._covered:
                self._learning = True
                self._parts.spawn(self._cover())
                break
            self._submit(record, exchange)
            submitted += 1
        done = self._held[:submitted]
        del self._held[:submitted]
        for _, _, size in done:  # after taking again, so that the gate does not flap
            self.budget.give(size)

    def forget_topic(self, topic: str) -> None:
        """A Kafka topic was deleted: what is on its way may be anywhere in another one of its name."""
        self._floors.forget(topic)
        self._covered.discard(topic)
        if topic in self.scan:
            self.scan = self.scan | {topic: dict.fromkeys(self.scan[topic], 0)}
            self._fresh = None
            if self._journal is not None:
                self._journal.save()

    def rest(self) -> bool:
        """Called now and then: a session that is quiet for that long gives up its floors, so that they do not age.

        Returns:
            Whether the flight record should be written.
        """
        if self._unanswered or self._held or self._doubts or not self.scan:
            return False
        if not self._quiet:
            self._quiet = True
            return False
        self.scan = {}
        self._covered.clear()
        return True
