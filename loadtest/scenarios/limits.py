"""Scenario `limits`: a limit of bytes per second is met in each protocol, into Kafka and out of it.

One connection at a time sends or receives as much as it is allowed. Bytes are counted after the burst is used up, like
the limit counts them: MQTT payloads, AMQP messages, HTTP bodies and events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, NamedTuple

import aiohttp

from loadtest.beside import beside
from loadtest.clients import amqp, mqtt
from loadtest.clients.amqp_messages import minimal
from loadtest.clients.amqp_receiver import Receiver
from loadtest.clients.joining import join
from loadtest.clients.pace import Pace
from loadtest.clients.sender import Sender
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess

EXACT: Final = 0.05
"""The largest deviation from the limit."""
WINDOW: Final = 500
SENDERS: Final = 3
BATCH: Final = 50  # records per HTTP request
_MEDIA: Final = {"Content-Type": "application/vnd.kafka.text.v2+json"}
_TICK_S: Final = 0.01


class Plan(NamedTuple):
    """Bytes per second, bytes of a message, seconds of measurement."""

    rate: int = 1_000_000
    size: int = 1_000
    seconds: float = 10.0


class Passed(NamedTuple):
    """The throughput in one direction of one protocol."""

    name: str
    bytes_s: float

    def row(self, plan: Plan) -> dict[str, Any]:
        """Return the columns of a report."""
        return {
            "": self.name,
            "kB/s": round(self.bytes_s / 1000, 1),
            "of the limit": round(self.bytes_s / plan.rate, 4),
        }


def settings(plan: Plan) -> Mapping[str, str]:
    """Return the gateway's settings: each connection has its own limit in both directions."""
    rule = {"per": "connection", "in_bytes_per_s": plan.rate, "out_bytes_per_s": plan.rate}
    return {"TRIVIUM_LIMITS__RULES": json.dumps([rule])}


Count = Callable[[], float]
Part = Callable[[GatewayProcess, Plan, str], contextlib.AbstractAsyncContextManager[Count]]
"""Sends or receives as much as it may during a block, and yields a count of the bytes."""


async def measure(gateway: GatewayProcess, name: str, plan: Plan) -> Passed:
    """Measure one part on its own topic."""
    topic = f"limits-{secrets.token_hex(4)}"
    await create_topic(gateway.kafka, topic, 1)
    async with PARTS[name](gateway, plan, topic) as count:
        while count() < 2 * plan.rate:  # noqa: ASYNC110 - the burst, and as much again
            await asyncio.sleep(_TICK_S)
        began, before = await _change(count)
        await asyncio.sleep(plan.seconds)
        ended, after = await _change(count)
        return Passed(name, (after - before) / (ended - began))


async def _change(count: Count) -> tuple[float, float]:
    """Wait until the count changes; return the time and the new count: pages arrive a second apart."""
    before = count()
    while (now := count()) == before:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(_TICK_S)
    return time.monotonic(), now


def _messages(plan: Plan) -> list[bytes]:
    """Return more messages than the limit allows."""
    return [b"x" * plan.size] * (int(plan.rate / plan.size * (plan.seconds + 4)) + 2 * WINDOW)


async def _send(sender: Sender, address: tuple[str, int]) -> None:
    await sender.join(address)
    sender.start()


@contextlib.asynccontextmanager
async def _mqtt_in(gateway: GatewayProcess, plan: Plan, topic: str) -> AsyncIterator[Count]:
    packets = mqtt.publishes(f"{topic}/a", _messages(plan))
    sender = mqtt.Publisher(topic, packets, Pace(200, None))
    await _send(sender, gateway.address("mqtt"))
    yield lambda: sender.answered * plan.size
    sender.abandon()


@contextlib.asynccontextmanager
async def _amqp_in(gateway: GatewayProcess, plan: Plan, topic: str) -> AsyncIterator[Count]:
    payloads = _messages(plan)
    size = len(minimal(0, payloads[0]))
    sender = amqp.Sender(topic, topic, amqp.transfers(payloads), Pace(WINDOW, None))
    await _send(sender, gateway.address("amqp"))
    yield lambda: sender.answered * size
    sender.abandon()


@contextlib.asynccontextmanager
async def _http_in(gateway: GatewayProcess, plan: Plan, topic: str) -> AsyncIterator[Count]:
    """Send requests, and repeat refused ones after their Retry-After."""
    body = json.dumps({"records": [{"value": "x" * plan.size}] * BATCH})
    taken = 0

    async def post() -> None:
        nonlocal taken
        async with aiohttp.ClientSession(f"http://{gateway.addresses['http']}") as http:
            while True:
                async with http.post(f"/topics/{topic}", data=body, headers=_MEDIA) as answer:
                    await answer.read()
                if answer.status == 429:
                    await asyncio.sleep(int(answer.headers["Retry-After"]))
                else:
                    answer.raise_for_status()
                    taken += len(body)

    async with beside(post()):
        yield lambda: taken


