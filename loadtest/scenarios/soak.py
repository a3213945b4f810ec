"""All protocols in both directions for long; memory, descriptors and tasks of the gateway must not grow.

Messages are sent in courses: new connections send some thousands, new connections receive them, all are compared and
every connection is closed. So leaks per message and leaks per connection both show. One HTTP
consumer polls through all courses.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import aiohttp

from loadtest import plot
from loadtest.clients.crowd.readers import Open, Reader, Readers
from loadtest.clients.topics import create_topic
from loadtest.engine.command import Scenario
from loadtest.engine.growth import flat, growth
from loadtest.engine.stand import MIB, Stand
from loadtest.engine.steady import PROTOCOLS, Steady, send
from loadtest.gateway import GatewayProcess, process_cpu, process_descriptors, process_resident
from loadtest.numbering import Numbering
from loadtest.verify import Ledger

RETENTION: Final = {"retention.bytes": "67108864", "segment.bytes": "16777216"}
QUALITIES: Final = (1, 2, 0)  # QoS of MQTT's courses, in turn
TASKS: Final = "trivium_event_loop_tasks"
ENOUGH: Final = 20
"""Problems after which a protocol ends."""
MEASURES: Final = {"rss": (0.03, 4 * MIB), "descriptors": (0.05, 3), "tasks": (0.05, 3)}
"""What must be flat: it may grow by this share, or by this much, from settling to the end."""


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        minutes: the duration, unless `messages` is reached before.
        messages: of each protocol; none: as many as fit into the time.
        protocol: only this protocol; repeatable.
        rate: messages per second of each protocol; 0: as fast as they are acknowledged.
        course: messages of one course.
        connections: senders of one course.
        size: payload bytes.
        interval: seconds between samples.
        settle: seconds before measurements count.
        patience: seconds without a message after which missing messages are lost.
    """

    minutes: float = 30.0
    messages: int | None = None
    protocol: tuple[Literal["mqtt", "amqp", "http"], ...] = ()
    rate: float = 1000.0
    course: int = 10_000
    connections: int = 4
    size: int = 100
    interval: float = 5.0
    settle: float = 300.0
    patience: float = 30.0


class Sample(NamedTuple):
    """The gateway at one moment; seconds since the start, bytes."""

    seconds: float
    rss: int
    descriptors: int
    tasks: int
    sent: int
    received: int
    cpu: float


def check(samples: Sequence[Sample], settle_s: float) -> list[str]:
    """Return the measures that are not flat."""
    found: list[str] = []
    for name, (share, least) in MEASURES.items():
        found += flat(name, [(one.seconds, getattr(one, name)) for one in samples], share, least, settle_s)
    return found


def judge(reader: Reader, ledger: Ledger, quality: int) -> list[str]:
    """Return what a reader got too little, twice or out of order; at QoS 0 messages may be lost."""
    verdict = reader.arrivals.verdict(ledger)
    return verdict._replace(lost=verdict.lost if quality else 0).problems(once=True)


