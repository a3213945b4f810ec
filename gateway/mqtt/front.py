"""The MQTT front: a listener whose sockets become sessions."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

import msgspec

from gateway.mqtt.session import Counters, Services, Session
from gateway.net.listener import Listener
from gateway.net.pump import Pump, Spawn
from protocols.mqtt.connection import Connection, Limits


class Statistics(msgspec.Struct, frozen=True):
    """A snapshot of the MQTT side."""

    connections: int
    connections_total: int
    sessions: int
    subscriptions: int
    takeovers_total: int
    messages: Counters


class MqttFront:
    """Everything MQTT of one process."""

    name = "mqtt"

    def __init__(self, services: Services, spawn: Spawn, tls: ssl.SSLContext | None) -> None:
        """Nothing is opened before `start`."""
        self._services = services
        self._spawn = spawn
        config = services.config
        self._limits = Limits(
            max_connect_bytes=config.max_connect_bytes,
            max_packet_bytes=config.max_packet_bytes,
            connect_timeout_s=config.connect_timeout_s,
            outgoing_inflight=config.outgoing_inflight,
            enforce_receive_maximum=config.enforce_receive_maximum,
        )
        self.listener = Listener(self.name, config.address, self._make, tls)

    async def start(self) -> None:
        """Listen; ListenError when the address cannot be had."""
        await self.listener.start()

    @property
    def bound(self) -> str:
        """The address really bound."""
        return self.listener.bound

    @property
    def accepting(self) -> bool:
        """Whether new connections are accepted."""
        return self.listener.accepting

    def stop_taking(self) -> None:
        """No new connection and no further packet from the open ones; acknowledgements still go out."""
        self.listener.stop_accepting()
        for pump in self.listener.pumps:
            pump.pause_reading("stopping")

    async def stop(self, timeout: float) -> None:
        """Say goodbye (0x8B) on every connection and close it."""
        for pump in list(self.listener.pumps):
            if isinstance(pump.handler, Session):
                pump.handler.shut_down()
        await self.listener.wait_closed(timeout)

    def statistics(self) -> Statistics:
        """Counts for the metrics."""
        services = self._services
        return Statistics(
            connections=len(self.listener.pumps),
            connections_total=self.listener.accepted,
            sessions=len(services.registry),
            subscriptions=len(services.router),
            takeovers_total=services.registry.takeovers,
            messages=services.counters,
        )

    def _make(self, lost: Callable[[Pump], None]) -> Pump:
        connection = Connection(self._limits)
        session = Session(connection, self._services)
        return Pump(connection, session, self._spawn, asyncio.get_running_loop().time, lost)
