"""HTTP's connections as clients of the operators' list: those that ask, or might ask again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import cast

from gateway.clients import ClientView
from gateway.flow import subject
from gateway.net.http_server import HttpConnection


class ListedConnection:
    """One connection; a `gateway.clients.Connected`."""

    __slots__ = ("socket",)

    def __init__(self, connection: HttpConnection) -> None:
        self.socket = connection  # what its bytes go through

    @property
    def identifier(self) -> str:
        """Its address; "" before the first request whose client is known, and at its end."""
        return "" if self.socket.identity is None or self.socket.left else f"http/{self.socket.peer}"

    @property
    def principal(self) -> str | None:
        """Whose request was the last."""
        return None if self.socket.identity is None else self.socket.identity.name

    @property
    def subject(self) -> str:
        """What its requests' pauses are told of."""
        return subject("http", self.principal or "", self.socket.peer)

    def view(self, *, whole: bool) -> ClientView:
        """What it tells; of its requests that produce `/flow` tells more."""
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
        """End it behind the answer to what was asked, if that comes soon."""
        self.socket.kick()


def listed(connections: Iterable[object]) -> Iterable[ListedConnection]:
    """Those of an `HttpServer`, made one by one."""
    return (ListedConnection(cast("HttpConnection", one)) for one in connections)
