"""Faults of Kafka and of the network to it: the broker, its disk, its topics, connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from aiokafka.errors import UnknownTopicOrPartitionError

from loadtest.clients.topics import create_topic
from loadtest.engine.steady import PROTOCOLS
from loadtest.faults.bench import Stage, fault
from loadtest.faults.disk import TinyKafka
from loadtest.faults.proxy import Proxy
from loadtest.gateway import frozen

FULL_S: Final = 60.0  # for the broker to notice
CUTS: Final = 20
HELD_S: Final = 1.0  # minimum time of a stall without acknowledgements


async def _stall(stage: Stage, seconds: float) -> None:
    """Stop Kafka; after the acknowledgements in flight, nothing may be acknowledged."""
    until = stage.load.now + seconds
    with frozen(stage.kafka.pid):
        quiet = await stage.settled()
        await asyncio.sleep(max(HELD_S, until - stage.load.now))
        if stage.load.answers != quiet:
            stage.problems.append(f"acknowledged while Kafka stood still: {quiet}, then {stage.load.answers}")


@fault("stall", silent=True, recovery_s=2.0)
async def stall(stage: Stage) -> None:
    """SIGSTOP to Kafka for {stall:g} s, within the delivery timeout."""
    await _stall(stage, stage.plan.stall)


@fault("long stall", all_refused=True, recovery_s=2.0)
async def long_stall(stage: Stage) -> None:
    """SIGSTOP to Kafka for {long_stall:g} s, beyond the delivery timeout of {delivery_timeout:g} s."""
    await _stall(stage, stage.plan.long_stall)


@fault("broker killed", silent=True)
async def kill(stage: Stage) -> None:
    """SIGKILL to Kafka, restarted immediately."""
    await stage.kafka.kill()
    await stage.kafka.start()


@fault("broker away", silent=True)
async def away(stage: Stage) -> None:
    """SIGKILL to Kafka, restarted {short:g} s later."""
    await stage.kafka.kill()
    await asyncio.sleep(stage.plan.short)
    await stage.kafka.start()


@fault("delay", silent=True, proxied=True)
async def delay(stage: Stage) -> None:
    """100 ms more to Kafka and 100 ms more back for {short:g} s."""
    stage.proxy.delay_s = 0.1
    await asyncio.sleep(stage.plan.short)
    stage.proxy.delay_s = 0.0


@fault("throttle", silent=True, proxied=True)
async def throttle(stage: Stage) -> None:
    """100 kB/s on each connection to Kafka for {short:g} s."""
    stage.proxy.rate = 100_000.0
    await asyncio.sleep(stage.plan.short)
    stage.proxy.rate = None


@fault("cuts", silent=True, proxied=True)
async def cuts(stage: Stage) -> None:
    """20 connections to Kafka reset in the middle of a frame."""
    already = stage.proxy.cuts
    for number in range(1, CUTS + 1):
        stage.proxy.cut(1)
        due = already + number
        if not await stage.until(partial(_has_cut, stage.proxy, due), f"cut {number}"):
            return
        await asyncio.sleep(stage.plan.short / CUTS)
    stage.seen["connections cut"] += CUTS


def _has_cut(proxy: Proxy, count: int) -> bool:
    return proxy.cuts >= count


@fault("half-open", silent=True, proxied=True)
async def half_open(stage: Stage) -> None:
    """Kafka's side of all connections gone without notice, until the gateway has replaced them."""
    before = stage.proxy.accepted
    stage.proxy.forget()
    await asyncio.sleep(1.0)  # for responses in flight
    await stage.until(
        stage.load.progressed(), "connections replaced", max(stage.plan.patience, stage.plan.delivery_timeout)
    )
    stage.seen["new connections to Kafka"] += stage.proxy.accepted - before


@fault("black hole", silent=True, proxied=True)
async def black_hole(stage: Stage) -> None:
    """Nothing passes to Kafka or back for {stall:g} s; connections can still be opened."""
    stage.proxy.block()
    await asyncio.sleep(stage.plan.stall)
    stage.proxy.unblock()


@fault("disk full", tiny=True)
async def full_disk(stage: Stage) -> None:
    """Kafka's disk is full, then freed, and Kafka is restarted."""
    assert isinstance(stage.kafka, TinyKafka)
    began = stage.load.now
    with stage.kafka.full():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FULL_S):
                await stage.kafka.ended()
        how = "went on for" if stage.kafka.is_running else "ended by itself after"
        stage.seen[f"the broker {how} {stage.load.now - began:.0f} s"] += 1
        await stage.kafka.kill()
    await stage.kafka.start()


@contextlib.asynccontextmanager
async def _admin(stage: Stage) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=stage.kafka.bootstrap_servers)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


@fault("topics made anew")
async def topics_made_anew(stage: Stage) -> None:
    """All topics deleted and re-created; their old messages are lost by intent."""
    topics = [stage.load.topic(protocol) for protocol in PROTOCOLS]
    async with _admin(stage) as admin:
        await admin.delete_topics(topics)
        for topic in topics:
            while True:
                (found,) = await admin.describe_topics([topic])
                if found["error_code"] == UnknownTopicOrPartitionError.errno:
                    break
                await asyncio.sleep(0.02)
        for protocol in PROTOCOLS:
            stage.load.count_from_now(protocol)
        await asyncio.sleep(stage.plan.short / 4)
        for topic in topics:
            await create_topic(stage.kafka.bootstrap_servers, topic)


@fault("more partitions", silent=True, by_partition=True)
async def more_partitions(stage: Stage) -> None:
    """Three partitions of each topic become nine; keys may move, and are in order within each partition."""
    async with _admin(stage) as admin:
        await admin.create_partitions({stage.load.topic(protocol): NewPartitions(9) for protocol in PROTOCOLS})
    await asyncio.sleep(stage.plan.short)
