"""The open connections of one kind, from accepted sockets to closed ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import cast

from flowcontrol.budget import Budget
from gateway.net.alarms import Alarms
from gateway.net.connected_client import ConnectedClient
from gateway.net.pump import Pump
from gateway.net.strangers import Strangers
from gateway.net.writes import Writes
from gateway.runtime.spawn import Spawn
from gateway.security.entrance import Entrance
from protocols.connection import Connection


class Pumps(set[Pump]):
    """The pumps whose sockets are not closed, with what they share."""

    def __init__(self, spawn: Spawn, *, outgoing: Budget, strangers: Strangers | None = None) -> None:
        """`outgoing` counts unread bytes, `strangers` bytes received before the login."""
        super().__init__()
        self.writes = Writes()  # of all sockets
        self._alarms = Alarms()
        self._spawn = spawn
        self._outgoing = outgoing
        self._strangers = strangers
        self._lost = self._remove  # one bound method for all
        self._clock: Callable[[], float] | None = None
        self._empty = asyncio.Event()

    def open(self, connection: Connection, handler: ConnectedClient, entrance: Entrance) -> Pump:
        """Return the pump for a connection through `entrance`, either just accepted or taken over from HTTP."""
        if self._clock is None:
            self._clock = asyncio.get_running_loop().time  # one bound method for all
        pump = Pump(
            connection,
            handler,
            self._spawn,
            self._clock,
            self._lost,
            writes=self.writes,
            alarms=self._alarms,
            strangers=self._strangers,
            outgoing=self._outgoing,
        )
        pump.entrance = entrance
        self.add(pump)
        self._empty.clear()
        return pump

    def _remove(self, pump: Pump) -> None:
        self.discard(pump)
        pump.entrance.connections -= 1
        if not self:
            self._empty.set()

    def handlers(self) -> Iterator[ConnectedClient]:
        """Yield the handlers of the open sockets."""
        # A handler knows its pump only when the TLS handshake is done, for which a client may let us wait.
        return (cast("ConnectedClient", pump.handler) for pump in self if pump.transport is not None)

    async def close(self, timeout: float) -> None:
        """Close every connection after its last bytes, and abort those that are left after `timeout` seconds."""
        for pump in tuple(self):
            pump.close()
        if self:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), timeout)
        for pump in tuple(self):
            pump.abort()
