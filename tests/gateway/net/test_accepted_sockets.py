"""A socket that was accepted, and whose connection is not made yet, belongs to no client."""

from __future__ import annotations

import pytest

from gateway.process.listeners import make_servers
from tests.support.assembled import assembled

LOCAL = {"address": "127.0.0.1:0", "websocket_address": "127.0.0.1:0"}


@pytest.mark.parametrize("what", ["departing", "flowing", "clients"])
async def test_a_socket_that_is_only_accepted_is_no_client(bootstrap: str, what: str) -> None:
    async with assembled(bootstrap, create=True, mqtt=LOCAL, amqp=LOCAL, http={"address": "127.0.0.1:0"}) as made:
        servers = make_servers(made.process, made.security, made.log, made.state)
        for server in servers:
            server.accept(server.listeners[0].entrance)
        assert [server.name for server in servers if list(getattr(server, what)())] == []
