"""`python -m loadtest.spark backlog | kills | archive | replay | audit | cluster | rates`: jobs, judged plainly.

Each starts Kafka (that of `trivium up`) unless it is given one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from loadtest.gateway import GatewayProcess
from loadtest.spark import audit, backlog, cluster, kills, replay

TRIGGERS = ("micro-batch", "real-time")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.spark", description=__doc__)
    parser.add_argument("--bootstrap-servers", help="a Kafka that is there already")
    scenarios = parser.add_subparsers(dest="scenario", required=True)
    one = scenarios.add_parser("backlog", help="readings of minutes are there before the job starts")
    one.add_argument("--readings", type=int, default=100_000)
    one.add_argument("--trigger", choices=TRIGGERS, default="real-time")
    one = scenarios.add_parser("kills", help="the job is killed again and again while readings come")
    one.add_argument("--kills", type=int, default=20)
    one.add_argument("--rate", type=int, default=200, help="readings a second; one in fifty is far too late")
    one.add_argument("--trigger", choices=TRIGGERS, default="micro-batch")
    one.add_argument("--seed", type=int, default=0)
    one = scenarios.add_parser("archive", help="the job of an archive is killed again and again while records come")
    one.add_argument("--format", choices=("parquet", "delta", "iceberg"), default="parquet")
    one.add_argument("--kills", type=int, default=20)
    one.add_argument("--rate", type=int, default=1_000, help="records a second")
    one.add_argument("--seed", type=int, default=0)
    one = scenarios.add_parser("replay", help="dead letters are replayed twice, by a job that is killed meanwhile")
    one.add_argument("--letters", type=int, default=10_000)
    one.add_argument("--kills", type=int, default=5)
    one.add_argument("--rate", type=int, default=500, help="letters a second, while it is killed")
    one.add_argument("--seed", type=int, default=0)
    one = scenarios.add_parser("audit", help="one record of a million is missing")
    one.add_argument("--records", type=int, default=1_000_000)
    one.add_argument("--minutes", type=int, default=10)
    one.add_argument("--seed", type=int, default=0)
    one = scenarios.add_parser("cluster", help="a standalone cluster, of which a worker is killed under load")
    one.add_argument("--rate", type=int, default=200, help="readings a second")
    one.add_argument("--trigger", choices=TRIGGERS, default="micro-batch")
    one = scenarios.add_parser("rates", help="records per CPU second: the bare source, decoding, windows")
    one.add_argument("--readings", type=int, default=400_000)
    one.add_argument("--rounds", type=int, default=3)
    return parser.parse_args(argv)


async def run(given: argparse.Namespace, bootstrap: str, directory: Path) -> int:
    """One scenario; 0: every promise was kept."""
    if given.scenario == "backlog":
        return await backlog.run(bootstrap, directory, given.readings, given.trigger)
    if given.scenario == "kills":
        plan = kills.Plan(given.kills, given.rate, given.trigger, given.seed)
        return await kills.run(bootstrap, directory, plan)
    if given.scenario == "replay":
        return await replay.run(bootstrap, directory, replay.Plan(given.letters, given.kills, given.rate, given.seed))
    if given.scenario == "audit":
        return await audit.run(bootstrap, directory, audit.Plan(given.records, given.minutes, given.seed))
    if given.scenario == "cluster":
        return await cluster.run(bootstrap, directory, given.rate, given.trigger)
    if given.scenario == "archive":
        from loadtest.spark import archive  # noqa: PLC0415 - with readers of three formats

        return await archive.run(bootstrap, directory, archive.Plan(given.format, given.kills, given.rate, given.seed))
    from loadtest.spark import rates  # noqa: PLC0415 - Spark in its own process

    return await rates.run(bootstrap, given.readings, given.rounds)


async def main() -> int:
    """The command."""
    given = arguments()
    with tempfile.TemporaryDirectory(prefix="trivium-spark-") as name:
        directory = Path(name)
        if given.bootstrap_servers:
            return await run(given, given.bootstrap_servers, directory)
        gateway = GatewayProcess(directory, None)
        await gateway.start()
        try:
            return await run(given, str(gateway.addresses["kafka"]), directory)
        finally:
            await gateway.stop()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
