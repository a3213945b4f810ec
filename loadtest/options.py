"""The command line of `python -m loadtest SCENARIO`."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

from loadtest.faults import bench
from loadtest.faults.cluster import LOGINS
from loadtest.run import commands
from loadtest.scenarios import (
    amqp_kills,
    amqp_memory,
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
from loadtest.scenarios.fuzz import Plan as Storm
from loadtest.scenarios.kills import Plan
from loadtest.scenarios.memory import Crowd
from loadtest.scenarios.steady import PROTOCOLS


def arguments(description: str | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=description)
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

    commands.add_options(scenario)
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
    quiet = scenario("idle", "what connected and silent MQTT clients cost, as they become many")
    resting = idle.Plan()
    for name in resting._fields:
        value = getattr(resting, name)
        quiet.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value:g}")
    quiet.add_argument("--unpinned", action="store_true", help="leave the processors to the system")
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
        help="parts whose name contains this: beside, crowd, equal mqtt, equal tight, mixed, idle and so on",
    )
    limited = scenario("limits", "a limit of bytes a second is met in each protocol, both ways")
    limit = limits.Plan()
    for name in limit._fields:
        limited.add_argument(f"--{name}", type=type(getattr(limit, name)), default=getattr(limit, name))
    limited.add_argument("--only", default="", help="parts whose name contains this: mqtt, in, out, pages and so on")
    sizes = scenario("windows", "fixed windows of AMQP's links and those that find their size", starts=("gateway",))
    sized = windows.Plan()
    for name in sized._fields:
        sizes.add_argument(f"--{name}", type=int, default=getattr(sized, name))
    sizes.add_argument("--only", default="", help="Kafka whose name contains this: fast, slow or jittery")
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
    broken.add_argument(
        "--secured", choices=tuple(LOGINS), help="those of three brokers alone, which ask the gateway who it is, here"
    )
    broken.add_argument("--only", action="append", default=[], help="faults whose name begins so; may be given again")
    rolls = scenario("rolling", "three gateways behind a balancer, each restarted by drain under load")
    roll = rolling.Plan()
    for name in roll._fields:
        value = getattr(roll, name)
        rolls.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value:g}")
    comes = scenario(
        "presence", "clients come and go while gateways are killed; the presence topic ends with the truth"
    )
    coming = presence.Plan()
    for name in coming._fields:
        value = getattr(coming, name)
        comes.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value:g}")
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
    return parser.parse_args()
