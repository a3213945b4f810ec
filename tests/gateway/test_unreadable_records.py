"""A broken record of every kind beside a reader of every kind: each reader gets all the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from tests.support.altering_proxy import AlteringProxy
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.raw_batches import BREAKS, batch, produce_raw
from tests.support.receivers import (
    Amqp,
    AmqpSettled,
    Events,
    Live,
    Mqtt,
    MqttAtMostOnce,
    Pages,
    Poll,
    Receiver,
    numbered,
)
from tests.support.waiting import wait_until

READERS: list[tuple[type[Receiver], bool]] = [
    (Mqtt, False), (MqttAtMostOnce, False), (Mqtt, True), (Amqp, False), (AmqpSettled, False), (Amqp, True),
    (Events, False), (Events, True), (Live, False), (Live, True), (Poll, True), (Pages, False),
]  # fmt: skip
MANY = "many headers"
KINDS = ["a name that is not UTF-8", MANY, "wrong checksum", "unknown codec", "not compressed", "a record too long"]
KEPT = {"clean_start": False, "session_expiry_interval": 600}


async def scraped(gateway: GatewayProcess, name: str) -> float:
    async with (
        aiohttp.ClientSession(f"http://{gateway.addresses['management']}") as http,
        http.get("/metrics") as response,
    ):
        text = await response.text()
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1])


@pytest.mark.part("live websockets")
@pytest.mark.parametrize("kind", KINDS)
async def test_every_reader_goes_on(
    bootstrap: str, admin: AIOKafkaAdminClient, new_topic: Any, new_gateway: Callable[..., GatewayProcess], kind: str
) -> None:
    topic, beside = await new_topic(partitions=1), await new_topic(partitions=1)
    host, _, port = bootstrap.rpartition(":")
    named = kind == KINDS[0]
    headers = [(b"caf\xe9", b"1")] if named else [(b"n", b"")] * 2000 if kind == MANY else []
    broken = batch([numbered(2, 1), numbered(3, 1)], headers)
    seen = [1, 2, 3, 4, 5] if named else [1, 4, 5]
    async with AlteringProxy((host, int(port))).running() as proxy, contextlib.AsyncExitStack() as stack:
        if kind in BREAKS:
            proxy.alter(broken, BREAKS[kind])
        gateway = await new_gateway(proxy.bootstrap).start()
        await produce_raw(bootstrap, topic, batch([numbered(0, 1)]))
        await produce_raw(bootstrap, beside, batch([numbered(0, 1)]))
        session = await RawClient.connect(gateway.address("mqtt"), f"kept-{topic}", **KEPT)
        await session.subscribe(f"{topic}/#")
        await session.disconnect()
        receivers = [
            await stack.enter_async_context(reader.connected(gateway, topic, f"g{number}-{topic}" if grouped else None))
            for number, (reader, grouped) in enumerate(READERS)
        ]
        others = [await stack.enter_async_context(reader.connected(gateway, beside)) for reader in (Mqtt, Amqp, Events)]
        for raw in (batch([numbered(1, 1)]), broken, batch([numbered(4, 1)]), batch([numbered(5, 1)])):
            await produce_raw(bootstrap, topic, raw)
        await produce_raw(bootstrap, beside, batch([numbered(1, 1)]))
        for other in others:
            assert await other.read(1) == [1]
        reading = [asyncio.create_task(receiver.read_on()) for receiver in receivers]
        expected = {
            f"{reader.__name__} {grouped}": ([0, *seen] if reader is Amqp and grouped else seen)
            for reader, grouped in READERS
        }

        def arrived() -> dict[str, list[int]]:
            names = (f"{reader.__name__} {grouped}" for reader, grouped in READERS)
            return {name: receiver.numbers for name, receiver in zip(names, receivers, strict=True)}

        with contextlib.suppress(TimeoutError):
            await wait_until(lambda: arrived() == expected, 30)
        assert arrived() == expected
        session = await RawClient.connect(gateway.address("mqtt"), f"kept-{topic}", **KEPT)
        assert [message.payload for message in await session.messages(len(seen))] == [numbered(one, 1) for one in seen]
        await session.disconnect()
        group, partition = f"g{READERS.index((Amqp, True))}-{topic}", TopicPartition(topic, 0)

        async def committed() -> bool:
            return (await admin.list_consumer_group_offsets(group))[partition].offset == 6

        await wait_until(committed)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        stepped = await scraped(gateway, "trivium_unreadable_batches_total")
        told = gateway.log.read_text().count("nothing can read")
        assert (stepped > 0, told) == ((False, 0) if named else (True, 1))
