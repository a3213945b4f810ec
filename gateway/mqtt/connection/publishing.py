"""Publishes of one client: submits them to Kafka and acknowledges them in order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from flowcontrol.budget import ConnectionBudget
from gateway.kafka.contracts import Owner, Result
from gateway.limits.rate_pauses import ReadingPause
from gateway.mqtt.connection.services import MqttServices
from gateway.mqtt.counters import Counters
from gateway.mqtt.session.acks import STORED, AckQueue, Slot
from gateway.mqtt.session.client_port import ClientPort
from gateway.mqtt.session.session import Session
from gateway.runtime.failures import failures
from gateway.security.rights.authorization import Grant
from mapping.mqtt.incoming import Inbound
from mapping.outcomes import ANSWERS, Outcome
from mapping.record import Record
from protocols.mqtt import packets
from protocols.mqtt.codec import is_text
from protocols.mqtt.connection import Connection
from protocols.mqtt.packets import Version
from protocols.mqtt.reasons import ReasonCode

EXACTLY_ONCE: Final = 2
REFUSED: Final = 0x80
NO_SUBSCRIBERS: Final = ReasonCode.NO_MATCHING_SUBSCRIBERS
PERMANENT: Final = frozenset(
    {
        Outcome.DENIED,
        Outcome.UNKNOWN_TOPIC,
        Outcome.FULL,
        Outcome.UNFIT,
        Outcome.BROKEN,
        Outcome.TOO_LARGE,
        Outcome.MANY_HEADERS,
    }
)
"""Permanent refusals: sending the message again fails again until the configuration or Kafka is changed."""
_DENIED: Final = Result(Outcome.DENIED, reason="not allowed to publish to this topic")
_NO_TEXT: Final = Result(Outcome.UNFIT, reason="the payload is not UTF-8 text")


class Qos0Owner(Owner):
    """The owner of a connection's QoS 0 records: not acknowledged, but counted against the connection's budget."""

    __slots__ = ("_counters", "budget", "principal")

    def __init__(self, budget: ConnectionBudget, principal: str, counters: Counters) -> None:
        self.budget = budget
        self.principal = principal
        self._counters = counters

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Count messages that were not stored; QoS 0 has no acknowledgement."""
        if result.outcome is not STORED:
            self._counters.lost_at_qos_0 += len(tokens)