class Soak:
    """One run.

    Attributes:
        samples: so far.
        sent: acknowledged messages.
        received: by all readers.
    """

    def __init__(self, stand: Stand, gateway: GatewayProcess, plan: Plan) -> None:
        self.samples: list[Sample] = []
        self.sent = self.received = 0
        self._stand, self._gateway, self._plan = stand, gateway, plan
        self._numbering = Numbering()
        self._readers = Readers(gateway, plan.size, plan.patience)
        self._over = False

    async def run(self) -> None:
        """Run until the time is over, or every protocol has sent its messages."""
        began = time.perf_counter()
        protocols = self._plan.protocol or PROTOCOLS
        for protocol in protocols:
            await create_topic(self._gateway.kafka, self._topic(protocol), configs=RETENTION)
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(self._sample(began))
            runs = [group.create_task(self._courses(protocol)) for protocol in protocols]
            await asyncio.wait(runs, timeout=self._plan.minutes * 60)
            self._over = True
            await asyncio.wait(runs)
            sampling.cancel()
        self.samples.append(await self._look(began))

    def _topic(self, protocol: str) -> str:
        return f"soak-{protocol}-{self._numbering.run}"

    async def _sample(self, began: float) -> None:
        reported = 0.0
        while True:
            one = await self._look(began)
            self.samples.append(one)
            if one.seconds - reported >= 60:
                reported = one.seconds
                self._stand.say(f"{one.rss // MIB} MiB, {one}")
            await asyncio.sleep(self._plan.interval)

    async def _look(self, began: float) -> Sample:
        pid, tasks = self._gateway.pid, -1
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            tasks = int((await self._gateway.metrics()).get(TASKS, -1))
        return Sample(
            round(time.perf_counter() - began, 1), process_resident(pid), process_descriptors(pid), tasks, self.sent,
            self.received, process_cpu(pid),
        )  # fmt: skip

    async def _courses(self, protocol: str) -> None:
        """Run courses of one protocol; an error is a problem, and the next course follows."""
        left, topic, failed = self._plan.messages, self._topic(protocol), 0
        consumer = self._readers.consumer(topic) if protocol == "http" else contextlib.nullcontext()
        async with consumer:
            for number in itertools.count():
                count = self._plan.course if left is None else min(self._plan.course, left)
                if self._over or not count or failed > ENOUGH:
                    return
                try:
                    await self._course(protocol, topic, number, count, self._readers.of[protocol])
                except (OSError, TimeoutError, aiohttp.ClientError) as error:
                    self._stand.problems.append(f"{protocol}, course {number}: {error!r}")
                    failed += 1
                left = None if left is None else left - count

    async def _course(self, protocol: str, topic: str, number: int, count: int, opens: Sequence[Open]) -> None:
        plan, prefix = self._plan, f"{self._numbering.run}-{protocol}-{number}"
        quality = QUALITIES[number % len(QUALITIES)] if protocol == "mqtt" else 1
        connections = min(plan.connections, count)
        whole = count // connections * connections
        load = Steady(
            protocol,
            connections,
            messages=whole,
            size=plan.size,
            rate=plan.rate or None,
            qos=quality,
            name=prefix,
            first=number * plan.connections,
        )
        readers, ledger = [Reader(self._numbering) for _ in opens], Ledger()
        async with contextlib.AsyncExitStack() as stack:
            for one, reader in zip(opens, readers, strict=True):
                await stack.enter_async_context(one(topic, prefix, reader))
            async with asyncio.timeout(plan.patience + (whole / plan.rate if plan.rate else 600)):
                measured = await send(load, self._gateway, topic, self._numbering, ledger)
            self.sent += measured.answered
            self._stand.check(not measured.refused, f"{prefix}: refused: {measured.refused}")
            self._stand.check(not measured.errors, f"{prefix}: {measured.errors}")
            while any(one.got < whole for one in readers):
                if time.monotonic() - max(one.moved for one in readers) > plan.patience:
                    break
                await asyncio.sleep(0.005)
            self._stand.problems += [
                f"{prefix}: {problem}" for one in readers for problem in judge(one, ledger, quality)
            ]
            self.received += sum(one.got for one in readers)


async def run(stand: Stand, plan: Plan) -> None:
    """Run all courses; nothing may be lost, and every curve be flat."""
    async with stand.gateway() as gateway:
        soak = Soak(stand, gateway, plan)
        await soak.run()
    samples = soak.samples
    stand.problems += check(samples, plan.settle)
    settled = [one for one in samples if one.seconds >= plan.settle]
    last = samples[-1]
    stand.row(**{
        "minutes": round(last.seconds / 60, 1), "sent": last.sent, "received": last.received,
        "cpu us/msg": round(last.cpu / max(1, last.sent + last.received) * 1e6, 1),
        "rss MiB at the end": round(last.rss / MIB, 1),
        "rss MiB at most": round(max(one.rss for one in samples) / MIB, 1),
        **{f"{name} growth": growth([(one.seconds, getattr(one, name)) for one in settled]) or 0 for name in MEASURES},
    })  # fmt: skip
    with (stand.directory / "soak.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Sample._fields)
        writer.writerows(samples)
    draw(stand.directory / "soak.svg", samples, plan.settle)
    stand.say(f"samples: {stand.directory}/soak.csv, soak.svg")


def draw(path: Path, samples: Sequence[Sample], settle_s: float) -> None:
    """Draw an SVG with a panel for each measure, and a line where measurements start to count."""
    end = samples[-1].seconds
    panels = [plot.Panel(name, {name: [(one.seconds, getattr(one, name)) for one in samples]}) for name in MEASURES]
    marks = [plot.Mark(settle_s, settle_s)] if settle_s < end else []
    note = f"0 to {end / 60:.1f} minutes; counted from {settle_s / 60:.1f} on"
    path.write_text(plot.draw(panels, end, note=note, marks=marks))


SCENARIOS = (
    Scenario(
        "soak",
        "run all protocols in both directions for long; nothing in the gateway may grow",
        Plan(),
        run,
        lines=False,
    ),
)
