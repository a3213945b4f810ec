"""`python -m loadtest.spark SCENARIO`: load tests of Spark jobs, with a verdict.

Each starts its own Kafka (that of `trivium up`) unless one is given.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from loadtest.gateway import GatewayProcess
from loadtest.spark import audit, backlog, behind, cluster, kills, last, latency, replay, state

TRIGGERS = ("micro-batch", "real-time")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.spark", description=__doc__)
    parser.add_argument("--bootstrap-servers", help="an existing Kafka")
    parser.add_argument("--limit", type=float, default=3_600.0, help="seconds after which the scenario is stopped")
    scenarios = parser.add_subparsers(dest="scenario", required=True)
    one = scenarios.add_parser("backlog", help="start a job on minutes of stored readings")
    one.add_argument("--readings", type=int, default=100_000)
    one.add_argument("--trigger", choices=TRIGGERS, default="real-time")
    one = scenarios.add_parser("kills", help="kill the job repeatedly while readings arrive")
    one.add_argument("--kills", type=int, default=20)
    one.add_argument("--rate", type=int, default=200, help="readings per second; one in fifty is far too late")
    one.add_argument("--trigger", choices=TRIGGERS, default="micro-batch")
    one.add_argument("--seed", type=int, default=0)
    one = scenarios.add_parser("archive", help="kill an archive job repeatedly while records arrive")
    one.add_argument("--format", choices=("parquet", "delta", "iceberg"), default="parquet")
    one.add_argument("--kills", type=int, default=20)
    one.add_argument("--rate", type=int, default=1_000, help="records per second")
    one.add_argument("--seed", type=int, default=0)
    one = scenarios.add_parser("large", help="archive large records with the default settings")
    one.add_argument("--format", choices=("parquet", "delta", "iceberg"), action="append", help="default: all")
    one.add_argument("--records", type=int, default=4_000)
    one.add_argument("--size", type=int, default=200_000, help="bytes of a record")
    one.add_argument("--compressed", action="store_true", help="records that compress well")
    one = scenarios.add_parser("poison", help="jobs of each kind under everything that a topic can hold")
    one.add_argument("--kind", action="append", metavar="KIND", help="only this kind; repeatable")
    one.add_argument("--trigger", choices=TRIGGERS, help="default: both")
    one.add_argument("--ticks", type=int, default=20, help="readings of each device, half a second apart")
    one = scenarios.add_parser("last", help="kill a last-known job repeatedly while values arrive")
    one.add_argument("--kills", type=int, default=20)
    one.add_argument("--rate", type=int, default=200, help="records per second")
    one.add_argument("--trigger", choices=TRIGGERS, default="micro-batch")
    one.add_argument("--seed", type=int, default=0)
    one = scenarios.add_parser("proofs", help="run `kills` with each trigger, `last`, and `archive` in each format")
    one.add_argument("--kills", type=int, default=20, help="kills of each proof")
    one.add_argument("--together", type=int, default=2, help="proofs that run at the same time")
    one.add_argument("--proof-limit", type=float, default=1_200.0, help="seconds after which a proof is stopped")
    one.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="only this proof, by the name in its verdict; repeatable",
    )
    one.add_argument("--seed", type=int, default=0)
    one = scenarios.add_parser("replay", help="replay dead letters twice, with a job that is killed meanwhile")
    one.add_argument("--letters", type=int, default=10_000)
    one.add_argument("--kills", type=int, default=5)
    one.add_argument("--rate", type=int, default=500, help="dead letters per second, while it is killed")
    one.add_argument("--seed", type=int, default=0)
    one = scenarios.add_parser("audit", help="hide one record of a million")
    one.add_argument("--records", type=int, default=1_000_000)
    one.add_argument("--minutes", type=int, default=10)
    one.add_argument("--seed", type=int, default=0)
    one = scenarios.add_parser("cluster", help="kill a worker of a standalone cluster under load")
    one.add_argument("--rate", type=int, default=200, help="readings per second")
    one.add_argument("--trigger", choices=TRIGGERS, default="micro-batch")
    one = scenarios.add_parser("rates", help="measure records per CPU second: bare source, decoding, windows, archive")
    one.add_argument("--readings", type=int, default=400_000, help="ten million take 2 GB of disk")
    one.add_argument("--rounds", type=int, default=3)
    one.add_argument("--step-limit", type=float, default=600.0, help="seconds after which a step is stopped")
    one.add_argument("--step", action="append", default=[], metavar="STEP", help="only this step; repeatable")
    one.add_argument(
        "--least", type=_least, action="append", default=[], metavar="STEP=RATE",
        help="records per CPU second that a step must reach",
    )  # fmt: skip
    one = scenarios.add_parser("state", help="keep one row of state for each of very many devices, on disk")
    one.add_argument("--devices", type=int, default=1_000_000)
    one.add_argument("--again", type=int, default=200_000, help="devices that send again after each restart")
    one.add_argument("--heap", default="1g", help="Java heap of the job")
    one = scenarios.add_parser("behind", help="let a job fall far behind, beside a client of the gateway")
    one.add_argument("--readings", type=int, default=400_000)
    one.add_argument("--most", type=int, default=40_000, help="the most records of a batch")
    one.add_argument("--rate", type=int, default=100, help="messages per second of the client")
    one.add_argument("--seconds", type=float, default=20.0, help="seconds of the client without the job")
    one = scenarios.add_parser("latency", help="measure from an MQTT sensor through Spark to an MQTT subscriber")
    one.add_argument("--rate", type=int, default=1_000, help="readings per second of all sensors")
    one.add_argument("--sensors", type=int, default=1_000)
    one.add_argument("--warm-up", type=float, default=60.0, help="seconds before measurements count")
    one.add_argument("--seconds", type=float, default=330.0, help="seconds measured; more than a real-time interval")
    one.add_argument("--trigger", choices=TRIGGERS, help="default: both, one after the other")
    one.add_argument("--interval", help="interval of real-time checkpoints (default: the job's own, 5m)")
    one.add_argument("--p50", type=float, default=60.0, help="limit in ms for the median in real time")
    one.add_argument("--p99", type=float, default=150.0, help="limit in ms for the 99th percentile in real time")
    return parser.parse_args(argv)


def _least(text: str) -> tuple[str, float]:
    step, _, rate = text.rpartition("=")
    return step, float(rate)


async def run(given: argparse.Namespace, bootstrap: str, directory: Path, gateway: GatewayProcess | None) -> int:
    """Run one scenario; 0 if it passed."""
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
    if given.scenario == "last":
        return await last.run(bootstrap, directory, last.Plan(given.kills, given.rate, given.trigger, given.seed))
    if given.scenario == "proofs":
        from loadtest.spark import proofs  # noqa: PLC0415 - with readers of three formats

        asked = proofs.Plan(given.kills, given.together, given.proof_limit, tuple(given.only), given.seed)
        return await proofs.run(bootstrap, directory, asked)
    if given.scenario == "archive":
        from loadtest.spark import archive  # noqa: PLC0415 - as above

        return await archive.run(bootstrap, directory, archive.Plan(given.format, given.kills, given.rate, given.seed))
    if given.scenario == "large":
        from loadtest.spark import large  # noqa: PLC0415 - as above

        formats = tuple(given.format or ("parquet", "delta", "iceberg"))
        wanted = large.Plan(formats, given.records, given.size, given.compressed)
        return await large.run(bootstrap, directory, wanted)
    if given.scenario == "poison":
        from loadtest.spark import poison  # noqa: PLC0415 - as above

        kinds = tuple(given.kind or poison.EACH_KIND)
        which = (given.trigger,) if given.trigger else TRIGGERS
        return await poison.run(bootstrap, directory, poison.Plan(kinds, which, given.ticks))
    if given.scenario == "state":
        return await state.run(bootstrap, directory, state.Plan(given.devices, given.again, given.heap))
    if given.scenario == "behind":
        late = behind.Plan(given.readings, given.most, given.rate, given.seconds)
        return await behind.run(bootstrap, directory, late, gateway)
    if given.scenario == "latency":
        triggers = (given.trigger,) if given.trigger else TRIGGERS[::-1]
        load = latency.Plan(
            given.rate, given.sensors, given.warm_up, given.seconds, triggers, given.interval, given.p50, given.p99
        )  # fmt: skip
        return await latency.run(bootstrap, directory, load, gateway)
    from loadtest.spark import rates  # noqa: PLC0415 - Spark in its own process

    least, only = tuple(given.least), tuple(given.step)
    return await rates.run(bootstrap, rates.Plan(given.readings, given.rounds, given.step_limit, least, only))


async def main() -> int:
    """Run the command line; the last line is the verdict."""
    given = arguments()
    code = 1
    try:
        async with asyncio.timeout(given.limit):
            code = await _with_kafka(given)
    except TimeoutError:
        print(f"not finished within {given.limit:g} s")
    print("not kept" if code else "kept")
    return code


async def _with_kafka(given: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="trivium-spark-") as name:
        directory = Path(name)
        if given.bootstrap_servers:
            return await run(given, given.bootstrap_servers, directory, None)
        gateway = GatewayProcess(directory, None)
        await gateway.start()
        try:
            return await run(given, gateway.kafka, directory, gateway)
        finally:
            await gateway.stop()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
