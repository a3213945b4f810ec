"""Every figure about speed in `docs/performance.md`, a row of a table each: MQTT, AMQP, HTTP, server-sent events.

On a machine with two processors the gateway has the first to itself; Kafka and the load share the second. Everything
that is acknowledged is compared with Kafka, and everything delivered with what was sent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from loadtest.bare import Stored, store_beside
from loadtest.clients.amqp_messages import encodings, jms_text, many_keys, minimal, typical
from loadtest.clients.topics import create_topic
from loadtest.engine.command import Scenario
from loadtest.engine.fan_out import Fan
from loadtest.engine.rows import BAD, Columns, Draining, Polling, Row, Through, Uploading, measure
from loadtest.engine.stand import Stand
from loadtest.engine.steady import Steady
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Numbering

BARE: Final = "bare aiokafka, no client"
BARE_S: Final = 3.0
WARMING: Final = 1_500_000  # messages


class Table(NamedTuple):
    """Parameters.

    Attributes:
        rounds: of each row; the least CPU counts, which the machine has disturbed least.
        share: share of the messages, for a quick test.
    """

    rounds: int = 3
    share: float = 1.0


def _sending(connections: int, window: int, messages: int, kind: Any = minimal) -> Steady:
    """Return AMQP senders of unsettled messages that keep their windows full."""
    return Steady("amqp", connections, window, messages, kind=kind)


def _spreading(messages: int, rate: float | None = None) -> Fan:
    """Return a fan-out to 1,000; a rate fills the gateway's Receive Maximum only if PUBACKs are late."""
    return Fan(messages=messages, rate=rate, window=256 if rate else 100)


TABLES: Final[Mapping[str, Mapping[str, Row]]] = {
    "table": {
        "QoS 1, 10 x 100": Steady(messages=600_000),
        "QoS 1, 1 x 100": Steady(connections=1, messages=300_000),
        "QoS 1, 1 x 1": Steady(connections=1, window=1, messages=3_000),
        "QoS 1, 100 x 20": Steady(connections=100, window=20, messages=600_000),
        "QoS 1, 100 x 20, to 100 topics with a property each": Steady("mqtt", 100, 20, 400_000, topics=100),
        "QoS 1, fan-in 1,000 x 10": Steady("mqtt", 1000, 10, 500_000),
        "QoS 1, fleet of 1,000, 10/s each": Steady("mqtt", 1000, 10, 100_000, rate=10_000.0),
        "QoS 1, fleet of 5,000, 5/s each": Steady("mqtt", 5000, 10, 200_000, rate=25_000.0),
        "QoS 2, 10 x 100": Steady(messages=300_000, qos=2),
        "QoS 0, 10 connections": Steady(messages=1_000_000, qos=0),
        "fan-out to 1,000 at QoS 0": _spreading(2000),
        "fan-out to 1,000, 100/s": _spreading(500, 100.0),
        "fan-out to 1,000, 200/s": _spreading(2000, 200.0),
        "fan-out to 1,000, 1,000/s": _spreading(10_000, 1000.0),
        "to 125 beside 100,000 other filters": Fan(subscribers=125, messages=5000, extra=100_000),
    },
    "amqp": {
        "in, 10 links x 1,000": _sending(10, 1000, 600_000),
        "in, 10 links x 1,000, 100 keys": _sending(10, 1000, 400_000, many_keys),
        "in, 10 links x 1,000, typical": _sending(10, 1000, 300_000, typical),
        "in, 10 links x 1,000, jms": _sending(10, 1000, 300_000, jms_text),
        "in, 10 links x 1,000, any encoding": _sending(10, 1000, 300_000, encodings),
        "in, 10 links x 100": _sending(10, 100, 600_000),
        "in, 1 link x 1,000": _sending(1, 1000, 300_000),
        "in, 100 links x 100": _sending(100, 100, 400_000),
        "in, 1 in flight": _sending(1, 1, 4_000),
        "out, 10 receivers of all, settled": Draining(10, 100_000, settled=True),
        "out, 10 receivers of all, accepted": Draining(10, 100_000),
        "out, 10 receivers of a queue, accepted": Draining(10, 300_000, queue=True),
        "in and out at once, 1 + 1": Through(300_000, 1000),
        "end to end, 1 in flight": Through(3_000, 1),
    },
    "http": {
        "POST of one record, 1 connection": Steady("http", 1, 1, 3_000, batch=1),
        "POST of one record, 64 connections": Steady("http", 64, 1, 60_000, batch=1),
        "POST of 100 records, 16 connections": Steady("http", 16, 100, 600_000),
        "upload of lines, 1 connection": Uploading(1, 600_000),
        "upload of lines, 4 connections": Uploading(4, 600_000),
        "poll, json": Polling("json", 600_000),
        "poll, binary": Polling("binary", 600_000),
    },
}