class Incoming(Owner):
    """The publishes of one connection; owns its QoS 1 records (the session owns those of QoS 2)."""

    __slots__ = (
        "_acks", "_allowed", "_answering", "_client", "_connection", "_inbound", "_names", "_qos0_owner", "_reading",
        "_refused_id", "_resent", "_self_delivery", "_services", "_session", "budget", "principal",
    )  # fmt: skip
    protocol = "mqtt"

    def __init__(  # noqa: PLR0917 - everything that a publish needs
        self,
        client: ClientPort,
        connection: Connection,
        session: Session,
        grant: Grant,
        services: MqttServices,
        reading: ReadingPause | None = None,
    ) -> None:
        self.budget: ConnectionBudget = session.budget
        self.principal = session.principal
        self._client = client
        self._connection = connection
        self._session = session
        self._services = services
        self._self_delivery = services.self_delivery
        self._allowed = grant.mqtt_publish
        self._names = grant.names
        self._inbound = Inbound(services.rules, client.version, client.client_id, self._names.mount)
        self._qos0_owner = Qos0Owner(session.budget, session.principal, services.counters)
        self._reading = reading  # None: no rate limit
        self._acks = AckQueue()
        self._answering = False  # whether the acknowledgements are scheduled
        self._refused_id = services.refused_again.take(client.client_id)  # packet id refused last, or 0
        self._resent: Record | None = None  # that message, once it was sent again

    @property
    def must_wait(self) -> bool:
        """Whether publishes must wait for the client's rate, until `over`; see `RatePause.must_wait`."""
        return self._reading is not None and self._reading.must_wait()

    async def over(self) -> None:
        """Wait until publishes may be handled, or the connection ends."""
        if self._reading is not None:
            await self._reading.over()

    def publish(self, received: list[Any], position: int) -> int:
        """Submit the publishes from `position` on to Kafka. An acknowledgement means that every in-sync replica has it.

        Returns:
            The position of the first event that is not a publish. One loop handles a whole run: this is the hot path.
        """
        if self._refused_id and self._resent is None:
            self._find_refused(received, position)
        services = self._services
        now_ms = services.wall_clock()
        first, count = position, len(received)
        special = services.config.report_no_subscribers or (
            self._self_delivery is not None and bool(self._session.subscriptions.by_filter)
        )
        ready = False
        while position < count:
            if not special:
                position = self._publish_run(received, position, now_ms)
                if position == count:
                    break
            event = received[position]
            if type(event) is not packets.Publish:
                break
            ready |= self._publish_one(event, now_ms, special)
            position += 1
        services.counters.published += position - first
        if ready:
            self._acknowledge()
        if self._reading is not None:  # last, since it may end the connection
            self._reading.spend(position - first, sum(len(event.payload) for event in received[first:position]))
        return position

    def rights_changed(self) -> None:
        """Authorize each topic again at its next publish."""
        assert self._client.grant is not None
        self._allowed = self._client.grant.mqtt_publish
        self._inbound.forget_admitted()

    def _find_refused(self, received: list[Any], position: int) -> None:
        """Find the message that was refused before and sent again, for a dead letter if it is refused once more."""
        for index in range(position, len(received)):
            event = received[index]
            if type(event) is not packets.Publish:
                break  # those behind it are the next call's
            if event.dup and event.packet_id == self._refused_id:
                to_record, now_ms = self._inbound.to_record, self._services.wall_clock()
                self._resent = to_record(event.topic, event.payload, event.qos, event.retain, event.properties, now_ms)

    def _publish_run(self, received: list[Any], position: int, now_ms: int) -> int:
        """Submit the run of ordinary publishes of one QoS at `position`, each as `_publish_one` would.

        Returns:
            The position of the first event that `_publish_one` must handle.
        """
        records, packet_ids = self._inbound.to_records(received, position, now_ms)
        if not records:
            return position
        if received[position].qos:
            self._services.publisher.submit_run(records, self, self._acks.arrive_run(packet_ids))
        else:
            self._services.publisher.submit_run(records, self._qos0_owner, packet_ids)
        return position + len(records)

    def _publish_one(self, event: packets.Publish, now_ms: int, special: bool) -> bool:
        """Submit one publish of any kind; return whether an acknowledgement may be due."""
        topic = event.topic
        record = self._inbound.to_record(topic, event.payload, event.qos, event.retain, event.properties, now_ms)
        whole = self._names.mqtt(topic)
        if not self._allowed(whole, record.topic, record.key) or (topic[0] == "$" and is_servers_own(topic)):
            self._client.audit_denied("publish", topic)
            return self._decline(event, _DENIED)
        self._inbound.admit(topic)
        if (
            special
            or event.retain
            or event.qos == EXACTLY_ONCE
            or (event.properties is not None and event.properties.payload_format_indicator)
        ):
            return self._publish_special(event, record, whole)
        if event.qos:
            self._services.publisher.submit(record, self, self._acks.arrive(event.packet_id))
        else:
            self._services.publisher.submit(record, self._qos0_owner)
        return False

    def _publish_special(self, event: packets.Publish, record: Record, whole: str) -> bool:
        """Submit a publish that is retained, of QoS 2, or needs checks; return whether an acknowledgement may be due.

        `whole` is its topic name with the tenant's prefix.
        """
        services = self._services
        properties = event.properties
        if (
            properties is not None
            and properties.payload_format_indicator
            and services.config.check_payload_format
            and not is_text(event.payload)
        ):
            return self._decline(event, _NO_TEXT)
        slot = self._acks.arrive(event.packet_id, event.qos) if event.qos else None
        if slot is not None and services.config.report_no_subscribers and event.qos != EXACTLY_ONCE:
            slot.no_subscribers = not services.router.has_subscribers(whole)
        self_delivered = (
            slot is not None and self._self_delivery is not None and self._session.subscriptions.matches_own(whole)
        )
        if event.qos == EXACTLY_ONCE:
            assert slot is not None
            retained = whole if event.retain else ""
            self._session.inbound().publish(record, event.packet_id, slot, retained, self_delivered=self_delivered)
            return True
        if slot is not None and self_delivered:
            slot.own_topic = record.topic
        owner = self._qos0_owner if slot is None else self
        if event.retain:
            services.retained.put(record, whole, owner, slot)
        else:
            services.publisher.submit(record, owner, slot)
        return False

    def _decline(self, event: packets.Publish, result: Result) -> bool:
        """Refuse a publish; return whether an acknowledgement may be due."""
        if not event.qos:
            self._services.counters.refused += 1
            return False
        self._acks.arrive(event.packet_id, event.qos).result = result
        return True

    def settle(self, tokens: Sequence[Slot], offsets: Sequence[int], result: Result) -> None:
        """Take Kafka's result for some publishes (contract: `gateway.kafka.contracts.Owner`)."""
        if self._self_delivery is not None and result.outcome is STORED:
            for slot, offset in zip(reversed(tokens), reversed(offsets), strict=True):
                if slot.own_topic:
                    self._self_delivery.after(
                        slot.own_topic, result.partition, offset, (self._settled, (tokens, result))
                    )
                    return
        self._settled((tokens, result))

    def broken(self, error: Exception, _tokens: Sequence[Any]) -> None:
        """End the connection after a bug in `settle` or `answer`.

        The client then sends unacknowledged messages again.
        """
        self._client.give_up()

    def _settled(self, argument: tuple[Sequence[Slot], Result]) -> None:
        """Store the result in the slots and schedule the acknowledgements."""
        tokens, result = argument
        for slot in tokens:
            slot.result = result
        self.answered()

    def answered(self) -> None:
        """Schedule the acknowledgements that are due for the end of this event loop iteration.

        Kafka answers for several partitions and clients in one response: one pass writes all their acknowledgements.
        """
        if not self._answering:
            self._answering = True
            self._services.answers.add(self)

    def flush_now(self) -> None:
        """Send the acknowledgements. Called by `Writes`."""
        self._answering = False
        try:
            self.answer()
        except Exception as error:
            failures.report("session", error)
            self.broken(error, ())

    def answer(self) -> None:
        """Send the acknowledgements that are due immediately, if the connection is open."""
        if self._connection.is_open:
            self._acknowledge()
            self._client.flush()

    def _acknowledge(self) -> None:
        """Queue the acknowledgements that are due, in order of arrival."""
        connection, counters = self._connection, self._services.counters
        good = self._acks.stored()
        slots = self._acks.ready()
        for index, slot in enumerate(slots):
            result = slot.result
            assert result is not None
            code = (
                (NO_SUBSCRIBERS if slot.no_subscribers else 0)
                if result.outcome is STORED
                else ANSWERS[result.outcome].mqtt
            )
            if not code and slot.qos != EXACTLY_ONCE:
                good.append(slot.packet_id)
                continue
            connection.send_pubacks(good)
            counters.acknowledged += len(good)
            good = []
            send = connection.send_pubrec if slot.qos == EXACTLY_ONCE else connection.send_puback
            if code < REFUSED:
                counters.acknowledged += 1
                send(slot.packet_id, code)
                continue
            # 3.1.1 has no error codes, and 0x95 is not valid in PUBACK: closing the connection is the only answer.
            closes = connection.version is not Version.V5 or code == ReasonCode.PACKET_TOO_LARGE
            again = closes and result.outcome in PERMANENT
            if again and self._resent is not None and slot.packet_id == self._refused_id:
                letter, self._resent, self._refused_id = self._resent, None, 0
                self._acks.put_back(slots[index:])
                self._services.refused_again.store(letter, self.answered, slot, result)
                return
            counters.refused += 1
            if again and code != ReasonCode.PACKET_TOO_LARGE and self._services.config.acknowledge_refused:
                send(slot.packet_id)  # acknowledged and dropped [MQTT311-3.3.5-2]
                continue
            if closes:
                if again:
                    self._services.refused_again.remember(self._client.client_id, slot.packet_id)
                self._client.disconnect(ReasonCode(code), self._names.text(result.reason))
                return
            send(slot.packet_id, code, self._names.text(result.reason) or None)
        connection.send_pubacks(good)
        counters.acknowledged += len(good)

    @property
    def waiting(self) -> int:
        """Number of messages at QoS 1 and 2 that wait for PUBACK or PUBREC."""
        return len(self._acks)

    def end(self) -> None:
        """Leave the rate limit's queue; the connection has ended."""
        if self._reading is not None:
            self._reading.end()

    def release(self, packet_id: int) -> None:
        """Handle PUBREL; PUBCOMP follows when the end of the exchange is stored.

        For an unknown message the exchange has ended before and PUBCOMP was lost: send it again [MQTT-4.3.3-11].
        """
        inbound_qos2 = self._session.inbound_qos2
        if inbound_qos2 is None or not inbound_qos2.release(packet_id):
            self._connection.send_pubcomp(packet_id)


def is_servers_own(topic: str) -> bool:
    """Whether a topic name is reserved for the server, so that clients must not publish to it (section 4.7.2).

    A bridge's state is not reserved: Mosquitto's bridges publish it.
    """
    if topic.startswith("$SYS/broker/connection/") and topic.endswith("/state"):
        return False
    return topic.startswith(("$SYS/", "$share/"))
