"""Maintains an archive of any format while its job writes it. Needs no Spark."""

from __future__ import annotations

import datetime
from pathlib import Path

from spark_sinks.archive.contract import ArchiveError, Maintained
from spark_sinks.archive.lake import table_of
from spark_sinks.decoders.needs import of_lake
from spark_sinks.spec.jobs import Archive


def maintain(job: Archive) -> Maintained:
    """Merge small files, delete old rows and unused files, as configured by the job's `[maintain]`.

    Raises:
        ArchiveError: it failed; the archive is unchanged, or a part of the work is done.
    """
    sink, settings = job.sink, job.maintain
    now = datetime.datetime.now(datetime.UTC)
    if (lack := next(of_lake(sink.format, upkeep=True), None)) is not None:
        raise ArchiveError(lack)
    if sink.format != "parquet":
        return table_of(sink).maintain(settings, now)
    from spark_sinks.archive import segments  # noqa: PLC0415 - needs pyarrow, of the extra `lake`

    if "://" in sink.archive and not sink.archive.startswith("file://"):
        raise ArchiveError(
            f"{sink.archive}: Parquet files can be maintained only in a local directory, where an exchange is atomic; "
            'elsewhere use format = "delta"'
        )
    return segments.maintain(Path(sink.archive.removeprefix("file://")), settings, now)


def described(done: Maintained) -> str:
    """Return one line for people, and one for each thing that could not be done."""
    summary = (
        f"{done.merged:,} files merged into {done.into:,} with their {done.rows:,} rows, "
        f"{done.expired:,} rows deleted because of their age, {done.unused:,} unused files deleted"
    )
    return "\n".join([summary, *done.left])
