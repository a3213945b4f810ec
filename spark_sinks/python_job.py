"""Runs a replay, a backfill or an audit as a process: command line, output, exit code.

Only a backfill uses Spark, to read the rows of an archive.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiokafka.errors import KafkaError

from spark_sinks.audit import run as audit
from spark_sinks.job_file import JobFile, JobFileError
from spark_sinks.replay.ledger import LedgerError
from spark_sinks.replay.run import Replayed, replay
from spark_sinks.replay.sources import SourceError
from spark_sinks.replay.writer import ReplacedError
from spark_sinks.spec.audit import BridgeAudit
from spark_sinks.spec.backfill import Backfill
from spark_sinks.spec.replays import ReplayRun

Problems = (LedgerError, SourceError, ReplacedError, KafkaError, OSError)
Report = Callable[[msgspec.Struct], None]
Say = Callable[[str], None]


def arguments(file: JobFile) -> argparse.ArgumentParser:
    """Return the command line parser; its options override the file's settings."""
    parser = argparse.ArgumentParser(prog=f"spark_sinks {file.path}", description=f"{type(file.spec).SUMMARY}.")
    add = parser.add_argument
    add("--bootstrap-servers", help="Kafka, host:port,...")
    if isinstance(file.spec.run, ReplayRun):
        add("--rate", type=float, help="the most records per second")
    if isinstance(file.spec, BridgeAudit):
        add("--once", action="store_true", help="audit once, and exit with 1 if a record is missing")
    if isinstance(file.spec, Backfill):
        add("--log-file", type=Path, default=Path(os.devnull), help="where Spark's log goes")
    add("--jars", help=argparse.SUPPRESS)  # `trivium spark run` gives these two to every job with Spark
    add("--driver-java-options", default="", help=argparse.SUPPRESS)
    return parser


def main(file: JobFile, argv: Sequence[str]) -> int:
    """Run the job of a file.

    Returns:
        0 if it is done or was stopped. 1 if it failed (the next run continues), records could not be replayed, or
        records are missing. 2 if the command line is wrong.
    """
    given = arguments(file).parse_args(argv)
    said = {name: getattr(given, name, None) for name in ("bootstrap_servers", "rate")}
    try:
        job: Any = file.running_with({name: value for name, value in said.items() if value is not None}).spec
    except JobFileError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    try:
        if isinstance(job, BridgeAudit):
            return asyncio.run(_until_stopped(lambda stopped: _audit(job, stopped, once=given.once)))
        if isinstance(job, Backfill):
            return asyncio.run(_until_stopped(lambda stopped: _backfill(job, stopped, given)))
        return asyncio.run(_until_stopped(lambda stopped: _replay(job, stopped)))
    except Problems as error:
        _say(f"{job.title} failed: {str(error) or type(error).__name__}")
        return 1


async def _until_stopped(work: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return await work(stopped)


async def _replay(job: Any, stopped: asyncio.Event) -> int:
    totals = await replay(job, report=_report, say=_say, stopped=stopped)
    sys.stdout.write(f"{_summary(totals).decode()}\n")
    return 1 if totals.unfit else 0


async def _backfill(job: Backfill, stopped: asyncio.Event, given: argparse.Namespace) -> int:
    """Replay with Spark, whose own output goes to the log file."""
    from py4j.protocol import Py4JError  # noqa: PLC0415 - with pyspark
    from pyspark.errors import PySparkException  # noqa: PLC0415

    from spark_sinks.process import Console, end_jvm  # noqa: PLC0415
    from spark_sinks.replay.backfill import backfill  # noqa: PLC0415
    from spark_sinks.session import session  # noqa: PLC0415

    console = Console()
    console.divert(given.log_file)
    run = job.run
    try:
        spark = await asyncio.to_thread(
            session,
            f"trivium {job.title}",
            master=run.master,
            driver_memory=run.driver_memory,
            shuffle_partitions=8,
            java_options=given.driver_java_options,
            conf=run.conf,
        )
        totals = await backfill(
            spark,
            job,
            report=lambda done: console.report(msgspec.json.encode(done)),
            say=console.say,
            stopped=stopped,
        )
        console.report(_summary(totals))
        await asyncio.to_thread(spark.stop)
    except (PySparkException, Py4JError) as error:
        traceback.print_exc()
        console.say(f"{job.title} failed: {next(iter(str(error).splitlines()), type(error).__name__)}")
        return 1
    finally:
        end_jvm(4.0)
        console.close()
    return 1 if totals.unfit else 0


async def _audit(job: BridgeAudit, stopped: asyncio.Event, *, once: bool) -> int:
    missing = await audit.run(job, report=_report, say=_say, stopped=stopped, once=once)
    return 1 if missing and once else 0


def _summary(totals: Replayed) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(totals), "kind": "summary"})


def _report(done: msgspec.Struct) -> None:
    sys.stdout.write(f"{msgspec.json.encode(done).decode()}\n")
    sys.stdout.flush()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
