"""HTTP connections as entries of the operators' list of clients."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import cast

from gateway.net.http.http_server import HttpConnection
from gateway.views.clients import ClientView
from gateway.views.flow import subject


class ListedConnection:
    """One connection; a `gateway.views.clients.Connected`."""

    __slots__ = ("socket",)

    def __init__(self, connection: HttpConnection) -> None:
        self.socket = connection

    @property
    def identifier(self) -> str:
        """The client's address; "" before the first authenticated request and while it closes."""
        return "" if self.socket.client is None or self.socket.left else f"http/{self.socket.peer}"

    @property
    def principal(self) -> str | None:
        """The principal of the latest request."""
        return None if self.socket.client is None else self.socket.client.grant.identity.name

    @property
    def subject(self) -> str:
        """The subject under which pauses of its requests are reported."""
        return subject("http", self.principal or "", self.socket.peer)

    def view(self, *, whole: bool) -> ClientView:
        """Return the entry of the list; `/flow` has more about its produce requests."""
        return ClientView(
            id=self.identifier,
            protocol="http",
            kind="connection",
            principal=self.principal or "",
            address=self.socket.peer,
            since=time.time() - self.socket.age_s,
            version="1.1" if whole else "",
        )

    def kick(self) -> None:
        """Close it after the current answer, if that comes soon."""
        self.socket.kick()


def listed(connections: Iterable[object]) -> Iterable[ListedConnection]:
    """Return a lazy list of an `HttpServer`'s connections."""
    return (ListedConnection(cast("HttpConnection", connection)) for connection in connections)
