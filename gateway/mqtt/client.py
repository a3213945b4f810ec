"""One network connection: login, what the client publishes, what it subscribes to, the goodbye.

What outlives the connection is the `Session`; this is the pump's handler and the owner of the records of QoS 0 and 1.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Sequence
from typing import Any, Final

import structlog

from flowcontrol.budget import Budget
from gateway.kafka.contracts import Refused, Result
from gateway.mqtt.acks import AckQueue, Slot
from gateway.mqtt.counters import Counters
from gateway.mqtt.login import Dialogue
from gateway.mqtt.records import Testament
from gateway.mqtt.services import Services
from gateway.mqtt.session import Session
from gateway.mqtt.subscribing import subscribe, unsubscribe
from gateway.net.pump import Pump
from gateway.security.authorization import Grant
from gateway.security.exchange import Done, Failed
from gateway.security.identity import Identity
from mapping.mqtt import Inbound
from mapping.outcomes import ANSWERS, Outcome
from mapping.record import Received, Record
from protocols.connection import ConnectionFailed
from protocols.mqtt import events
from protocols.mqtt.codec import is_text
from protocols.mqtt.connection import Connection
from protocols.mqtt.encoding import PreparedPublish
from protocols.mqtt.packets import Connect, Version
from protocols.mqtt.properties import NONE, Properties
from protocols.mqtt.reasons import ReasonCode

log = structlog.get_logger(__name__)

KAFKA_SHUT: Final = "kafka"
OWN_SHARE_SHUT: Final = "connection"
EXACTLY_ONCE: Final = 2


class Unanswered:
    """The owner of a connection's QoS 0 records: nobody waits for them, but they count against its budget."""

    __slots__ = ("_counters", "budget")

    def __init__(self, budget: Budget, counters: Counters) -> None:
        self.budget = budget
        self._counters = counters

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """A QoS 0 message is owed no answer; one that was not stored is counted."""
        if result.outcome is not Outcome.STORED:
            self._counters.lost_at_qos_0 += len(tokens)


