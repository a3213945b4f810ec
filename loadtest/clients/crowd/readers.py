"""Receivers of every protocol that count what they get during a block."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import aiohttp

from loadtest.beside import beside
from loadtest.clients import amqp_receiver, mqtt
from loadtest.clients.connection import Connection, join
from loadtest.clients.http_wire import CONTROL
from loadtest.clients.rest import TEXT_RECORDS
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Numbering
from loadtest.verify import Arrivals

READ_BYTES: Final = 1 << 20


class Reader:
    """What a receiver of a course got.

    Attributes:
        got: number of messages.
        moved: when the last one came, `time.monotonic`.
        arrivals: the messages.
    """

    def __init__(self, numbering: Numbering) -> None:
        self.got = 0
        self.moved = time.monotonic()
        self.arrivals = Arrivals(numbering)

    def take(self, payload: bytes) -> None:
        """Count a message."""
        self.got += 1
        self.moved = time.monotonic()
        self.arrivals.take(payload)


Open = Callable[[str, str, Reader], contextlib.AbstractAsyncContextManager[None]]


class Readers:
    """Makes them for a gateway.

    Attributes:
        of: the ways to receive, by protocol; each takes a topic, a prefix of its names and its count.
    """

    def __init__(self, gateway: GatewayProcess, size: int, patience_s: float) -> None:
        self._gateway, self._size, self._patience = gateway, size, patience_s
        self._polling: list[Reader] = []  # readers of the HTTP consumer
        self.of: dict[str, tuple[Open, ...]] = {
            "mqtt": (self.subscriber,),
            "amqp": (self.receiver,),
            "http": (self.listener, self.poll),
        }

    @contextlib.asynccontextmanager
    async def subscriber(self, topic: str, prefix: str, reader: Reader) -> AsyncIterator[None]:
        """Subscribe at QoS 1."""
        one = mqtt.Subscriber(f"{prefix}-s", f"{topic}/#", 1, reader.take)
        async with self._joined(one, "mqtt", one.subscribed):
            yield

    @contextlib.asynccontextmanager
    async def receiver(self, topic: str, prefix: str, reader: Reader) -> AsyncIterator[None]:
        """Accept what an AMQP link delivers."""
        one = amqp_receiver.Receiver(
            f"{prefix}-r", topic, size=self._size, on_message=lambda payload, _: reader.take(payload)
        )
        async with self._joined(one, "amqp", one.attached):
            yield

    @contextlib.asynccontextmanager
    async def _joined(self, one: Connection, protocol: str, ready: asyncio.Future[Any]) -> AsyncIterator[None]:
        await join(one, self._gateway.address(protocol))
        await asyncio.wait_for(asyncio.shield(ready), self._patience)
        try:
            yield
        finally:
            one.close()

    def _http(self, total_s: float | None) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=30)
        return aiohttp.ClientSession(
            f"http://{self._gateway.addresses['http']}", timeout=timeout, read_bufsize=READ_BYTES
        )

    @contextlib.asynccontextmanager
    async def listener(self, topic: str, _prefix: str, reader: Reader) -> AsyncIterator[None]:
        """Receive server-sent events during the block."""
        async with self._http(None) as http, http.get(f"/topics/{topic}/stream?format=text") as answer:
            answer.raise_for_status()
            await answer.content.readline()

            async def listen() -> None:
                async for line in answer.content:
                    if line.startswith(b"data:"):
                        reader.take(str(json.loads(line[len(b"data:") :])["value"]).encode())

            async with beside(listen()):
                yield

    @contextlib.asynccontextmanager
    async def poll(self, _topic: str, _prefix: str, reader: Reader) -> AsyncIterator[None]:
        """Have the consumer count for a course."""
        self._polling.append(reader)
        try:
            yield
        finally:
            self._polling.remove(reader)

    @contextlib.asynccontextmanager
    async def consumer(self, topic: str) -> AsyncIterator[None]:
        """Run one consumer for all courses."""
        place = f"/consumers/{topic}/instances/soak"
        partitions = [{"topic": topic, "partition": number} for number in range(3)]
        async with self._http(60) as http:
            options = {"name": "soak", "format": "text", "auto.offset.reset": "earliest"}
            for path, value in ((f"/consumers/{topic}", options), (f"{place}/assignments", {"partitions": partitions})):
                async with http.post(path, json=value, headers={"Content-Type": CONTROL}) as answer:
                    answer.raise_for_status()

            async def poll() -> None:
                while True:
                    async with http.get(f"{place}/records?timeout=1000", headers={"Accept": TEXT_RECORDS}) as answer:
                        answer.raise_for_status()
                        records: list[Any] = await answer.json(content_type=None)
                    for one in self._polling:
                        for record in records:
                            one.take(str(record["value"]).encode())

            async with beside(poll()):
                yield
            async with http.delete(place) as answer:
                await answer.read()
