"""Half-open connections to Kafka: the other side has gone without closing them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

import aiohttp
import pytest

from gateway.embedded.broker import EmbeddedBroker
from loadtest.faults.kafka import second_listener
from loadtest.faults.proxy import Proxy
from loadtest.ports import free_port
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

CONFIG = "[kafka]\ncreate_topics = true\nrequest_timeout_s = 100\n"  # longer than any wait in this test
MOST: Final = 4  # new connections in 15 s, while a few get no answer


@pytest.fixture
async def proxy(new_broker: Callable[..., EmbeddedBroker]) -> AsyncIterator[Proxy]:
    """Start a proxy before a broker; its `address` is the broker's advertised listener."""
    port, controller, inner = (free_port() for _ in range(3))
    made = Proxy(("127.0.0.1", inner))
    await made.start()
    settings = second_listener(port, controller, inner, made.address[1])
    await new_broker(port=port, controller_port=controller, settings=settings).start()
    yield made
    await made.stop()


async def test_a_new_connection_reveals_a_half_open_one(
    proxy: Proxy, new_gateway: Callable[..., GatewayProcess]
) -> None:
    """The records in flight are stored soon, and once.

    A broker that answers on no connection is not called half-open. It is probed with a single new connection, since
    many would fill its backlog.
    """
    host, port = proxy.address
    gateway = await new_gateway(f"{host}:{port}", config=CONFIG).start()
    client = await RawClient.connect(gateway.address("mqtt"))
    await client.subscribe("half/#")
    assert await client.publish("half/open", b"before") == 0
    assert (await client.message()).payload == b"before"
    before = proxy.accepted
    proxy.block()
    late = asyncio.create_task(client.publish("half/open", b"late"))
    await unreachable(gateway)
    assert proxy.accepted - before <= MOST
    proxy.unblock()
    assert await late == 0
    assert (await client.message()).payload == b"late"
    assert "is half-open" not in gateway.log.read_text()
    proxy.forget()
    assert await client.publish("half/open", b"after") == 0
    assert (await client.message()).payload == b"after"
    client.drop()
    assert await gateway.stop() == 0
    assert "is half-open" in gateway.log.read_text()


async def unreachable(gateway: GatewayProcess) -> None:
    """Wait until the gateway reports Kafka as unreachable, after about 15 s without an answer."""
    async with aiohttp.ClientSession(f"http://{gateway.addresses['management']}") as http:

        async def is_reported() -> bool:
            async with http.get("/flow") as answer:
                return any(pause["reason"] == "Kafka unreachable" for pause in (await answer.json())["paused"])

        await wait_until(is_reported, 120)
