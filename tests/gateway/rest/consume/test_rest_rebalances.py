"""Consumers at `latest` whose partitions move or grow get all that was stored since they began, and nothing older."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from aiokafka.coordinator.assignors.range import RangePartitionAssignor

from tests.gateway.rest.conftest import CONTROL, JSON_RECORDS, ask
from tests.gateway.rest.consume.test_rest_consumers import Consumer, new_consumer

PARTITIONS = 4
LATEST = {"auto.offset.reset": "latest"}
Read = Callable[[], Any]


async def store(http: aiohttp.ClientSession, topic: str, *values: int, partitions: int = PARTITIONS) -> None:
    records = [{"value": value, "partition": value % partitions} for value in values]
    assert (await ask(http, "POST", f"/topics/{topic}", {"records": records}, headers=JSON_RECORDS))[0] == 200


async def poll(consumer: Consumer) -> list[int]:
    status, page = await consumer.poll(timeout=300)
    return [record["value"] for record in page] if status == 200 else []


async def read(readers: list[Read], wanted: set[int]) -> set[int]:
    """Poll until all wanted values have come, or for a while; return all that came."""
    found: set[int] = set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(40):
            while not wanted <= found:
                for reader in readers:
                    found.update(await reader())
    return found


@asynccontextmanager
async def joins(
    http: Any, admin: Any, bootstrap: str, topic: str, group: str, **settings: Any
) -> AsyncIterator[list[Read]]:
    other = await new_consumer(http, topic, group=group, **settings)
    yield [lambda: poll(other)]
    await other.delete()


@asynccontextmanager
async def passes(
    http: Any, admin: Any, bootstrap: str, topic: str, group: str, **settings: Any
) -> AsyncIterator[list[Read]]:
    other = await new_consumer(http, topic, group=group, **settings)
    await other.delete()
    yield []


@asynccontextmanager
async def grows(
    http: Any, admin: Any, bootstrap: str, topic: str, group: str, **settings: Any
) -> AsyncIterator[list[Read]]:
    await admin.create_partitions({topic: NewPartitions(PARTITIONS + 2)})
    yield []


@asynccontextmanager
async def native(
    http: Any, admin: Any, bootstrap: str, topic: str, group: str, **settings: Any
) -> AsyncIterator[list[Read]]:
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, group_id=group, auto_offset_reset="latest",
        partition_assignment_strategy=(RangePartitionAssignor,),
    )  # fmt: skip
    async with consumer:

        async def get() -> list[int]:
            found = await consumer.getmany(timeout_ms=300)
            return [int(record.value) for records in found.values() for record in records]

        yield [get]


@pytest.mark.parametrize("polled", [False, True], ids=["not polled before", "polled before"])
@pytest.mark.parametrize(
    ("change", "commits"),
    [(joins, True), (joins, False), (passes, True), (passes, False), (grows, True), (grows, False), (native, True)],
)
async def test_nothing_unread_is_lost(  # noqa: PLR0917 - fixtures
    http: aiohttp.ClientSession, admin: AIOKafkaAdminClient, bootstrap: str, new_topic: Any, change: Any,
    commits: bool, polled: bool,
) -> None:  # fmt: skip
    topic = await new_topic(partitions=PARTITIONS)
    settings = {**LATEST, "enable.auto.commit": commits}
    await store(http, topic, *range(1000, 1020))
    first = await new_consumer(http, topic, group=f"g-{topic}", **settings)
    if polled:
        assert await poll(first) == []
    wanted = set(range(20))
    await store(http, topic, *wanted)
    async with change(http, admin, bootstrap, topic, f"g-{topic}", **settings) as others:
        readers = [lambda: poll(first), *others]
        assert await read(readers, wanted) == wanted
        await store(http, topic, *range(100, 104))
        assert await read(readers, set(range(100, 104))) >= set(range(100, 104))
    await first.delete()


async def test_a_new_partition_is_read_from_its_beginning(
    http: aiohttp.ClientSession, admin: AIOKafkaAdminClient, bootstrap: str, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    first = await new_consumer(http, topic, **LATEST)
    await admin.create_partitions({topic: NewPartitions(2)})

    async def stored() -> bool:
        body = {"records": [{"value": 7}]}
        return bool((await ask(http, "POST", f"/topics/{topic}/partitions/1", body, headers=JSON_RECORDS))[0] == 200)

    async with asyncio.timeout(60):
        while not await stored():
            pass
    assert await read([lambda: poll(first)], {7}) == {7}
    await first.delete()


async def test_partitions_assigned_again_keep_their_place(http: aiohttp.ClientSession, new_topic: Any) -> None:
    topic = await new_topic(partitions=2)
    await store(http, topic, 1000, 1001, partitions=2)
    first = await new_consumer(http, **LATEST)

    async def assign(*numbers: int) -> None:
        body = {"partitions": [{"topic": topic, "partition": number} for number in numbers]}
        assert (await ask(http, "POST", f"{first.path}/assignments", body, headers=CONTROL))[0] == 204

    await assign(0)
    await store(http, topic, 0, 2, partitions=2)
    await assign(0, 1)
    await store(http, topic, 1, 3, partitions=2)
    assert await read([lambda: poll(first)], {0, 1, 2, 3}) == {0, 1, 2, 3}
    await first.delete()


async def test_a_commit_without_offsets_includes_where_nothing_was_read(
    http: aiohttp.ClientSession, admin: AIOKafkaAdminClient, new_topic: Any
) -> None:
    topic = await new_topic(partitions=2)
    await store(http, topic, 1000, 1001, partitions=2)
    first = await new_consumer(http, topic, group=f"g-{topic}", **LATEST)
    await store(http, topic, 0, partitions=2)
    assert await read([lambda: poll(first)], {0}) == {0}
    assert (await first.post("offsets"))[0] == 204
    stored = await admin.list_consumer_group_offsets(f"g-{topic}")
    assert {where.partition: entry.offset for where, entry in stored.items()} == {0: 2, 1: 1}
    await first.delete()
