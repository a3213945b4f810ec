"""`python -m loadtest SCENARIO`: load on a gateway, judged by what is in Kafka afterwards.

`steady` works on a gateway started with `trivium up --ready-file FILE`; the others start their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import uvloop

from loadtest.clients.topics import create_topic
from loadtest.faults import bench
from loadtest.faults.run import run as run_faults
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Numbering
from loadtest.report import Report
from loadtest.scenarios import (
    amqp_kills,
    amqp_memory,
    amqp_table,
    events,
    fair,
    http_reads,
    many,
    many_topics,
    recovery,
    soak,
    topic_flood,
)
from loadtest.scenarios.fuzz import SETTINGS, Fuzz
from loadtest.scenarios.fuzz import Plan as Storm
from loadtest.scenarios.kills import Plan, Round
from loadtest.scenarios.memory import Crowd, Scales, allow_files, weigh
from loadtest.scenarios.steady import PROTOCOLS, Load, judge, send
from loadtest.scenarios.table import make_way
from loadtest.scenarios.table import measure as mqtt_table
from loadtest.verify import Ledger


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    scenarios = parser.add_subparsers(dest="scenario", required=True)

    def scenario(name: str, text: str, *, starts: Collection[str] = ("kafka", "gateway")) -> argparse.ArgumentParser:
        """One with the options that all have; `starts`: what it starts by itself."""
        made = scenarios.add_parser(name, help=text)
        made.add_argument("--json", type=Path, help="write the report here as well")
        if starts:
            made.add_argument("--directory", type=Path, help="for logs and data; default: a new one under /tmp")
        if "kafka" in starts:
            made.add_argument(
                "--bootstrap", help="Kafka, which is left running with what is in it; without it one is started"
            )
        return made

    steady = scenario("steady", "windows kept full, or a rate; then verified", starts=())
    steady.add_argument("--ready-file", type=Path, required=True, help="what `trivium up --ready-file` wrote")
    steady.add_argument("--protocol", choices=(*PROTOCOLS, "all"), default="all")
    steady.add_argument("--connections", type=int, default=10)
    steady.add_argument("--window", type=int, default=100, help="unanswered messages per connection")
    steady.add_argument(
        "--messages",
        type=int,
        default=200_000,
        help="in total, per protocol; they are made beforehand, about 0.4 kB of memory each",
    )
    steady.add_argument("--size", type=int, default=100, help="payload bytes")
    steady.add_argument("--batch", type=int, default=100, help="records per HTTP request")
    steady.add_argument("--qos", type=int, choices=(0, 1, 2), default=1, help="MQTT only")
    steady.add_argument("--rate", type=float, help="messages per second in total; default: as fast as answered")
    steady.add_argument("--partitions", type=int, default=3)
    kills = scenario("kills", "the gateway is killed under load; nothing acknowledged may be lost")
    kills.add_argument("--protocol", choices=("mqtt", "amqp"), default="mqtt")
    plan, amqp = Plan(), amqp_kills.Plan()
    kills.add_argument("--kills", type=int, help=f"default: {plan.kills}")
    kills.add_argument(
        "--senders",
        type=int,
        help=f"MQTT: of each QoS, beside one of Paho's of each ({plan.senders}); AMQP: beside one of proton's"
        f" ({amqp.senders})",
    )
    kills.add_argument("--subscribers", type=int, help=f"MQTT: of each QoS, beside one of Paho's ({plan.subscribers})")
    kills.add_argument("--rate", type=float, help=f"messages per second of one sender ({plan.rate:g})")
    kills.add_argument("--window", type=int, help=f"unanswered messages per sender ({plan.window})")
    kills.add_argument("--between", type=float, help=f"seconds of load before a kill, at most ({plan.between:g})")
    kills.add_argument("--early", type=float, help=f"share of kills while the gateway is starting ({plan.early:g})")
    kills.add_argument(
        "--patient", type=float, help=f"AMQP: share of the others when all groups are served ({amqp.patient:g})"
    )
    kills.add_argument("--broker", type=float, help=f"AMQP: share of kills that hit the broker ({amqp.broker:g})")
    kills.add_argument(
        "--grace", type=float, help=f"AMQP: seconds that a commit may take beside its interval ({amqp.grace:g})"
    )
    kills.add_argument("--seed", type=int, help=f"default: {plan.seed}")
    memory = scenario("memory", "resident memory of idle connections and offline sessions")
    memory.add_argument("--protocol", choices=("mqtt", "amqp"), default="mqtt", help="amqp: idle connections only")
    crowd = Crowd()
    memory.add_argument(
        "--connections",
        type=int,
        help=f"default: {crowd.connections}; AMQP: {amqp_memory.Crowd().connections} of each kind",
    )
    memory.add_argument("--at-once", type=int, help="AMQP: connections that are made at the same time")
    memory.add_argument("--sessions", type=int, default=crowd.sessions)
    memory.add_argument("--backlog", type=int, default=crowd.backlog, help="messages for each session")
    memory.add_argument("--returning", type=int, default=crowd.returning, help="sessions that come back for them")
    memory.add_argument("--payload", type=int, default=crowd.payload, help="bytes")
    memory.add_argument("--settle", type=float, default=crowd.settle, help="seconds before each look")
    fuzz = scenario("fuzz", "damaged AMQP conversations against a gateway that must not mind")
    storm = Storm()
    fuzz.add_argument("--seconds", type=float, default=storm.seconds)
    fuzz.add_argument("--at-once", type=int, default=storm.at_once, help="connections")
    fuzz.add_argument("--seed", type=int, default=storm.seed)
    fuzz.add_argument("--warm-up", type=float, default=storm.warm_up, help="share of the time")
    fuzz.add_argument("--silent", type=float, default=storm.silent, help="share of conversations that end in silence")
    fuzz.add_argument("--first", type=int, default=storm.first, help="number of the first conversation")
    sse = scenario("sse", "many listeners to server-sent events; nobody may fall behind")
    listeners = events.Crowd()
    sse.add_argument("--listeners", type=int, default=listeners.listeners)
    sse.add_argument("--messages", type=int, default=listeners.messages)
    sse.add_argument("--rate", type=float, default=listeners.rate, help="messages a second")
    sse.add_argument("--size", type=int, default=listeners.size, help="payload bytes")
    sse.add_argument("--late", type=float, default=listeners.late, help="seconds that nobody may ever be behind")
    sse.add_argument("--unpinned", action="store_true", help="leave the processors to the system")
    topics = scenario("many-topics", "what `#` costs beside many Kafka topics, and absent topics")
    beside = many_topics.Plan()
    topics.add_argument("--topics", type=int, default=beside.topics)
    topics.add_argument("--partitions", type=int, default=beside.partitions, help="of each")
    topics.add_argument("--others", type=int, default=beside.others, help="subscribers after the first")
    topics.add_argument("--filters", type=int, default=beside.filters, help="whose topics do not exist")
    topics.add_argument("--idle-s", type=float, default=beside.idle_s, help="seconds of doing nothing")
    flood = scenario(
        "topics", "clients make Kafka topics until the limits refuse; kills, few files", starts=("gateway",)
    )
    flooding = topic_flood.Plan()
    for name in flooding._fields:
        flood.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(flooding, name))
    manys = scenario("many", "what a client can make many of, beside a modest client's latency")
    most = many.Plan()
    for name in most._fields[:-1]:
        manys.add_argument(f"--{name}", type=type(getattr(most, name)), default=getattr(most, name))
    manys.add_argument("--only", default="", help="those whose name contains this")
    fairness = scenario("fair", "equal shares for the greedy, beside whom the modest get what they ask for")
    shares = fair.Plan()
    for name in shares._fields:
        fairness.add_argument(f"--{name}", type=type(getattr(shares, name)), default=getattr(shares, name))
    fairness.add_argument(
        "--only",
        default="",
        help="parts whose name contains this: beside, equal mqtt, equal tight, mixed, idle and so on",
    )
    long = scenario("soak", "all protocols in and out for long; nothing in the gateway may grow")
    soaking = soak.Plan()
    long.add_argument("--protocol", choices=PROTOCOLS, action="append", help="one alone; default: all at once")
    long.add_argument("--minutes", type=float, default=soaking.minutes, help="at most")
    long.add_argument("--messages", type=int, help="for each protocol; default: as many as fit into the time")
    long.add_argument(
        "--rate", type=float, default=soaking.rate, help="messages a second of each protocol; 0: no limit"
    )
    long.add_argument("--course", type=int, default=soaking.course, help="messages between two sets of connections")
    long.add_argument("--connections", type=int, default=soaking.connections, help="senders of a course")
    long.add_argument("--size", type=int, default=soaking.size, help="payload bytes")
    long.add_argument("--interval", type=float, default=soaking.interval, help="seconds between two samples")
    long.add_argument("--settle", type=float, default=soaking.settle, help="seconds before anything is judged")
    long.add_argument("--csv", type=Path, help="write the samples here; default: soak.csv in the directory")
    long.add_argument("--plot", type=Path, help="draw them here, as SVG; default: soak.svg in the directory")
    broken = scenario(
        "faults", "everything that goes wrong, one after the other, under load; a report", starts=("gateway",)
    )
    going_wrong = bench.Plan()
    for name in going_wrong._fields:
        value = getattr(going_wrong, name)
        broken.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"default: {value:g}")
    broken.add_argument("--only", action="append", default=[], help="faults whose name begins so; may be given again")
    recoveries = scenario(
        "recovery",
        "the embedded Kafka, whose data are deleted at the end, is killed with many GB that it had not flushed",
        starts=("gateway",),
    )
    back = recovery.Plan()
    recoveries.add_argument("--gigabytes", type=float, default=back.gigabytes)
    recoveries.add_argument("--kills", type=int, default=back.kills, help="of starts, while Kafka recovers")
    again = scenario("reads", "HTTP consumers read the same again and again; nothing of it may stay")
    reading = http_reads.Plan()
    again.add_argument("--rounds", type=int, default=reading.rounds)
    again.add_argument("--records", type=int, default=reading.records, help="that each round reads")
    again.add_argument("--size", type=int, default=reading.size, help="bytes of a record's value")
    for name, protocol in (("table", "MQTT"), ("amqp", "AMQP")):
        table = scenario(name, f"every figure of docs/performance.md about {protocol}'s speed")
        table.add_argument("--rounds", type=int, default=3, help="of each row; the one with the least CPU counts")
        table.add_argument("--share", type=float, default=1.0, help="of the messages, for a quick look")
        table.add_argument("--only", default="", help="rows whose name contains this")
        table.add_argument("--unpinned", action="store_true", help="leave the processors to the system")
    return parser.parse_args(argv)


async def steady(options: argparse.Namespace) -> int:
    """Run it; 0 when nothing acknowledged was lost and no connection failed."""
    try:
        ready = json.loads(options.ready_file.read_text())
    except (OSError, ValueError) as error:
        print(f"no gateway is ready: cannot read {options.ready_file}: {error}", file=sys.stderr)
        return 1
    report = Report("steady")
    good = True
    for protocol in PROTOCOLS if options.protocol == "all" else (options.protocol,):
        numbering = Numbering()
        topic = f"load-{protocol}-{numbering.run}"
        await create_topic(ready["kafka"], topic, options.partitions)
        load = Load(
            protocol,
            ready[protocol],
            topic,
            options.connections,
            options.window if protocol != "http" else max(options.window, options.batch),
            options.messages,
            options.size,
            options.batch,
            options.rate,
            options.qos,
        )
        ledger = Ledger()
        measured = await send(load, numbering, ledger, ready["pid"])
        verdict = await judge(ready["kafka"], load, numbering, ledger)
        report.add(protocol=protocol, **measured.row(), **verdict.row())
        good = good and verdict.honest and not measured.errors
        for text in measured.errors[:5]:
            print(f"{protocol}: {text}", file=sys.stderr)
    report.print()
    if options.json:
        options.json.write_text(report.to_json())
    return 0 if good else 1


@contextlib.asynccontextmanager
async def own_gateway(
    options: argparse.Namespace,
    processors: set[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[GatewayProcess, GatewayProcess | None]]:
    """A gateway of ours, and, unless there is a `--bootstrap`, the host of a Kafka that survives it."""
    directory = options.directory or Path(tempfile.mkdtemp(prefix="trivium-load-"))
    for part in ("kafka", "gateway"):
        (directory / part).mkdir(parents=True, exist_ok=True)
    # A gateway that nobody talks to is only the host of the broker.
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
    """What is going on, for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def conclude(options: argparse.Namespace, report: Report, problems: list[str]) -> int:
    """Print and write the report; the exit code."""
    report.print()
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.json:
        options.json.write_text(report.to_json())
    return 1 if problems else 0


