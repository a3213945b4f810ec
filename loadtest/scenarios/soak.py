"""Scenario `soak`: all protocols in both directions for long; memory, descriptors and tasks must not grow.

Messages are sent in courses: new connections send some thousands, new connections receive them, all are counted and
every connection is closed. So leaks per message and leaks per connection both show. One HTTP consumer polls through all
courses.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp

from loadtest import plot
from loadtest.beside import beside
from loadtest.clients import amqp_receiver, mqtt
from loadtest.clients.joining import join
from loadtest.clients.pace import Pace
from loadtest.clients.sender import Sender
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess, process_cpu, process_descriptors, process_resident
from loadtest.numbering import Numbering
from loadtest.scenarios.steady import PROTOCOLS, Load, make_sender
from loadtest.verify import Ledger

RECORDS: Final = "application/vnd.kafka.text.v2+json"
CONSUMERS: Final = "application/vnd.kafka.v2+json"
RETENTION: Final = {"retention.bytes": "67108864", "segment.bytes": "16777216"}
TICK_S: Final = 0.005
MIB: Final = 1024 * 1024
QUALITIES: Final = (1, 2, 0)  # QoS of MQTT's courses, in turn
TASKS: Final = "trivium_event_loop_tasks"
Say = Callable[[str], None]


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        minutes: the duration, unless `messages` is reached before.
        messages: of each protocol. None means as many as fit into the time.
        protocols: the protocols to run.
        rate: messages per second of each protocol. None means as fast as they are acknowledged.
        course: messages of one course.
        connections: senders of one course.
        size: payload bytes.
        interval: seconds between samples.
        settle: seconds before measurements count.
        patience: seconds without a message after which missing messages are lost.
    """

    minutes: float = 30.0
    messages: int | None = None
    protocols: tuple[str, ...] = PROTOCOLS
    rate: float | None = 1000.0
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


class Measure(NamedTuple):
    """A measure that must be flat: it may grow by this share, or by `least`, from settling to the end."""

    name: str
    share: float
    least: float
    unit: float = 1.0


MEASURES: Final = (
    Measure("rss", 0.03, 4 * MIB, MIB),
    Measure("descriptors", 0.05, 3),
    Measure("tasks", 0.05, 3),
)


class Soaked(NamedTuple):
    """The result."""

    samples: list[Sample]
    growth: dict[str, float]
    problems: list[str]

    def row(self) -> dict[str, float | int]:
        """Return the columns of a report."""
        last = self.samples[-1]
        return {
            "minutes": round(last.seconds / 60, 1),
            "sent": last.sent,
            "received": last.received,
            "cpu us/msg": round(last.cpu / max(1, last.sent + last.received) * 1e6, 1),
            "rss MiB at the end": round(last.rss / MIB, 1),
            "rss MiB at most": round(max(one.rss for one in self.samples) / MIB, 1),
            **{
                f"{measure.name} growth": round(self.growth[measure.name] / measure.unit, 2)
                for measure in MEASURES
                if measure.name in self.growth
            },
            "problems": len(self.problems),
        }


def growth(samples: Sequence[Sample], measure: Measure, settle: float) -> float | None:
    """Return the growth from `settle` to the end, ignoring a single peak; None if there are too few samples.

    It is the greater of the median slope of all pairs (Theil-Sen) times that span, which detects a steady rise, and
    the last third's median minus the first third's, which detects a step.
    """
    settled = [one for one in samples if one.seconds >= settle]
    if len(settled) < 3:
        return None
    slopes = (
        (getattr(later, measure.name) - getattr(earlier, measure.name)) / (later.seconds - earlier.seconds)
        for earlier, later in itertools.combinations(settled, 2)
        if later.seconds > earlier.seconds
    )
    third = len(settled) // 3
    ends = settled[:third], settled[-third:]
    first, last = (statistics.median(getattr(one, measure.name) for one in some) for some in ends)
    return max(float(statistics.median(slopes)) * (settled[-1].seconds - settled[0].seconds), float(last - first))


def check(samples: Sequence[Sample], settle: float) -> tuple[dict[str, float], list[str]]:
    """Return the growth of each measure, and the measures that are not flat."""
    grown: dict[str, float] = {}
    problems: list[str] = []
    for measure in MEASURES:
        much = growth(samples, measure, settle)
        if much is None:
            continue
        grown[measure.name] = much
        usual = statistics.median(getattr(one, measure.name) for one in samples if one.seconds >= settle)
        if much > max(measure.least, measure.share * usual):
            problems.append(
                f"{measure.name} is not flat: +{much / measure.unit:.1f} in {samples[-1].seconds - settle:.0f} s"
                f" at {usual / measure.unit:.1f}"
            )
    return grown, problems


