"""Slow readers of every protocol, alone and mixed, delay no other client, use bounded memory, and lose nothing.

Clients that read get everything immediately; slow ones get it when they read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import aiohttp
import pytest
from aiokafka.admin import AIOKafkaAdminClient

from tests.conftest import NewTopicFactory
from tests.support.gateway import GatewayProcess
from tests.support.receivers import (
    WAIT_S,
    Amqp,
    AmqpSettled,
    Events,
    FirstPage,
    Live,
    Mqtt,
    MqttAtMostOnce,
    Pages,
    Poll,
    PollAhead,
    Polling,
    Receiver,
    Sender,
    numbered,
)
from tests.support.waiting import wait_until

JSON_RECORDS: Final = "application/vnd.kafka.json.v2+json"
MEBIBYTE: Final = 1 << 20
LEAST: Final = 65_536  # the smallest page size
SIZE: Final = 32_768
KERNEL: Final = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])  # unread bytes in the kernel
MOST: Final = 2 * MEBIBYTE
BURST: Final = 65_536 + 2 * SIZE  # the maximum sent to a receiver between two checks of its share
CONFIG: Final = f"""
[kafka]
create_topics = true
topic_partitions = 1
[budget]
outgoing_bytes = {MOST}
"""
KINDS: Final = (Mqtt, Amqp, Events, Live)
POLLING: Final = (Poll, Pages)
ALL: Final = (*KINDS, MqttAtMostOnce, AmqpSettled, PollAhead, FirstPage)


@pytest.fixture(scope="module")
async def gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("gateway"), bootstrap, config=CONFIG)
    await process.start()
    yield process
    await process.kill()


async def figures(gateway: GatewayProcess) -> dict[str, int]:
    """Return the metrics of the receivers' budget."""
    url = f"http://{gateway.addresses['management']}/metrics"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        lines = [line.split() for line in (await answer.text()).splitlines()]
    prefix = "trivium_budget_outgoing_"
    return {line[0].removeprefix(prefix): int(float(line[1])) for line in lines if line[0].startswith(prefix)}


async def paused(gateway: GatewayProcess) -> dict[str, list[str]]:
    """Return the paused clients by reason."""
    async with aiohttp.ClientSession() as http, http.get(f"http://{gateway.addresses['management']}/flow") as answer:
        flow = await answer.json()
    found: dict[str, list[str]] = {}
    for pause in flow["paused"]:
        found.setdefault(pause["reason"], []).append(pause["subject"])
    return found


def names(kinds: tuple[type[Receiver], ...]) -> str:
    return "-".join(kind.__name__ for kind in kinds)


async def test_receivers_that_read_nothing_share_a_bounded_budget(gateway: GatewayProcess) -> None:
    topic, count, each = f"unread-{uuid.uuid4().hex[:8]}", (KERNEL + 3 * MEBIBYTE) // SIZE, 3
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(Sender.connected(gateway, topic, SIZE))
        await sender.publish(1)  # creates the topic
        stalled = [
            await stack.enter_async_context(kind.connected(gateway, topic)) for kind in KINDS for _ in range(each)
        ]
        modest = [await stack.enter_async_context(kind.connected(gateway, topic)) for kind in KINDS]
        async with asyncio.TaskGroup() as tasks:
            reading = [tasks.create_task(one.read(count)) for one in modest]
            tasks.create_task(sender.publish(count))
        assert [task.result() for task in reading] == [list(range(1, count + 1))] * len(KINDS)
        seen = await figures(gateway)
        assert len(stalled) <= seen["receivers"] <= 2 * len(stalled)
        assert seen["bytes"] <= MOST + seen["receivers"] * BURST
        reasons = await paused(gateway)
        assert len(reasons["slow reader"]) >= 3 * each  # an AMQP link may pause for its unsettled deliveries instead
        async with asyncio.TaskGroup() as tasks:
            reading = [tasks.create_task(one.read(count)) for one in stalled]
        assert [task.result() for task in reading] == [list(range(1, count + 1))] * len(stalled)
        while (await figures(gateway))["bytes"]:
            pass


@pytest.mark.parametrize("slow", [(Mqtt,), (Amqp,), (Events,), (PollAhead, FirstPage), ALL], ids=names)
async def test_a_stalled_receiver_delays_no_other_on_its_topic(
    gateway: GatewayProcess, slow: tuple[type[Receiver], ...]
) -> None:
    """Each message is sent after all others have received the previous one, so no client waits for the slow one."""
    topic = f"slow-{uuid.uuid4().hex[:8]}"
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(Sender.connected(gateway, topic, 2 * SIZE))
        await sender.publish(1)
        stalled = [await stack.enter_async_context(kind.connected(gateway, topic)) for kind in slow]
        others = [await stack.enter_async_context(kind.connected(gateway, topic)) for kind in (*KINDS, *POLLING)]
        sent, behind = 0, 0
        while behind < 2:  # two rounds in which the slow clients' buffers were full
            for _ in range(5):
                await sender.publish(1)
                sent += 1
                for other in others:
                    assert await other.read(sent) == list(range(1, sent + 1))
            told = (await paused(gateway)).get("slow reader", [])
            behind += (await figures(gateway))["receivers"] >= len(slow) and all(
                f"http {one.address}" in told for one in stalled if isinstance(one, Polling)
            )
        for one in stalled:
            if one.lossless:
                assert await one.read(sent) == list(range(1, sent + 1))