@contextlib.asynccontextmanager
async def _upload_in(gateway: GatewayProcess, plan: Plan, topic: str) -> AsyncIterator[Count]:
    """Send one endless body; each line of the response means that a line's bytes were accepted."""
    line = json.dumps({"value": "x" * plan.size}).encode() + b"\n"
    taken = 0

    async def lines() -> AsyncIterator[bytes]:
        while True:
            yield line * BATCH

    async def upload() -> None:
        nonlocal taken
        async with (
            aiohttp.ClientSession(f"http://{gateway.addresses['http']}", timeout=aiohttp.ClientTimeout()) as http,
            http.post(
                f"/topics/{topic}/records", data=lines(), headers={"Content-Type": "application/x-ndjson"}
            ) as answer,
        ):
            async for _ in answer.content:
                taken += len(line)

    async with beside(upload()):
        yield lambda: taken


@contextlib.asynccontextmanager
async def _mqtt_out(gateway: GatewayProcess, plan: Plan, topic: str) -> AsyncIterator[Count]:
    came = 0

    def take(payload: bytes) -> None:
        nonlocal came
        came += len(payload)

    reader = mqtt.Subscriber(topic, f"{topic}/#", 1, take)
    await (await join(reader, gateway.address("mqtt"))).subscribed
    # The subscriber gets only new messages: each of these senders alone reaches its limit.
    packets = mqtt.publishes(f"{topic}/a", _messages(plan))
    senders = [mqtt.Publisher(f"{topic}-{n}", packets, Pace(200, None)) for n in range(SENDERS)]
    for sender in senders:
        await _send(sender, gateway.address("mqtt"))
    yield lambda: came
    reader.close()
    for sender in senders:
        sender.abandon()


@contextlib.asynccontextmanager
async def _amqp_out(gateway: GatewayProcess, plan: Plan, topic: str) -> AsyncIterator[Count]:
    came = 0

    def take(message: bytes, _at: float) -> None:
        nonlocal came
        came += len(message)

    await _store(gateway, plan, topic)
    reader = Receiver(topic, topic, size=0, first=True, on_message=take, keep=False)
    await (await join(reader, gateway.address("amqp"))).attached
    yield lambda: came
    reader.close()


@contextlib.asynccontextmanager
async def _events_out(gateway: GatewayProcess, plan: Plan, topic: str) -> AsyncIterator[Count]:
    await _store(gateway, plan, topic)
    came = 0

    async def read() -> None:
        nonlocal came
        async with (
            aiohttp.ClientSession(f"http://{gateway.addresses['http']}", timeout=aiohttp.ClientTimeout()) as http,
            http.get(f"/topics/{topic}/stream?from=beginning&format=text") as answer,
        ):
            async for part in answer.content.iter_any():
                came += len(part)

    async with beside(read()):
        yield lambda: came


@contextlib.asynccontextmanager
async def _pages_out(gateway: GatewayProcess, plan: Plan, topic: str) -> AsyncIterator[Count]:
    """Read one page after the other; after a refusal, wait for its Retry-After."""
    await _store(gateway, plan, topic)
    came = 0

    async def read() -> None:
        nonlocal came
        position = "beginning"
        async with aiohttp.ClientSession(f"http://{gateway.addresses['http']}") as http:
            while True:
                path = f"/topics/{topic}/records?limit=10000&from={position}"
                async with http.get(path, headers={"Accept": _MEDIA["Content-Type"]}) as answer:
                    page = await answer.read()
                if answer.status == 429:
                    await asyncio.sleep(int(answer.headers["Retry-After"]))
                else:
                    answer.raise_for_status()
                    came += len(page)
                    position = answer.headers["Next-Position"]

    async with beside(read()):
        yield lambda: came


async def _store(gateway: GatewayProcess, plan: Plan, topic: str) -> None:
    """Store more than will be read, with many connections, each of which has its own burst."""
    payloads = _messages(plan)
    each = max(1, plan.rate // plan.size // 2)  # half of a burst
    parts = [payloads[at : at + each] for at in range(0, len(payloads), each)]
    senders = [
        mqtt.Publisher(f"{topic}-{number}", mqtt.publishes(f"{topic}/a", part), Pace(200, None))
        for number, part in enumerate(parts)
    ]
    for sender in senders:
        await _send(sender, gateway.address("mqtt"))
    for sender in senders:
        await sender.finished
        sender.close()


PARTS: Final[Mapping[str, Part]] = {
    "mqtt in": _mqtt_in,
    "amqp in": _amqp_in,
    "http in, requests": _http_in,
    "http in, an upload": _upload_in,
    "mqtt out": _mqtt_out,
    "amqp out": _amqp_out,
    "http out, events": _events_out,
    "http out, pages": _pages_out,
}


def check(found: list[Passed], plan: Plan) -> list[str]:
    """Return the parts that do not meet their limit."""
    return [
        f"{one.name}: {one.bytes_s / 1000:.1f} kB/s, the limit is {plan.rate / 1000:.1f}"
        for one in found
        if abs(one.bytes_s - plan.rate) > EXACT * plan.rate
    ]
