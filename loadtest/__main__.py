"""`python -m loadtest SCENARIO --ready-file FILE`: load on a gateway started with `trivium up --ready-file FILE`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import uvloop

from loadtest.clients.topics import create_topic
from loadtest.numbering import Numbering
from loadtest.report import Report
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


def main() -> None:
    """The command."""
    sys.exit(uvloop.run(steady(arguments())))


if __name__ == "__main__":
    main()
