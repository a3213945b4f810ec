"""Scenario `table`: measures every figure about MQTT's speed in `docs/performance.md`, on its own gateway.

On a machine with two processors the gateway has the first to itself; Kafka and the load share the second.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from loadtest.bare import Stored, store_beside
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Numbering
from loadtest.scenarios.fan_out import Fan, fan_out
from loadtest.scenarios.steady import Load, send, verify_load
from loadtest.verify import Ledger


class Publishing(NamedTuple):
    """A row about publishing: a load for `steady`."""

    name: str
    qos: int
    connections: int
    window: int
    messages: int
    rate: float | None = None
    topics: int = 0


class Spreading(NamedTuple):
    """A row about deliveries: a load for `fan-out`."""

    name: str
    fan: Fan


BARE: Final = "bare aiokafka, no client"
BARE_S: Final = 3.0
OPEN: Final = 256
"""The gateway's Receive Maximum: a rate fills it only if PUBACKs are late."""

ROWS: Final[tuple[Publishing | Spreading, ...]] = (
    Publishing("QoS 1, 10 x 100", 1, 10, 100, 600_000),
    Publishing("QoS 1, 1 x 100", 1, 1, 100, 300_000),
    Publishing("QoS 1, 1 x 1", 1, 1, 1, 3_000),
    Publishing("QoS 1, 100 x 20", 1, 100, 20, 600_000),
    Publishing("QoS 1, 100 x 20, to 100 topics with a property each", 1, 100, 20, 400_000, topics=100),
    Publishing("QoS 1, fan-in 1,000 x 10", 1, 1000, 10, 500_000),
    Publishing("QoS 1, 1,000 connections, 1,000/s", 1, 1000, 10, 10_000, 1000.0),
    Publishing("QoS 2, 10 x 100", 2, 10, 100, 300_000),
    Publishing("QoS 0, 10 connections", 0, 10, 100, 1_000_000),
    Spreading("fan-out to 1,000 at QoS 0", Fan(subscribers=1000, messages=2000)),
    Spreading("fan-out to 1,000, 100/s", Fan(subscribers=1000, messages=500, rate=100.0, window=OPEN)),
    Spreading("fan-out to 1,000, 200/s", Fan(subscribers=1000, messages=2000, rate=200.0, window=OPEN)),
    Spreading("fan-out to 1,000, 1,000/s", Fan(subscribers=1000, messages=10_000, rate=1000.0, window=OPEN)),
    Spreading("to 125 beside 100,000 other filters", Fan(subscribers=125, messages=5000, extra=100_000)),
)


def make_way() -> set[int]:
    """Leave the first processor to the gateway: this process, and a Kafka that it starts, use the others.

    Returns:
        the processors for the gateway.
    """
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) > 1:
        os.sched_setaffinity(0, processors[1:])
    return set(processors[:1])


async def measure(
    gateway: GatewayProcess, rounds: int, share: float, wanted: str, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Run the rows whose name contains `wanted`, each `rounds` times, with `share` of its messages.

    Returns:
        the columns of a report: for each row the round with the least CPU per message, which other activity of the
        machine has disturbed least.
    """
    found = [await beside_aiokafka(gateway, rounds, share, say)]
    for row in ROWS:
        if wanted not in row.name:
            continue
        best: dict[str, Any] | None = None
        for number in range(rounds):
            if isinstance(row, Publishing):
                columns, cost = await _publishing(gateway, row, share)
            else:
                columns, cost = await _spreading(gateway, row, share)
            say(f"{row.name}, round {number + 1}: {columns['per second']:,}/s, {cost:.2f} us")
            if best is None or cost < best["cpu us"]:
                best = {"": row.name, **columns, "cpu us": round(cost, 2), "load": round(os.getloadavg()[0], 1)}
        assert best is not None
        found.append(best)
    return found


async def beside_aiokafka(
    gateway: GatewayProcess, rounds: int, share: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the first row of every table: the cost of aiokafka alone on the gateway's processors; the best round."""
    topic = f"bare-{Numbering().run}"
    await create_topic(gateway.kafka, topic)
    best: Stored | None = None
    for number in range(rounds + 1):  # the first does not count: the broker's JVM is still compiling
        stored = await store_beside(gateway.kafka, topic, BARE_S * share, os.sched_getaffinity(gateway.pid))
        if number:
            say(f"{BARE}, round {number}: {stored.rate:,.0f}/s, {stored.cpu_us:.2f} us")
            best = min(best or stored, stored, key=lambda one: one.cpu_us)
    assert best is not None
    return {"": BARE, **best.row()}


async def _publishing(gateway: GatewayProcess, row: Publishing, share: float) -> tuple[dict[str, Any], float]:
    numbering, ledger = Numbering(), Ledger()
    topic = f"table-{numbering.run}"
    await create_topic(gateway.kafka, topic)
    messages = max(row.connections, int(row.messages * share))
    load = Load(
        "mqtt", gateway.addresses["mqtt"], topic, row.connections, row.window, messages, rate=row.rate, qos=row.qos,
        topics=row.topics,
    )  # fmt: skip
    measured = await send(load, numbering, ledger, gateway.pid)
    verdict = await verify_load(gateway.kafka, load, numbering, ledger)
    lost = verdict.lost if row.qos else messages // row.connections * row.connections - verdict.stored
    columns = {
        "per second": round(measured.answered / measured.seconds),
        "p50 ms": measured.latencies.milliseconds(50) if row.qos else "",
        "p99 ms": measured.latencies.milliseconds(99) if row.qos else "",
        "lost": lost,
        "doubled": verdict.duplicated,
        "out of order": verdict.reordered,
        "errors": len(measured.errors) + sum(measured.refused.values()),
    }
    return columns, measured.cpu_us


async def _spreading(gateway: GatewayProcess, row: Spreading, share: float) -> tuple[dict[str, Any], float]:
    fan = row.fan._replace(messages=max(1, int(row.fan.messages * share)))
    spread = await fan_out(gateway.kafka, gateway.address("mqtt"), fan, gateway.pid)
    columns = {
        "per second": round(spread.deliveries / spread.seconds),
        "p50 ms": spread.latencies.milliseconds(50),
        "p99 ms": spread.latencies.milliseconds(99),
        "PUBACK p99 ms": spread.puback_ms["p99"],
        "beside p99 ms": spread.modest_ms["p99"],
        "generator": round(spread.generator, 2),
        "lost": spread.lost,
    }
    return columns, spread.cpu_us