async def kills(options: argparse.Namespace) -> int:
    """Run it; 0 when every promise was kept."""
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
    """Run it; 0 when the gateway took no harm."""
    async with own_gateway(options, environment=SETTINGS) as (gateway, _):
        outcome = await Fuzz(gateway, Storm(**chosen(options, Storm._fields)), say).run()
    report = Report("fuzz, AMQP")
    report.add(**outcome.row())
    return conclude(options, report, outcome.problems)


async def sse(options: argparse.Namespace) -> int:
    """Run it; 0 when every listener got everything in time."""
    allow_files()
    crowd = events.Crowd(**chosen(options, ("listeners", "messages", "rate", "size", "late")))
    async with own_gateway(options, None if options.unpinned else make_way()) as (gateway, _):
        heard = await events.listen(gateway.kafka, gateway.address("mqtt"), gateway.address("http"), crowd, gateway.pid)
    report = Report("server-sent events")
    report.add(listeners=crowd.listeners, rate=crowd.rate, **heard.row())
    return conclude(options, report, heard.problems)


async def everything(options: argparse.Namespace) -> int:
    """Scenario `many-topics`."""
    async with own_gateway(options) as (gateway, _):
        measured = many_topics.Measured(gateway.address("mqtt"), gateway.pid, gateway.kafka)
        row = await many_topics.measure(
            measured, many_topics.Plan(**chosen(options, ("topics", "partitions", "others", "filters", "idle_s")))
        )
    report = Report("many topics")
    report.add(**row)
    return conclude(options, report, [])