def _check(stand: Stand, row: Columns) -> None:
    stand.problems += [f"{row['']}: {name} {row[name]}" for name in BAD if row.get(name)]


def _table(name: str) -> Any:
    async def run(stand: Stand, plan: Table) -> None:
        """Measure the wanted rows, after the cost of aiokafka alone."""
        async with stand.gateway() as gateway:
            await _bare(stand, gateway, plan)
            if name == "amqp":  # the broker's JVM is still compiling
                await measure(_sending(10, 1000, WARMING), gateway, plan.share)
            for title, row in TABLES[name].items():
                if not stand.wants(title):
                    continue
                rounds: list[Columns] = []
                for number in range(plan.rounds):
                    rounds.append(await measure(row, gateway, plan.share))
                    stand.say(f"{title}, round {number + 1}: {rounds[-1]}")
                    _check(stand, {"": title, **rounds[-1]})
                best = min(rounds, key=lambda one: float(one["cpu us"]))
                stand.row(**{"": title, **best, "load": round(os.getloadavg()[0], 1)})

    return run


async def _bare(stand: Stand, gateway: GatewayProcess, plan: Table) -> None:
    """Add the first row of every table: aiokafka alone on the gateway's processors; the best round."""
    topic = f"bare-{Numbering().run}"
    await create_topic(gateway.kafka, topic)
    best: Stored | None = None
    for number in range(plan.rounds + 1):  # the first does not count: the broker's JVM is still compiling
        stored = await store_beside(gateway.kafka, topic, BARE_S * plan.share, os.sched_getaffinity(gateway.pid))
        if number:
            best = min(best or stored, stored, key=lambda one: one.cpu_us)
    assert best is not None
    stand.row(**{"": BARE, **best.row()})


class Crowd(NamedTuple):
    """Parameters.

    Attributes:
        listeners: number of listeners.
        messages: number of messages, published at QoS 1 over MQTT.
        rate: messages per second.
        size: payload bytes.
        late: the most seconds that a listener may be behind the publisher.
    """

    listeners: int = 1000
    messages: int = 2000
    rate: float = 100.0
    size: int = 100
    late: float = 1.0


async def sse(stand: Stand, plan: Crowd) -> None:
    """Run many listeners to server-sent events; none may fall behind."""
    fan = Fan(plan.listeners, plan.messages, plan.messages, plan.rate, plan.size, events=True)
    async with stand.gateway() as gateway:
        row = {"": f"{plan.listeners:,} listeners, {plan.rate:g}/s", **await measure(fan, gateway, 1.0)}
    stand.row(**row)
    _check(stand, row)
    stand.check(row["p99 ms"] <= 1000 * plan.late, f"listeners were {row['p99 ms'] / 1000:.2f} s behind (p99)")


_ONLY: Final = "rows whose name contains this"
SCENARIOS = (
    Scenario("table", "measure every figure about MQTT's speed", Table(), _table("table"), _ONLY, pins=True),
    Scenario("amqp", "measure every figure about AMQP's speed", Table(), _table("amqp"), _ONLY, pins=True),
    Scenario("http", "measure every figure about HTTP's throughput", Table(), _table("http"), _ONLY, pins=True),
    Scenario("sse", "run many listeners to server-sent events; none may fall behind", Crowd(), sse, pins=True),
)  # fmt: skip
