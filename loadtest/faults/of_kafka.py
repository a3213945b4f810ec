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
from loadtest.faults.bench import Fault, Plan, Stage
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


async def stall(stage: Stage) -> None:
    """Stall Kafka for less than the delivery timeout."""
    await _stall(stage, stage.plan.stall)


async def long_stall(stage: Stage) -> None:
    """Stall Kafka for longer than the delivery timeout."""
    await _stall(stage, stage.plan.long_stall)


async def kill(stage: Stage) -> None:
    """Kill Kafka, and restart it immediately."""
    await stage.kafka.kill()
    await stage.kafka.start()


async def away(stage: Stage) -> None:
    """Kill Kafka, and restart it after a while."""
    await stage.kafka.kill()
    await asyncio.sleep(stage.plan.short)
    await stage.kafka.start()


async def delay(stage: Stage) -> None:
    """Add 200 ms to every round trip to Kafka."""
    stage.proxy.delay_s = 0.1
    await asyncio.sleep(stage.plan.short)
    stage.proxy.delay_s = 0.0


async def throttle(stage: Stage) -> None:
    """Limit each connection to 100 kB/s."""
    stage.proxy.rate = 100_000.0
    await asyncio.sleep(stage.plan.short)
    stage.proxy.rate = None


async def cuts(stage: Stage) -> None:
    """Cut connections to Kafka in the middle of a frame, repeatedly."""
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


async def half_open(stage: Stage) -> None:
    """Drop Kafka's side of every connection without telling the gateway, until it notices."""
    before = stage.proxy.accepted
    stage.proxy.forget()
    await asyncio.sleep(1.0)  # for responses in flight
    await stage.until(
        stage.load.progressed(), "connections replaced", max(stage.plan.patience, stage.plan.delivery_timeout)
    )
    stage.seen["new connections to Kafka"] += stage.proxy.accepted - before


async def black_hole(stage: Stage) -> None:
    """Pass nothing in either direction; connections can still be opened."""
    stage.proxy.block()
    await asyncio.sleep(stage.plan.stall)
    stage.proxy.unblock()


async def full_disk(stage: Stage) -> None:
    """Fill the broker's disk; then free it and restart the broker."""
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


async def topics_made_anew(stage: Stage) -> None:
    """Delete all topics and re-create them after a while; their old messages are lost by intent."""
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


async def more_partitions(stage: Stage) -> None:
    """Increase three partitions to nine; keys may move, and are in order within each partition."""
    async with _admin(stage) as admin:
        await admin.create_partitions({stage.load.topic(protocol): NewPartitions(9) for protocol in PROTOCOLS})
    await asyncio.sleep(stage.plan.short)


def faults(plan: Plan) -> tuple[Fault, ...]:
    """Return all faults of Kafka."""
    return (
        Fault(
            "stall", f"SIGSTOP to Kafka for {plan.stall:g} s, within the delivery timeout", stall,
            silent=True, recovery_s=2.0,
        ),
        Fault(
            "long stall", f"SIGSTOP to Kafka for {plan.long_stall:g} s, beyond the delivery timeout"
            f" of {plan.delivery_timeout:g} s", long_stall, all_refused=True, recovery_s=2.0,
        ),
        Fault("broker killed", "SIGKILL to Kafka, restarted immediately", kill, silent=True),
        Fault("broker away", f"SIGKILL to Kafka, restarted {plan.short:g} s later", away, silent=True),
        Fault("delay", f"100 ms more to Kafka and 100 ms more back for {plan.short:g} s", delay, silent=True,
              proxied=True),
        Fault("throttle", f"100 kB/s on each connection to Kafka for {plan.short:g} s", throttle, silent=True,
              proxied=True),
        Fault("cuts", f"{CUTS} connections to Kafka reset in the middle of a frame", cuts, silent=True, proxied=True),
        Fault("half-open", "Kafka's side of all connections gone without notice, until the gateway has replaced them",
              half_open, silent=True, proxied=True),
        Fault("black hole", f"nothing passes to Kafka or back for {plan.stall:g} s", black_hole, silent=True,
              proxied=True),
        Fault("disk full", "Kafka's disk is full, then freed, and Kafka is restarted", full_disk, tiny=True),
        Fault("topics made anew", "all topics deleted and re-created", topics_made_anew),
        Fault("more partitions", "three partitions of each topic become nine", more_partitions, silent=True,
              by_partition=True),
    )  # fmt: skip
