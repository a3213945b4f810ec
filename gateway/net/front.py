"""The common part of the listeners for protocols on bare sockets: accept, make pumps, drain, close."""

from __future__ import annotations

import abc
import asyncio
import ssl
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.config import Address
from gateway.net.alarms import Alarms
from gateway.net.listener import Listener
from gateway.net.pump import Handler, Pump, Writes
from gateway.net.strangers import Strangers
from gateway.spawn import Spawn
from protocols.connection import Connection

STOPPING: Final = "stopping"


class SocketFront(abc.ABC):
    """One protocol's side of the gateway; a subclass makes its connections and closes them in its protocol's way."""

    def __init__(
        self, name: str, address: Address, spawn: Spawn, tls: ssl.SSLContext | None, strangers: Strangers | None
    ) -> None:
        """Make a listener that `start` opens.

        Args:
            name: the configuration's section.
            address: to listen on.
            spawn: starts a task of the application.
            tls: what the sockets speak.
            strangers: counts what peers send before they have logged in.
        """
        self.name = name
        self._spawn = spawn
        self._strangers = strangers
        self._writes = Writes()
        self._alarms = Alarms()
        self._clock: Callable[[], float] | None = None
        self.listener = Listener(name, address, self._make_pump, tls, strangers)

    @abc.abstractmethod
    def open(self) -> tuple[Connection, Handler]:
        """The sans-io connection of a new socket, and the session that gives it meaning."""

    @abc.abstractmethod
    def close_connections(self) -> None:
        """Tell every client, in the protocol's own way, that the gateway stops."""

    @abc.abstractmethod
    def statistics(self) -> msgspec.Struct:
        """Counts for the metrics."""

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
        """No new connection, and nothing more is read from the open ones; answers still go out."""
        self.listener.stop_accepting()
        for pump in self.listener.pumps:
            pump.pause_reading(STOPPING)

    async def stop(self, timeout: float) -> None:
        """Close every connection in its protocol's way within `timeout` seconds."""
        self.close_connections()
        await self.listener.wait_closed(timeout)

    def _make_pump(self, lost: Callable[[Pump], None]) -> Pump:
        connection, session = self.open()
        if self._clock is None:
            self._clock = asyncio.get_running_loop().time  # one bound method for all
        return Pump(
            connection,
            session,
            self._spawn,
            self._clock,
            lost,
            writes=self._writes,
            alarms=self._alarms,
            strangers=self._strangers,
        )
