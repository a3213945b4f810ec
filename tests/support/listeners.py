"""Listeners for servers that a test makes without a configuration."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.net.http.http_server import HttpServer
from gateway.net.listener import Listener, Server
from gateway.net.proxied import Proxies
from gateway.net.strangers import Strangers
from gateway.security.entrance import Entrance
from gateway.security.login.authentication import Authenticator
from gateway.settings.config import Address, SecurityConfig
from gateway.settings.listeners import ListenerSettings

LOCAL = Address("127.0.0.1:0")


def entrance(authenticator: Authenticator, *logins: Any, name: str = "test") -> Entrance:
    """Make an entrance that allows these of the authenticator's logins, or all of them if none are given."""
    configured = {*authenticator._config.logins, "certificate"}
    return Entrance(name, authenticator, configured.intersection(logins or configured), lambda identity, _: identity)


def one_listener(
    accept: Callable[[Entrance], Any],
    address: Address = LOCAL,
    *,
    tls: ssl.SSLContext | None = None,
    strangers: Strangers | None = None,
    proxies: Proxies | None = None,
    **options: Any,
) -> Listener:
    """Make a listener that calls `accept` for the protocol of each socket; `options` are its settings."""
    settings = ListenerSettings(**{"name": "test", "protocol": "mqtt", "address": address, "key": "test"} | options)
    door = entrance(Authenticator(SecurityConfig()), *settings.logins, name=settings.name)
    return Listener(settings, door, accept, tls=tls, strangers=strangers, proxies=proxies)


def listening(server: Server, address: Address = LOCAL, **options: Any) -> None:
    """Add a listener to a server; it starts with the server."""
    server.add(one_listener(server.accept, address, **options))


class BareServer(Server):
    """A server without connections."""

    def accept(self, entrance: Entrance) -> asyncio.BaseProtocol:
        """See `Server`."""
        raise NotImplementedError

    async def stop(self, timeout: float) -> None:
        """See `Server`."""
        self.stop_accepting()

    def statistics(self) -> msgspec.Struct:
        """See `Server`."""
        raise NotImplementedError


class BareHttpServer(HttpServer):
    """An HTTP server that a test gives its handler; nobody asks for its counts."""

    def statistics(self) -> msgspec.Struct:
        """See `Server`."""
        raise NotImplementedError