async def many_of_all(options: argparse.Namespace) -> int:
    """Scenario `many`; 0 when the gateway did not hold up its modest client."""
    plan = many.Plan(**chosen(options, many.Plan._fields))
    allow_files()
    async with own_gateway(options, environment=many.SETTINGS) as (gateway, _):
        found = await many.Many(gateway, plan).measure()
    report = Report("many", lines=True)
    for one in found:
        report.add(**one.row())
    return conclude(options, report, many.judge(found))


async def fair_shares(options: argparse.Namespace) -> int:
    """Scenario `fair`; 0 when nobody had more than a fair share."""
    plan = fair.Plan(**chosen(options, fair.Plan._fields))
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    if options.only in "beside":
        async with own_gateway(options) as (gateway, _):
            alone, flooded = await fair.beside(gateway, plan)
        rows += [{"": "alone"} | alone.row(), {"": f"beside {plan.greedy} greedy clients"} | flooded.row()]
        problems += fair.judge(alone, flooded)
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


async def soak_gateway(options: argparse.Namespace) -> int:
    """Run it; 0 when nothing was lost and everything is flat."""
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
    """Run it; 0 when everything held that must."""
    allow_files()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="trivium-faults-"))
    outcomes = await run_faults(directory, bench.Plan(**chosen(options, bench.Plan._fields)), options.only, say)
    say(f"report: {directory / 'faults.md'}, {directory / 'faults.html'}")
    report = Report("faults")
    for outcome in outcomes:
        report.add(**outcome.row())
    return conclude(options, report, [f"{one.fault.name}: {text}" for one in outcomes for text in one.problems])


