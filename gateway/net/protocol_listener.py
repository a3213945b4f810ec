"""The server of a protocol on bare sockets: what MQTT and AMQP have in common from accepted sockets to their end."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from flowcontrol.budget import Budget
from gateway.clients import Connected
from gateway.drain import Departing
from gateway.flow import Flowing
from gateway.net.alarms import Alarms
from gateway.net.listener import PumpServer
from gateway.net.pump import Handler, Pump
from gateway.net.strangers import Strangers
from gateway.net.writes import Writes
from gateway.spawn import Spawn
from protocols.connection import Connection

STOPPING: Final = "stopping"


class ProtocolServer(PumpServer, abc.ABC):
    """A subclass makes the connections of its protocol, and closes them in the protocol's way."""

    def __init__(
        self,
        name: str,
        spawn: Spawn,
        strangers: Strangers | None,
        *,
        outgoing: Budget,
    ) -> None:
        """`strangers` counts what peers send before they have logged in, `outgoing` what they have not read."""
        super().__init__(name, self._make_pump)
        self._strangers = strangers
        self._outgoing = outgoing
        self._spawn = spawn
        self.writes = Writes()  # of all its sockets
        self._alarms = Alarms()
        self._clock: Callable[[], float] | None = None

    @abc.abstractmethod
    def open(self) -> tuple[Connection, Handler]:
        """The sans-io connection of a new socket, and the session that gives it meaning."""

    @abc.abstractmethod
    def close_connections(self) -> None:
        """Tell every client, in the protocol's own way, that the gateway stops."""

    @abc.abstractmethod
    def statistics(self) -> msgspec.Struct:
        """Counts for the metrics."""

    @abc.abstractmethod
    def departing(self) -> Iterable[Departing]:
        """Every connection, for when the gateway stops."""

    def close_doors(self) -> None:
        """Accept no connection; a subclass refuses who was accepted and has not logged in."""
        self.stop_accepting()

    def flowing(self) -> list[Flowing]:
        """What can be asked for its flow."""
        return [pump.handler for pump in self.pumps]

    def clients(self) -> list[Connected]:
        """Every connection, also those that have not logged in."""
        return [pump.handler for pump in self.pumps]

    def stop_taking(self) -> None:
        """No new connection, and nothing more is read from the open ones; answers still go out."""
        self.close_doors()
        for pump in self.pumps:
            pump.pause_reading(STOPPING)

    async def stop(self, timeout: float) -> None:
        """Close every connection in its protocol's way within `timeout` seconds."""
        self.close_connections()
        await self.wait_closed(timeout)

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
            writes=self.writes,
            alarms=self._alarms,
            strangers=self._strangers,
            outgoing=self._outgoing,
        )
