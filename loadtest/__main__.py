"""`python -m loadtest SCENARIO`: load on a gateway, judged by what is in Kafka afterwards.

`steady` works on a gateway started with `trivium up --ready-file FILE`; `kills` starts and kills its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Final

import uvloop

from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Numbering
from loadtest.report import Report
from loadtest.scenarios.kills import Plan, Round
from loadtest.scenarios.steady import PROTOCOLS, Load, judge, send
from loadtest.verify import Ledger


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    scenarios = parser.add_subparsers(dest="scenario", required=True)
    steady = scenarios.add_parser("steady", help="windows kept full, or a rate; then verified")
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
    steady.add_argument("--json", type=Path, help="write the report here as well")
    kills = scenarios.add_parser("kills", help="the gateway is killed under load; nothing acknowledged may be lost")
    kills.add_argument("--bootstrap", help="Kafka; without it one is started that survives the kills")
    plan = Plan()
    kills.add_argument("--kills", type=int, default=plan.kills)
    kills.add_argument("--senders", type=int, default=plan.senders, help="of each QoS, beside one of Paho's of each")
    kills.add_argument("--subscribers", type=int, default=plan.subscribers, help="of each QoS, beside one of Paho's")
    kills.add_argument("--rate", type=float, default=plan.rate, help="messages per second of one sender")
    kills.add_argument("--window", type=int, default=plan.window, help="unanswered messages per sender")
    kills.add_argument("--between", type=float, default=plan.between, help="seconds of load before a kill, at most")
    kills.add_argument("--early", type=float, default=plan.early, help="share of kills while the gateway is starting")
    kills.add_argument("--seed", type=int, default=plan.seed)
    kills.add_argument("--directory", type=Path, help="for logs and data; default: a new one under /tmp")
    kills.add_argument("--json", type=Path, help="write the report here as well")
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


async def kills(options: argparse.Namespace) -> int:
    """Run it; 0 when every promise was kept."""
    directory = options.directory or Path(tempfile.mkdtemp(prefix="trivium-kills-"))
    for part in ("kafka", "gateway"):
        (directory / part).mkdir(parents=True, exist_ok=True)
    # A gateway of its own is only the host of the broker that survives.
    host = None if options.bootstrap else GatewayProcess(directory / "kafka", None)
    gateway = None
    try:
        if host is not None:
            await host.start()
        gateway = GatewayProcess(directory / "gateway", host.kafka if host is not None else options.bootstrap)
        await gateway.start()
        plan = Plan(**{name: getattr(options, name) for name in Plan._fields})
        outcome = await Round(gateway, plan, lambda text: print(text, file=sys.stderr)).run()
    finally:
        for process in (gateway, host):
            if process is not None:
                await process.stop()
    report = Report("kills")
    report.add(**outcome.row())
    report.print()
    for problem in outcome.problems:
        print(problem, file=sys.stderr)
    print(f"logs: {directory}", file=sys.stderr)
    if options.json:
        options.json.write_text(report.to_json())
    return 1 if outcome.problems else 0


RUN: Final = {"steady": steady, "kills": kills}


def main() -> None:
    """The command."""
    options = arguments()
    sys.exit(uvloop.run(RUN[options.scenario](options)))


if __name__ == "__main__":
    main()
