"""Clients that send or receive as much as they may, each way of each protocol, and count the bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, NamedTuple

import aiohttp

from loadtest.beside import beside
from loadtest.clients import amqp, mqtt
from loadtest.clients.amqp_messages import minimal
from loadtest.clients.amqp_receiver import Receiver
from loadtest.clients.connection import join
from loadtest.clients.pace import Pace
from loadtest.clients.rest import TEXT_RECORDS
from loadtest.clients.sender import Sender
from loadtest.clients.topics import store
from loadtest.gateway import GatewayProcess

WINDOW: Final = 500
SENDERS: Final = 3
BATCH: Final = 50  # records per HTTP request


class Limit(NamedTuple):
    """Parameters.

    Attributes:
        rate: the limit, bytes per second.
        size: bytes of a message.
        seconds: of measurement.
    """

    rate: int = 1_000_000
    size: int = 1_000
    seconds: float = 10.0


class Lane(NamedTuple):
    """What a part needs: a gateway, the plan, a topic, and what counts its bytes."""

    gateway: GatewayProcess
    plan: Limit
    topic: str
    took: Callable[[int], None]

    def messages(self) -> list[bytes]:
        """Return more messages than the limit allows."""
        return [b"x" * self.plan.size] * (int(self.plan.rate / self.plan.size * (self.plan.seconds + 4)) + 2 * WINDOW)

    @contextlib.asynccontextmanager
    async def sending(self, sender: Sender, protocol: str) -> AsyncIterator[None]:
        """Have a sender send during the block."""
        await sender.join(self.gateway.address(protocol))
        sender.start()
        yield
        sender.abandon()

    def publisher(self, number: int = 0, size: int = 0) -> mqtt.Publisher:
        """Return an MQTT sender; its acknowledgements count `size` bytes each."""
        packets = mqtt.publishes(f"{self.topic}/a", self.messages())
        counted = (lambda first, behind: self.took((behind - first) * size)) if size else (lambda first, behind: None)
        return mqtt.Publisher(f"{self.topic}-{number}", packets, Pace(200, None), counted)

    @contextlib.asynccontextmanager
    async def http(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Open a session without a time limit."""
        base = f"http://{self.gateway.addresses['http']}"
        async with aiohttp.ClientSession(base, timeout=aiohttp.ClientTimeout()) as http:
            yield http

    async def store(self) -> None:
        """Store more than will be read."""
        await store(self.gateway.kafka, self.topic, 1, self.messages())


async def _allowed(answer: aiohttp.ClientResponse) -> bool:
    """Return whether a request was let through; after a refusal, wait for its Retry-After."""
    if answer.status == 429:
        await asyncio.sleep(int(answer.headers["Retry-After"]))
        return False
    answer.raise_for_status()
    return True


@contextlib.asynccontextmanager
async def _mqtt_in(lane: Lane) -> AsyncIterator[None]:
    async with lane.sending(lane.publisher(size=lane.plan.size), "mqtt"):
        yield


@contextlib.asynccontextmanager
async def _amqp_in(lane: Lane) -> AsyncIterator[None]:
    payloads = lane.messages()
    size = len(minimal(0, payloads[0]))
    counted = lambda first, behind: lane.took((behind - first) * size)  # noqa: E731 - it has no name of its own
    sender = amqp.Sender(lane.topic, lane.topic, amqp.transfers(payloads), Pace(WINDOW, None), counted)
    async with lane.sending(sender, "amqp"):
        yield


@contextlib.asynccontextmanager
async def _http_in(lane: Lane) -> AsyncIterator[None]:
    """Send requests, and repeat refused ones."""
    body = json.dumps({"records": [{"value": "x" * lane.plan.size}] * BATCH})

    async def post(http: aiohttp.ClientSession) -> None:
        while True:
            async with http.post(f"/topics/{lane.topic}", data=body, headers={"Content-Type": TEXT_RECORDS}) as answer:
                await answer.read()
                if await _allowed(answer):
                    lane.took(len(body))

    async with lane.http() as http, beside(post(http)):
        yield


@contextlib.asynccontextmanager
async def _upload_in(lane: Lane) -> AsyncIterator[None]:
    """Send one endless body; each line of the response means that a line's bytes were accepted."""
    line = json.dumps({"value": "x" * lane.plan.size}).encode() + b"\n"

    async def lines() -> AsyncIterator[bytes]:
        while True:
            yield line * BATCH

    async def upload(http: aiohttp.ClientSession) -> None:
        headers = {"Content-Type": "application/x-ndjson"}
        async with http.post(f"/topics/{lane.topic}/records", data=lines(), headers=headers) as answer:
            async for _ in answer.content:
                lane.took(len(line))

    async with lane.http() as http, beside(upload(http)):
        yield


@contextlib.asynccontextmanager
async def _mqtt_out(lane: Lane) -> AsyncIterator[None]:
    """Receive; the subscriber gets only new messages, and each of the senders alone reaches its limit."""
    reader = mqtt.Subscriber(lane.topic, f"{lane.topic}/#", 1, lambda payload: lane.took(len(payload)))
    await (await join(reader, lane.gateway.address("mqtt"))).subscribed
    async with contextlib.AsyncExitStack() as stack:
        for number in range(SENDERS):
            await stack.enter_async_context(lane.sending(lane.publisher(number), "mqtt"))
        yield
        reader.close()


@contextlib.asynccontextmanager
async def _amqp_out(lane: Lane) -> AsyncIterator[None]:
    await lane.store()
    take = lambda message, _: lane.took(len(message))  # noqa: E731 - as above
    reader = Receiver(lane.topic, lane.topic, size=0, first=True, on_message=take, keep=False)
    await (await join(reader, lane.gateway.address("amqp"))).attached
    yield
    reader.close()


@contextlib.asynccontextmanager
async def _events_out(lane: Lane) -> AsyncIterator[None]:
    await lane.store()

    async def read(http: aiohttp.ClientSession) -> None:
        async with http.get(f"/topics/{lane.topic}/stream?from=beginning&format=text") as answer:
            async for part in answer.content.iter_any():
                lane.took(len(part))

    async with lane.http() as http, beside(read(http)):
        yield


@contextlib.asynccontextmanager
async def _pages_out(lane: Lane) -> AsyncIterator[None]:
    """Read one page after the other."""
    await lane.store()

    async def read(http: aiohttp.ClientSession) -> None:
        position = "beginning"
        while True:
            path = f"/topics/{lane.topic}/records?limit=10000&from={position}"
            async with http.get(path, headers={"Accept": TEXT_RECORDS}) as answer:
                page = await answer.read()
                if await _allowed(answer):
                    lane.took(len(page))
                    position = answer.headers["Next-Position"]

    async with lane.http() as http, beside(read(http)):
        yield


PARTS: Final[Mapping[str, Callable[[Lane], contextlib.AbstractAsyncContextManager[None]]]] = {
    "mqtt in": _mqtt_in,
    "amqp in": _amqp_in,
    "http in, requests": _http_in,
    "http in, an upload": _upload_in,
    "mqtt out": _mqtt_out,
    "amqp out": _amqp_out,
    "http out, events": _events_out,
    "http out, pages": _pages_out,
}
"""Each sends or receives as much as it may during its block."""