class Client:
    """The client at the other end of one connection."""

    __slots__ = (
        "_acks",
        "_connection",
        "_dialogue",
        "_gone",
        "_inbound",
        "_pump",
        "_services",
        "_starved",
        "_unanswered",
        "budget",
        "client_id",
        "grant",
        "session",
    )

    def __init__(self, connection: Connection, services: Services) -> None:
        """Nobody is known yet."""
        self.client_id = ""
        self.budget: Budget | None = None  # the session's, once there is one
        self.grant: Grant | None = None
        self.session: Session | None = None
        self._connection = connection
        self._services = services
        self._pump: Pump | None = None
        self._dialogue: Dialogue | None = None
        self._inbound: Inbound | None = None
        self._unanswered: Unanswered | None = None
        self._acks = AckQueue()
        self._starved = False
        self._gone = False

    # the pump's handler

    def connected(self, pump: Pump) -> None:
        """The socket is open."""
        self._pump = pump

    def handle(self, received: list[Any]) -> Awaitable[None] | None:
        """Act on events in order; what has to wait holds the rest back."""
        position, count = 0, len(received)
        while position < count:
            event = received[position]
            kind = type(event)
            if kind is events.PublishReceived:
                position = self._publish(received, position)
                continue
            position += 1
            if kind is events.PubackReceived:
                self._acknowledged(event.packet_id)
            elif kind in _WAITING:
                self._feed()
                return self._wait(event, received[position:])
            elif kind is events.PubrecReceived:
                self._received(event)
            elif kind is events.PubrelReceived:
                self._released(event)
            elif kind is events.PubcompReceived:
                self._acknowledged(event.packet_id)
            elif kind is events.DisconnectReceived:
                self._disconnect(event)
            elif kind is ConnectionFailed:
                self._services.counters.failed_connections += 1
                log.info("connection failed", client=self.client_id, reason=event.reason, code=event.code)
                self._leave(with_will=True)
        self._feed()
        return None

    def _feed(self) -> None:
        """The client's window has room again: once for all the acknowledgements of one read."""
        if self._starved:
            self._starved = False
            if self.session is not None:
                self.session.feed()

    def writable(self) -> None:
        """The socket has room again."""
        if self.session is not None:
            self.session.feed()
            self.session.feed_lossy()

    def disconnected(self, reason: str) -> None:
        """The socket is gone; records on their way to Kafka stay on it."""
        self._gone = True
        self._acks.clear()
        self._leave(with_will=True)
        if self.client_id:
            log.info("client gone", client=self.client_id, reason=reason)

    @property
    def _is_over(self) -> bool:
        """Whether nothing is left to be said."""
        return self._gone or self._connection.closing

    def _leave(self, *, with_will: bool) -> None:
        """Give the session up; without effect after the first time."""
        session, self.session = self.session, None
        if session is not None:
            session.budget.gate.unsubscribe(self._own_gate)
            self._services.sessions.leave(session, with_will=with_will)

    # login

    async def _wait(self, event: Any, rest: list[Any]) -> None:
        """Do what has to wait, then go on with the events behind it."""
        kind = type(event)
        if kind is events.ConnectReceived:
            rest = await self._connect(event) + rest
        elif kind is events.AuthReceived:
            rest = await self._authenticate(event) + rest
        elif kind is events.SubscribeReceived:
            await subscribe(self, self._connection, self._services, event)
        else:
            await unsubscribe(self, self._connection, self._services, event)
        self._flush()
        if rest and not self._gone:
            waiting = self.handle(rest)
            if waiting is not None:
                await waiting

    async def _connect(self, event: events.ConnectReceived) -> list[Any]:
        """Judge a CONNECT; the events in return are what the client had sent ahead."""
        pump, login = self._pump, self._services.login
        assert pump is not None
        assert pump.transport is not None
        method = event.properties.authentication_method if event.properties is not None else None
        if method is not None:
            assert event.properties is not None
            self._dialogue = login.dialogue(self._connection, method, peer=pump.peer)
            if self._dialogue is None:
                return self._refuse(ReasonCode.BAD_AUTHENTICATION_METHOD, "this authentication method is not served")
            return await self._judged(event, await self._dialogue.begin(event.properties.authentication_data))
        certificate = pump.transport.get_extra_info("peercert")
        identity = await login.identify(event, peer=pump.peer, certificate=certificate)
        if identity is None:
            return self._refuse(*login.refusal(event))
        return await self._admit(event, identity, NONE)

    async def _authenticate(self, event: events.AuthReceived) -> list[Any]:
        """Go on with an exchange of AUTH, before CONNACK or for a re-authentication (section 4.12)."""
        assert self._dialogue is not None  # the connection refuses AUTH without a method
        step = await self._dialogue.receive(event)
        if self._connection.is_open or self._connection.connect is None:
            return []
        return await self._judged(self._connection.connect, step)

    async def _judged(self, connect: Connect, step: Done | Failed | None) -> list[Any]:
        """What an exchange came to."""
        if isinstance(step, Failed):
            self._services.counters.refused_connections += 1
            log.info("authentication failed", client=connect.client_id, reason=step.reason)
        if not isinstance(step, Done):
            return []
        assert self._dialogue is not None
        return await self._admit(connect, step.identity, self._dialogue.properties(step.data))

    def _refuse(self, code: ReasonCode, reason: str) -> list[Any]:
        if not self._is_over:
            self._services.counters.refused_connections += 1
            self._connection.refuse(code, reason)
        return []

    async def _admit(self, connect: Connect, identity: Identity, proof: Properties) -> list[Any]:
        """The client is known: give it its session and say CONNACK."""
        services, pump = self._services, self._pump
        if self._is_over:
            return []
        assert pump is not None
        asked = connect.properties if connect.properties is not None else NONE
        grant = self.grant = services.access.for_identity(identity)
        self.client_id = connect.client_id or f"trivium-{secrets.token_hex(8)}"
        self._inbound = Inbound(services.rules, connect.version, self.client_id)
        refusal = self._judge_will(connect, grant)
        if refusal is not None:
            return self._refuse(*refusal)
        will = Testament(connect.will, connect.version) if connect.will is not None else None
        try:
            session, present = await services.sessions.open(
                self.client_id,
                clean_start=connect.clean_start,
                expiry=self._expiry(connect, asked),
                will=will,
                services=services,
            )
        except Refused as refused:
            return self._refuse(ReasonCode.SERVER_UNAVAILABLE, refused.reason)
        if self._is_over:
            services.sessions.leave(session, with_will=True)
            return []
        log.info("client connected", client=self.client_id, principal=identity.name, peer=pump.peer, present=present)
        ahead = self._connection.accept(
            present,
            self._announcement(connect, asked, proof, session.expiry),
            received=session.exchanges.open_ids if session.exchanges is not None else (),
            reserved=session.reserved_ids,
        )
        self.session = session
        self.budget = session.budget
        self._unanswered = Unanswered(session.budget, services.counters)
        if not services.publisher.gate.is_open:
            self._brake(KAFKA_SHUT)
        if not session.budget.gate.is_open:
            self._brake(OWN_SHARE_SHUT)
        session.budget.gate.subscribe(self._own_gate)
        session.attach(self)
        return ahead

    def _judge_will(self, connect: Connect, grant: Grant) -> tuple[ReasonCode, str] | None:
        """Why the will of a CONNECT is refused, if it is."""
        will = connect.will
        if will is None:
            return None
        if will.qos > self._services.config.maximum_qos:
            return ReasonCode.QOS_NOT_SUPPORTED, f"QoS {will.qos} is not available"  # [MQTT-3.2.2-12]
        destination = self._services.rules.destination(will.topic)
        if not grant.publish(destination.topic, destination.key):
            return ReasonCode.NOT_AUTHORIZED, "not allowed to publish to the will's topic"
        return None

    def _expiry(self, connect: Connect, asked: Properties) -> int:
        """Session Expiry Interval in seconds, at most what the configuration allows."""
        longest = self._services.config.session_expiry_max_s
        if connect.version is not Version.V5:
            return 0 if connect.clean_start else longest  # clean session 0: for as long as it is kept at all
        return min(asked.session_expiry_interval or 0, longest)

    def _announcement(self, connect: Connect, asked: Properties, proof: Properties, expiry: int) -> Properties:
        """CONNACK says what differs from what was asked and from the standard's defaults."""
        config = self._services.config
        too_long = connect.keep_alive == 0 or connect.keep_alive > config.max_keep_alive_s
        information = None
        if asked.request_response_information and config.response_information is not None:
            information = config.response_information.replace("{client}", self.client_id)
        return Properties(
            session_expiry_interval=None if expiry == (asked.session_expiry_interval or 0) else expiry,
            receive_maximum=config.receive_maximum,
            maximum_qos=config.maximum_qos if config.maximum_qos < EXACTLY_ONCE else None,
            assigned_client_identifier=None if connect.client_id else self.client_id,
            topic_alias_maximum=config.topic_alias_maximum,
            server_keep_alive=config.max_keep_alive_s if too_long else None,
            response_information=information,
            authentication_method=proof.authentication_method,
            authentication_data=proof.authentication_data,
        )

    # the goodbye

    def _disconnect(self, event: events.DisconnectReceived) -> None:
        """The client says goodbye; 0x00 takes its will back [MQTT-3.14.4-3], everything else does not."""
        session = self.session
        if session is None:
            return
        changed = event.properties.session_expiry_interval if event.properties is not None else None
        if changed is not None:
            session.expiry = min(changed, self._services.config.session_expiry_max_s)
        self._leave(with_will=event.reason_code != ReasonCode.SUCCESS)

    def taken_over(self) -> None:
        """Another connection has the client id now [MQTT-3.1.4-3]."""
        self.say_goodbye(ReasonCode.SESSION_TAKEN_OVER, "another connection uses this client id")

    def shut_down(self) -> None:
        """The gateway stops; everything acknowledged so far has been said."""
        reference = self._services.config.server_reference
        if reference is None:
            self.say_goodbye(ReasonCode.SERVER_SHUTTING_DOWN, "the gateway is stopping")
        else:
            properties = Properties(server_reference=reference)
            self.say_goodbye(ReasonCode.USE_ANOTHER_SERVER, "the gateway is stopping", properties)

    def say_goodbye(self, code: ReasonCode, reason: str, properties: Properties = NONE) -> None:
        """Close from our side; the will is published all the same."""
        self._leave(with_will=True)
        self._connection.send_disconnect(code, reason, properties)
        self._flush()

    # publish: client to Kafka

    def _publish(self, received: list[Any], position: int) -> int:
        """Hand the publishes from `position` on to Kafka; acknowledged is what every in-sync replica has.

        Returns:
            Where the first event stands that is no publish. A run of them is one loop: this is the hot path.
        """
        inbound, grant, services = self._inbound, self.grant, self._services
        assert inbound is not None
        assert grant is not None
        to_record, allowed = inbound.to_record, grant.publish
        submit, arrive, unanswered = services.publisher.submit, self._acks.arrive, self._unanswered
        now_ms = services.wall_clock()
        first, count = position, len(received)
        special = services.config.report_no_subscribers
        ready = False
        while position < count:
            event = received[position]
            if type(event) is not events.PublishReceived:
                break
            position += 1
            record = to_record(event.topic, event.payload, event.qos, event.retain, event.properties, now_ms)
            if not allowed(record.topic, record.key) or (event.topic[0] == "$" and is_servers_own(event.topic)):
                ready |= self._decline(event, _DENIED)
            elif special or event.retain or event.qos == EXACTLY_ONCE or event.properties is not None:
                ready |= self._publish_special(event, record)
            elif event.qos:
                submit(record, self, arrive(event.packet_id))
            else:
                submit(record, unanswered)
        services.counters.published += position - first
        if ready:
            self._acknowledge()
        return position

    def _publish_special(self, event: events.PublishReceived, record: Record) -> bool:
        """A publish that is retained, or of QoS 2, or has properties; whether an acknowledgement may be due."""
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
            slot.unheard = not services.router.has_subscribers(event.topic)
        if event.qos == EXACTLY_ONCE:
            session = self.session
            if session is not None:
                assert slot is not None
                session.incoming().publish(record, event.packet_id, slot, event.topic if event.retain else "")
            return True
        owner = self._unanswered if slot is None else self
        assert owner is not None
        if event.retain:
            services.retained.put(record, event.topic, owner, slot)
        else:
            services.publisher.submit(record, owner, slot)
        return False

    def _decline(self, event: events.PublishReceived, result: Result) -> bool:
        """Refuse a publish; whether an acknowledgement may be due."""
        if not event.qos:
            self._services.counters.refused += 1
            return False
        self._acks.arrive(event.packet_id, event.qos).result = result
        return True

    def settle(self, tokens: Sequence[Slot], offsets: Sequence[int], result: Result) -> None:
        """Kafka answered for some publishes (contract: `gateway.kafka.contracts.Owner`)."""
        for slot in tokens:
            slot.result = result
        self.answered()

    def answered(self) -> None:
        """Results of publishes are known."""
        if not self._gone:
            self._acknowledge()
            self._flush()

    def _acknowledge(self) -> None:
        """Send the acknowledgements that are due, in order of arrival."""
        connection, counters = self._connection, self._services.counters
        good: list[int] = []
        for slot in self._acks.ready():
            result = slot.result
            assert result is not None
            outcome = result.outcome
            code = slot.unheard * UNHEARD if outcome is Outcome.STORED else ANSWERS[outcome].mqtt
            if not code and slot.qos != EXACTLY_ONCE:
                good.append(slot.packet_id)
                continue
            connection.send_pubacks(good)
            counters.acknowledged += len(good)
            good = []
            if code < REFUSED:
                counters.acknowledged += 1
                send = connection.send_pubrec if slot.qos == EXACTLY_ONCE else connection.send_puback
                send(slot.packet_id, code)
                continue
            counters.refused += 1
            # A failure cannot be said in 3.1.1, and 0x95 is no code of PUBACK: the connection is the scope left.
            if connection.version is not Version.V5 or code == ReasonCode.PACKET_TOO_LARGE:
                self.say_goodbye(ReasonCode(code), result.reason)
                return
            send = connection.send_pubrec if slot.qos == EXACTLY_ONCE else connection.send_puback
            send(slot.packet_id, code, result.reason or None)
        connection.send_pubacks(good)
        counters.acknowledged += len(good)

    def _released(self, event: events.PubrelReceived) -> None:
        """PUBREL: the exchange ends when that is stored.

        One that is not known has ended before, and its PUBCOMP was lost: success is said again [MQTT-4.3.3-11].
        """
        session = self.session
        if session is not None and not (session.exchanges is not None and session.exchanges.release(event.packet_id)):
            self._connection.send_pubcomp(event.packet_id)

    def complete(self, packet_id: int) -> None:
        """Say PUBCOMP (contract: `gateway.mqtt.exchanges.Talker`)."""
        self._connection.send_pubcomp(packet_id)
        self.flush_soon()

    # brakes: TCP is the last one, and silence is not judged while it is on

    def kafka_gate(self, is_open: bool) -> None:
        """The process's budget has shut or opened; who is not logged in yet sends nothing that counts."""
        if is_open:
            self._release(KAFKA_SHUT)
        elif self._connection.is_open:
            self._brake(KAFKA_SHUT)

    def _own_gate(self, is_open: bool) -> None:
        if is_open:
            self._release(OWN_SHARE_SHUT)
        else:
            self._brake(OWN_SHARE_SHUT)

    def _brake(self, reason: str) -> None:
        if self._pump is not None:
            self._pump.pause_reading(reason)
            self._connection.suspend_keepalive()

    def _release(self, reason: str) -> None:
        if self._pump is not None:
            self._pump.resume_reading(reason)
            if self._pump.reading:
                self._connection.resume_keepalive(self._services.clock())
                self._flush()

    # deliveries: the session's side

    @property
    def is_open(self) -> bool:
        """Whether something can be sent."""
        return self._connection.is_open

    @property
    def version(self) -> Version:
        """Of the protocol; CONNECT has come."""
        version = self._connection.version
        assert version is not None
        return version

    @property
    def takes_more(self) -> bool:
        """Whether something can be sent, and the socket's buffer is below its mark."""
        return self._connection.is_open and self._pump is not None and self._pump.writable

    @property
    def window(self) -> int:
        """Free places in the client's Receive Maximum."""
        return self._connection.outbound.free

    def may_receive(self, record: Received, retained: str = "") -> bool:
        """Whether the client may read a record, or the retained message of an MQTT topic."""
        grant = self.grant
        if grant is None:
            return False
        if not retained:
            return grant.subscribe(record.topic, record.key)
        destination = self._services.rules.destination(retained)
        return grant.subscribe(destination.topic, destination.key)

    def send(
        self,
        message: PreparedPublish,
        qos: int,
        *,
        retain: bool = False,
        dup: bool = False,
        packet_id: int | None = None,
    ) -> int | None:
        """Send a PUBLISH; see `protocols.mqtt.sending.Sender.send_prepared`."""
        sent = self._connection.send_prepared(message, qos, retain=retain, dup=dup, packet_id=packet_id)
        if sent is None:
            self._services.counters.too_large += 1
            return None
        self._services.counters.delivered += 1
        self.flush_soon()
        return sent

    def send_pubrel(self, packet_id: int) -> None:
        """Send PUBREL."""
        self._connection.send_pubrel(packet_id)
        self.flush_soon()

    def _acknowledged(self, packet_id: int) -> None:
        """PUBACK or PUBCOMP."""
        self._services.counters.delivered_acknowledged += 1
        self._starved = True
        if self.session is not None:
            self.session.acknowledged(packet_id)

    def _received(self, event: events.PubrecReceived) -> None:
        """PUBREC: PUBREL is due; with an error the delivery is over [MQTT-4.3.3-4]."""
        session = self.session
        if session is None:
            return
        if event.reason_code >= REFUSED:
            self._starved = True
            session.acknowledged(event.packet_id)
        elif not session.received(event.packet_id):
            self._connection.send_pubrel(event.packet_id, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND)

    def flush_soon(self) -> None:
        """Write at the end of this loop turn."""
        if self._pump is not None:
            self._pump.flush_soon()

    def _flush(self) -> None:
        if self._pump is not None:
            self._pump.flush()


def is_servers_own(topic: str) -> bool:
    """Whether clients shall not publish to a topic name, since it is the server's (section 4.7.2).

    The state of a bridge is not: Mosquitto's bridges publish it.
    """
    if topic.startswith("$SYS/broker/connection/") and topic.endswith("/state"):
        return False
    return topic.startswith(("$SYS/", "$share/"))


REFUSED: Final = 0x80
UNHEARD: Final = ReasonCode.NO_MATCHING_SUBSCRIBERS
_DENIED: Final = Result(Outcome.DENIED, reason="not allowed to publish to this topic")
_NO_TEXT: Final = Result(Outcome.UNFIT, reason="the payload is no UTF-8 text")
_WAITING: Final = frozenset(
    {events.ConnectReceived, events.AuthReceived, events.SubscribeReceived, events.UnsubscribeReceived}
)
