"""Drives everything that a client can have many of to its limit, and ends it, beside a modest client.

The modest client is a process that publishes one QoS 1 message after the other; nothing may delay its PUBACK for long.
The result also has the slow event-loop turns (in CPU time) that the gateway's watchdog saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from loadtest.clients.crowd.many import Many, Numbers
from loadtest.clients.crowd.modest import Modest
from loadtest.clients.mqtt_wire import connect_packet, packet, subscribe_packet
from loadtest.clients.talk import PINGRESP, SUBACK, MqttTalk
from loadtest.clients.topics import create_topic
from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.gateway import process_cpu

SETTINGS: Final = {
    "TRIVIUM_AMQP__LINKS_PER_SESSION": "20000",
    "TRIVIUM_MQTT__MAX_SUBSCRIPTIONS": "20000",
    "TRIVIUM_MQTT__OUTGOING_INFLIGHT": "65535",
    "TRIVIUM_HTTP__MAX_BODY_BYTES": "16777216",
}
"""Limits above the defaults: an operator's larger limits must not let one client stop the others."""
TURN_S: Final = 0.25  # the longest turn that is allowed
SLOW: Final = "trivium_event_loop_slow_turn_seconds_count"
LONGEST: Final = "trivium_event_loop_longest_turn_seconds"
MADE_AT_ONCE: Final = 250
SETTLE_S: Final = 6.0  # the gateway looks for new topics every five seconds while one is watched


async def run(stand: Stand, plan: Numbers) -> None:
    """Run each part in turn, and measure its effect on the modest client and the watchdog."""
    async with stand.gateway(SETTINGS) as gateway:
        many = Many(gateway, plan)
        await create_topic(gateway.kafka, many.topic)
        modest = await Modest.start(*gateway.address("mqtt"), many.topic)
        longest = 0.0
        for name, (count, drive) in many.parts.items():
            if not stand.wants(name):
                continue
            await asyncio.sleep(plan.quiet)
            cpu, slow, begin = process_cpu(gateway.pid), (await gateway.metrics()).get(SLOW, 0), time.monotonic()
            await drive(count)
            await asyncio.sleep(plan.quiet)  # include its aftermath
            end = time.monotonic()
            await modest.answered(end)
            found, took = await gateway.metrics(), modest.between(begin, end)
            turn = found.get(LONGEST, 0.0)
            stand.row(**{
                "many": name, "number": count, "modest client's p50 ms": took.milliseconds(50),
                "p99 ms": took.milliseconds(99), "most ms": took.milliseconds(100),
                "turns over 0.1 s": int(found.get(SLOW, 0) - slow), "longest turn so far, s": turn,
                "gateway cpu s": round(process_cpu(gateway.pid) - cpu, 2),
            })  # fmt: skip
            stand.check(turn <= max(longest, TURN_S), f"{name}: a turn of {turn:.2f} s")
            longest = max(turn, longest)
        await modest.stop()


class Topics(NamedTuple):
    """Parameters.

    Attributes:
        topics: number of Kafka topics.
        partitions: of each topic.
        others: number of subscribers after the first.
        filters: number of filters in the SUBSCRIBE to missing topics.
        idle: how long the idle gateway is measured, in seconds.
    """

    topics: int = 5000
    partitions: int = 1
    others: int = 5
    filters: int = 1000
    idle: float = 10.0


async def everything(stand: Stand, plan: Topics) -> None:
    """Measure the cost of `#` with many Kafka topics, and of missing topics."""
    async with stand.gateway() as gateway:
        await _make_topics(gateway.kafka, plan)
        await asyncio.sleep(SETTLE_S)
        pid, address = gateway.pid, gateway.address("mqtt")
        walls, cpus, clients = [], [], []
        for number in range(plan.others + 1):
            clients.append(await MqttTalk.open(address, connect_packet(f"many-{number}")))
            before, begun = process_cpu(pid), time.perf_counter()
            await clients[-1].ask([subscribe_packet(1, [("#", 1)])], SUBACK)
            walls.append(time.perf_counter() - begun)
            cpus.append(process_cpu(pid) - before)
            await asyncio.sleep(0 if number else 1)
        before = process_cpu(pid)
        await asyncio.sleep(plan.idle)
        idle = (process_cpu(pid) - before) / plan.idle
        absent = await MqttTalk.open(address, connect_packet("many-absent"))
        begun = time.perf_counter()
        absent.writer.write(subscribe_packet(1, [(f"absent-{number}/#", 1) for number in range(plan.filters)]))
        await absent.ask([packet(PINGRESP - 0x10, b"")], PINGRESP)
        ping = time.perf_counter() - begun
        await absent.take(SUBACK)
        stand.row(
            topics=plan.topics, partitions=plan.partitions, first_s=round(walls[0], 3), first_cpu_s=round(cpus[0], 2),
            next_s=round(sorted(walls[1:])[plan.others // 2], 3), next_cpu_s=round(sum(cpus[1:]) / plan.others, 3),
            idle_cpu=round(idle, 3), absent_filters=plan.filters, absent_s=round(time.perf_counter() - begun, 3),
            ping_s=round(ping, 3),
        )  # fmt: skip
        for client in (*clients, absent):
            client.drop()


async def _make_topics(bootstrap: str, plan: Topics) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=120_000)
    await admin.start()
    try:
        there = set(await admin.list_topics())
        names = [name for number in range(plan.topics) if (name := f"many-{number:05}") not in there]
        for at in range(0, len(names), MADE_AT_ONCE):
            with contextlib.suppress(TimeoutError):
                part = names[at : at + MADE_AT_ONCE]
                await admin.create_topics([NewTopic(name, plan.partitions, 1) for name in part])
        while not there.issuperset(names):  # accepted, but the broker is still creating their logs
            await asyncio.sleep(0.5)
            there = set(await admin.list_topics())
    finally:
        await admin.close()


SCENARIOS = (
    Scenario(
        "many", "have clients open too much of everything, and measure a modest client's latency", Numbers(), run,
        "parts whose name contains this",
    ),
    Scenario(
        "many-topics", "measure the cost of `#` with many Kafka topics, and of missing topics", Topics(), everything
    ),
)  # fmt: skip
