"""Publish rates: a sender above its rate is held to it, loses nothing, and delays no other client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from aiokafka import AIOKafkaConsumer

from gateway.views.pauses import RATES
from loadtest.clients import amqp, mqtt
from loadtest.clients.pace import Pace
from loadtest.clients.sender import Sender
from tests.support.gateway import GatewayProcess
from tests.support.waiting import wait_until

CONNECTION_RATE, PRINCIPAL_RATE, *_ = RATES
RATE, PRINCIPALS_RATE, SIZE, BYTES_RATE = 300, 400, 100, 1_000_000
CONFIG = f"""
[[limits.rules]]
per = "connection"
in_messages_per_s = {RATE}
in_bytes_per_s = {BYTES_RATE}

[[limits.rules]]
per = "principal"
in_messages_per_s = {PRINCIPALS_RATE}
"""
SENSOR, GREEDY, OTHERS = "127.0.0.1", "127.0.0.2", "127.0.0.3"  # each address of anonymous clients is a principal
SECONDS = 2.0  # after the burst, which is a second's worth
WINDOW = 30  # so many may come at once when one may: a tenth of a second, and three twentieths for two senders
ENDLESS = 20_000  # more than anybody is let send here
HELD = 0.9  # of the time that it must take: within 10 %


@pytest.fixture(scope="module")
async def limited(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    gateway = await GatewayProcess(tmp_path_factory.mktemp("rates"), bootstrap, config=CONFIG).start()
    yield gateway
    assert await gateway.stop() == 0


@contextlib.asynccontextmanager
async def sending(
    gateway: GatewayProcess, protocol: str, topic: str, address: str, count: int
) -> AsyncIterator[Sender]:
    """A connection from `address` that keeps a window full."""
    payloads = [b"%0*d" % (SIZE, number) for number in range(count)]
    name, pace = f"{protocol}-{uuid.uuid4().hex[:8]}", Pace(WINDOW, None)

    def make() -> Sender:
        if protocol == "mqtt":
            return mqtt.Publisher(name, mqtt.publishes(f"{topic}/{name}", payloads), pace, lambda *_: None)
        return amqp.Sender(name, topic, amqp.transfers(payloads), pace, lambda *_: None)

    loop = asyncio.get_running_loop()
    _, sender = await loop.create_connection(make, *gateway.address(protocol), local_addr=(address, 0))
    await sender.connected
    pace.start()
    sender.push()
    try:
        yield sender
    finally:
        sender.finished.cancel()
        sender.close()


async def stored(bootstrap: str, topic: str) -> list[bytes]:
    """Return the values in a topic of one partition."""
    async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest") as consumer:
        (partition,) = consumer.assignment()
        end = (await consumer.end_offsets([partition]))[partition]
        values: list[bytes] = []
        while len(values) < end:
            found = await consumer.getmany(timeout_ms=1000)
            values += [record.value for record in itertools.chain(*found.values())]
        return values


async def paused(gateway: GatewayProcess, protocol: str) -> set[str]:
    """Return why clients of a protocol are or were paused."""
    address = f"http://{gateway.addresses['management']}/flow"
    async with aiohttp.ClientSession() as http, http.get(address) as answer:
        flow = json.loads(await answer.text())
    return {pause["reason"] for pause in flow["paused"] + flow["episodes"] if pause["subject"].startswith(protocol)}


async def seen_paused(gateway: GatewayProcess, protocol: str, reason: str) -> None:
    """The limit is reported."""
    async with asyncio.timeout(60):
        while reason not in await paused(gateway, protocol):
            pass


@pytest.mark.parametrize("protocol", ["mqtt", "amqp"])
async def test_a_connection_is_held_at_its_rate_and_delays_nobody(
    protocol: str, limited: GatewayProcess, bootstrap: str, new_topic: Callable
) -> None:
    topic, quiet = await new_topic(partitions=1), await new_topic(partitions=1)
    began = time.monotonic()
    async with sending(limited, protocol, topic, GREEDY, ENDLESS) as greedy:
        await seen_paused(limited, protocol, CONNECTION_RATE)
        async with sending(limited, protocol, quiet, SENSOR, 5) as sensor:
            await sensor.finished
        assert greedy.answered < ENDLESS  # the others are not behind it
        due = RATE + SECONDS * RATE
        await wait_until(lambda: greedy.answered >= due)
        assert time.monotonic() - began >= HELD * SECONDS
        assert not greedy.finished.done()  # it is still connected
        assert not greedy.refused
        answered = greedy.answered
    values = await stored(bootstrap, topic)
    assert len(values) >= answered
    assert values == [b"%0*d" % (SIZE, number) for number in range(len(values))]


async def test_the_connections_of_a_principal_share_its_rate(limited: GatewayProcess, new_topic: Callable) -> None:
    topic = await new_topic(partitions=1)
    began = time.monotonic()
    async with (
        sending(limited, "mqtt", topic, OTHERS, ENDLESS) as one,
        sending(limited, "amqp", topic, OTHERS, ENDLESS) as other,
    ):
        await seen_paused(limited, "mqtt", PRINCIPAL_RATE)
        due = PRINCIPALS_RATE + SECONDS * PRINCIPALS_RATE
        await wait_until(lambda: one.answered + other.answered >= due)
        assert time.monotonic() - began >= HELD * SECONDS
        assert min(one.answered, other.answered) >= due / 10


async def test_a_client_of_http_is_told_when_to_come_again(
    limited: GatewayProcess, bootstrap: str, new_topic: Callable
) -> None:
    topic, quiet = await new_topic(partitions=1), await new_topic(partitions=1)
    host, port = limited.address("http")
    headers = {"Content-Type": "application/vnd.kafka.binary.v2+json"}
    refused = sent = 0

    def client(address: str) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(local_addr=(address, 0), limit=1)
        return aiohttp.ClientSession(f"http://{host}:{port}", connector=connector)

    async with client(GREEDY) as greedy, client(SENSOR) as sensor:
        began = time.monotonic()
        while sent < RATE + SECONDS * RATE:
            records = [{"value": "AAAA"}] * 50
            async with greedy.post(f"/topics/{topic}", json={"records": records}, headers=headers) as answer:
                assert answer.status in {200, 429}, await answer.text()
                if answer.status == 200:
                    sent += len(records)
                    continue
                refused += 1
                assert CONNECTION_RATE in (await answer.json())["message"]
                again = time.monotonic() + int(answer.headers["Retry-After"])
            async with sensor.post(f"/topics/{quiet}", json={"records": records[:1]}, headers=headers) as answer:
                assert answer.status == 200
            assert CONNECTION_RATE in await paused(limited, "http")
            await wait_until(lambda again=again: time.monotonic() >= again)
        assert time.monotonic() - began >= HELD * (SECONDS - 50 / RATE)  # the last request may owe for all of it
    assert refused
    assert len(await stored(bootstrap, topic)) == sent


async def test_an_upload_is_read_at_its_rate(limited: GatewayProcess, bootstrap: str, new_topic: Callable) -> None:
    topic = await new_topic(partitions=1)
    host, port = limited.address("http")
    part, parts = [b'{"value":"%s"}\n' % (b"A" * 984)] * 100, 8

    async def body() -> AsyncIterator[bytes]:
        for _ in range(parts):
            yield b"".join(part)

    connector = aiohttp.TCPConnector(local_addr=("127.0.0.4", 0))
    async with aiohttp.ClientSession(f"http://{host}:{port}", connector=connector) as http:
        began = time.monotonic()
        headers = {"Content-Type": "application/x-ndjson"}
        async with http.post(f"/topics/{topic}/records", data=body(), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            reports = (await answer.text()).splitlines()
        read_at_once = 128 * 1024 / 1000  # what aiohttp holds of a body
        assert time.monotonic() - began >= HELD * (parts * len(part) - RATE - read_at_once) / RATE
    assert len(reports) == parts * len(part) == len(await stored(bootstrap, topic))
    assert all(b"offset" in report.encode() for report in reports)
