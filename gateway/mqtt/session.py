"""What the packets of one MQTT connection mean: login, publish into Kafka, subscriptions, deliveries, goodbye.

This step keeps no state beyond the connection: CONNACK announces what is not served (QoS 2, retained messages,
shared subscriptions, a session that outlives its connection), and the connection refuses what was not announced.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
import structlog

from flowcontrol.budget import Budget
from gateway.config import MqttConfig
from gateway.kafka.contracts import Outlet, Refused, Result
from gateway.kafka.publisher import Publisher
from gateway.kafka.tail import Tail
from gateway.mqtt.acks import AckQueue, Slot
from gateway.mqtt.counters import Counters
from gateway.mqtt.outbox import Outbox
from gateway.mqtt.registry import Registry
from gateway.mqtt.router import Match, Router, Wish
from gateway.net.pump import Pump
from gateway.security.authentication import Authenticator
from gateway.security.authorization import AccessList, Grant
from gateway.security.identity import Identity
from mapping.mqtt import Inbound, for_subscriber
from mapping.outcomes import ANSWERS, Outcome
from mapping.record import Received
from mapping.rules import Rules
from protocols.connection import ConnectionFailed
from protocols.mqtt import events
from protocols.mqtt.connection import Connection
from protocols.mqtt.encoding import prepare_publish
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import NONE, Properties
from protocols.mqtt.reasons import ReasonCode
from protocols.mqtt.topics import is_shared

log = structlog.get_logger(__name__)

ACKNOWLEDGED: Final = 1  # QoS up to which this step serves
KAFKA_SHUT: Final = "kafka"
OWN_SHARE_SHUT: Final = "connection"


class Services(msgspec.Struct, frozen=True):
    """What every session needs; built once by the application."""

    config: MqttConfig
    rules: Rules
    publisher: Publisher
    tail: Tail
    router: Router
    registry: Registry
    authenticator: Authenticator
    access: AccessList
    clock: Callable[[], float]
    wall_clock: Callable[[], int]
    counters: Counters


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


class Session:
    """One connection's session; the pump's handler, the publisher's owner and the tail's outlets in one place."""

    __slots__ = (
        "_acks",
        "_connection",
        "_filters",
        "_gone",
        "_grant",
        "_inbound",
        "_lossless",
        "_lossy",
        "_pump",
        "_services",
        "_starved",
        "_unanswered",
        "budget",
        "client_id",
    )  # fmt: skip

    def __init__(self, connection: Connection, services: Services) -> None:
        self.client_id = ""
        self.budget: Budget = services.publisher.connection_budget()
        self._unanswered = Unanswered(self.budget, services.counters)
        self._connection = connection
        self._services = services
        self._pump: Pump | None = None
        self._inbound: Inbound | None = None
        self._grant: Grant | None = None
        self._acks = AckQueue()
        self._filters: set[str] = set()
        self._lossy = Outbox(self, services.counters, lossy=True)
        self._lossless = Outbox(self, services.counters, lossy=False)
        self._starved = False
        self._gone = False

    # the pump's handler

    def connected(self, pump: Pump) -> None:
        """The socket is open."""
        self._pump = pump
        self.budget.gate.subscribe(self._own_gate)

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
                self._services.counters.delivered_acknowledged += 1
                self._starved = True
            elif kind in _WAITING:
                self._feed()
                return self._wait(event, received[position:])
            elif kind is events.UnsubscribeReceived:
                self._unsubscribe(event)
            elif kind is ConnectionFailed:
                self._services.counters.failed_connections += 1
                log.info("connection failed", client=self.client_id, reason=event.reason, code=event.code)
            elif kind is events.AuthReceived:
                # Re-authentication needs a method in CONNECT, and no method is accepted yet.
                self._connection.send_disconnect(ReasonCode.PROTOCOL_ERROR, "no authentication is under way")
        self._feed()
        return None

    def _feed(self) -> None:
        """The client's window has room again: once for all the PUBACKs of one read."""
        if self._starved:
            self._starved = False
            self._services.tail.room(self._lossless)

    def writable(self) -> None:
        """The socket has room again."""
        self._services.tail.room(self._lossless)
        self._services.tail.room(self._lossy)

    def disconnected(self, reason: str) -> None:
        """The socket is gone: nothing of the session stays behind; records on their way to Kafka stay on it."""
        self._gone = True
        services = self._services
        self.budget.gate.unsubscribe(self._own_gate)
        self._acks.clear()
        self._leave()
        if self.client_id:
            services.registry.release(self.client_id, self)
            log.info("client gone", client=self.client_id, reason=reason)

    # login

    async def _wait(self, event: Any, rest: list[Any]) -> None:
        """Do what has to wait, then go on with the events behind it."""
        if type(event) is events.ConnectReceived:
            rest = await self._connect(event) + rest
        else:
            await self._subscribe(event)
        self._flush()
        if rest and not self._gone:
            waiting = self.handle(rest)
            if waiting is not None:
                await waiting

    async def _connect(self, event: events.ConnectReceived) -> list[Any]:
        """Judge a CONNECT; the events in return are what the client had sent ahead."""
        properties = event.properties if event.properties is not None else NONE
        refusal = _unserved(event, properties)
        if refusal is None:
            identity = await self._identify(event)
            if identity is None:
                anonymous = event.username is None and event.password is None
                refusal = (
                    ReasonCode.NOT_AUTHORIZED if anonymous else ReasonCode.BAD_USER_NAME_OR_PASSWORD,
                    "authentication is needed" if anonymous else "user name or password is wrong",
                )
        if self._gone or self._connection.closing:
            return []
        if refusal is not None:
            self._services.counters.refused_connections += 1
            self._connection.refuse(*refusal)
            return []
        assert identity is not None
        assert self._pump is not None
        self._grant = self._services.access.for_identity(identity)
        self.client_id = event.client_id or f"trivium-{secrets.token_hex(8)}"
        self._inbound = Inbound(self._services.rules, event.version, self.client_id)
        self._services.registry.claim(self.client_id, self)
        log.info("client connected", client=self.client_id, principal=identity.name, peer=self._pump.peer)
        ahead = self._connection.accept(False, self._announcement(event, properties))
        if not self._services.publisher.gate.is_open:
            self._brake(KAFKA_SHUT)
        return ahead

    async def _identify(self, event: events.ConnectReceived) -> Identity | None:
        authenticator = self._services.authenticator
        pump = self._pump
        assert pump is not None
        assert pump.transport is not None
        if event.username is not None or event.password is not None:
            return await authenticator.authenticate_password(
                event.username or "", event.password or b"", peer=pump.peer, client_id=event.client_id
            )
        certificate = authenticator.identify_certificate(pump.transport.get_extra_info("peercert"))
        return certificate if certificate is not None else authenticator.anonymous()

    def _announcement(self, event: events.ConnectReceived, asked: Properties) -> Properties:
        """CONNACK says what differs from the standard's defaults; the connection enforces it."""
        config = self._services.config
        too_long = event.keep_alive == 0 or event.keep_alive > config.max_keep_alive_s
        return Properties(
            session_expiry_interval=0 if asked.session_expiry_interval else None,
            receive_maximum=config.receive_maximum,
            maximum_qos=ACKNOWLEDGED,
            retain_available=0,
            assigned_client_identifier=None if event.client_id else self.client_id,
            topic_alias_maximum=config.topic_alias_maximum,
            shared_subscription_available=0,
            server_keep_alive=config.max_keep_alive_s if too_long else None,
        )

    def taken_over(self) -> None:
        """Another connection has the client id now [MQTT-3.1.4-3]."""
        self._goodbye(ReasonCode.SESSION_TAKEN_OVER, "another connection uses this client id")

    def shut_down(self) -> None:
        """The gateway stops; everything acknowledged so far has been said."""
        self._goodbye(ReasonCode.SERVER_SHUTTING_DOWN, "the gateway is stopping")

    def _goodbye(self, code: ReasonCode, reason: str) -> None:
        self._leave()
        self._connection.send_disconnect(code, reason)
        self._flush()

    # publish: client to Kafka

    def _publish(self, received: list[Any], position: int) -> int:
        """Hand the publishes from `position` on to Kafka; PUBACK follows when every in-sync replica has them.

        Returns:
            Where the first event stands that is no publish. A run of them is one loop: this is the hot path.
        """
        inbound, grant, services = self._inbound, self._grant, self._services
        assert inbound is not None
        assert grant is not None
        to_record, allowed = inbound.to_record, grant.publish
        submit, arrive = services.publisher.submit, self._acks.arrive
        now_ms = services.wall_clock()
        first, count = position, len(received)
        while position < count:
            event = received[position]
            if type(event) is not events.PublishReceived:
                break
            position += 1
            record = to_record(event.topic, event.payload, event.qos, event.retain, event.properties, now_ms)
            if not event.qos:
                if allowed(record.topic, record.key):
                    submit(record, self._unanswered)
                else:
                    services.counters.refused += 1
            elif allowed(record.topic, record.key):
                submit(record, self, arrive(event.packet_id))
            else:
                arrive(event.packet_id).result = _DENIED
                self._acknowledge()
        services.counters.published += position - first
        return position

    def settle(self, tokens: Sequence[Slot], offsets: Sequence[int], result: Result) -> None:
        """Kafka answered for some publishes (contract: `gateway.kafka.contracts.Owner`)."""
        for slot in tokens:
            slot.result = result
        if self._gone:
            return
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
            code = 0 if outcome is Outcome.STORED else ANSWERS[outcome].mqtt
            if not code:
                good.append(slot.packet_id)
                continue
            counters.refused += 1
            connection.send_pubacks(good)
            counters.acknowledged += len(good)
            good = []
            # A failure cannot be said in 3.1.1, and 0x95 is no code of PUBACK: the connection is the scope left.
            if self._connection.version is not Version.V5 or code == ReasonCode.PACKET_TOO_LARGE:
                self._goodbye(ReasonCode(code), result.reason)
                return
            connection.send_puback(slot.packet_id, code, result.reason or None)
        connection.send_pubacks(good)
        counters.acknowledged += len(good)

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

    # subscriptions and deliveries: Kafka to client

    async def _subscribe(self, event: events.SubscribeReceived) -> None:
        """Grant each filter that may be granted; SUBACK follows when what comes now will be delivered."""
        grant, services = self._grant, self._services
        assert grant is not None
        identifiers = event.properties.subscription_identifiers if event.properties is not None else ()
        identifier = identifiers[0] if identifiers else 0
        codes: list[int] = []
        reason: str | None = None
        for options in event.subscriptions:
            topic_filter = options.topic_filter
            if is_shared(topic_filter):  # 5.0 clients were told so and disconnected; 3.1.1 cannot be told
                codes.append(ReasonCode.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED)
            elif not grant.subscribe.filter(topic_filter):
                codes.append(ReasonCode.NOT_AUTHORIZED)
            elif topic_filter not in self._filters and len(self._filters) >= services.config.max_subscriptions:
                codes.append(ReasonCode.QUOTA_EXCEEDED)
            else:
                try:
                    await services.router.subscribe(self, Wish(options, identifier))
                except Refused as refused:
                    denied = refused.outcome is Outcome.DENIED
                    codes.append(ReasonCode.NOT_AUTHORIZED if denied else ReasonCode.UNSPECIFIED_ERROR)
                    reason = refused.reason
                    continue
                self._filters.add(topic_filter)
                codes.append(min(options.qos, ACKNOWLEDGED))
        if self._gone:
            self._leave()
            return
        explained = Properties(reason_string=reason) if reason is not None else None
        self._connection.send_suback(event.packet_id, codes, explained)

    def _unsubscribe(self, event: events.UnsubscribeReceived) -> None:
        codes = []
        for topic_filter in event.topic_filters:
            found = self._services.router.unsubscribe(self, topic_filter)
            self._filters.discard(topic_filter)
            codes.append(ReasonCode.SUCCESS if found else ReasonCode.NO_SUBSCRIPTION_EXISTED)
        self._connection.send_unsuback(event.packet_id, codes)

    def outlet_for(self, record: Received, match: Match) -> Outlet:
        """The outlet of this delivery's QoS (contract: `gateway.mqtt.router.Subscriber`)."""
        outlet = self._lossless if match.qos else self._lossy
        outlet.noted = (record, match)
        return outlet

    def match(self, record: Received) -> Match | None:
        """How this session's filters match a record that it catches up on."""
        return self._services.router.match(record, self)

    @property
    def takes_more(self) -> bool:
        """Whether the socket's buffer is below its mark."""
        return self._pump is not None and self._pump.writable

    @property
    def room(self) -> int:
        """Free places in the client's window [MQTT-3.3.4-7], 0 while the socket is full."""
        return self._connection.outbound.free if self.takes_more else 0

    def deliver(self, record: Received, match: Match) -> None:
        """Send one message; an expired one, or one larger than the client takes, counts as delivered."""
        services, connection = self._services, self._connection
        delivery = services.router.delivery(record)
        if delivery is None or not connection.is_open or connection.version is None:
            return
        grant = self._grant
        if grant is None or not grant.subscribe(record.topic, record.key):
            return
        now_ms = services.wall_clock() if delivery.expires is not None else 0
        if delivery.expires is not None and delivery.expires <= now_ms:
            services.counters.expired += 1
            return
        if delivery.expires is None and not match.identifiers:
            message = services.router.prepared(record, delivery, connection.version)
        else:
            properties = for_subscriber(delivery, match.identifiers, now_ms)
            message = prepare_publish(delivery.topic, delivery.payload, properties, connection.version)
        if connection.send_prepared(message, min(match.qos, ACKNOWLEDGED), retain=match.retain) is None:
            services.counters.too_large += 1
            return
        services.counters.delivered += 1
        assert self._pump is not None
        self._pump.flush_soon()

    # the end

    def _leave(self) -> None:
        """Give up the subscriptions."""
        for topic_filter in self._filters:
            self._services.router.unsubscribe(self, topic_filter)
        self._filters.clear()
        self._services.tail.forget(self._lossy)
        self._services.tail.forget(self._lossless)

    def _flush(self) -> None:
        if self._pump is not None:
            self._pump.flush()


_DENIED: Final = Result(Outcome.DENIED, reason="not allowed to publish to this topic")
_WAITING: Final = frozenset({events.ConnectReceived, events.SubscribeReceived})


def _unserved(event: events.ConnectReceived, asked: Properties) -> tuple[ReasonCode, str] | None:
    """What a CONNECT asks for that this step does not serve, as its refusal."""
    if asked.authentication_method is not None:
        return ReasonCode.BAD_AUTHENTICATION_METHOD, "enhanced authentication is not served"
    if event.version is not Version.V5:
        # 3.1.1 has one code for what a server cannot do now, and no way to say that a session will not be kept.
        unserved = event.will is not None or not event.clean_start
        return (ReasonCode.SERVER_UNAVAILABLE, "wills and kept sessions are not served") if unserved else None
    if event.will is not None:
        if event.will.qos > ACKNOWLEDGED:
            return ReasonCode.QOS_NOT_SUPPORTED, "wills are not served"
        if event.will.retain:
            return ReasonCode.RETAIN_NOT_SUPPORTED, "wills are not served"
        return ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, "wills are not served"
    return None
