"""While Kafka is frozen, greedy clients are stopped at their share, and all others are served as before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable

import aiohttp

from gateway.embedded.broker import EmbeddedBroker
from loadtest.clients.mqtt_wire import connect_packet, publish_packet
from tests.support.frozen import freeze
from tests.support.gateway import GatewayProcess
from tests.support.waiting import wait_until

MEBIBYTE = 1 << 20
TOPIC_BYTES = 32 * MEBIBYTE
GREEDY = 12
SHARES = TOPIC_BYTES * 7 / 8 * GREEDY / (GREEDY + 1)  # what they hold if no client may hold more than what is free
SIZE = 65_536
CONFIG = f"""
[kafka]
create_topics = true
[budget]
process_bytes = {2 * TOPIC_BYTES}
topic_bytes = {TOPIC_BYTES}
"""
RECORDS = {"Content-Type": "application/vnd.kafka.json.v2+json"}
PINGREQ, PINGRESP = b"\xc0\x00", b"\xd0\x00"
WAIT_S = 60


class Device:
    """An MQTT client on a bare socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, address: tuple[str, int]) -> AsyncIterator[Device]:
        reader, writer = await asyncio.open_connection(*address)
        device = cls(reader, writer)
        writer.write(connect_packet(f"device-{uuid.uuid4().hex[:8]}", keep_alive_s=0))
        try:
            await device.packet(0x20)
            yield device
        finally:
            writer.transport.abort()

    async def packet(self, first: int) -> bytes:
        """Read the next packet, whose first byte must be `first`."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readexactly(2)
            assert head[0] == first, head
            return await self.reader.readexactly(head[1])

    async def publish(self, topic: str) -> None:
        """Publish one message at QoS 1 and wait for its acknowledgement."""
        self.writer.write(publish_packet(topic, b"x", 1, 1))
        assert (await self.packet(0x40))[:2] == b"\0\1"

    async def ping(self) -> None:
        """Check that the gateway reads this socket."""
        self.writer.write(PINGREQ)
        await self.packet(PINGRESP[0])

    async def flood(self, topic: str) -> None:
        """Publish at QoS 0, as fast as the gateway reads."""
        while True:
            self.writer.write(publish_packet(topic, b"x" * SIZE, 0))
            await self.writer.drain()

    @property
    def is_stopped(self) -> bool:
        """Whether the gateway has stopped reading from this client."""
        return self.writer.transport.get_write_buffer_size() > 0


async def bytes_in_flight(management: str) -> int:
    """Return the bytes in flight to Kafka, from the metrics."""
    async with aiohttp.ClientSession() as http, http.get(f"http://{management}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith("trivium_publisher_bytes_in_flight "))


async def refused(address: tuple[str, int], topic: str, size: int) -> bytes:
    """Send a request that is refused before its body; return the answer's header."""
    reader, writer = await asyncio.open_connection(*address)
    fields = [f"{name}: {value}" for name, value in RECORDS.items()]
    head = [f"POST /topics/{topic} HTTP/1.1", "Host: x", f"Content-Length: {size}", "Expect: 100-continue", *fields]
    writer.write("\r\n".join([*head, "", ""]).encode())
    async with asyncio.timeout(WAIT_S):
        answer = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert answer.startswith(b"HTTP/1.1 503 "), answer
    return answer


async def test_greedy_clients_are_stopped_and_modest_ones_are_served(
    stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = await new_gateway(stoppable.bootstrap_servers, config=CONFIG).start()
    host, port = gateway.address("http")
    flood, quiet = (f"{name}-{uuid.uuid4().hex[:6]}" for name in ("flood", "quiet"))
    body = {"records": [{"value": 1}]}
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://{host}:{port}", timeout=aiohttp.ClientTimeout(WAIT_S))
        )

        async def post(topic: str) -> int:
            async with http.post(f"/topics/{topic}", json=body, headers=RECORDS) as answer:
                return answer.status

        sensor = await stack.enter_async_context(Device.connected(gateway.address("mqtt")))
        greedy = [await stack.enter_async_context(Device.connected(gateway.address("mqtt"))) for _ in range(GREEDY)]
        await sensor.publish(f"{quiet}/sensor")
        await greedy[0].publish(f"{flood}/greedy")
        freeze(stoppable.pid)
        try:
            flooding = [asyncio.create_task(device.flood(f"{flood}/greedy")) for device in greedy]
            for task in flooding:
                stack.callback(task.cancel)
            await wait_until(lambda: all(device.is_stopped for device in greedy), WAIT_S)
            management = gateway.addresses["management"]
            while await bytes_in_flight(management) < SHARES:
                pass
            await sensor.ping()  # it is read, although others have used up their share
            assert await bytes_in_flight(management) <= TOPIC_BYTES
            assert b"Retry-After: 1" in await refused(gateway.address("http"), flood, 7 * MEBIBYTE)
            waiting = [asyncio.create_task(post(topic)) for topic in (quiet, flood)]
            publishing = asyncio.create_task(sensor.publish(f"{quiet}/sensor"))
            newcomer = await stack.enter_async_context(Device.connected(gateway.address("mqtt")))
            await newcomer.ping()
        finally:
            os.kill(stoppable.pid, signal.SIGCONT)
        assert [await task for task in waiting] == [200, 200]  # accepted while Kafka was frozen
        await publishing
