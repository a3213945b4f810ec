"""Hostile clients of each kind beside honest ones: nothing is lost, nothing is left behind.

Every connection must be answered or closed, the gateway's log must show no bug, and descriptors, tasks and memory must
come back. `fuzz` damages conversations of real AMQP clients; `hostile` damages HTTP requests, and one client in ten
leaves in mid-poll, stream or upload; `strangers` sends bad lines, bad records, floods, wills, share names and thousands
of properties for a long time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import aiohttp
from aiokafka.client import AIOKafkaClient

from loadtest.clients.crowd.apart import Apart, Order
from loadtest.clients.hostile import amqp_damage, http_damage
from loadtest.clients.hostile.storm import Storm
from loadtest.clients.hostile.strangers import TOPIC, Strangers
from loadtest.clients.topics import create_topic
from loadtest.engine.command import Scenario
from loadtest.engine.growth import flat
from loadtest.engine.honest import figures, honest, settled
from loadtest.engine.stand import MIB, Stand
from loadtest.gateway import GatewayProcess
from loadtest.report import Latencies

SETTINGS: Final = {
    "TRIVIUM_KAFKA__CREATE_TOPICS": "false",  # damaged addresses create no topics
    "TRIVIUM_AMQP__IDLE_TIMEOUT_S": "20",  # silent clients are closed soon
    "TRIVIUM_HTTP__CONSUMER_IDLE_S": "3",  # consumers that were not deleted expire soon
    "TRIVIUM_HTTP__HEADER_TIMEOUT_S": "3",  # incomplete requests time out soon
}
POOLED: Final = 40
"""What may stay open: transactional producers wait five minutes for the next transaction."""
GROWTH: Final = 64 * MIB
"""Memory that large messages of several connections may leave in the allocator."""
WARM_UP: Final = 0.2
"""Share of the attacks before the first measurement: caches fill, Kafka's connections open."""
ERROR: Final = re.compile(r'^.*"level": "(?:error|critical)".*$', re.MULTILINE)
REPLIES: Final = "replies"  # the topic of temporary queues; it may exist already
BACK: Final = ("trivium_http_connections", "trivium_http_consumers_instances", "trivium_http_produce_active")
"""Metrics that must return to 0 when the honest clients have left."""


async def _assault(stand: Stand, gateway: GatewayProcess, attacks: Callable[[float], Awaitable[None]]) -> None:
    """Attack with a share of everything, measure, attack with the rest; what is left must come back.

    `attacks` gets the share. Honest clients run beside it.
    """
    async with honest(stand, gateway) as load:
        idle = await figures(gateway)
        await attacks(WARM_UP)
        before = await settled(stand, gateway, idle, POOLED)
        await attacks(1 - WARM_UP)
        after = await settled(stand, gateway, before, POOLED)
        grown = after.resident - before.resident
        stand.check(grown <= GROWTH, f"memory: {before.resident:,}, then {after.resident:,}")
    stand.row(**{
        "honest": sum(load.answers.values()), "honest p99 ms": load.latencies.milliseconds(99),
        "descriptors": f"{before.descriptors} -> {after.descriptors}", "tasks": f"{before.tasks} -> {after.tasks}",
        "MiB": f"{before.resident // MIB} -> {after.resident // MIB}",
    })  # fmt: skip


class Fuzz(NamedTuple):
    """Parameters.

    Attributes:
        seconds: the duration.
        at_once: connections at the same time.
        seed: of all random choices.
        first: number of the first conversation; each depends only on the seed and its number.
        silent: share of conversations that end in silence, which the gateway must close.
    """

    seconds: float = 600.0
    at_once: int = 20
    seed: int = 0
    first: int = 0
    silent: float = 0.005


