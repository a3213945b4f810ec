"""Scenario `reads`: HTTP consumers read the same records in every round; read records must not stay in memory."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from loadtest.bench.http_client import Connection
from loadtest.clients.topics import create_topic, store
from loadtest.gateway import GatewayProcess, process_cpu, process_resident

PARTITIONS: Final = 3
POLLED_BYTES: Final = 1 << 20
SETTLED: Final = 3
"""Rounds after which memory should be stable: buffers and heap space are allocated in the first ones."""
SHARE: Final = 0.05
LEAST: Final = 8 * 1024 * 1024
"""The memory growth, in bytes, that is allowed from there to the end, unless `SHARE` allows more."""


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        rounds: how often all records are read.
        records: read in each round.
        size: bytes of a record's value.
    """

    rounds: int = 20
    records: int = 400_000
    size: int = 100


class Round(NamedTuple):
    """The state after one round: records read, resident bytes, CPU seconds since the start."""

    records: int
    resident: int
    cpu: float


async def fill(bootstrap: str, topic: str, plan: Plan) -> None:
    """Create the topic and its records."""
    await create_topic(bootstrap, topic, PARTITIONS)
    value = json.dumps({"text": "x" * max(0, plan.size - len('{"text": ""}'))}).encode()
    await store(bootstrap, topic, PARTITIONS, [value] * plan.records)


async def read_all(connection: Connection, topic: str, name: str, expected: int) -> int:
    """Read a topic from its beginning with a consumer in its own group; return the number of records."""
    group = f"/consumers/{topic}-{name}"
    await connection.ask("POST", group, {"name": name, "format": "json", "auto.offset.reset": "earliest"})
    place = f"{group}/instances/{name}"
    await connection.ask("POST", f"{place}/subscription", {"topics": [topic]})
    records = idle = 0
    while records < expected and idle < 10:
        page = await connection.ask("GET", f"{place}/records?timeout=3000&max_bytes={POLLED_BYTES}")
        found = page.count(b'"offset":')
        records += found
        idle = 0 if found else idle + 1
    await connection.ask("DELETE", place)
    return records


async def read(gateway: GatewayProcess, plan: Plan, say: Callable[[str], None]) -> list[Round]:
    """Run all rounds against `gateway`."""
    topic = f"reads-{uuid.uuid4().hex[:8]}"
    await fill(gateway.kafka, topic, plan)
    rounds: list[Round] = []
    connection = await Connection.open(gateway.address("http"))
    try:
        for number in range(plan.rounds):
            records = await read_all(connection, topic, f"r{number}", plan.records)
            rounds.append(Round(records, process_resident(gateway.pid), process_cpu(gateway.pid)))
            say(f"round {number + 1}: {records} records, {rounds[-1].resident / 1024 / 1024:.1f} MiB resident")
    finally:
        connection.close()
    return rounds


def check(rounds: Sequence[Round], plan: Plan) -> list[str]:
    """Return the problems: missing records, or growing memory."""
    problems = [
        f"round {number}: {one.records} of {plan.records} records"
        for number, one in enumerate(rounds, 1)
        if one.records != plan.records
    ]
    settled = [one.resident for one in rounds[min(SETTLED, len(rounds)) - 1 :]]
    grown = settled[-1] - settled[0]
    if grown > max(LEAST, SHARE * settled[0]):
        problems.append(f"memory grew by {grown / 1024 / 1024:.1f} MiB since round {SETTLED}")
    return problems
