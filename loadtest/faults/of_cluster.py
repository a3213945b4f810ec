"""Faults of a cluster of three brokers: dead and moved leaders, missing replicas, a slow broker."""

from __future__ import annotations

import asyncio
from typing import Final

from loadtest.engine.steady import PROTOCOLS
from loadtest.faults.bench import Stage, fault
from loadtest.faults.cluster import KafkaCluster
from loadtest.faults.of_kafka import more_partitions
from loadtest.gateway import frozen

SLOW_S: Final = 0.4  # how long a broker is stopped
AWAKE_S: Final = 0.1  # how long it runs in between


def _cluster(stage: Stage) -> KafkaCluster:
    assert isinstance(stage.kafka, KafkaCluster)
    return stage.kafka


async def _leader(stage: Stage) -> int:
    """Return a broker that leads partitions of every protocol, or at least of MQTT."""
    cluster = _cluster(stage)
    led = [set((await cluster.leaders(stage.load.topic(protocol))).values()) for protocol in PROTOCOLS]
    return min(set.intersection(*led) or led[0])


async def _lose_leader(stage: Stage, fate: str) -> tuple[KafkaCluster, int]:
    """Kill a leader, and wait until the others serve all senders; return the cluster and the killed node."""
    cluster, node = _cluster(stage), await _leader(stage)
    await cluster.kill_node(node)
    stage.seen[f"node {node} {fate}"] += 1
    await stage.until(stage.load.progressed(), "answers to all with two brokers")
    await asyncio.sleep(stage.plan.short)
    return cluster, node


@fault("leader killed", silent=True, in_sync=2)
async def leader_killed(stage: Stage) -> None:
    """SIGKILL to a leader of three brokers, started again {short:g} s later."""
    cluster, _ = await _lose_leader(stage, "killed")
    await cluster.start()


@fault("leader gone for good", silent=True, in_sync=2)
async def gone_for_good(stage: Stage) -> None:
    """SIGKILL to a leader of three brokers, which never comes back."""
    cluster, node = await _lose_leader(stage, "is gone")
    leaders = {
        leader for protocol in PROTOCOLS for leader in (await cluster.leaders(stage.load.topic(protocol))).values()
    }
    if node in leaders:
        stage.problems.append(f"node {node} is gone but still leads")


@fault("too few replicas", silent=True, in_sync=3)
async def too_few_replicas(stage: Stage) -> None:
    """One of three brokers away for {short:g} s with min.insync.replicas=3, so that Kafka refuses `acks=all`."""
    cluster, node = _cluster(stage), await _leader(stage)
    await cluster.kill_node(node)
    await stage.settled()
    quiet = stage.load.stored()
    await asyncio.sleep(stage.plan.short)
    if stage.load.stored() != quiet:
        stage.problems.append(f"acknowledged with two replicas: {quiet}, then {stage.load.stored()}")
    await cluster.start()
    await stage.until(stage.load.progressed(), "answers to all")


@fault("election", silent=True, in_sync=2)
async def election(stage: Stage) -> None:
    """A broker restarted so that it leads nothing, then the preferred of three brokers lead again."""
    cluster, node = _cluster(stage), await _leader(stage)
    await cluster.kill_node(node)
    await stage.until(stage.load.progressed(), "answers to all with two brokers")
    await cluster.start()
    topics = [stage.load.topic(protocol) for protocol in PROTOCOLS]
    moved = 0
    async with asyncio.timeout(stage.plan.patience):
        while not moved:  # it can lead only when it has caught up
            await asyncio.sleep(0.5)
            moved = await cluster.elect(topics)
    stage.seen["partitions moved"] += moved
    await stage.until(stage.load.progressed(), "answers to all after the election")


fault("partitions added", silent=True, by_partition=True, in_sync=2)(more_partitions)


@fault("slow broker", silent=True, in_sync=2)
async def slow_broker(stage: Stage) -> None:
    """SIGSTOP for 0.4 s of each 0.5 s to a leader of three brokers, for {short:g} s: too briefly to replace it."""
    pid = _cluster(stage).node(await _leader(stage))
    assert pid is not None
    until = stage.load.now + stage.plan.short
    while stage.load.now < until:
        with frozen(pid):
            await asyncio.sleep(SLOW_S)
        await asyncio.sleep(AWAKE_S)