async def fuzz(stand: Stand, plan: Fuzz) -> None:
    """Damage what real clients say."""
    async with stand.gateway(SETTINGS) as gateway:
        topic = amqp_damage.TOPIC.format(secrets.randbits(32))
        for name in (topic, REPLIES):
            await create_topic(gateway.kafka, name)
        recordings, numbers = amqp_damage.recordings(topic), itertools.count(plan.first)
        storm = Storm(
            gateway.address("amqp"), plan.seed, lambda rng: amqp_damage.hostile(recordings, rng, plan.silent),
            amqp_damage.judged, stand.problems.append,
        )  # fmt: skip

        async def rage(share: float) -> None:
            until = time.monotonic() + plan.seconds * share
            await storm.rage(itertools.takewhile(lambda _: time.monotonic() < until, numbers), plan.at_once)

        await _assault(stand, gateway, rage)
        stand.problems += [f"the log says {line[:2000]}" for line in ERROR.findall(gateway.log.read_text())[:3]]
    stand.rows[-1] |= dict(storm.ended)


class Requests(NamedTuple):
    """Parameters.

    Attributes:
        requests: number of attacks.
        at_once: at the same time.
        seed: of all random choices.
    """

    requests: int = 10_000
    at_once: int = 20
    seed: int = 0


async def hostile(stand: Stand, plan: Requests) -> None:
    """Send damaged requests."""
    async with stand.gateway(SETTINGS) as gateway:
        run = secrets.token_hex(4)
        for topic in (f"target-{run}", f"silent-{run}"):
            await create_topic(gateway.kafka, topic, 1)
        storm, numbers = Storm(
            gateway.address("http"), plan.seed, lambda rng: http_damage.attack(rng, f"target-{run}", f"silent-{run}"),
            http_damage.judged, stand.problems.append,
        ), itertools.count()  # fmt: skip

        async def rage(share: float) -> None:
            await storm.rage(itertools.islice(numbers, round(plan.requests * share)), plan.at_once)

        await _assault(stand, gateway, rage)
        await settled(stand, gateway, await figures(gateway), POOLED, BACK)
    stand.rows[-1] |= dict(sorted(storm.ended.items()))


class Long(NamedTuple):
    """Parameters.

    Attributes:
        minutes: the duration.
        every: seconds between two lines.
        limit: the longest p99 of the honest clients, ms.
    """

    minutes: float = 30.0
    every: float = 60.0
    limit: float = 250.0


GROWN: Final = 0.15
"""The share by which memory may grow while it settles."""


async def strangers(stand: Stand, plan: Long) -> None:
    """Run everything; memory must be flat, and honest clients be served in time."""
    async with stand.gateway() as gateway, contextlib.AsyncExitStack() as stack:
        await create_topic(gateway.kafka, TOPIC, 1)
        kafka = AIOKafkaClient(bootstrap_servers=gateway.kafka)
        await kafka.bootstrap()
        stack.push_async_callback(kafka.close)
        await kafka.add_topic(TOPIC)
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{gateway.addresses['http']}"))
        others = Strangers(gateway, kafka, http)
        async with honest(stand, gateway) as load, asyncio.TaskGroup() as group:
            modest = [await Apart.start(gateway.address("mqtt"), Order(TOPIC, rate=rate)) for rate in (20.0, 1.0)]
            tasks = [group.create_task(others.run(kind)) for kind in others.kinds]
            begun, end = time.perf_counter(), load.now + plan.minutes * 60
            while load.now < end:
                await asyncio.sleep(min(plan.every, max(0.0, end - load.now)))
                now = time.perf_counter()
                for client in modest:
                    await client.answered(now)
                waited = Latencies()
                for client in modest:
                    waited.merge(client.between(begun, now))
                p99 = waited.milliseconds(99)
                stand.say(f"{load.samples[-1].resident // MIB} MiB, honest p99 {p99:.1f} ms; {dict(others.done)}")
            for task in tasks:
                task.cancel()
            for client in modest:
                await client.stop()
    stand.problems += flat("memory", [(one.at, one.resident) for one in load.samples], GROWN, 16 * MIB)
    stand.check(p99 <= plan.limit, f"the honest clients waited {p99:.0f} ms (p99)")
    stand.row(**{"MiB at most": max(one.resident for one in load.samples) // MIB, "honest p99 ms": p99}, **others.done)


SCENARIOS = (
    Scenario("fuzz", "send damaged AMQP conversations beside honest clients", Fuzz(), fuzz, lines=False),
    Scenario("hostile", "send damaged HTTP requests beside honest clients", Requests(), hostile, lines=False),
    Scenario(
        "strangers", "hostile input of every kind for a long time beside honest clients", Long(), strangers, lines=False
    ),
)
