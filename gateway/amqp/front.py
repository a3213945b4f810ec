"""The AMQP front: a listener whose sockets become sessions."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from gateway.amqp.services import AmqpStatistics, Services
from gateway.amqp.session import AmqpSession
from gateway.net.listener import Listener
from gateway.net.pump import Pump, Spawn
from protocols.amqp.connection import Connection
from protocols.amqp.endpoints import Limits

STOPPING = "stopping"


class AmqpFront:
    """Everything AMQP of one process."""

    name = "amqp"

    def __init__(self, services: Services, spawn: Spawn, tls: ssl.SSLContext | None) -> None:
        """Nothing is opened before `start`."""
        self._services = services
        self._spawn = spawn
        config = services.config
        self._limits = Limits(
            max_frame_bytes=config.max_frame_bytes,
            channel_max=config.channel_max,
            links_per_session=config.links_per_session,
            idle_timeout_s=config.idle_timeout_s,
            session_window_bytes=config.session_window_bytes,
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
        """No new connection, no more credit, no further transfer read; outcomes still go out."""
        self.listener.stop_accepting()
        for session in self._services.sessions:
            session.quiesce()
        for pump in self.listener.pumps:
            pump.pause_reading(STOPPING)

    async def stop(self, timeout: float) -> None:
        """Close every connection with `amqp:connection:forced` (part 2.8.16)."""
        for session in tuple(self._services.sessions):
            session.goodbye("the gateway is stopping")
        await self.listener.wait_closed(timeout)

    def statistics(self) -> AmqpStatistics:
        """Counts for the metrics."""
        return self._services.statistics()

    def _make(self, lost: Callable[[Pump], None]) -> Pump:
        services = self._services
        connection = Connection(services.container_id, self._limits, open_timeout_s=services.config.open_timeout_s)
        session = AmqpSession(services, connection)
        return Pump(connection, session, self._spawn, asyncio.get_running_loop().time, lost)
