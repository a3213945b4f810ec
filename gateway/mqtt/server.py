"""The MQTT server: accepts sockets and creates a `Client` for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Final, cast

import msgspec

from gateway.mqtt.connection.client import Client
from gateway.mqtt.connection.services import MqttServices
from gateway.mqtt.counters import Counters, SessionStatistics
from gateway.net.protocol_listener import ProtocolServer
from gateway.net.pump import WRITE_HIGH, Pump
from gateway.net.strangers import Strangers
from gateway.runtime.spawn import Spawn
from gateway.runtime.turns import in_turns
from gateway.security.rights.authorization import Grant
from protocols.mqtt.codec import split_packets
from protocols.mqtt.connection import Connection
from protocols.mqtt.states import PacketLimits
from telemetry.statistics import counter, gauge

FROZEN: Final = "frozen"
WEBSOCKET_SUBPROTOCOLS: Final = ("mqtt", "mqttv3.1")  # [MQTT-6.0.0-4]; some 3.1 clients offer only the latter


class MqttServerStatistics(msgspec.Struct, frozen=True):
    """A snapshot of the MQTT server, for the metrics."""

    connections: Annotated[int, gauge("connections now")]
    connections_total: Annotated[int, counter("connections accepted")]
    sessions: SessionStatistics
    subscriptions: Annotated[int, gauge("subscriptions of connected sessions")]
    unanswered: Annotated[int, gauge("messages at QoS 1 and 2 from clients without an answer yet")]
    unacknowledged: Annotated[int, gauge("messages at QoS 1 and 2 to clients without an answer yet")]
    unmapped_total: Annotated[int, counter("records that have no MQTT topic name")]
    messages: Counters


class MqttServer(ProtocolServer):
    """Serves all MQTT connections of one process."""

    def __init__(self, services: MqttServices, spawn: Spawn, strangers: Strangers | None = None) -> None:
        config = services.config
        super().__init__("mqtt", spawn, strangers, outgoing=services.publisher.budgets.outgoing)
        self._services = services
        self._clock = services.publisher.fence.now
        services.publisher.fence.listen(self._frozen)
        services.access.watch(lambda changed: in_turns(self._recheck_rights(changed)))
        self._limits = PacketLimits(
            max_connect_bytes=config.max_connect_bytes,
            max_packet_bytes=config.max_packet_bytes,
            max_user_properties=services.publisher.most_headers,
            connect_timeout_s=config.connect_timeout_s,
            outgoing_inflight=config.outgoing_inflight,
            outgoing_aliases=config.outgoing_aliases,
            enforce_receive_maximum=config.enforce_receive_maximum,
        )

    def messages(self, data: bytes) -> Sequence[bytes]:
        """Return WebSocket messages with one packet each: paho's C client stalls on several (see [MQTT-6.0.0-2])."""
        return split_packets(data)

    async def start(self) -> None:
        """Start listening, and stop reading sockets whenever the process's budget for Kafka is used up."""
        await super().start()
        self._services.publisher.gate.subscribe(self._kafka_gate)

    def _kafka_gate(self, is_open: bool) -> None:
        for client in self.departing():
            client.kafka_gate(is_open)

    def _recheck_rights(self, changed: AbstractSet[Grant]) -> Iterator[None]:
        """Check the clients whose grants have changed."""
        for client in self.departing():
            if client.grant in changed:
                client.rights_changed()
            yield

    def _frozen(self) -> None:
        """Hold all connections back after a long freeze: another gateway may have taken sessions over meanwhile."""
        pumps = list(self.pumps)
        for pump in pumps:
            pump.pause_reading(FROZEN)
            pump.writable = False
            cast("Connection", pump.connection).suspend_keepalive()  # the gateway was silent, not the client

        def thaw() -> None:
            for pump in pumps:
                if not pump.closed:
                    self._thaw(pump)

        self._services.publisher.fence.call_when_open(thaw)

    def _thaw(self, pump: Pump) -> None:
        if not pump.is_held_back:
            cast("Connection", pump.connection).resume_keepalive(self._services.clock())
        pump.resume_reading(FROZEN)
        if pump.unwritten <= WRITE_HIGH:  # otherwise the transport calls it
            pump.resume_writing()
        pump.flush_soon()

    def open(self) -> tuple[Connection, Client]:
        """Create the protocol connection and its handler for a new socket."""
        connection = Connection(self._limits)
        return connection, Client(connection, self._services)

    def departing(self) -> list[Client]:
        """Return every client whose socket is open."""
        return [client for client in self.pumps.handlers() if isinstance(client, Client)]

    def stop_accepting(self) -> None:
        """Stop accepting connections, and refuse CONNECT on those that are open."""
        super().stop_accepting()
        self._services.opening.is_closed = True
        self._services.sessions.parts.store.leaving = True

    def close_connections(self) -> None:
        """Send DISCONNECT to every client."""
        if self._services.self_delivery is not None:
            self._services.self_delivery.release()
        for client in self.departing():
            client.leave()

    def statistics(self) -> MqttServerStatistics:
        """Return a snapshot for the metrics."""
        services = self._services
        unanswered = unacknowledged = 0
        for connection in cast("list[Connection]", [pump.connection for pump in self.pumps]):  # tens of thousands
            unanswered += connection.inbound.used
            unacknowledged += connection.outbound.used
        return MqttServerStatistics(
            unanswered=unanswered,
            unacknowledged=unacknowledged,
            connections=len(self.pumps),
            connections_total=self.accepted,
            sessions=services.sessions.statistics(),
            subscriptions=len(services.router),
            unmapped_total=services.router.unmapped,
            messages=services.counters,
        )