@pytest.mark.parametrize("slow", [(Mqtt,), (Amqp,), (Live,), KINDS], ids=names)
async def test_slow_group_members_hold_only_their_windows(
    gateway: GatewayProcess, slow: tuple[type[Receiver], ...]
) -> None:
    """All others get the rest, and the slow members' messages when these leave. Only event streams have no window."""
    topic, group = (f"{kind}-{uuid.uuid4().hex[:8]}" for kind in ("shared", "group"))
    size, count, window = (2 * SIZE, 300, 10) if Events in slow else (100, 2000, 10)
    most = sum((KERNEL + MEBIBYTE) // size if kind is Events else window for kind in slow)
    assert most < count // 2
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(Sender.connected(gateway, topic, size))
        await sender.publish(1)
        members = [await stack.enter_async_context(kind.connected(gateway, topic, group, window)) for kind in slow]
        others = [await stack.enter_async_context(kind.connected(gateway, topic, group)) for kind in KINDS]
        tasks = [asyncio.create_task(other.read_on()) for other in others]
        for task in tasks:
            stack.callback(task.cancel)
        await sender.publish(count)

        def missing() -> int:
            assert not any(task.done() for task in tasks)
            return len(set(range(1, count + 1)).difference(*(other.numbers for other in others)))

        await wait_until(lambda: missing() <= most, WAIT_S)
        for member in members:
            member.leave()
        await wait_until(lambda: not missing(), WAIT_S)


async def test_slow_consumers_delay_only_their_own_partitions(
    gateway: GatewayProcess, admin: AIOKafkaAdminClient, new_topic: NewTopicFactory
) -> None:
    """Kafka assigns each a partition. One consumer reads nothing, one a byte at a time, one never polls again.

    The others get the records of their partitions immediately, and those of the slow consumers when these are deleted.
    """
    topic, group = await new_topic(partitions=6), f"group-{uuid.uuid4().hex[:8]}"
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{gateway.addresses['http']}"))
        kinds = (PollAhead, PollAhead, Poll, Poll, Poll, Amqp)
        async with asyncio.TaskGroup() as joining:
            tasks = [
                joining.create_task(stack.enter_async_context(kind.connected(gateway, topic, group))) for kind in kinds
            ]
        consumers = [consumer for task in tasks if isinstance(consumer := task.result(), Poll)]
        link = tasks[-1].result()
        async with asyncio.timeout(WAIT_S):
            while not await is_settled(admin, group, len(kinds)):
                pass
            while {len(await partitions(http, one)) for one in consumers} != {1}:
                pass
        owned = [(await partitions(http, one))[0] for one in consumers]
        left = set(range(len(kinds))).difference(owned).pop()
        sent: dict[int, list[int]] = {partition: [] for partition in range(len(kinds))}

        async def send(partition: int, size: int = 100) -> None:
            number = sum(map(len, sent.values())) + 1
            sent[partition].append(number)
            records = {"records": [{"value": json.loads(numbered(number, size))}]}
            path, headers = f"/topics/{topic}/partitions/{partition}", {"Content-Type": JSON_RECORDS}
            async with http.post(path, data=json.dumps(records), headers=headers) as answer:
                assert answer.status == 200

        stalled, dribbling, silent, *quick = consumers
        for partition in owned[:2]:
            for _ in range((KERNEL + 2 * MEBIBYTE) // (2 * SIZE)):
                await send(partition, 2 * SIZE)
        await send(owned[2])
        assert await silent.read(1) == sent[owned[2]]
        silent.leave()
        while (await figures(gateway))["receivers"] < 2:
            pass
        others = dict(zip((*owned[3:], left), (*quick, link), strict=True))
        for _ in range(20):
            for partition in range(len(kinds)):
                await send(partition)
            for partition, other in others.items():
                assert await other.read(len(sent[partition])) == sent[partition]
            await dribbling.read_byte()
        reading = [asyncio.create_task(other.read_on()) for other in others.values()]
        for task in reading:
            stack.callback(task.cancel)
        for one in (stalled, dribbling, silent):
            async with http.delete(one.path) as answer:
                assert answer.status == 204
        everything = {number for numbers in sent.values() for number in numbers}

        def complete() -> bool:
            assert not any(task.done() for task in reading)
            return everything.issubset(number for other in others.values() for number in other.numbers)

        await wait_until(complete, WAIT_S)


async def is_settled(admin: AIOKafkaAdminClient, group: str, members: int) -> bool:
    """Return whether the group is stable with this number of members."""
    (answer,) = await admin.describe_consumer_groups([group])
    _, _, state, _, _, described = answer.groups[0][:6]
    return state == "Stable" and len(described) == members


async def partitions(http: aiohttp.ClientSession, consumer: Poll) -> list[int]:
    """Return the partitions that a consumer of one topic is assigned."""
    async with http.get(f"{consumer.path}/subscription") as answer:
        found = await answer.json(content_type=None)
    return [number for one in found["partitions"] for numbers in one.values() for number in numbers]
