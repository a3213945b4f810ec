"""Runs `python -m loadtest faults`: one fault after the other under load of all protocols, with a verdict each."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from loadtest.beside import until
from loadtest.engine.load import Load, Sample, Stored, Terms
from loadtest.faults.cluster import COPIES, KafkaCluster
from loadtest.faults.kafka import Kafka
from loadtest.faults.proxy import Proxy
from loadtest.gateway import GatewayProcess, process_resident

MIB: Final = 1024 * 1024
SHOWN: Final = 5
QUIET_S: Final = 2.0
CONNECTION_LOST: Final = "connection lost"


class Plan(NamedTuple):
    """Size and duration of the test. Times are in seconds.

    Attributes:
        connections: of each protocol.
        window: unacknowledged messages per connection; records of an HTTP request.
        rate: messages per second of each protocol. 0 means as fast as they are acknowledged.
        size: payload bytes.
        before: load before a fault; its second half measures the usual throughput.
        after: minimum load after a fault.
        patience: limit for throughput to recover, and for the last acknowledgements.
        stall: of Kafka, shorter than the delivery timeout.
        long_stall: of Kafka, longer than the delivery timeout.
        delivery_timeout: of the gateway.
        short: duration of every other fault.
        rounds: kills of broker and gateway in turn.
        crowd: simultaneous connections.
        budget: of the gateway, MiB.
        outgoing: its budget for receivers, MiB.
        secured: only the faults of three brokers, with this authentication at the brokers.
        only: only faults whose name begins with this; repeatable.
    """

    connections: int = 4
    window: int = 100
    rate: float = 0.0
    size: int = 100
    before: float = 10.0
    after: float = 5.0
    patience: float = 60.0
    stall: float = 30.0
    long_stall: float = 150.0
    delivery_timeout: float = 120.0
    short: float = 10.0
    rounds: int = 10
    crowd: int = 5000
    budget: int = 64
    outgoing: int = 16
    secured: Literal["TLS", "SASL"] | None = None
    only: tuple[str, ...] = ()

    @property
    def terms(self) -> Terms:
        """The load's terms."""
        return Terms(self.connections, self.window, self.rate, self.size)

    def settings(self) -> dict[str, str]:
        """Return the gateway's settings as environment variables."""
        return {
            "TRIVIUM_KAFKA__DELIVERY_TIMEOUT_S": f"{self.delivery_timeout:g}",
            "TRIVIUM_BUDGET__PROCESS_BYTES": str(self.budget * MIB),
            "TRIVIUM_BUDGET__CONNECTION_BYTES": str(self.budget * MIB // 4),
            "TRIVIUM_BUDGET__TOPIC_BYTES": str(self.budget * MIB // 2),
            "TRIVIUM_BUDGET__OUTGOING_BYTES": str(self.outgoing * MIB),
            "TRIVIUM_HTTP__HEADER_TIMEOUT_S": "5",
            "TRIVIUM_AMQP__IDLE_TIMEOUT_S": "5",
        }


class Stage:
    """The systems that a fault acts on, and its observations.

    Attributes:
        seen: results of the fault's own clients and other observations for the report.
        problems: violations.
    """

    def __init__(self, gateway: GatewayProcess, kafka: Kafka, proxy: Proxy, load: Load, plan: Plan) -> None:
        self.gateway = gateway
        self.kafka = kafka
        self.proxy = proxy
        self.load = load
        self.plan = plan
        self.seen: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []

    async def until(self, condition: Callable[[], bool], what: str, limit_s: float | None = None) -> bool:
        """Wait for a condition; return whether it became true. A timeout (default: plan.patience) is a problem."""
        try:
            await until(condition, what, self.plan.patience if limit_s is None else limit_s)
        except TimeoutError as error:
            self.problems.append(str(error))
            return False
        return True

    async def settled(self) -> dict[str, int]:
        """Wait until nothing is acknowledged for `QUIET_S`; return the acknowledgements so far, by protocol."""
        last, since = dict(self.load.answers), self.load.now

        def still() -> bool:
            nonlocal last, since
            if self.load.answers != last:
                last, since = dict(self.load.answers), self.load.now
            return self.load.now - since > QUIET_S

        await self.until(still, "no more acknowledgements")
        return last


Act = Callable[[Stage], Awaitable[None]]


class Fault(NamedTuple):
    """A fault, and what must still hold; no acknowledged message may ever be lost.

    Attributes:
        name: of the fault.
        act: causes the fault and ends it; its docstring is the description for the report.
        connected: every honest client must stay connected.
        all_refused: every honest client must see a refusal or lose its connection.
        silent: no honest client may see a refusal.
        proxied: the gateway reaches Kafka through the proxy.
        by_partition: keys move to other partitions, by Kafka's own rule.
        tiny: Kafka's data is on a file system that is soon full.
        in_sync: min.insync.replicas of the load's topics, which have a replica on each of three brokers. 0 means a
            single broker.
        recovery_s: limit for throughput to recover.
        held_mib: memory that the fault's own clients may occupy in addition to the budget.
        receives: whether they may also fill the budget for receivers.
    """

    name: str
    act: Act
    connected: bool = True
    all_refused: bool = False
    silent: bool = False
    proxied: bool = False
    by_partition: bool = False
    tiny: bool = False
    in_sync: int = 0
    recovery_s: float | None = None
    held_mib: int = 0
    receives: bool = False

    def what(self, plan: Plan) -> str:
        """Return its description, with the plan's numbers."""
        return " ".join((inspect.getdoc(self.act) or "").format(**plan._asdict()).split())


FAULTS: Final[list[Fault]] = []
"""All faults, in the order of their declaration."""


def fault(name: str, **terms: Any) -> Callable[[Act], Act]:
    """Declare a function as a fault; `terms` are further attributes of `Fault`."""

    def declare(act: Act) -> Act:
        FAULTS.append(Fault(name, act, **terms))
        return act

    return declare


class Course(NamedTuple):
    """The course of a fault from its first message to the last acknowledgement; times in seconds of the load."""

    begin: float
    end: float
    usual: float
    recovered: float | None
    disconnected: int
    hanging: str | None


class Outcome(NamedTuple):
    """The result of a fault; memory in bytes."""

    fault: Fault
    course: Course
    stored: Stored
    refusals: dict[str, collections.Counter[str]]
    seen: collections.Counter[str]
    idle: int
    peak: int
    bound: int
    samples: Sequence[Sample]
    problems: list[str]

    def row(self) -> dict[str, Any]:
        """Return the columns of a report."""
        names, course = ("acknowledged", "lost", "reordered", "duplicated"), self.course
        return {
            "fault": self.fault.name,
            "s": round(course.end - course.begin, 1),
            "msg/s before": round(course.usual),
            "back to 90 % after s": "never" if course.recovered is None else round(course.recovered, 2),
            **{name: self.stored.total(name) for name in names},
            "connections lost": course.disconnected,
            "MiB idle": self.idle // MIB,
            "MiB at most": self.peak // MIB,
            "refusals": "; ".join(f"{protocol}: {words(found)}" for protocol, found in self.refusals.items() if found),
            "seen": words(self.seen),
            "problems": len(self.problems),
        }


def words(found: collections.Counter[str]) -> str:
    """Return the words with their counts."""
    return ", ".join(f"{word} x {count:,}" if count > 1 else word for word, count in sorted(found.items()))


class Bench:
    """Runs faults, each with a new gateway and with its own load and topics."""

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        kafka: Kafka,
        proxy: Proxy,
        *,
        say: Callable[[str], None] = print,
        tiny: Callable[[], contextlib.AbstractAsyncContextManager[Kafka]] | None = None,
        cluster: Callable[[], contextlib.AbstractAsyncContextManager[KafkaCluster]] | None = None,
    ) -> None:
        """`proxy` is in front of a second listener of `kafka`.

        `tiny` starts a broker whose disk is soon full, `cluster` starts three brokers.
        """
        self.plan = plan
        self._directory = directory
        self._say = say
        self._kafka = kafka
        self._proxy = proxy
        self._tiny = tiny
        self._cluster = cluster

    async def run(self, fault: Fault) -> Outcome:
        """Run one fault."""
        self._say(f"{fault.name}: {fault.what(self.plan)}")
        async with contextlib.AsyncExitStack() as stack:
            kafka, login = self._kafka, dict[str, str]()
            if fault.tiny:
                assert self._tiny is not None
                kafka = await stack.enter_async_context(self._tiny())
            host, port = self._proxy.address
            bootstrap = f"{host}:{port}" if fault.proxied else kafka.bootstrap_servers
            if fault.in_sync:
                assert self._cluster is not None
                kafka = cluster = await stack.enter_async_context(self._cluster())
                bootstrap, login = cluster.way()
            gateway = await stack.enter_async_context(self._gateway(fault, bootstrap, login))
            outcome = await self._run(fault, gateway, kafka)
        for problem in outcome.problems:
            self._say(f"  {problem}")
        return outcome

    @contextlib.asynccontextmanager
    async def _gateway(self, fault: Fault, bootstrap: str, login: Mapping[str, str]) -> AsyncIterator[GatewayProcess]:
        directory = self._directory / fault.name.replace(" ", "-").replace(",", "")
        gateway = GatewayProcess(directory, bootstrap, environment={**self.plan.settings(), **login})
        try:
            await gateway.start()
            yield gateway
        finally:
            await gateway.stop()

    async def _run(self, fault: Fault, gateway: GatewayProcess, kafka: Kafka) -> Outcome:
        plan = self.plan
        idle = process_resident(gateway.pid)
        load = Load(gateway, kafka.bootstrap_servers, plan.terms)
        stage = Stage(gateway, kafka, self._proxy, load, plan)
        async with asyncio.TaskGroup() as group:
            await load.start(group, COPIES if fault.in_sync else 1, fault.in_sync or 1)
            course = await self._course(fault, stage)
        stored = await load.verify(by_partition=fault.by_partition)
        peak = max((one.resident for one in load.samples), default=0)
        held = fault.held_mib + (plan.outgoing if fault.receives else 0)
        bound = idle + (3 * plan.budget // 2 + held) * MIB
        outcome = Outcome(
            fault, course, stored, load.refusals(), stage.seen, idle, peak, bound, load.samples,
            [*stage.problems, *([course.hanging] if course.hanging else []), *gateway.bugs()],
        )  # fmt: skip
        outcome.problems.extend(_check(outcome, load))
        return outcome

    async def _course(self, fault: Fault, stage: Stage) -> Course:
        plan, load = self.plan, stage.load
        begin = end = usual = 0.0
        connects: list[int] = []
        recovered = None
        try:
            moving = await stage.until(lambda: all(one.answered for one in load.all), "answers to all senders")
            if moving:
                begin = load.now
                await asyncio.sleep(plan.before)
                usual = load.rate(begin + plan.before / 2, load.samples[-1].at)
                connects = [one.connects for one in load.all]
                begin = load.now
                await fault.act(stage)
                end = load.now
                await asyncio.sleep(plan.after)
                if await stage.until(lambda: load.recovered(usual, end) is not None, "throughput back"):
                    recovered = load.recovered(usual, end)
        finally:
            disconnected = sum(one.connects for one in load.all) - sum(connects)
            hanging = await load.finish(plan.patience)
        return Course(begin, end, usual, recovered, disconnected, hanging)


def _check(outcome: Outcome, load: Load) -> list[str]:
    """Return the violations."""
    fault, course, problems = outcome.fault, outcome.course, load.faults()[:SHOWN]
    problems += outcome.stored.problems()
    if fault.connected and (course.disconnected or any(found[CONNECTION_LOST] for found in outcome.refusals.values())):
        problems.append(f"honest clients were disconnected: {[dict(found) for found in outcome.refusals.values()]}")
    if fault.silent and any(outcome.refusals.values()):
        problems.append(f"something was refused: {[dict(found) for found in outcome.refusals.values()]}")
    if fault.all_refused:
        problems += [f"{one.client_id} saw no refusal" for one in load.all if not one.refusals]
    if outcome.peak > outcome.bound:
        problems.append(f"memory: {outcome.peak // MIB} MiB, over {outcome.bound // MIB}")
    if fault.recovery_s is not None and course.recovered is not None and course.recovered > fault.recovery_s:
        problems.append(f"throughput was back after {course.recovered:.2f} s, not within {fault.recovery_s:g}")
    return problems
