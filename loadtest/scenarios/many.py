"""Drives everything that a client can have many of to its limit, and ends it, beside a modest client.

The modest client is a process that publishes one QoS 1 message after the other; nothing may delay its PUBACK for long.
The result also has the slow event-loop turns (in CPU time) that the gateway's watchdog saw.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from loadtest.clients.crowd.apart import Apart, Order
from loadtest.clients.crowd.many import Many, Numbers
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
MODEST_RATE: Final = 200.0  # messages per second
TURN_S: Final = 0.25  # the longest turn that is allowed
SLOW: Final = "trivium_event_loop_slow_turn_seconds_count"
LONGEST: Final = "trivium_event_loop_longest_turn_seconds"


async def run(stand: Stand, plan: Numbers) -> None:
    """Run each part in turn, and measure its effect on the modest client and the watchdog."""
    async with stand.gateway(SETTINGS) as gateway:
        many = Many(gateway, plan)
        await create_topic(gateway.kafka, many.topic)
        modest = await Apart.start(gateway.address("mqtt"), Order(many.topic, rate=MODEST_RATE))
        longest = 0.0
        for name, (count, drive) in many.parts.items():
            if not stand.wants(name):
                continue
            await asyncio.sleep(plan.quiet)
            cpu, slow, begin = process_cpu(gateway.pid), (await gateway.metrics()).get(SLOW, 0), time.perf_counter()
            await drive(count)
            await asyncio.sleep(plan.quiet)  # include its aftermath
            end = time.perf_counter()
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


SCENARIOS = (
    Scenario(
        "many", "have clients open too much of everything, and measure a modest client's latency", Numbers(), run,
        "parts whose name contains this",
    ),
)  # fmt: skip
