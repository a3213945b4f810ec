"""Slow readers of every protocol, alone and mixed: they delay nobody, hold a bounded part of memory, and lose nothing.

Those who read get everything at once; those who did not get it when they read on.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from tests.support.gateway import GatewayProcess
from tests.support.receivers import (
    WAIT_S,
    Amqp,
    AmqpSettled,
    Events,
    Live,
    Mqtt,
    MqttAtMostOnce,
    Receiver,
    Sender,
)

MEBIBYTE: Final = 1 << 20
LEAST: Final = 65_536  # of a page
SIZE: Final = 32_768
KERNEL: Final = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])  # so much it takes of what is not read
MOST: Final = 2 * MEBIBYTE
BURST: Final = 65_536 + 2 * SIZE  # what is sent to a receiver between two looks at its share
CONFIG: Final = f"""
[kafka]
create_topics = true
topic_partitions = 1
[budget]
outgoing_bytes = {MOST}
"""
KINDS: Final = (Mqtt, Amqp, Events, Live)
ALL: Final = (*KINDS, MqttAtMostOnce, AmqpSettled)


@pytest.fixture(scope="module")
async def gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("gateway"), bootstrap, config=CONFIG)
    await process.start()
    yield process
    await process.kill()


async def figures(gateway: GatewayProcess) -> dict[str, int]:
    """Of the budget of all receivers."""
    url = f"http://{gateway.addresses['management']}/metrics"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        lines = [line.split() for line in (await answer.text()).splitlines()]
    prefix = "trivium_budget_outgoing_"
    return {line[0].removeprefix(prefix): int(float(line[1])) for line in lines if line[0].startswith(prefix)}


async def paused(gateway: GatewayProcess) -> dict[str, list[str]]:
    """Who is paused, by reason."""
    async with aiohttp.ClientSession() as http, http.get(f"http://{gateway.addresses['management']}/flow") as answer:
        flow = await answer.json()
    found: dict[str, list[str]] = {}
    for pause in flow["paused"]:
        found.setdefault(pause["reason"], []).append(pause["subject"])
    return found


def names(kinds: tuple[type[Receiver], ...]) -> str:
    return "-".join(kind.__name__ for kind in kinds)


async def test_receivers_that_read_nothing_are_bounded_in_all(gateway: GatewayProcess) -> None:
    topic, count, each = f"unread-{uuid.uuid4().hex[:8]}", (KERNEL + 3 * MEBIBYTE) // SIZE, 3
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(Sender.connected(gateway, topic, SIZE))
        await sender.publish(1)  # which makes the topic
        deaf = [await stack.enter_async_context(kind.connected(gateway, topic)) for kind in KINDS for _ in range(each)]
        modest = [await stack.enter_async_context(kind.connected(gateway, topic)) for kind in KINDS]
        async with asyncio.TaskGroup() as tasks:
            reading = [tasks.create_task(one.read(count)) for one in modest]
            tasks.create_task(sender.publish(count))
        assert [task.result() for task in reading] == [list(range(1, count + 1))] * len(KINDS)
        seen = await figures(gateway)
        assert len(deaf) <= seen["receivers"] <= 2 * len(deaf)
        assert seen["bytes"] <= MOST + seen["receivers"] * BURST
        reasons = await paused(gateway)
        assert len(reasons["slow reader"]) >= 3 * each  # of an AMQP link, what is unsettled may be more
        async with asyncio.TaskGroup() as tasks:
            reading = [tasks.create_task(one.read(count)) for one in deaf]
        assert [task.result() for task in reading] == [list(range(1, count + 1))] * len(deaf)
        while (await figures(gateway))["bytes"]:
            pass


@pytest.mark.parametrize("slow", [(Mqtt,), (Amqp,), (Events,), ALL], ids=names)
async def test_who_reads_nothing_delays_no_other_of_its_topic(
    gateway: GatewayProcess, slow: tuple[type[Receiver], ...]
) -> None:
    """Nothing is sent before all others have what was sent before, so nobody waits for the one that does not read."""
    topic = f"slow-{uuid.uuid4().hex[:8]}"
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(Sender.connected(gateway, topic, 2 * SIZE))
        await sender.publish(1)
        deaf = [await stack.enter_async_context(kind.connected(gateway, topic)) for kind in slow]
        others = [await stack.enter_async_context(kind.connected(gateway, topic)) for kind in KINDS]
        sent, behind = 0, 0
        while behind < 2:  # steps in which the slow one has had more than it takes
            for _ in range(5):
                await sender.publish(1)
                sent += 1
                for other in others:
                    assert await other.read(sent) == list(range(1, sent + 1))
            behind += (await figures(gateway))["receivers"] >= len(slow)
        for one in deaf:
            if one.lossless:
                assert await one.read(sent) == list(range(1, sent + 1))


@pytest.mark.parametrize("slow", [(Mqtt,), (Amqp,), KINDS], ids=names)
async def test_slow_members_delay_no_other_of_their_group(
    gateway: GatewayProcess, slow: tuple[type[Receiver], ...]
) -> None:
    """They hold what they were given, all others get the rest; when they are gone these get that too."""
    topic, group = (f"{kind}-{uuid.uuid4().hex[:8]}" for kind in ("shared", "group"))
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(Sender.connected(gateway, topic, 2 * SIZE))
        await sender.publish(1)
        members = [await stack.enter_async_context(kind.connected(gateway, topic, group)) for kind in slow]
        others = [await stack.enter_async_context(kind.connected(gateway, topic, group)) for kind in KINDS]
        count = 400
        tasks = [asyncio.create_task(other.read_on()) for other in others]
        for task in tasks:
            stack.callback(task.cancel)
        await sender.publish(count)

        def missing() -> set[int]:
            assert not any(task.done() for task in tasks)
            return set(range(1, count + 1)).difference(*(other.numbers for other in others))

        async with asyncio.timeout(WAIT_S):
            while len(missing()) > count // 2:  # the sockets of the slow ones have taken less
                await figures(gateway)
            for member in members:
                member.leave()
            while missing():
                await figures(gateway)
