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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiokafka.errors import KafkaError

from spark_sinks.audit import run as audit
from spark_sinks.replay.ledger import LedgerError
from spark_sinks.replay.run import Replayed, replay
from spark_sinks.replay.sources import SourceError
from spark_sinks.replay.writer import ReplacedError
from spark_sinks.run.failures import told
from spark_sinks.run.job_file import JobFile, JobFileError
from spark_sinks.spark.process import JobConsole, end_jvm, on_stop
from spark_sinks.spec.audit import BridgeAudit
from spark_sinks.spec.backfill import Backfill
from spark_sinks.spec.replays import ReplayRun

Problems = (LedgerError, SourceError, ReplacedError, KafkaError, OSError)


def arguments(file: JobFile) -> argparse.ArgumentParser:
    """Return the command line parser; its options override the file's settings."""
    parser = argparse.ArgumentParser(prog=f"spark_sinks {file.path}", description=f"{type(file.spec).SUMMARY}.")
    add = parser.add_argument
    add("--bootstrap-servers", help="Kafka, host:port,...")
    if isinstance(file.spec.run, ReplayRun):
        add("--rate", type=float, help="the most records per second")
    if isinstance(file.spec, BridgeAudit):
        add("--once", action="store_true", help="audit once, and exit with 1 if a record is missing or cannot be read")
    if isinstance(file.spec, Backfill):
        add("--log-file", type=Path, default=Path(os.devnull), help="where Spark's log goes")
    add("--jars", help=argparse.SUPPRESS)  # `trivium spark run` gives these two to every job with Spark
    add("--driver-java-options", default="", help=argparse.SUPPRESS)
    return parser


def main(file: JobFile, argv: Sequence[str]) -> int:
    """Run the job of a file.

    Returns:
        0 if it is done or was stopped. 1 if it failed (the next run continues), records could not be replayed or
        read, or records are missing. 2 if the command line is wrong.
    """
    given = arguments(file).parse_args(argv)
    said = {name: getattr(given, name, None) for name in ("bootstrap_servers", "rate")}
    try:
        job: Any = file.running_with({name: value for name, value in said.items() if value is not None}).spec
    except JobFileError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    console = JobConsole()
    try:
        if isinstance(job, Backfill):
            return _with_spark(job, given, console)
        return asyncio.run(_run(job, given, console))
    except Problems as error:
        console.say(f"{job.title} failed: {str(error) or type(error).__name__}")
        return 1
    finally:
        console.close()


async def _run(job: Any, given: argparse.Namespace, console: JobConsole, replayed: Callable[..., Any] = replay) -> int:
    """Run the job until it is done, or SIGTERM or SIGINT stops it; return the exit code."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)

    def report(done: msgspec.Struct) -> None:
        console.report(msgspec.json.encode(done))

    if isinstance(job, BridgeAudit):
        missing = await audit.run(job, report=report, say=console.say, stopped=stopped, once=given.once)
        return 1 if missing and given.once else 0
    totals = await replayed(job, report=report, say=console.say, stopped=stopped)
    console.report(msgspec.json.encode({**msgspec.to_builtins(totals), "kind": "summary"}))
    return 1 if totals.unfit else 0


def _with_spark(job: Backfill, given: argparse.Namespace, console: JobConsole) -> int:
    """Run a backfill; an error of Spark becomes a SourceError, with its traceback in the log."""
    on_stop(_stop_now)  # until the JVM has started there is nothing to stop cleanly
    console.divert(given.log_file)  # Spark's own output
    from py4j.protocol import Py4JError  # noqa: PLC0415 - with pyspark
    from pyspark.errors import PySparkException  # noqa: PLC0415

    from spark_sinks.replay.archive_rows import backfill  # noqa: PLC0415
    from spark_sinks.spark.session import session  # noqa: PLC0415

    run = job.run
    try:
        spark = session(
            f"trivium {job.title}",
            master=run.master,
            driver_memory=run.driver_memory,
            shuffle_partitions=8,
            java_options=given.driver_java_options,
            conf=run.conf,
        )

        async def replayed(*args: Any, **running: Any) -> Replayed:
            try:
                return await backfill(spark, *args, **running)
            finally:
                end_jvm(4.0)  # here, since asyncio waits for threads, which may wait for the JVM

        return asyncio.run(_run(job, given, console, replayed))
    except (PySparkException, Py4JError) as error:
        traceback.print_exc()
        raise SourceError(told(error)) from error
    finally:
        end_jvm(4.0)


def _stop_now() -> None:
    raise SystemExit(0)
