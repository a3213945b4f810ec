"""The command line of `python -m loadtest SCENARIO`."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

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

    def scenario(
        name: str,
        text: str,
        *,
        starts: Collection[str] = ("kafka", "gateway"),
        plan: Any = None,
        but: Collection[str] = (),
        only: str | None = None,
        pins: bool = False,
    ) -> argparse.ArgumentParser:
        """Add a scenario with the common options.

        Args:
            name: of the scenario.
            text: its help.
            starts: what it starts itself.
            plan: a named tuple of defaults; each field is an option, except those in `but`.
            but: fields with an option of another kind, or none.
            only: what its option `--only` selects by a part of its name.
            pins: whether it pins processes, unless `--unpinned` is given.
        """
        made = scenarios.add_parser(name, help=text)
        made.add_argument("--json", type=Path, help="also write the report to this file")
        if starts:
            made.add_argument("--directory", type=Path, help="for logs and data (default: a new one under /tmp)")
        if "kafka" in starts:
            made.add_argument("--bootstrap", help="use this Kafka, and leave its data untouched (default: start one)")
        for field in plan._fields if plan is not None else ():
            if field not in but:
                value = getattr(plan, field)
                meaning = _meanings(plan).get(field, "")
                made.add_argument(
                    f"--{field.replace('_', '-')}", type=type(value), default=value, help=f"{meaning} ({value})".strip()
                )
        if only is not None:
            made.add_argument("--only", default="", help=f"only {only}")
        if pins:
            made.add_argument("--unpinned", action="store_true", help="do not pin processes to processors")
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
    crowd = Crowd()
    memory = scenario(
        "memory", "measure the resident memory of idle connections and offline sessions", plan=crowd,
        but=("connections",),
    )  # fmt: skip
    memory.add_argument("--protocol", choices=("mqtt", "amqp"), default="mqtt", help="amqp: idle connections only")
    memory.add_argument(
        "--connections",
        type=int,
        help=f"default: {crowd.connections}; AMQP: {amqp_memory.Crowd().connections} of each kind",
    )
    memory.add_argument("--at-once", type=int, help="AMQP: connections opened at the same time")
    quiet = "measure the cost of connected but silent MQTT clients, as their number grows"
    scenario("idle", quiet, plan=idle.Plan(), pins=True)
    scenario("fuzz", "send damaged AMQP conversations; the gateway must survive them", plan=Storm())
    behind = "run many listeners to server-sent events; none may fall behind"
    scenario("sse", behind, plan=events.Crowd(), but=("patience",), pins=True)
    topics = "measure the cost of `#` with many Kafka topics, and of missing topics"
    scenario("many-topics", topics, plan=many_topics.Plan(), but=("settle_s",))
    flood = "have clients create Kafka topics up to the limits, with kills and few open files"
    scenario("topics", flood, starts=("gateway",), plan=topic_flood.Plan())
    too_much = "have clients open too much of everything, and measure a modest client's latency"
    scenario("many", too_much, plan=many.Plan(), but=("only",), only="parts whose name contains this")
    scenario(
        "fair", "check that greedy clients get equal shares and modest ones what they ask for", plan=fair.Plan(),
        only="parts whose name contains this: beside, crowd, equal mqtt, equal tight, mixed, idle and so on",
    )  # fmt: skip
    scenario(
        "limits", "check a limit of bytes per second for each protocol in both directions", plan=limits.Plan(),
        only="parts whose name contains this: mqtt, in, out, pages, ...",
    )  # fmt: skip
    scenario(
        "windows", "compare fixed and adaptive windows of AMQP links", starts=("gateway",), plan=windows.Plan(),
        only="the Kafka whose name contains this: fast, slow or jittery",
    )  # fmt: skip
    soaking = soak.Plan()
    long = scenario(
        "soak", "run all protocols in both directions for long; nothing in the gateway may grow", plan=soaking,
        but=("messages", "rate", "protocols", "patience"),
    )  # fmt: skip
    long.add_argument("--protocol", choices=PROTOCOLS, action="append", help="only this protocol (default: all)")
    long.add_argument("--messages", type=int, help="messages per protocol (default: as many as fit into the time)")
    long.add_argument("--rate", type=float, default=soaking.rate, help="messages/s of each protocol; 0 means no limit")
    long.add_argument("--csv", type=Path, help="write the samples to this file (default: soak.csv in the directory)")
    long.add_argument("--plot", type=Path, help="draw them to this SVG file (default: soak.svg in the directory)")
    fault = "inject one fault after the other under load, and write a report"
    broken = scenario("faults", fault, starts=("gateway",), plan=bench.Plan())
    broken.add_argument(
        "--secured",
        choices=tuple(LOGINS),
        help="only the faults of three brokers, with this authentication at the brokers",
    )
    broken.add_argument("--only", action="append", default=[], help="only faults with this prefix; repeatable")
    restarts = "restart three gateways behind a balancer one by one, draining them under load"
    scenario("rolling", restarts, plan=rolling.Plan())
    comes = "connect and disconnect clients while gateways are killed; the presence topic must be right in the end"
    scenario("presence", comes, plan=presence.Plan())
    back = "kill the embedded Kafka with many GB that it has not flushed (its data is deleted at the end)"
    scenario("recovery", back, starts=("gateway",), plan=recovery.Plan())
    again = "have HTTP consumers read the same records again and again; memory must not grow"
    scenario("reads", again, plan=http_reads.Plan())
    for name, protocol in (("table", "MQTT"), ("amqp", "AMQP")):
        every = f"measure every figure about {protocol}'s speed in docs/performance.md"
        table = scenario(name, every, only="rows whose name contains this", pins=True)
        table.add_argument("--rounds", type=int, default=3, help="rounds of each row; the least CPU counts")
        table.add_argument("--share", type=float, default=1.0, help="share of the messages, for a quick test")
    return parser.parse_args()


def _meanings(plan: object) -> dict[str, str]:
    """Return what the docstring of a plan's class says about its attributes."""
    _, _, attributes = inspect.cleandoc(type(plan).__doc__ or "").partition("Attributes:\n")
    found = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for name, text in found}
