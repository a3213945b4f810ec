"""The common part of the MQTT and AMQP servers, from accepted sockets to closed ones."""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from flowcontrol.budget import Budget
from gateway.clients import Connected
from gateway.flow import Flowing
from gateway.net.alarms import Alarms
from gateway.net.listener import Server
from gateway.net.pump import Handler, Pump
from gateway.net.strangers import Strangers
from gateway.net.writes import Writes
from gateway.security.entrance import Entrance
from gateway.spawn import Spawn
from protocols.connection import Connection

STOPPING: Final = "stopping"


class ProtocolServer(Server):
    """The pumps of one protocol; a subclass makes their connections and closes them in the protocol's way."""

    def __init__(
        self,
        name: str,
        spawn: Spawn,
        strangers: Strangers | None,
        *,
        outgoing: Budget,
    ) -> None:
        """`name` is the protocol's. `strangers` counts bytes received before the login, `outgoing` unread bytes."""
        super().__init__()
        self.name = name
        self.pumps: set[Pump] = set()
        self.accepted = 0
        self._lost = self._remove  # one bound method for all
        self._empty = asyncio.Event()
        self._strangers = strangers
        self._outgoing = outgoing
        self._spawn = spawn
        self.writes = Writes()  # of all its sockets
        self._alarms = Alarms()
        self._clock: Callable[[], float] | None = None

    @abc.abstractmethod
    def open(self) -> tuple[Connection, Handler]:
        """Return the sans-io connection and the session for a new socket."""

    @abc.abstractmethod
    def close_connections(self) -> None:
        """Close every connection with the protocol's own message that the gateway stops."""

    def _handlers(self) -> Iterator[Handler]:
        # A handler knows its pump only when the TLS handshake is done, for which a client may let us wait.
        return (pump.handler for pump in self.pumps if pump.transport is not None)

    def flowing(self) -> list[Flowing]:
        """Return every open connection, for /flow."""
        return list(self._handlers())

    def clients(self) -> list[Connected]:
        """Return every open connection, including those that have not logged in."""
        return list(self._handlers())

    def stop_receiving(self) -> None:
        """Stop accepting connections and reading from the open ones; answers are still sent."""
        self.stop_accepting()
        for pump in self.pumps:
            pump.pause_reading(STOPPING)

    async def stop(self, timeout: float) -> None:
        """Close every connection in its protocol's way within `timeout` seconds."""
        self.close_connections()
        await self.wait_closed(timeout)

    async def wait_closed(self, timeout: float) -> None:
        """Close every connection after its last bytes, and abort those that are left after `timeout` seconds."""
        for pump in list(self.pumps):
            pump.close()
        if self.pumps:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), timeout)
        for pump in list(self.pumps):
            pump.abort()

    def accept(self, entrance: Entrance) -> Pump:
        """Return the pump for a connection through `entrance`, either just accepted or upgraded from HTTP."""
        self.accepted += 1
        connection, session = self.open()
        if self._clock is None:
            self._clock = asyncio.get_running_loop().time  # one bound method for all
        pump = Pump(
            connection,
            session,
            self._spawn,
            self._clock,
            self._lost,
            writes=self.writes,
            alarms=self._alarms,
            strangers=self._strangers,
            outgoing=self._outgoing,
        )
        pump.entrance = entrance
        self.pumps.add(pump)
        self._empty.clear()
        return pump

    def _remove(self, pump: Pump) -> None:
        self.pumps.discard(pump)
        pump.entrance.connections -= 1
        if not self.pumps:
            self._empty.set()
