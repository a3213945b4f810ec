"""Keyed state in RocksDB for very many devices, with a stop, a kill and restarts.

Prints the rows and bytes of state, the duration of micro-batches, the JVM's memory (which must stay within its heap
plus what RocksDB may use, however large the state), and the time from a restart to the first micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Final, NamedTuple

from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.spark.filling import Reading, fill
from loadtest.spark.job import Job
from loadtest.spark.readings import Topics, make_topics
from loadtest.verify import stored

PARTITIONS: Final = 3
BESIDE_HEAP: Final = 1 << 30
"""JVM memory allowed beyond the heap: code, threads, and RocksDB's caches and buffers."""
DONE_S: Final = 1_800.0
MIB: Final = 1 << 20
FILE: Final = """
job = "last-known"
source = {{ topics = ["{source}"], decode = "none", dead_letters = "{letters}" }}
sink = {{ kafka = "{target}" }}
run = {{ checkpoint = "{checkpoint}", driver_memory = "{heap}" }}
"""


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        devices: each has one row of state.
        again: devices that send again after each restart.
        heap: Java heap of the job.
    """

    devices: int = 1_000_000
    again: int = 200_000
    heap: str = "1g"


async def run(stand: Stand, plan: Plan) -> None:
    """Fill, restart after a stop and after a kill: all devices must be there, and memory be bounded."""
    bootstrap, directory = await stand.kafka(), stand.directory
    topics = await make_topics(bootstrap, PARTITIONS, compacted=True)
    file = directory / "state.toml"
    file.write_text(
        FILE.format(
            source=topics.source, target=topics.target, letters=topics.dead_letter,
            checkpoint=directory / "checkpoint", heap=plan.heap,
        )
    )  # fmt: skip
    await fill(bootstrap, topics.source, PARTITIONS, _all(plan.devices))
    async with Job(bootstrap, topics, directory, file=file, quick_start=False) as job:
        resident = [await _seen(job, "first start")]
        code = await job.stopped()
        await fill(bootstrap, topics.source, PARTITIONS, _some(plan, 1))
        resident.append(await _seen(job, "after a stop"))
        await job.kill()
        await fill(bootstrap, topics.source, PARTITIONS, _some(plan, 2))
        resident.append(await _seen(job, "after a kill"))
        code = await job.stopped() or code
    rows = job.batches()[-1]["state_rows"]
    wrong = await _wrong(bootstrap, topics)
    on_disk = sum(path.stat().st_size for path in (directory / "checkpoint").rglob("*") if path.is_file())
    bounded = max(resident) <= _bytes(plan.heap) + BESIDE_HEAP
    stand.row(**{
        "devices": plan.devices, "rows of state": rows, "checkpoint MiB": on_disk // MIB,
        "JVM MiB at most": max(resident) // MIB, "heap": plan.heap, "wrong devices": wrong,
    })  # fmt: skip
    stand.check(rows == plan.devices and not wrong, f"{rows} rows of state, {wrong} devices with a wrong last value")
    stand.check(bounded and code == 0, f"exit code {code}, {max(resident) // MIB} MiB")


async def _seen(job: Job, what: str) -> int:
    """Start the job, wait until it has read everything, and return the JVM's peak memory in bytes."""
    before = len(job.batches())
    began = time.monotonic()
    await job.start()
    ready = time.monotonic() - began
    await job.wait_until(lambda: len(job.batches()) > before, DONE_S)
    first = time.monotonic() - began
    await job.wait_until(lambda: job.batches()[-1]["lag"] == 0, DONE_S)
    seconds, resident = time.monotonic() - began, job.most_resident()
    new = job.batches()[before:]
    took = [line["duration_ms"] / 1000 for line in new]
    print(
        f"{what}: running after {ready:.1f} s, first micro-batch done after {first:.1f} s, all after {seconds:.1f} s; "
        f"{len(new)} batches, median {median(took):.1f} s, maximum {max(took):.1f} s; {job.cpu():.1f} CPU s; state "
        f"{new[-1]['state_rows']:,} rows, {new[-1]['state_bytes'] >> 20:,} MiB; JVM peak {resident >> 20:,} MiB",
        flush=True,
    )
    return resident


def _all(devices: int) -> Iterator[Reading]:
    now = int(time.time() * 1000)
    return (Reading(device, device, now) for device in range(devices))


def _some(plan: Plan, number: int) -> Iterator[Reading]:
    now = int(time.time() * 1000)
    step = max(1, plan.devices // plan.again)
    return (Reading(device, device + number, now) for device in range(0, plan.devices, step))


async def _wrong(bootstrap: str, topics: Topics) -> int:
    """The number of devices whose last result differs from their last reading."""
    newest = [
        {record.key: record.value async for record in stored(bootstrap, topic, partition_bytes=8 << 20)}
        for topic in (topics.source, topics.target)
    ]
    return sum(newest[1].get(key) != value for key, value in newest[0].items())


def _bytes(heap: str) -> int:
    return int(heap[:-1]) << {"m": 20, "g": 30}[heap[-1]]


SCENARIOS = (Scenario("state", "keep one row of state for each of very many devices, on disk", Plan(), run),)
