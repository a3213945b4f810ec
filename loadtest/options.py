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
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=description)
    scenarios = parser.add_subparsers(dest="scenario", required=True)

    def scenario(name: str, text: str, *, starts: Collection[str] = ("kafka", "gateway")) -> argparse.ArgumentParser:
        """Add a scenario with the common options; `starts` names what it starts itself."""
        made = scenarios.add_parser(name, help=text)
        made.add_argument("--json", type=Path, help="also write the report to this file")
        if starts:
            made.add_argument("--directory", type=Path, help="for logs and data (default: a new one under /tmp)")
        if "kafka" in starts:
            made.add_argument("--bootstrap", help="use this Kafka, and leave its data untouched (default: start one)")
        return made

    commands.add_options(scenario)
    kills = scenario("kills", "kill the gateway under load; no acknowledged message may be lost")
    kills.add_argument("--protocol", choices=("mqtt", "amqp"), default="mqtt")
    plan, amqp = Plan(), amqp_kills.Plan()
    kills.add_argument("--kills", type=int, help=f"default: {plan.kills}")
    kills.add_argument(
        "--senders",
        type=int,
        help=f"MQTT: of each QoS, plus one Paho client of each ({plan.senders}); AMQP: plus one proton client"
        f" ({amqp.senders})",
    )
    kills.add_argument("--subscribers", type=int, help=f"MQTT: of each QoS, plus one Paho client ({plan.subscribers})")
    kills.add_argument("--rate", type=float, help=f"messages per second of one sender ({plan.rate:g})")
    kills.add_argument("--window", type=int, help=f"unacknowledged messages per sender ({plan.window})")
    kills.add_argument("--between", type=float, help=f"most seconds of load before a kill ({plan.between:g})")
    kills.add_argument("--early", type=float, help=f"share of kills while the gateway is starting ({plan.early:g})")
    kills.add_argument(
        "--patient",
        type=float,
        help=f"AMQP: share of the other kills that wait until all groups are served ({amqp.patient:g})",
    )
    kills.add_argument("--broker", type=float, help=f"AMQP: share of kills that hit the broker ({amqp.broker:g})")
    kills.add_argument(
        "--grace", type=float, help=f"AMQP: seconds that a commit may take in addition to its interval ({amqp.grace:g})"
    )
    kills.add_argument("--seed", type=int, help=f"default: {plan.seed}")
    memory = scenario("memory", "measure the resident memory of idle connections and offline sessions")
    memory.add_argument("--protocol", choices=("mqtt", "amqp"), default="mqtt", help="amqp: idle connections only")
    crowd = Crowd()
    memory.add_argument(
        "--connections",
        type=int,
        help=f"default: {crowd.connections}; AMQP: {amqp_memory.Crowd().connections} of each kind",
    )
    memory.add_argument("--at-once", type=int, help="AMQP: connections opened at the same time")
    memory.add_argument("--sessions", type=int, default=crowd.sessions)
    memory.add_argument("--backlog", type=int, default=crowd.backlog, help="messages queued for each session")
    memory.add_argument("--returning", type=int, default=crowd.returning, help="sessions that reconnect to get them")
    memory.add_argument("--payload", type=int, default=crowd.payload, help="bytes")
    memory.add_argument("--settle", type=float, default=crowd.settle, help="seconds before each measurement")
    quiet = scenario("idle", "measure the cost of connected but silent MQTT clients, as their number grows")
    resting = idle.Plan()
    for name in resting._fields:
        value = getattr(resting, name)
        quiet.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value:g}")
    quiet.add_argument("--unpinned", action="store_true", help="do not pin processes to processors")
    fuzz = scenario("fuzz", "send damaged AMQP conversations; the gateway must survive them")
    storm = Storm()
    fuzz.add_argument("--seconds", type=float, default=storm.seconds)
    fuzz.add_argument("--at-once", type=int, default=storm.at_once, help="connections")
    fuzz.add_argument("--seed", type=int, default=storm.seed)
    fuzz.add_argument("--warm-up", type=float, default=storm.warm_up, help="share of the time for the warm-up")
    fuzz.add_argument("--silent", type=float, default=storm.silent, help="share of conversations left without a close")
    fuzz.add_argument("--first", type=int, default=storm.first, help="number of the first conversation")
    sse = scenario("sse", "run many listeners to server-sent events; none may fall behind")
    listeners = events.Crowd()
    sse.add_argument("--listeners", type=int, default=listeners.listeners)
    sse.add_argument("--messages", type=int, default=listeners.messages)
    sse.add_argument("--rate", type=float, default=listeners.rate, help="messages per second")
    sse.add_argument("--size", type=int, default=listeners.size, help="payload bytes")
    sse.add_argument("--late", type=float, default=listeners.late, help="most seconds that a listener may be behind")
    sse.add_argument("--unpinned", action="store_true", help="do not pin processes to processors")
    topics = scenario("many-topics", "measure the cost of `#` with many Kafka topics, and of missing topics")
    beside = many_topics.Plan()
    topics.add_argument("--topics", type=int, default=beside.topics)
    topics.add_argument("--partitions", type=int, default=beside.partitions, help="of each")
    topics.add_argument("--others", type=int, default=beside.others, help="subscribers after the first")
    topics.add_argument("--filters", type=int, default=beside.filters, help="filters whose topics do not exist")
    topics.add_argument("--idle-s", type=float, default=beside.idle_s, help="seconds without traffic")
    flood = scenario(
        "topics",
        "have clients create Kafka topics up to the limits, with kills and few open files",
        starts=("gateway",),
    )
    flooding = topic_flood.Plan()
    for name in flooding._fields:
        flood.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(flooding, name))
    manys = scenario("many", "have clients open too much of everything, and measure a modest client's latency")
    most = many.Plan()
    for name in most._fields[:-1]:
        manys.add_argument(f"--{name}", type=type(getattr(most, name)), default=getattr(most, name))
    manys.add_argument("--only", default="", help="only parts whose name contains this")
    fairness = scenario("fair", "check that greedy clients get equal shares and modest ones what they ask for")
    shares = fair.Plan()
    for name in shares._fields:
        fairness.add_argument(f"--{name}", type=type(getattr(shares, name)), default=getattr(shares, name))
    fairness.add_argument(
        "--only",
        default="",
        help="only parts whose name contains this: beside, crowd, equal mqtt, equal tight, mixed, idle and so on",
    )
    limited = scenario("limits", "check a limit of bytes per second for each protocol in both directions")
    limit = limits.Plan()
    for name in limit._fields:
        limited.add_argument(f"--{name}", type=type(getattr(limit, name)), default=getattr(limit, name))
    limited.add_argument("--only", default="", help="only parts whose name contains this: mqtt, in, out, pages, ...")
    sizes = scenario("windows", "compare fixed and adaptive windows of AMQP links", starts=("gateway",))
    sized = windows.Plan()
    for name in sized._fields:
        sizes.add_argument(f"--{name}", type=int, default=getattr(sized, name))
    sizes.add_argument("--only", default="", help="only the Kafka whose name contains this: fast, slow or jittery")
    long = scenario("soak", "run all protocols in both directions for long; nothing in the gateway may grow")
    soaking = soak.Plan()
    long.add_argument("--protocol", choices=PROTOCOLS, action="append", help="only this protocol (default: all)")
    long.add_argument("--minutes", type=float, default=soaking.minutes, help="the most minutes")
    long.add_argument("--messages", type=int, help="messages per protocol (default: as many as fit into the time)")
    long.add_argument("--rate", type=float, default=soaking.rate, help="messages/s of each protocol; 0 means no limit")
    long.add_argument("--course", type=int, default=soaking.course, help="messages before the connections are replaced")
    long.add_argument("--connections", type=int, default=soaking.connections, help="senders at the same time")
    long.add_argument("--size", type=int, default=soaking.size, help="payload bytes")
    long.add_argument("--interval", type=float, default=soaking.interval, help="seconds between two samples")
    long.add_argument("--settle", type=float, default=soaking.settle, help="seconds before measurements count")
    long.add_argument("--csv", type=Path, help="write the samples to this file (default: soak.csv in the directory)")
    long.add_argument("--plot", type=Path, help="draw them to this SVG file (default: soak.svg in the directory)")
    broken = scenario("faults", "inject one fault after the other under load, and write a report", starts=("gateway",))
    going_wrong = bench.Plan()
    for name in going_wrong._fields:
        value = getattr(going_wrong, name)
        broken.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"default: {value:g}")
    broken.add_argument(
        "--secured",
        choices=tuple(LOGINS),
        help="only the faults of three brokers, with this authentication at the brokers",
    )
    broken.add_argument("--only", action="append", default=[], help="only faults with this prefix; repeatable")
    rolls = scenario("rolling", "restart three gateways behind a balancer one by one, draining them under load")
    roll = rolling.Plan()
    for name in roll._fields:
        value = getattr(roll, name)
        rolls.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value:g}")
    comes = scenario(
        "presence",
        "connect and disconnect clients while gateways are killed; the presence topic must be right in the end",
    )
    coming = presence.Plan()
    for name in coming._fields:
        value = getattr(coming, name)
        comes.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value:g}")
    recoveries = scenario(
        "recovery",
        "kill the embedded Kafka with many GB that it has not flushed (its data is deleted at the end)",
        starts=("gateway",),
    )
    back = recovery.Plan()
    recoveries.add_argument("--gigabytes", type=float, default=back.gigabytes)
    recoveries.add_argument("--kills", type=int, default=back.kills, help="kills of Kafka while it starts and recovers")
    again = scenario("reads", "have HTTP consumers read the same records again and again; memory must not grow")
    reading = http_reads.Plan()
    again.add_argument("--rounds", type=int, default=reading.rounds)
    again.add_argument("--records", type=int, default=reading.records, help="records read in each round")
    again.add_argument("--size", type=int, default=reading.size, help="bytes of a record's value")
    for name, protocol in (("table", "MQTT"), ("amqp", "AMQP")):
        table = scenario(name, f"measure every figure about {protocol}'s speed in docs/performance.md")
        table.add_argument("--rounds", type=int, default=3, help="rounds of each row; the least CPU counts")
        table.add_argument("--share", type=float, default=1.0, help="share of the messages, for a quick test")
        table.add_argument("--only", default="", help="only rows whose name contains this")
        table.add_argument("--unpinned", action="store_true", help="do not pin processes to processors")
    return parser.parse_args()
