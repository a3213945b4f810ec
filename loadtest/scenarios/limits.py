"""A limit of bytes per second is met in each protocol, into Kafka and out of it.

One connection at a time sends or receives as much as it is allowed. Bytes are counted after the burst is used up, like
the limit counts them: MQTT payloads, AMQP messages, HTTP bodies and events.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from typing import Any, Final

from loadtest.clients.crowd.lanes import PARTS, Lane, Limit
from loadtest.clients.topics import create_topic
from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.gateway import GatewayProcess

EXACT: Final = 0.05
"""The largest deviation from the limit."""
_TICK_S: Final = 0.01


async def measure(gateway: GatewayProcess, name: str, plan: Limit) -> float:
    """Return the bytes per second of one part, on its own topic."""
    count = 0

    def took(size: int) -> None:
        nonlocal count
        count += size

    async def change() -> tuple[float, int]:
        """Wait until the count changes: pages arrive a second apart."""
        before = count
        while count == before:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(_TICK_S)
        return time.monotonic(), count

    topic = f"limits-{secrets.token_hex(4)}"
    await create_topic(gateway.kafka, topic, 1)
    async with PARTS[name](Lane(gateway, plan, topic, took)):
        while count < 2 * plan.rate:  # noqa: ASYNC110 - the burst, and as much again
            await asyncio.sleep(_TICK_S)
        began, before = await change()
        await asyncio.sleep(plan.seconds)
        ended, after = await change()
        return (after - before) / (ended - began)


def check(name: str, bytes_s: float, plan: Limit) -> list[str]:
    """Return a problem if a part does not meet its limit."""
    if abs(bytes_s - plan.rate) <= EXACT * plan.rate:
        return []
    return [f"{name}: {bytes_s / 1000:.1f} kB/s, the limit is {plan.rate / 1000:.1f}"]


async def run(stand: Stand, plan: Limit) -> None:
    """Measure each part, each connection with its own limit in both directions."""
    rule: dict[str, Any] = {"per": "connection", "in_bytes_per_s": plan.rate, "out_bytes_per_s": plan.rate}
    async with stand.gateway({"TRIVIUM_LIMITS__RULES": json.dumps([rule])}) as gateway:
        for name in filter(stand.wants, PARTS):
            bytes_s = await measure(gateway, name, plan)
            stand.row(**{"": name, "kB/s": round(bytes_s / 1000, 1), "of the limit": round(bytes_s / plan.rate, 4)})
            stand.problems += check(name, bytes_s, plan)


SCENARIOS = (
    Scenario(
        "limits", "check a limit of bytes per second for each protocol in both directions", Limit(), run,
        "parts whose name contains this: mqtt, in, out, pages, ...",
    ),
)  # fmt: skip
