"""Listeners of the test's own for servers that no configuration has made."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any, get_args

from gateway.config import Address, SecurityConfig
from gateway.net.listener import Listener, Server
from gateway.net.proxied import Proxies
from gateway.net.strangers import Strangers
from gateway.security.authentication import Authenticator
from gateway.security.entrance import Entrance
from gateway.settings.listeners import ListenerSettings
from gateway.settings.values import LoginMethod

LOCAL = Address("127.0.0.1:0")


def entrance(authenticator: Authenticator, *logins: Any, name: str = "test") -> Entrance:
    """One that takes these logins; none: whatever the authenticator does."""
    return Entrance(name, authenticator, logins or get_args(LoginMethod), lambda identity, _: identity)


def one_listener(
    accept: Callable[[Entrance], Any],
    address: Address = LOCAL,
    *,
    tls: ssl.SSLContext | None = None,
    strangers: Strangers | None = None,
    proxies: Proxies | None = None,
    **options: Any,
) -> Listener:
    """A listener whose sockets `accept` makes the protocols of; `options` are its settings."""
    settings = ListenerSettings(**{"name": "test", "protocol": "mqtt", "address": address, "key": "test"} | options)
    door = entrance(Authenticator(SecurityConfig()), *settings.logins, name=settings.name)
    return Listener(settings, door, accept, tls=tls, strangers=strangers, proxies=proxies)


def listening(server: Server, address: Address = LOCAL, **options: Any) -> None:
    """Give a server one more listener, which listens when the server starts."""
    server.add(one_listener(server.accept, address, **options))
