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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

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

P = TypeVar("P")


@contextlib.asynccontextmanager
async def own_kafka(options: argparse.Namespace) -> AsyncIterator[tuple[Path, str, GatewayProcess | None]]:
    """Yield a directory, Kafka's address, and without `--bootstrap` the gateway without clients that hosts Kafka."""
    directory = own_directory(options)
    if options.bootstrap:
        yield directory, options.bootstrap, None
    else:
        host = GatewayProcess(directory / "kafka", None)
        try:
            await host.start()
            yield directory, host.kafka, host
        finally:
            await host.stop()
    say(f"logs: {directory}")


@contextlib.asynccontextmanager
async def own_gateway(
    options: argparse.Namespace,
    processors: set[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[GatewayProcess, GatewayProcess | None]]:
    """Start a gateway, and without `--bootstrap` a host of a Kafka that survives the gateway."""
    async with own_kafka(options) as (directory, bootstrap, host):
        gateway = GatewayProcess(directory / "gateway", bootstrap, processors=processors, environment=environment)
        try:
            await gateway.start()
            yield gateway, host
        finally:
            await gateway.stop()


def own_directory(options: argparse.Namespace) -> Path:
    """Return the directory for logs and data, which exists."""
    directory: Path = options.directory or Path(tempfile.mkdtemp(prefix=f"trivium-{options.scenario}-"))
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def say(text: str) -> None:
    """Print progress to the standard error."""
    print(text, file=sys.stderr, flush=True)


def conclude(
    options: argparse.Namespace, title: str, rows: Iterable[dict[str, Any]], problems: list[str], *, lines: bool = False
) -> int:
    """Print and write the report of these rows, see `Report`; return the exit code."""
    report = Report(title, lines=lines)
    for row in rows:
        report.add(**row)
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
            scenario = amqp_kills.AmqpRound(gateway, chosen(options, amqp_kills.Plan), say, host)
        else:
            scenario = Round(gateway, chosen(options, Plan), say)
        outcome = await scenario.run()
    return conclude(options, f"kills, {options.protocol}", [outcome.row()], outcome.problems)


async def fuzz(options: argparse.Namespace) -> int:
    """Run scenario `fuzz`; 0 if the gateway was not harmed."""
    async with own_gateway(options, environment=SETTINGS) as (gateway, _):
        outcome = await Fuzz(gateway, chosen(options, Storm), say).run()
    return conclude(options, "fuzz, AMQP", [outcome.row()], outcome.problems)


async def sse(options: argparse.Namespace) -> int:
    """Run scenario `sse`; 0 if every listener received everything in time."""
    allow_files()
    crowd = chosen(options, events.Crowd)
    async with own_gateway(options, None if options.unpinned else make_way()) as (gateway, _):
        mqtt, http = gateway.address("mqtt"), gateway.address("http")
        result = await events.listen(gateway.kafka, mqtt, http, crowd, gateway.pid)
    row = {"listeners": crowd.listeners, "rate": crowd.rate, **result.row()}
    return conclude(options, "server-sent events", [row], result.problems)


async def everything(options: argparse.Namespace) -> int:
    """Run scenario `many-topics`."""
    async with own_gateway(options) as (gateway, _):
        measured = many_topics.Measured(gateway.address("mqtt"), gateway.pid, gateway.kafka)
        row = await many_topics.measure(measured, chosen(options, many_topics.Plan))
    return conclude(options, "many topics", [row], [])


async def many_of_all(options: argparse.Namespace) -> int:
    """Run scenario `many`; 0 if the modest client was not delayed."""
    allow_files()
    async with own_gateway(options, environment=many.SETTINGS) as (gateway, _):
        found = await many.Many(gateway, chosen(options, many.Plan)).measure()
    return conclude(options, "many", [one.row() for one in found], many.check(found), lines=True)


async def fair_shares(options: argparse.Namespace) -> int:
    """Run scenario `fair`; 0 if no client had more than its fair share."""
    plan = chosen(options, fair.Plan)
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for kind, limit_rules in (("beside", None), ("beside, limited", fair.LIMITED)):
        if options.only not in kind:
            continue
        async with own_gateway(options, environment=limit_rules) as (gateway, _):
            alone, flooded = await fair.beside_greedy(gateway, plan)
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
    return conclude(options, "fair shares", rows, problems, lines=True)


async def limit(options: argparse.Namespace) -> int:
    """Run scenario `limits`; 0 if each limit was met."""
    plan = chosen(options, limits.Plan)
    found: list[limits.Passed] = []
    async with own_gateway(options, environment=limits.settings(plan)) as (gateway, _):
        for name in limits.PARTS:
            if options.only in name:
                found.append(await limits.measure(gateway, name, plan))
                say(f"{name}: {found[-1].bytes_s / 1000:.1f} kB/s")
    return conclude(options, "limits", [one.row(plan) for one in found], limits.check(found, plan), lines=True)


async def compare_windows(options: argparse.Namespace) -> int:
    """Run scenario `windows`; 0 if the adaptive window is as good as required."""
    rows = await windows.measure(own_directory(options), chosen(options, windows.Plan), options.only, say)
    return conclude(options, "windows", rows, windows.check_windows(rows), lines=True)


async def soak_gateway(options: argparse.Namespace) -> int:
    """Run scenario `soak`; 0 if nothing was lost and every curve is flat."""
    plan = chosen(options, soak.Plan)
    plan = plan._replace(rate=options.rate or None, protocols=tuple(options.protocol or PROTOCOLS))
    async with own_gateway(options) as (gateway, _):
        soaked = await soak.Soak(gateway, plan, say).run()
    table = options.csv or gateway.log.with_name("soak.csv")
    plot = options.plot or gateway.log.with_name("soak.svg")
    soak.write_samples(table, soaked.samples)
    soak.draw(plot, soaked.samples, plan.settle)
    say(f"samples: {table}, {plot}")
    return conclude(options, f"soak, {', '.join(plan.protocols)}", [soaked.row()], soaked.problems)


async def faults(options: argparse.Namespace) -> int:
    """Run scenario `faults`; 0 if every fault was handled as required."""
    allow_files()
    directory = own_directory(options)
    outcomes = await run_faults(directory, chosen(options, bench.Plan), options.only, say, secured=options.secured)
    say(f"report: {directory / 'faults.md'}, {directory / 'faults.html'}")
    problems = [f"{one.fault.name}: {text}" for one in outcomes for text in one.problems]
    return conclude(options, "faults", [one.row() for one in outcomes], problems)


async def roll(options: argparse.Namespace) -> int:
    """Run scenario `rolling`; 0 if nothing was lost and no client was away for long."""
    allow_files()
    plan = chosen(options, rolling.Plan)
    async with own_kafka(options) as (directory, bootstrap, _):
        rolled = await rolling.Rolling(directory, bootstrap, plan, say).run()
    return conclude(options, "rolling restart", [rolled.row()], rolled.problems(plan), lines=True)


async def run_presence(options: argparse.Namespace) -> int:
    """Run scenario `presence`; 0 if the topic finally agrees with every client."""
    allow_files()
    async with own_kafka(options) as (directory, bootstrap, _):
        shown = await presence.Presence(directory, bootstrap, chosen(options, presence.Plan), say).run()
    return conclude(options, "presence", [shown.row()], shown.problems[:20], lines=True)


async def recover(options: argparse.Namespace) -> int:
    """Run scenario `recovery`; 0 if all records were recovered."""
    directory = own_directory(options)
    gateway = GatewayProcess(directory / "gateway", None)
    try:
        outcome = await recovery.Recovery(gateway, chosen(options, recovery.Plan), say).run()
    finally:
        await gateway.stop()
        recovery.clear(directory)
    say(f"logs: {directory}")
    return conclude(options, "recovery of the embedded Kafka", [outcome.row()], outcome.problems, lines=True)


async def flood_topics(options: argparse.Namespace) -> int:
    """Run scenario `topics`; 0 if every limit was reported correctly, and other clients were served."""
    directory = own_directory(options)
    parts, problems = await topic_flood.Flood(directory, chosen(options, topic_flood.Plan), say).run()
    say(f"logs: {directory}")
    return conclude(options, "topics that clients make", [part.row() for part in parts], problems)


async def reads(options: argparse.Namespace) -> int:
    """Run scenario `reads`; 0 if everything was read and no memory was kept."""
    plan = chosen(options, http_reads.Plan)
    async with own_gateway(options) as (gateway, _):
        rounds = await http_reads.read(gateway, plan, say)
    rows = [
        {"round": number, "records": one.records, "rss MiB": one.resident / 1024 / 1024, "cpu s": one.cpu}
        for number, one in enumerate(rounds, 1)
    ]
    return conclude(options, "reads, HTTP", rows, http_reads.check(rounds, plan), lines=True)


async def memory(options: argparse.Namespace) -> int:
    """Run scenario `memory`; 0 if every returning session received everything."""
    allow_files()
    if options.protocol == "amqp":
        return await memory_of_amqp(options)
    crowd = chosen(options, Crowd)
    async with own_gateway(options) as (gateway, _):
        weight = await weigh(Scales(gateway.address("mqtt"), gateway.pid, gateway.kafka), crowd, say)
    return conclude(options, "memory", [weight.row(crowd)], weight.problems)


async def silent(options: argparse.Namespace) -> int:
    """Run scenario `idle`; 0 if every client stayed connected."""
    allow_files()
    asked = chosen(options, idle.Plan)
    plan = idle.fitting(asked)
    if plan != asked:
        say(f"the limit of open files allows {plan.connections:,} of {asked.connections:,} connections")
    async with own_gateway(options, None if options.unpinned else make_way()) as (gateway, _):
        scales = Scales(gateway.address("mqtt"), gateway.pid, gateway.kafka)
        rows = await idle.Idle(scales, gateway.address("management"), plan, say).measure()
    problems = [f"{row['gone']} connections were lost" for row in rows if row["gone"]]
    return conclude(options, "idle connections, MQTT", rows, problems, lines=True)


async def memory_of_amqp(options: argparse.Namespace) -> int:
    """Run scenario `memory` for AMQP connections."""
    crowd = chosen(options, amqp_memory.Crowd)
    async with own_gateway(options, environment=amqp_memory.SETTINGS) as (gateway, _):
        scales = Scales(gateway.address("amqp"), gateway.pid, gateway.kafka)
        found = await amqp_memory.weigh_amqp(scales, gateway.address("http"), crowd, say)
    row = {"connections": crowd.connections, **{name: round(size) for name, size in found.items()}}
    return conclude(options, "memory, AMQP: bytes for each idle connection", [row], [])


async def table(options: argparse.Namespace) -> int:
    """Run scenario `table` or `amqp`; 0 if no acknowledged message is missing."""
    allow_files()
    processors = None if options.unpinned else make_way()
    measure, name = TABLES[options.scenario]
    async with own_gateway(options, processors) as (gateway, _):
        rows = await measure(gateway, options.rounds, options.share, options.only, say)
    bad = ("lost", "doubled", "out of order", "errors")
    problems = [f"{row['']}: {name} {row[name]}" for row in rows for name in bad if row.get(name)]
    return conclude(options, f"{name}, one gateway process", rows, problems, lines=True)


async def sized(options: argparse.Namespace) -> int:
    """Run `size`; 0 if successful."""
    if options.result is not None:
        return await commands.sized(options, say)
    allow_files()
    async with own_gateway(options) as (gateway, _):
        return await commands.sized(options, say, gateway)


def chosen(options: argparse.Namespace, plan: type[P]) -> P:
    """Return a plan, a named tuple, with the options that were given for its fields."""
    fields: tuple[str, ...] = plan._fields  # type: ignore[attr-defined]
    return plan(**{name: value for name in fields if (value := getattr(options, name, None)) is not None})


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