async def recover(options: argparse.Namespace) -> int:
    """Scenario `recovery`; 0 when all data were there again."""
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
    """Run it; 0 when every limit was told as it should be, and everybody else was served."""
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
    """Run it; 0 when everything was read and nothing has stayed."""
    plan = http_reads.Plan(**chosen(options, http_reads.Plan._fields))
    async with own_gateway(options) as (gateway, _):
        rounds = await http_reads.read(gateway, plan, say)
    report = Report("reads, HTTP", lines=True)
    for number, one in enumerate(rounds, 1):
        report.add(round=number, records=one.records, **{"rss MiB": one.resident / 1024 / 1024, "cpu s": one.cpu})
    return conclude(options, report, http_reads.judge(rounds, plan))


async def memory(options: argparse.Namespace) -> int:
    """Run it; 0 when every session that came back got everything."""
    allow_files()
    if options.protocol == "amqp":
        return await memory_of_amqp(options)
    crowd = Crowd(**chosen(options, Crowd._fields))
    async with own_gateway(options) as (gateway, _):
        weight = await weigh(Scales(gateway.address("mqtt"), gateway.pid, gateway.kafka), crowd, say)
    report = Report("memory")
    report.add(**weight.row(crowd))
    return conclude(options, report, weight.problems)


async def memory_of_amqp(options: argparse.Namespace) -> int:
    """The same for AMQP's connections."""
    crowd = amqp_memory.Crowd(**chosen(options, ("connections", "settle", "at_once")))
    async with own_gateway(options, environment=amqp_memory.SETTINGS) as (gateway, _):
        scales = Scales(gateway.address("amqp"), gateway.pid, gateway.kafka)
        found = await amqp_memory.weigh_amqp(scales, gateway.address("http"), crowd, say)
    report = Report("memory, AMQP: bytes for each idle connection")
    report.add(connections=crowd.connections, **{name: round(size) for name, size in found.items()})
    return conclude(options, report, [])


async def table(options: argparse.Namespace) -> int:
    """Run it; 0 when nothing that was promised is missing."""
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


def chosen(options: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """The options of these names that were given."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


TABLES: Final = {"table": (mqtt_table, "MQTT"), "amqp": (amqp_table.measure, "AMQP")}
RUN: Final = {
    "steady": steady, "kills": kills, "fuzz": fuzz, "memory": memory, "table": table, "amqp": table, "sse": sse,
    "many-topics": everything,
    "many": many_of_all,
    "fair": fair_shares,
    "soak": soak_gateway,
    "faults": faults,
    "recovery": recover,
    "reads": reads,
    "topics": flood_topics,
}  # fmt: skip


def main() -> None:
    """The command."""
    options = arguments()
    sys.exit(uvloop.run(RUN[options.scenario](options)))


if __name__ == "__main__":
    main()
