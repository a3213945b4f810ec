"""`python -m loadtest SCENARIO`: load tests of a gateway, verified by the records in Kafka.

`run` tests your own gateway, `compare` compares its results; all other scenarios start their own gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvloop

from loadtest.faults import bench
from loadtest.faults.run import run as run_faults
from loadtest.gateway import GatewayProcess
from loadtest.options import arguments
from loadtest.report import Report
from loadtest.run import commands
from loadtest.scenarios import (
    amqp_kills,
    amqp_memory,
    amqp_table,
    events,
    fair,
    http_reads,
    idle,
    limits,
    many,
    many_topics,
    presence,
    recovery,
    rolling,
    soak,
    topic_flood,
    windows,
)
from loadtest.scenarios.fuzz import SETTINGS, Fuzz
from loadtest.scenarios.fuzz import Plan as Storm
from loadtest.scenarios.kills import Plan, Round
from loadtest.scenarios.memory import Crowd, Scales, allow_files, weigh
from loadtest.scenarios.steady import PROTOCOLS
from loadtest.scenarios.table import make_way
from loadtest.scenarios.table import measure as mqtt_table


@contextlib.asynccontextmanager
async def own_gateway(
    options: argparse.Namespace,
    processors: set[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[GatewayProcess, GatewayProcess | None]]:
    """Start a gateway, and without `--bootstrap` a host of a Kafka that survives the gateway."""
    directory = options.directory or Path(tempfile.mkdtemp(prefix="trivium-load-"))
    for part in ("kafka", "gateway"):
        (directory / part).mkdir(parents=True, exist_ok=True)
    # A second gateway without clients only hosts the broker.
    host = None if options.bootstrap else GatewayProcess(directory / "kafka", None)
    gateway = None
    try:
        if host is not None:
            await host.start()
        bootstrap = host.kafka if host is not None else options.bootstrap
        gateway = GatewayProcess(directory / "gateway", bootstrap, processors=processors, environment=environment)
        await gateway.start()
        yield gateway, host
    finally:
        for process in (gateway, host):
            if process is not None:
                await process.stop()
    print(f"logs: {directory}", file=sys.stderr)


def say(text: str) -> None:
    """Print progress to the standard error."""
    print(text, file=sys.stderr, flush=True)


def conclude(options: argparse.Namespace, report: Report, problems: list[str]) -> int:
    """Print and write the report; return the exit code."""
    report.print()
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.json:
        options.json.write_text(report.to_json())
    return 1 if problems else 0


async def kills(options: argparse.Namespace) -> int:
    """Run scenario `kills`; 0 if it found no problem."""
    async with own_gateway(options) as (gateway, host):
        scenario: Round | amqp_kills.AmqpRound
        if options.protocol == "amqp":
            amqp_plan = amqp_kills.Plan(**chosen(options, amqp_kills.Plan._fields))
            scenario = amqp_kills.AmqpRound(gateway, amqp_plan, say, host)
        else:
            scenario = Round(gateway, Plan(**chosen(options, Plan._fields)), say)
        outcome = await scenario.run()
    report = Report(f"kills, {options.protocol}")
    report.add(**outcome.row())
    return conclude(options, report, outcome.problems)


async def fuzz(options: argparse.Namespace) -> int:
    """Run scenario `fuzz`; 0 if the gateway was not harmed."""
    async with own_gateway(options, environment=SETTINGS) as (gateway, _):
        outcome = await Fuzz(gateway, Storm(**chosen(options, Storm._fields)), say).run()
    report = Report("fuzz, AMQP")
    report.add(**outcome.row())
    return conclude(options, report, outcome.problems)


async def sse(options: argparse.Namespace) -> int:
    """Run scenario `sse`; 0 if every listener received everything in time."""
    allow_files()
    crowd = events.Crowd(**chosen(options, ("listeners", "messages", "rate", "size", "late")))
    async with own_gateway(options, None if options.unpinned else make_way()) as (gateway, _):
        mqtt, http = gateway.address("mqtt"), gateway.address("http")
        result = await events.listen(gateway.kafka, mqtt, http, crowd, gateway.pid)
    report = Report("server-sent events")
    report.add(listeners=crowd.listeners, rate=crowd.rate, **result.row())
    return conclude(options, report, result.problems)


async def everything(options: argparse.Namespace) -> int:
    """Run scenario `many-topics`."""
    async with own_gateway(options) as (gateway, _):
        measured = many_topics.Measured(gateway.address("mqtt"), gateway.pid, gateway.kafka)
        row = await many_topics.measure(
            measured, many_topics.Plan(**chosen(options, ("topics", "partitions", "others", "filters", "idle_s")))
        )
    report = Report("many topics")
    report.add(**row)
    return conclude(options, report, [])


async def many_of_all(options: argparse.Namespace) -> int:
    """Run scenario `many`; 0 if the modest client was not delayed."""
    plan = many.Plan(**chosen(options, many.Plan._fields))
    allow_files()
    async with own_gateway(options, environment=many.SETTINGS) as (gateway, _):
        found = await many.Many(gateway, plan).measure()
    report = Report("many", lines=True)
    for one in found:
        report.add(**one.row())
    return conclude(options, report, many.check(found))


async def fair_shares(options: argparse.Namespace) -> int:
    """Run scenario `fair`; 0 if no client had more than its fair share."""
    plan = fair.Plan(**chosen(options, fair.Plan._fields))
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for kind, limit_rules in (("beside", None), ("beside, limited", fair.LIMITED)):
        if options.only not in kind:
            continue
        async with own_gateway(options, environment=limit_rules) as (gateway, _):
            alone, flooded = await fair.beside(gateway, plan)
        rows += [{"": f"{kind}: alone"} | alone.row(), {"": f"{kind}: {plan.greedy} greedy clients"} | flooded.row()]
        problems += fair.check(alone, flooded)
    if options.only in "crowd":
        async with own_gateway(options) as (gateway, _):
            crowd = await fair.crowd(gateway, plan)
        for name, took in crowd:
            columns = {f"{protocol} p{at}": each.milliseconds(at) for protocol, each in took.items() for at in (50, 99)}
            rows.append({"": f"{plan.modest} modest clients: {name}"} | columns)
        problems += fair.check_crowd(crowd)
    for kind, (settings, protocols) in fair.KINDS.items():
        if options.only not in f"equal {kind}":
            continue
        async with own_gateway(options, environment=settings) as (gateway, _):
            each = plan._replace(bytes=plan.large) if settings else plan
            counts = await fair.equal(gateway, protocols, each)
        index = fair.jain(counts)
        say(f"{kind}: {counts}, Jain's index {index:.4f}")
        rows.append({"": kind, "per second": sum(counts) / plan.seconds, "Jain's index": index})
        if index < fair.EQUAL:
            problems.append(f"{kind}: Jain's index is {index:.3f}")
    if options.only in "idle":
        async with own_gateway(options, environment=fair.TIGHT) as (gateway, _):
            rates = await fair.idle(gateway, plan)
        for links, rate in zip((0, plan.links), rates, strict=True):
            rows.append({"": f"one AMQP link beside {links} idle ones", "per second": rate})
    report = Report("fair shares", lines=True)
    for row in rows:
        report.add(**row)
    return conclude(options, report, problems)


async def limit(options: argparse.Namespace) -> int:
    """Run scenario `limits`; 0 if each limit was met."""
    plan = limits.Plan(**chosen(options, limits.Plan._fields))
    found: list[limits.Passed] = []
    async with own_gateway(options, environment=limits.settings(plan)) as (gateway, _):
        for name in limits.PARTS:
            if options.only in name:
                found.append(await limits.measure(gateway, name, plan))
                say(f"{name}: {found[-1].bytes_s / 1000:.1f} kB/s")
    report = Report("limits", lines=True)
    for one in found:
        report.add(**one.row(plan))
    return conclude(options, report, limits.check(found, plan))


async def compare_windows(options: argparse.Namespace) -> int:
    """Run scenario `windows`; 0 if the adaptive window is as good as required."""
    directory = options.directory or Path(tempfile.mkdtemp(prefix="trivium-windows-"))
    plan = windows.Plan(**chosen(options, windows.Plan._fields))
    report = Report("windows", lines=True)
    for row in await windows.measure(directory, plan, options.only, say):
        report.add(**row)
    return conclude(options, report, windows.check_windows(report.rows))


async def soak_gateway(options: argparse.Namespace) -> int:
    """Run scenario `soak`; 0 if nothing was lost and every curve is flat."""
    names = ("minutes", "messages", "course", "connections", "size", "interval", "settle")
    plan = soak.Plan(**chosen(options, names))
    plan = plan._replace(rate=options.rate or None, protocols=tuple(options.protocol or PROTOCOLS))
    async with own_gateway(options) as (gateway, _):
        soaked = await soak.Soak(gateway, plan, say).run()
    table = options.csv or gateway.log.with_name("soak.csv")
    plot = options.plot or gateway.log.with_name("soak.svg")
    soak.write_samples(table, soaked.samples)
    soak.draw(plot, soaked.samples, plan.settle)
    say(f"samples: {table}, {plot}")
    report = Report(f"soak, {', '.join(plan.protocols)}")
    report.add(**soaked.row())
    return conclude(options, report, soaked.problems)


async def faults(options: argparse.Namespace) -> int:
    """Run scenario `faults`; 0 if every fault was handled as required."""
    allow_files()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="trivium-faults-"))
    plan = bench.Plan(**chosen(options, bench.Plan._fields))
    outcomes = await run_faults(directory, plan, options.only, say, secured=options.secured)
    say(f"report: {directory / 'faults.md'}, {directory / 'faults.html'}")
    report = Report("faults")
    for outcome in outcomes:
        report.add(**outcome.row())
    return conclude(options, report, [f"{one.fault.name}: {text}" for one in outcomes for text in one.problems])


async def roll(options: argparse.Namespace) -> int:
    """Run scenario `rolling`; 0 if nothing was lost and no client was away for long."""
    allow_files()
    plan = rolling.Plan(**chosen(options, rolling.Plan._fields))
    directory = options.directory or Path(tempfile.mkdtemp(prefix="trivium-rolling-"))
    (directory / "kafka").mkdir(parents=True, exist_ok=True)
    host = None if options.bootstrap else GatewayProcess(directory / "kafka", None)
    try:
        if host is not None:
            await host.start()
        bootstrap = host.kafka if host is not None else options.bootstrap
        rolled = await rolling.Rolling(directory, bootstrap, plan, say).run()
    finally:
        if host is not None:
            await host.stop()
    say(f"logs: {directory}")
    report = Report("rolling restart", lines=True)
    report.add(**rolled.row())
    return conclude(options, report, rolled.problems(plan))


async def run_presence(options: argparse.Namespace) -> int:
    """Run scenario `presence`; 0 if the topic finally agrees with every client."""
    allow_files()
    plan = presence.Plan(**chosen(options, presence.Plan._fields))
    directory = options.directory or Path(tempfile.mkdtemp(prefix="trivium-presence-"))
    (directory / "kafka").mkdir(parents=True, exist_ok=True)
    host = None if options.bootstrap else GatewayProcess(directory / "kafka", None)
    try:
        if host is not None:
            await host.start()
        bootstrap = host.kafka if host is not None else options.bootstrap
        shown = await presence.Presence(directory, bootstrap, plan, say).run()
    finally:
        if host is not None:
            await host.stop()
    say(f"logs: {directory}")
    report = Report("presence", lines=True)
    report.add(**shown.row())
    return conclude(options, report, shown.problems[:20])


async def recover(options: argparse.Namespace) -> int:
    """Run scenario `recovery`; 0 if all records were recovered."""
    directory = options.directory or Path(tempfile.mkdtemp(prefix="trivium-load-"))
    (directory / "gateway").mkdir(parents=True, exist_ok=True)
    gateway = GatewayProcess(directory / "gateway", None)
    try:
        outcome = await recovery.Recovery(gateway, recovery.Plan(**chosen(options, recovery.Plan._fields)), say).run()
    finally:
        await gateway.stop()
        recovery.clear(directory)
    say(f"logs: {directory}")
    report = Report("recovery of the embedded Kafka", lines=True)
    report.add(**outcome.row())
    return conclude(options, report, outcome.problems)


async def flood_topics(options: argparse.Namespace) -> int:
    """Run scenario `topics`; 0 if every limit was reported correctly, and other clients were served."""
    directory = options.directory or Path(tempfile.mkdtemp(prefix="trivium-load-"))
    directory.mkdir(parents=True, exist_ok=True)
    plan = topic_flood.Plan(**chosen(options, topic_flood.Plan._fields))
    parts, problems = await topic_flood.Flood(directory, plan, say).run()
    say(f"logs: {directory}")
    report = Report("topics that clients make")
    for part in parts:
        report.add(**part.row())
    return conclude(options, report, problems)


async def reads(options: argparse.Namespace) -> int:
    """Run scenario `reads`; 0 if everything was read and no memory was kept."""
    plan = http_reads.Plan(**chosen(options, http_reads.Plan._fields))
    async with own_gateway(options) as (gateway, _):
        rounds = await http_reads.read(gateway, plan, say)
    report = Report("reads, HTTP", lines=True)
    for number, one in enumerate(rounds, 1):
        report.add(round=number, records=one.records, **{"rss MiB": one.resident / 1024 / 1024, "cpu s": one.cpu})
    return conclude(options, report, http_reads.check(rounds, plan))


async def memory(options: argparse.Namespace) -> int:
    """Run scenario `memory`; 0 if every returning session received everything."""
    allow_files()
    if options.protocol == "amqp":
        return await memory_of_amqp(options)
    crowd = Crowd(**chosen(options, Crowd._fields))
    async with own_gateway(options) as (gateway, _):
        weight = await weigh(Scales(gateway.address("mqtt"), gateway.pid, gateway.kafka), crowd, say)
    report = Report("memory")
    report.add(**weight.row(crowd))
    return conclude(options, report, weight.problems)


async def silent(options: argparse.Namespace) -> int:
    """Run scenario `idle`; 0 if every client stayed connected."""
    allow_files()
    asked = idle.Plan(**chosen(options, idle.Plan._fields))
    plan = idle.fitting(asked)
    if plan != asked:
        say(f"the limit of open files allows {plan.connections:,} of {asked.connections:,} connections")
    async with own_gateway(options, None if options.unpinned else make_way()) as (gateway, _):
        scales = Scales(gateway.address("mqtt"), gateway.pid, gateway.kafka)
        rows = await idle.Idle(scales, gateway.address("management"), plan, say).measure()
    report = Report("idle connections, MQTT", lines=True)
    for row in rows:
        report.add(**row)
    return conclude(options, report, [f"{row['gone']} connections were lost" for row in rows if row["gone"]])


async def memory_of_amqp(options: argparse.Namespace) -> int:
    """Run scenario `memory` for AMQP connections."""
    crowd = amqp_memory.Crowd(**chosen(options, ("connections", "settle", "at_once")))
    async with own_gateway(options, environment=amqp_memory.SETTINGS) as (gateway, _):
        scales = Scales(gateway.address("amqp"), gateway.pid, gateway.kafka)
        found = await amqp_memory.weigh_amqp(scales, gateway.address("http"), crowd, say)
    report = Report("memory, AMQP: bytes for each idle connection")
    report.add(connections=crowd.connections, **{name: round(size) for name, size in found.items()})
    return conclude(options, report, [])


async def table(options: argparse.Namespace) -> int:
    """Run scenario `table` or `amqp`; 0 if no acknowledged message is missing."""
    allow_files()
    processors = None if options.unpinned else make_way()
    measure, name = TABLES[options.scenario]
    async with own_gateway(options, processors) as (gateway, _):
        rows = await measure(gateway, options.rounds, options.share, options.only, say)
    report = Report(f"{name}, one gateway process", lines=True)
    for row in rows:
        report.add(**row)
    bad = ("lost", "doubled", "out of order", "errors")
    problems = [f"{row['']}: {name} {row[name]}" for row in rows for name in bad if row.get(name)]
    return conclude(options, report, problems)


async def sized(options: argparse.Namespace) -> int:
    """Run `size`; 0 if successful."""
    if options.result is not None:
        return await commands.sized(options, say)
    allow_files()
    async with own_gateway(options) as (gateway, _):
        return await commands.sized(options, say, gateway)


def chosen(options: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of these names that were given."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


TABLES: Final = {"table": (mqtt_table, "MQTT"), "amqp": (amqp_table.measure, "AMQP")}
RUN: Final[dict[str, Callable[[argparse.Namespace], Coroutine[Any, Any, int]]]] = {
    "run": partial(commands.run, say=say),
    "compare": partial(commands.compared, _say=say),
    "size": sized,
    "kills": kills, "fuzz": fuzz, "memory": memory, "table": table, "amqp": table, "sse": sse,
    "many-topics": everything,
    "many": many_of_all,
    "fair": fair_shares,
    "limits": limit,
    "windows": compare_windows,
    "soak": soak_gateway,
    "faults": faults,
    "recovery": recover,
    "rolling": roll,
    "presence": run_presence,
    "idle": silent,
    "reads": reads,
    "topics": flood_topics,
}  # fmt: skip


def main() -> None:
    """Run the command line."""
    options = arguments(__doc__)
    sys.exit(uvloop.run(until_signal(RUN[options.scenario](options))))


async def until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Run `work`; SIGTERM and SIGINT cancel it, so that its processes are stopped. Then exit as a shell would."""
    loop, task, signals = asyncio.get_running_loop(), asyncio.current_task(), list[int]()
    assert task is not None

    def stop(number: int) -> None:
        signals.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not signals:
            raise
        return 128 + signals[0]


if __name__ == "__main__":
    main()
