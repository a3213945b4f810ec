"""Scenario `table`: measures every figure about MQTT's speed in `docs/performance.md`, on its own gateway.

On a machine with two processors the gateway has the first to itself; Kafka and the load share the second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from loadtest.bare import Stored, store_beside
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Numbering
from loadtest.scenarios.fan_out import Fan, fan_out
from loadtest.scenarios.steady import Load, send, verify_load
from loadtest.verify import Ledger

Columns = dict[str, Any]


class Row(Protocol):
    """A row of a table."""

    async def run(self, gateway: GatewayProcess, share: float) -> Columns:
        """Run it once with this share of its messages, and return its columns, among them `cpu us`, of a message."""


class Publishing(NamedTuple):
    """A row about publishing: a load for `steady`."""

    qos: int
    connections: int
    window: int
    messages: int
    rate: float | None = None
    topics: int = 0

    async def run(self, gateway: GatewayProcess, share: float) -> Columns:
        """See `Row`."""
        numbering, ledger = Numbering(), Ledger()
        topic = f"table-{numbering.run}"
        await create_topic(gateway.kafka, topic)
        messages = max(self.connections, int(self.messages * share))
        load = Load(
            "mqtt", gateway.addresses["mqtt"], topic, self.connections, self.window, messages, rate=self.rate,
            qos=self.qos, topics=self.topics,
        )  # fmt: skip
        measured = await send(load, numbering, ledger, gateway.pid)
        verdict = await verify_load(gateway.kafka, load, numbering, ledger)
        return {
            "per second": round(measured.answered / measured.seconds),
            "p50 ms": measured.latencies.milliseconds(50) if self.qos else "",
            "p99 ms": measured.latencies.milliseconds(99) if self.qos else "",
            "lost": verdict.lost if self.qos else messages // self.connections * self.connections - verdict.stored,
            "doubled": verdict.duplicated,
            "out of order": verdict.reordered,
            "errors": len(measured.errors) + sum(measured.refused.values()),
            "cpu us": round(measured.cpu_us, 2),
        }


class Spreading(NamedTuple):
    """A row about deliveries: a load for `fan-out`."""

    fan: Fan

    async def run(self, gateway: GatewayProcess, share: float) -> Columns:
        """See `Row`."""
        fan = self.fan._replace(messages=max(1, int(self.fan.messages * share)))
        spread = await fan_out(gateway.kafka, gateway.address("mqtt"), fan, gateway.pid)
        return {
            "per second": round(spread.deliveries / spread.seconds),
            "p50 ms": spread.latencies.milliseconds(50),
            "p99 ms": spread.latencies.milliseconds(99),
            "PUBACK p99 ms": spread.puback_ms["p99"],
            "beside p99 ms": spread.modest_ms["p99"],
            "generator": round(spread.generator, 2),
            "lost": spread.lost,
            "cpu us": round(spread.cpu_us, 2),
        }


BARE: Final = "bare aiokafka, no client"
BARE_S: Final = 3.0
OPEN: Final = 256
"""The gateway's Receive Maximum: a rate fills it only if PUBACKs are late."""

ROWS: Final[Mapping[str, Row]] = {
    "QoS 1, 10 x 100": Publishing(1, 10, 100, 600_000),
    "QoS 1, 1 x 100": Publishing(1, 1, 100, 300_000),
    "QoS 1, 1 x 1": Publishing(1, 1, 1, 3_000),
    "QoS 1, 100 x 20": Publishing(1, 100, 20, 600_000),
    "QoS 1, 100 x 20, to 100 topics with a property each": Publishing(1, 100, 20, 400_000, topics=100),
    "QoS 1, fan-in 1,000 x 10": Publishing(1, 1000, 10, 500_000),
    "QoS 1, 1,000 connections, 1,000/s": Publishing(1, 1000, 10, 10_000, 1000.0),
    "QoS 2, 10 x 100": Publishing(2, 10, 100, 300_000),
    "QoS 0, 10 connections": Publishing(0, 10, 100, 1_000_000),
    "fan-out to 1,000 at QoS 0": Spreading(Fan(subscribers=1000, messages=2000)),
    "fan-out to 1,000, 100/s": Spreading(Fan(subscribers=1000, messages=500, rate=100.0, window=OPEN)),
    "fan-out to 1,000, 200/s": Spreading(Fan(subscribers=1000, messages=2000, rate=200.0, window=OPEN)),
    "fan-out to 1,000, 1,000/s": Spreading(Fan(subscribers=1000, messages=10_000, rate=1000.0, window=OPEN)),
    "to 125 beside 100,000 other filters": Spreading(Fan(subscribers=125, messages=5000, extra=100_000)),
}


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
) -> list[Columns]:
    """Measure the rows about MQTT; see `best_of`."""
    return await best_of(ROWS, gateway, rounds, share, wanted=wanted, say=say)


async def best_of(
    rows: Mapping[str, Row],
    gateway: GatewayProcess,
    rounds: int,
    share: float,
    *,
    wanted: str,
    say: Callable[[str], None],
) -> list[Columns]:
    """Run the rows whose name contains `wanted`, each `rounds` times, with `share` of its messages.

    Returns:
        the columns of a report: for each row the round with the least CPU per message, which other activity of the
        machine has disturbed least.
    """
    found = [await beside_aiokafka(gateway, rounds, share, say)]
    for name, row in rows.items():
        if wanted not in name:
            continue
        all_rounds: list[Columns] = []
        for number in range(rounds):
            columns = await row.run(gateway, share)
            say(f"{name}, round {number + 1}: {columns}")
            all_rounds.append({"": name, **columns, "load": round(os.getloadavg()[0], 1)})
        found.append(min(all_rounds, key=lambda one: float(one["cpu us"])))
    return found


async def beside_aiokafka(gateway: GatewayProcess, rounds: int, share: float, say: Callable[[str], None]) -> Columns:
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
