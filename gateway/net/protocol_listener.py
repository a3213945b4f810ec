"""The common part of the MQTT and AMQP servers."""

from __future__ import annotations

import abc
from typing import Final

from flowcontrol.budget import Budget
from gateway.net.connected_client import ConnectedClient
from gateway.net.listener import Server
from gateway.net.pump import Pump
from gateway.net.pumps import Pumps
from gateway.net.strangers import Strangers
from gateway.runtime.spawn import Spawn
from gateway.security.entrance import Entrance
from gateway.views.clients import Connected
from gateway.views.flow import Flowing
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
        """`name` is the protocol's; see `Pumps`."""
        super().__init__()
        self.name = name
        self.pumps = Pumps(spawn, outgoing=outgoing, strangers=strangers)
        self.accepted = 0

    @abc.abstractmethod
    def open(self) -> tuple[Connection, ConnectedClient]:
        """Return the sans-io connection and the session for a new socket."""

    @abc.abstractmethod
    def close_connections(self) -> None:
        """Close every connection with the protocol's own message that the gateway stops."""

    def flowing(self) -> list[Flowing]:
        """Return every open connection, for /flow."""
        return list(self.pumps.handlers())

    def clients(self) -> list[Connected]:
        """Return every open connection, including those that have not logged in."""
        return list(self.pumps.handlers())

    def stop_receiving(self) -> None:
        """Stop accepting connections and reading from the open ones; answers are still sent."""
        self.stop_accepting()
        for pump in self.pumps:
            pump.pause_reading(STOPPING)

    async def stop(self, timeout: float) -> None:
        """Close every connection in its protocol's way within `timeout` seconds."""
        self.close_connections()
        await self.pumps.close(timeout)

    def accept(self, entrance: Entrance) -> Pump:
        """Return the pump for a connection through `entrance`, either just accepted or upgraded from HTTP."""
        self.accepted += 1
        connection, session = self.open()
        return self.pumps.open(connection, session, entrance)
