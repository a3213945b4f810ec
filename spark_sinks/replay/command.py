"""A replay as a process: its command line, its lines, its end. Neither Spark nor Java is started."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from aiokafka.errors import KafkaError

from spark_sinks.job_file import JobFile, JobFileError
from spark_sinks.replay.ledger import Entry, LedgerError, places_of
from spark_sinks.replay.run import Clients, Replayed, Say, run
from spark_sinks.replay.sources import Source, SourceError, of_log
from spark_sinks.replay.writer import TakenOver
from spark_sinks.spec.replays import DlqReplay, Replay

Problems = (LedgerError, SourceError, TakenOver, KafkaError, OSError)


def arguments(file: JobFile) -> argparse.ArgumentParser:
    """The command line; what it says wins over the file."""
    parser = argparse.ArgumentParser(prog=f"spark_sinks {file.path}", description=type(file.spec).SUMMARY)
    add = parser.add_argument
    add("--bootstrap-servers", help="Kafka, host:port,...")
    add("--rate", type=float, help="the most records a second")
    add("--jars", help=argparse.SUPPRESS)  # `trivium spark run` gives these to every job
    add("--driver-java-options", help=argparse.SUPPRESS)
    return parser


def main(file: JobFile, argv: Sequence[str]) -> int:
    """Run the replay of a job file.

    Returns:
        0: nothing is left, or it was stopped. 1: it failed, and the next run goes on; or records could not be replayed.
        2: the command line is wrong.
    """
    given = arguments(file).parse_args(argv)
    said = {name: getattr(given, name) for name in ("bootstrap_servers", "rate") if getattr(given, name) is not None}
    try:
        job: Any = file.running_with(said).spec
    except JobFileError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    try:
        totals = asyncio.run(_main(job))
    except Problems as error:
        sys.stderr.write(f"{job.title} failed: {str(error) or type(error).__name__}\n")
        return 1
    sys.stdout.write(f"{msgspec.json.encode({**msgspec.to_builtins(totals), 'kind': 'summary'}).decode()}\n")
    return 1 if totals.unfit else 0


async def _main(job: Replay | DlqReplay) -> Replayed:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)

    def report(done: Replayed) -> None:
        sys.stdout.write(f"{msgspec.json.encode(done).decode()}\n")
        sys.stdout.flush()

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    return await replay(job, report=report, say=say, stopped=stopped)


async def replay(job: Replay | DlqReplay, *, report: Any, say: Say, stopped: asyncio.Event) -> Replayed:
    """See `run`."""

    async def open_source(clients: Clients, entry: Entry | None, tell: Say) -> Source:
        sources = await clients.topics.known(job.topics)
        if missing := [name for name in job.topics if name not in sources]:
            raise SourceError(f"there is no topic {', '.join(missing)}")
        began, positions = ({}, {}) if entry is None else (places_of(entry.began), places_of(entry.positions))
        return await of_log(job, clients.committed, sources, began=began, positions=positions, say=tell)

    settings = {"bootstrap.servers": job.run.bootstrap_servers, **job.run.kafka}
    return await run(job, settings, open_source, report=report, say=say, stopped=stopped)