class Soak:
    """One run."""

    def __init__(self, gateway: GatewayProcess, plan: Plan, say: Say) -> None:
        self._gateway = gateway
        self._plan = plan
        self._say = say
        self._numbering = Numbering()
        self._samples: list[Sample] = []
        self._problems: list[str] = []
        self._sent = self._received = 0
        self._over = False

    async def run(self) -> Soaked:
        """Run until the time is over, or every protocol has sent its messages."""
        plan = self._plan
        for protocol in plan.protocols:
            await create_topic(self._gateway.kafka, self._topic(protocol), configs=RETENTION)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(self._sample(began))
            runs = [group.create_task(self._protocol(protocol)) for protocol in plan.protocols]
            await asyncio.wait(runs, timeout=plan.minutes * 60)
            self._over = True
            await asyncio.wait(runs)
            sampling.cancel()
        self._samples.append(await self._look(began))
        grown, rising = check(self._samples, plan.settle)
        return Soaked(self._samples, grown, self._problems + rising)

    def _topic(self, protocol: str) -> str:
        return f"soak-{protocol}-{self._numbering.run}"

    # looking

    async def _sample(self, began: float) -> None:
        reported = 0.0
        while True:
            sample = await self._look(began)
            self._samples.append(sample)
            if sample.seconds - reported >= 60:
                reported = sample.seconds
                self._say(
                    f"{sample.seconds / 60:.0f} min: {sample.rss / MIB:.0f} MiB, {sample.descriptors} descriptors,"
                    f" {sample.tasks} tasks, {sample.sent:,} sent, {sample.received:,} received"
                )
            await asyncio.sleep(self._plan.interval)

    async def _look(self, began: float) -> Sample:
        pid = self._gateway.pid
        tasks = -1
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            tasks = int((await self._gateway.metrics()).get(TASKS, -1))
        return Sample(
            round(time.perf_counter() - began, 1),
            process_resident(pid),
            process_descriptors(pid),
            tasks,
            self._sent,
            self._received,
            process_cpu(pid),
        )

    # loading

    async def _protocol(self, protocol: str) -> None:
        """Run courses of one protocol; an error that ends them early is a problem."""
        try:
            await self._courses(protocol)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            self._problems.append(f"{protocol}: {error!r}")

    async def _courses(self, protocol: str) -> None:
        left = self._plan.messages
        topic = self._topic(protocol)
        async with contextlib.AsyncExitStack() as stack:
            if protocol == "http":
                poll = await stack.enter_async_context(self._consumer(topic))
            for number in itertools.count():
                count = self._plan.course if left is None else min(self._plan.course, left)
                if self._over or not count:
                    return
                try:
                    if protocol == "mqtt":
                        await self._course(protocol, topic, number, count, self._subscriber)
                    elif protocol == "amqp":
                        await self._course(protocol, topic, number, count, self._receiver)
                    else:
                        await self._course(protocol, topic, number, count, self._listener, poll)
                except (OSError, TimeoutError, aiohttp.ClientError, AssertionError) as error:
                    self._problems.append(f"{protocol}, course {number}: {error!r}")
                    if len(self._problems) > 20:
                        return
                if left is not None:
                    left -= count

    async def _course(self, protocol: str, topic: str, number: int, count: int, *readers: Callable[..., Any]) -> None:
        plan, loop = self._plan, asyncio.get_running_loop()
        quality = QUALITIES[number % len(QUALITIES)] if protocol == "mqtt" else 1
        prefix = f"{self._numbering.run}-{protocol}-{number}"
        load = Load(
            protocol, self._gateway.addresses[protocol], topic, plan.connections, size=plan.size, qos=quality,
        )  # fmt: skip
        got = [0] * len(readers)
        moved = loop.time()

        def on_messages(reader: int, times: int) -> None:
            nonlocal moved
            got[reader] += times
            self._received += times
            moved = loop.time()

        async with contextlib.AsyncExitStack() as stack:
            for at, reader in enumerate(readers):
                await stack.enter_async_context(reader(topic, prefix, partial(on_messages, at)))
            senders = await self._senders(load, prefix, count)
            for one in senders:
                stack.callback(one.close)
            answered = 0
            while not all(one.finished.done() for one in senders):
                for one in senders:
                    one.push()
                await asyncio.wait([one.finished for one in senders], timeout=TICK_S)
                now = sum(one.answered for one in senders)
                self._sent += now - answered
                if now > answered:
                    answered, moved = now, loop.time()
                elif loop.time() - moved > plan.patience:
                    raise TimeoutError(f"{count - answered} messages are not acknowledged")
            for one in senders:
                one.finished.result()
                if one.refused:
                    self._problems.append(f"{prefix}: refused: {one.refused}")
            while min(got) < count:
                if loop.time() - moved > plan.patience:
                    if quality:  # at QoS 0 a message may be lost
                        self._problems.append(f"{prefix}: received {got} of {count}")
                    break
                await asyncio.sleep(TICK_S)

    async def _senders(self, load: Load, prefix: str, count: int) -> list[Sender]:
        plan = self._plan
        ledger = Ledger()
        senders: list[Sender] = []
        rate = None if plan.rate is None else plan.rate / plan.connections
        for number in range(plan.connections):
            some = count // plan.connections + (number < count % plan.connections)
            if not some:
                continue
            payloads = [self._numbering.payload(number, sequence, plan.size) for sequence in range(some)]
            pace = Pace(load.window, rate, phase=1 - number / plan.connections)
            one = make_sender(load, number, payloads, pace, ledger)
            senders.append(await join(one, self._gateway.address(load.protocol)))
        await asyncio.gather(*(one.connected for one in senders))
        for one in senders:
            one.pace.start()
        return senders

    # receiving

    @contextlib.asynccontextmanager
    async def _subscriber(self, topic: str, prefix: str, on_messages: Callable[[int], None]) -> AsyncIterator[None]:
        one = mqtt.Subscriber(f"{prefix}-s", f"{topic}/#", 1, lambda _: on_messages(1))
        await join(one, self._gateway.address("mqtt"))
        try:
            await asyncio.wait_for(asyncio.shield(one.subscribed), self._plan.patience)
            yield
        finally:
            one.close()

    @contextlib.asynccontextmanager
    async def _receiver(self, topic: str, prefix: str, on_messages: Callable[[int], None]) -> AsyncIterator[None]:
        one = amqp_receiver.Receiver(f"{prefix}-r", topic, size=self._plan.size, on_message=lambda *_: on_messages(1))
        await join(one, self._gateway.address("amqp"))
        try:
            await asyncio.wait_for(asyncio.shield(one.attached), self._plan.patience)
            yield
        finally:
            one.close()

    @contextlib.asynccontextmanager
    async def _listener(self, topic: str, prefix: str, on_messages: Callable[[int], None]) -> AsyncIterator[None]:
        """Receive server-sent events during the block."""
        host, port = self._gateway.address("http")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=MIB) as http,
            http.get(f"http://{host}:{port}/topics/{topic}/stream", params={"format": "text"}) as answer,
        ):
            answer.raise_for_status()
            await answer.content.readline()

            async def listen() -> None:
                async for line in answer.content:
                    if line.startswith(b"data:"):
                        on_messages(1)

            async with beside(listen()):
                yield

    @contextlib.asynccontextmanager
    async def _consumer(self, topic: str) -> AsyncIterator[Callable[..., Any]]:
        """Run one consumer for all courses; yield a factory of a course's reader."""
        host, port = self._gateway.address("http")
        base = f"http://{host}:{port}/consumers/{topic}"
        partitions = [{"topic": topic, "partition": number} for number in range(3)]
        current: list[Callable[[int], None]] = []
        headers = {"Content-Type": CONSUMERS}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
            options = {"name": "soak", "format": "text", "auto.offset.reset": "earliest"}
            async with http.post(base, json=options, headers=headers) as answer:
                answer.raise_for_status()
            place = f"{base}/instances/soak"
            async with http.post(f"{place}/assignments", json={"partitions": partitions}, headers=headers) as answer:
                answer.raise_for_status()

            async def poll() -> None:
                while True:
                    async with http.get(
                        f"{place}/records", params={"timeout": "1000"}, headers={"Accept": RECORDS}
                    ) as answer:
                        answer.raise_for_status()
                        records = await answer.json(content_type=None)
                    for one in current:
                        one(len(records))

            @contextlib.asynccontextmanager
            async def reader(_topic: str, _prefix: str, on_messages: Callable[[int], None]) -> AsyncIterator[None]:
                current.append(on_messages)
                try:
                    yield
                finally:
                    current.remove(on_messages)

            try:
                async with beside(poll()):
                    yield reader
            finally:
                async with http.delete(place) as answer:
                    await answer.read()


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write the samples as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Sample._fields)
        writer.writerows(samples)


def draw(path: Path, samples: Sequence[Sample], settle: float) -> None:
    """Draw an SVG with a panel for each measure, and a line where measurements start to count."""
    end = samples[-1].seconds
    panels = [
        plot.Panel(
            f"{measure.name} (MiB)" if measure.unit == MIB else measure.name,
            {measure.name: [(one.seconds, getattr(one, measure.name) / measure.unit) for one in samples]},
        )
        for measure in MEASURES
    ]
    marks = [plot.Mark(settle, settle)] if settle < end else []
    note = f"0 to {end / 60:.1f} minutes; counted from {settle / 60:.1f} on"
    path.write_text(plot.draw(panels, end, note=note, marks=marks))
