"""One MQTT connection as the gateway sees it: dispatch of received packets, pauses of reading, DISCONNECT.

`ConnectAdmission` takes the client from CONNECT to its session. State that outlives the connection is in the `Session`,
which sends through it (`gateway.mqtt.session.client_port`). `Incoming` owns the records that the client publishes at
QoS 0 and 1.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Any, Final

import structlog

from gateway.mqtt.connection import connack
from gateway.mqtt.connection.admission import Admitted, ConnectAdmission
from gateway.mqtt.connection.present import report_offline, report_online
from gateway.mqtt.connection.publishing import REFUSED, Incoming
from gateway.mqtt.connection.services import MqttServices
from gateway.mqtt.connection.subscribing import subscribe, unsubscribe
from gateway.mqtt.session.client_port import ClientPort
from gateway.mqtt.session.session import Session
from gateway.net.protocol_listener import STOPPING
from gateway.runtime.audited import audit, where_of
from gateway.runtime.taps import taps
from gateway.views.clients import CLOSED, CONNECTION_LOG, SubscriptionView
from gateway.views.flow import FlowWindow
from gateway.views.pauses import CONNECTION_BUDGET, PROCESS_BUDGET, RECEIVE_MAXIMUM, SHARE, Pause
from protocols.connection import ConnectionFailed
from protocols.mqtt import packets
from protocols.mqtt.connection import Connection
from protocols.mqtt.packets import Version
from protocols.mqtt.reasons import ReasonCode

log = structlog.get_logger(CONNECTION_LOG)


class Client(ClientPort):
    """The client at the other end of one connection, and the pump's handler."""

    __slots__ = ("_admission", "_incoming", "_services", "_window_opened", "session")

    def __init__(self, connection: Connection, services: MqttServices) -> None:
        super().__init__(connection, services.counters, services.self_delivery)
        self.session: Session | None = None
        self._services = services
        self._admission: ConnectAdmission | None = None  # during login, and as long as AUTH may follow
        self._incoming: Incoming | None = None
        self._window_opened = False

    # the pump's handler

    def handle(self, received: list[Any]) -> Awaitable[None] | None:
        """Process events in order; an event that has to wait holds back those behind it."""
        if not self._services.publisher.fence.is_open:
            return self._handle_after_freeze(received)
        waiting = self._act(received)
        return None if waiting is None else self._wait(*waiting)

    async def _handle_after_freeze(self, received: list[Any]) -> None:
        """Process events after a long freeze, as soon as it is known which gateway has the session."""
        await self._services.publisher.fence.wait_open()
        waiting = self._act(received) if not self.left else None
        if waiting is not None:
            await self._wait(*waiting)

    def _act(self, received: list[Any]) -> tuple[Any, list[Any]] | None:
        """Process events until one has to wait; return that event and those behind it."""
        position, count = 0, len(received)
        while position < count:
            event = received[position]
            kind = type(event)
            if kind is packets.Publish:
                assert self._incoming is not None  # nothing is parsed before CONNACK
                late = self._incoming.must_wait  # this may disconnect the client
                if self.session is None:
                    return None  # another connection may have it, in which the identifiers mean other messages
                if late:
                    self._feed()
                    return event, received[position + 1 :]
                position = self._incoming.publish(received, position)
                continue
            position += 1
            if kind is packets.Puback or kind is packets.Pubcomp:
                self._acknowledged(event.packet_id)
            elif kind in _WAITING:
                self._feed()
                return event, received[position:]
            elif kind is packets.Pubrec:
                self._received(event)
            elif kind is packets.Pubrel:
                assert self._incoming is not None
                if self.session is None:
                    return None
                self._incoming.release(event.packet_id)
            elif kind is packets.Disconnect:
                self._disconnect(event)
            elif kind is ConnectionFailed:
                self._counters.failed_connections += 1
                self._ended = (int(event.code, 16) if event.code else None, event.reason)
                log.info(
                    "connection failed",
                    client=self.client_id,
                    peer=self.pump.peer,
                    reason=event.reason,
                    code=event.code,
                )
                self._leave(with_will=True)
        self._feed()
        return None

    def _feed(self) -> None:
        """Send more once for all acknowledgements of one read, if they freed capacity in the client's window."""
        if self._window_opened:
            self._window_opened = False
            if self.session is not None:
                self.session.feed()

    def writable(self) -> None:
        """Go on sending: the socket has capacity again."""
        if not self._services.publisher.fence.is_open:
            self.pump.writable = False
            return
        if self.session is not None:
            self.session.feed()

    def disconnected(self, reason: str) -> None:
        """Clean up after the socket has closed; records in flight to Kafka are not withdrawn."""
        if self._incoming is not None:  # CONNACK had admitted it
            self._incoming.end()
            self._incoming = None
            log.info("client disconnected", client=self.client_id, reason=self._disconnected_for or reason)
        if self._admission is not None:
            self._admission.end()
            self._admission = None  # avoids a reference cycle
        self._leave(with_will=True)

    # for operators

    @property
    def identifier(self) -> str:
        """The client's id; "" without a session."""
        return "" if self.session is None else f"mqtt/{self.client_id}"

    @property
    def protocol_version(self) -> str:
        """The version that CONNECT named."""
        return VERSIONS[self.version]

    def windows(self) -> tuple[list[FlowWindow], int]:
        """Return the window of each direction (section 4.9)."""
        inbound, outbound = self._connection.inbound, self._connection.outbound
        full = None if outbound.free else Pause(RECEIVE_MAXIMUM)
        return [
            FlowWindow("PUBLISH from the client", True, "", inbound.limit, inbound.free, inbound.used),
            FlowWindow("PUBLISH to the client", False, "", outbound.limit, outbound.free, outbound.used, full),
        ], 2

    def subscriptions(self) -> tuple[list[SubscriptionView], int]:
        """Return the first subscriptions, and the number of all."""
        return ([], 0) if self.session is None else self.session.subscription_views()

    def kick(self) -> None:
        """Send DISCONNECT 0x98 (only close for 3.1.1) and publish the will."""
        self.disconnect(ReasonCode.ADMINISTRATIVE_ACTION, CLOSED)

    def _leave(self, *, with_will: bool) -> None:
        """Detach the session from this connection; later calls do nothing."""
        self.leave_limits()  # the client may connect again before this socket has closed
        session, self.session = self.session, None
        self.budget = self.principal = None
        if session is not None:
            if self._services.presence is not None:
                report_offline(self._services.presence, self, *self._ended)
            session.budget.gate.unsubscribe(self._own_gate)
            leave = partial(self._services.sessions.leave, session, with_will=with_will)
            if self._services.publisher.fence.is_open:
                leave()
            else:  # another gateway may have taken the session over meanwhile
                self._services.publisher.fence.call_when_open(leave)

    # login

    async def _wait(self, event: Any, rest: list[Any]) -> None:
        """Process an event that has to wait, then those behind it."""
        pump = self.pump
        waiting: tuple[Any, list[Any]] | None = (event, rest)
        while waiting is not None:
            event, rest = waiting
            kind = type(event)
            self._connection.suspend_keepalive()  # the socket is not read meanwhile, possibly for long
            if self._connection.is_open:
                pump.read_ahead()  # PINGREQ is still answered
            if kind is packets.Connect or kind is packets.Auth:
                rest = await self._log_in(event) + rest
            elif self.session is not None:
                if kind is packets.Publish:
                    assert self._incoming is not None
                    await self._incoming.over()
                    rest = [event, *rest]
                else:
                    change = subscribe if kind is packets.Subscribe else unsubscribe
                    await change(self, self.session, self._connection, self._services, event)
            if not pump.is_held_back:
                self._connection.resume_keepalive(self._services.clock())
            pump.flush()
            waiting = self._act(rest) if rest and not pump.closed else None

    async def _log_in(self, event: Any) -> list[Any]:
        """Process CONNECT or AUTH; return the events that the client had sent ahead of CONNACK."""
        pump = self.pump
        admission = self._admission = self._admission or ConnectAdmission(self, self._connection, pump, self._services)
        admitted = await admission.process(event)
        if pump.closed or not admission.continues:
            admission.end()
            self._admission = None
        return self._open(admitted) if admitted is not None else []

    def _open(self, admitted: Admitted) -> list[Any]:
        """Send CONNACK and attach the session; return the events that the client had sent ahead of it."""
        services, pump, identity, session = self._services, self.pump, admitted.identity, admitted.session
        log.info(
            "client connected",
            client=self.client_id,
            principal=identity.name,
            peer=pump.peer,
            listener=pump.entrance.name,
            present=admitted.present,
        )
        if audit.enabled:
            audit.accepted(where_of("mqtt", pump, self.client_id), identity.name, identity.method)
        if taps.watchers:
            taps.named(pump, f"mqtt/{self.client_id}")
        ahead = self._connection.accept(
            admitted.present,
            admitted.announced,
            received=session.inbound_qos2.open_ids if session.inbound_qos2 is not None else (),
            reserved=session.reserved_ids,
        )
        pump.identified()
        self.session, self.budget, self.principal = session, session.budget, session.principal
        reading = self.apply_limits(services.limits, self._pause_reading, self._resume_reading)
        self._incoming = Incoming(self, self._connection, session, admitted.grant, services, reading)
        if not services.publisher.gate.is_open:
            self._pause_reading(PROCESS_BUDGET)
        if not session.budget.gate.is_open:
            self._own_gate(False)
        session.budget.gate.subscribe(self._own_gate)
        session.attach(self)
        if services.presence is not None:
            report_online(services.presence, self, session, pump.peer, services.wall_clock())
        return ahead

    def rights_changed(self) -> None:
        """Apply changed rights: disconnect the client if its will or a subscription is no longer allowed."""
        if self.session is None or self.grant is None or self._incoming is None or self.left:
            return
        self._incoming.rights_changed()
        withdrawn = connack.check_rights(self.session, self.grant, self._services.config)
        if withdrawn is not None:
            reason, with_will = withdrawn
            self.disconnect(ReasonCode.NOT_AUTHORIZED, reason, with_will=with_will)

    # the end of the connection

    def _disconnect(self, event: packets.Disconnect) -> None:
        """Handle the client's DISCONNECT; only code 0x00 deletes the will [MQTT-3.14.4-3]."""
        self._connection.finish()
        session = self.session
        if session is None:
            return
        self._ended = (event.reason_code, "")
        changed = event.properties.session_expiry_interval if event.properties is not None else None
        if changed is not None:
            session.expiry = min(changed, self._services.config.session_expiry_max_s)
        self._leave(with_will=event.reason_code != ReasonCode.SUCCESS)

    def prepare_to_leave(self) -> bool:
        """Stop reading; acknowledgements are still sent."""
        self._pause_reading(STOPPING)
        return False

    @property
    def may_leave(self) -> bool:
        """Whether Kafka has answered for every message and all acknowledgements were sent."""
        return self.session is None or not (self.session.budget.records or (self._incoming and self._incoming.waiting))

    def leave(self) -> None:
        """Send the acknowledgements that are due, then DISCONNECT 0x8B, or 0x9C if another server is configured."""
        self.answered()
        self.disconnect(*connack.shutdown_disconnect(self._services.config, ReasonCode.SERVER_SHUTTING_DOWN))

    def taken_over(self) -> None:
        """Disconnect, because another connection uses the client id now [MQTT-3.1.4-3]."""
        if self._incoming is not None:
            self._services.publisher.withdraw(self._incoming)
        self.disconnect(ReasonCode.SESSION_TAKEN_OVER, "another connection uses this client id")

    def answered(self) -> None:
        """Send due acknowledgements immediately, since copies of the published messages may follow."""
        if self._incoming is not None:
            self._incoming.answer()

    # pauses of reading; keep-alive is suspended meanwhile

    def kafka_gate(self, is_open: bool) -> None:
        """Pause or resume reading with the process's budget; before login a client sends nothing that counts."""
        if is_open:
            self._resume_reading(PROCESS_BUDGET)
        elif self._connection.is_open:
            self._pause_reading(PROCESS_BUDGET)

    def _own_gate(self, is_open: bool) -> None:
        """Pause or resume reading as this connection exceeds its own limit or its share of the budget."""
        if is_open:
            self._resume_reading(CONNECTION_BUDGET, SHARE)
        elif self.session is not None:
            self._pause_reading(CONNECTION_BUDGET if self.session.budget.waits_for is None else SHARE)

    def _pause_reading(self, reason: str) -> None:
        self.pump.pause_reading(reason)
        self._connection.suspend_keepalive()

    def _resume_reading(self, *reasons: str) -> None:
        for reason in reasons:
            self.pump.resume_reading(reason)
        if self.pump.reading:
            self._connection.resume_keepalive(self._services.clock())
            self.flush()

    def _acknowledged(self, packet_id: int) -> None:
        """Handle PUBACK or PUBCOMP."""
        self._counters.delivered_acknowledged += 1
        self._window_opened = True
        if self.session is not None:
            self.session.deliveries.acknowledged(packet_id)

    def _received(self, event: packets.Pubrec) -> None:
        """Handle PUBREC: send PUBREL; an error code ends the delivery [MQTT-4.3.3-4]."""
        session = self.session
        if session is None:
            return
        if event.reason_code >= REFUSED:
            self._window_opened = True
            session.deliveries.acknowledged(event.packet_id)
        elif not session.deliveries.received(event.packet_id):
            self._connection.send_pubrel(event.packet_id, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND)


VERSIONS: Final = {Version.V5: "5.0", Version.V311: "3.1.1", Version.V31: "3.1"}
_WAITING: Final = frozenset({packets.Connect, packets.Auth, packets.Subscribe, packets.Unsubscribe})
