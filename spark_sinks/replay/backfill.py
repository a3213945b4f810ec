"""Runs a backfill: Spark reads and sorts an archive's rows, this process writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pyspark.sql import SparkSession

from spark_sinks.replay.archive_rows import ArchiveRows, selected
from spark_sinks.replay.ledger import Entry, places_of
from spark_sinks.replay.run import Clients, Replayed, Say, run
from spark_sinks.replay.sources import Source, SourceError
from spark_sinks.spec.backfill import Backfill


async def backfill(
    spark: SparkSession, job: Backfill, *, report: Callable[[Replayed], None], say: Say, stopped: asyncio.Event
) -> Replayed:
    """Replay the rest of an archive; see `run`."""

    async def open_source(clients: Clients, entry: Entry) -> Source:
        if job.sink.kafka not in await clients.topics.known([job.sink.kafka]):
            raise SourceError(f"topic {job.sink.kafka} does not exist")
        positions = places_of(entry.positions)
        rows = await asyncio.to_thread(selected, spark, job.source, positions)
        return ArchiveRows(rows, positions, await asyncio.to_thread(rows.count))

    return await run(job, open_source, report=report, say=say, stopped=stopped)
