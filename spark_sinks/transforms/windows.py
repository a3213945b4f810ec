"""Statistics of groups of readings over windows of event time and over sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark_sinks.read.records import term
from spark_sinks.spec.parts import Session, Window
from spark_sinks.spec.values import Aggregate, Term
from spark_sinks.transforms.dead_letters import LATE, LATE_BY_OTHERS

_RANK_ERROR: Final = 10_000
"""The accuracy of percentiles: their rank error is at most 1 in this number."""


WITHIN_LONG: Final = "isEmpty"
"""The column that sums of a long have in the state, so that one can be null because it left the range of a long."""


def statistics(
    readings: DataFrame,
    by: Sequence[Term],
    window: Window,
    aggregates: Mapping[str, Aggregate],
    *,
    sums: Callable[[Column], Column] = F.try_sum,
) -> DataFrame:
    """Return the aggregates of each group and window.

    `sums` is `F.sum` for a checkpoint whose state lacks `WITHIN_LONG`: there a sum that is too large ends the query.

    A window closes, and a reading is too late for it, when the newest event time is `window.watermark` past its end.

    Returns:
        the terms of `by` under their names, `start`, `end` (epoch ms, end exclusive), the aggregates.
    """
    names = [of.name for of in by]
    slide = window.slide or window.length
    grouped = _grouped(readings, by, aggregates, window.watermark.ms).groupBy(
        F.window("time", interval(window.length.ms), interval(slide.ms)).alias("window"), *names
    )
    seconds = F.lit(window.length.ms / 1_000)
    return grouped.agg(*(_aggregate(of, seconds, sums).alias(name) for name, of in aggregates.items())).select(
        *names,
        F.unix_millis("window.start").alias("start"),
        F.unix_millis("window.end").alias("end"),
        *aggregates,
    )


def sessions(
    readings: DataFrame,
    by: Sequence[Term],
    session: Session,
    aggregates: Mapping[str, Aggregate],
    *,
    sums: Callable[[Column], Column] = F.try_sum,
) -> DataFrame:
    """Return the aggregates of each group's sessions. A gap of `session.gap` or more between readings ends a session.

    For `sums` see `statistics`.

    Returns:
        the terms of `by` under their names, `start` and `end` (the first and the last reading, epoch ms),
        `duration_ms`, the aggregates.
    """
    names = [of.name for of in by]
    grouped = _grouped(readings, by, aggregates, session.watermark.ms).groupBy(
        F.session_window("time", interval(session.gap.ms)).alias("window"), *names
    )
    start = F.unix_millis("window.start")
    duration = F.unix_millis("window.end") - start - F.lit(session.gap.ms)
    seconds = (F.unix_millis("window.end") - start) / 1_000
    return (
        grouped.agg(*(_aggregate(of, None, sums).alias(name) for name, of in aggregates.items()))
        .select(
            *names,
            start.alias("start"),
            (start + duration).alias("end"),
            duration.alias("duration_ms"),
            *(
                (F.col(name) / seconds).alias(name) if of.parts[0] == "rate" else F.col(name)
                for name, of in aggregates.items()
            ),
        )
    )  # fmt: skip


def left_out(checked: DataFrame, window: Window | Session, watermark_ms: Column) -> DataFrame:
    """Return the records of `decode.readings` that no result counts: bad ones, and those that Spark dropped as late.

    A session of only one reading lasts for `gap`.

    Args:
        checked: the result of `decode.readings`, with the source's columns in `record`.
        window: the job's window or session.
        watermark_ms: the watermark that Spark applied to the record, epoch ms.

    Returns:
        the source's columns, and the reason in `error`.
    """
    closes = F.unix_millis("time") + window.gap.ms if isinstance(window, Session) else newest_close(window)
    return with_late(checked, closes, watermark_ms, window.watermark.ms).select("record.*", "error")


def newest_close(window: Window) -> Column:
    """Return when (epoch ms) the newest window of a reading closes.

    It starts at the last multiple of the slide that is not after the reading.
    """
    at = F.unix_millis("time")  # `window` would drop records without a time
    return at - F.pmod(at, F.lit((window.slide or window.length).ms)) + window.length.ms


def with_late(checked: DataFrame, closes: Column, watermark_ms: Column, delay_ms: int) -> DataFrame:
    """Return the bad records and the late ones, with the reason in `error`: late if all its windows were closed.

    Args:
        checked: readings with `timestamp` (their arrival) and `error`.
        closes: when (epoch ms) the newest window of a reading closes.
        watermark_ms: the watermark that Spark applied to the record, epoch ms.
        delay_ms: how late a reading may be. One that was later than this at its own arrival is late by itself; any
            other would have counted, had no later reading come before it.
    """
    by_itself = closes <= F.unix_millis("timestamp") - delay_ms
    late = F.when(closes <= watermark_ms, F.when(by_itself, LATE).otherwise(LATE_BY_OTHERS))
    return checked.withColumn("error", F.coalesce("error", late)).where(F.col("error").isNotNull())


def _grouped(
    readings: DataFrame, by: Sequence[Term], aggregates: Mapping[str, Aggregate], watermark_ms: int
) -> DataFrame:
    """Select only the needed columns, renamed so that they cannot clash."""
    used = dict.fromkeys(column for of in aggregates.values() if (column := of.parts[1]) is not None)
    return readings.select(
        "time", *(term(of).alias(of.name) for of in by), *(F.col(name).alias(f"_of_{name}") for name in used)
    ).withWatermark("time", interval(watermark_ms))


def _aggregate(of: Aggregate, seconds: Column | None, sums: Callable[[Column], Column]) -> Column:
    function, name, rank = of.parts
    if name is None:
        count = F.count(F.lit(1))
        return count / seconds if function == "rate" and seconds is not None else count
    column = F.col(f"_of_{name}")
    if function == "percentile":
        return F.percentile_approx(column, rank or 0.5, _RANK_ERROR)
    made: Mapping[str, Column] = {
        "count": F.count(column), "min": F.min(column), "max": F.max(column), "sum": sums(column),
        "mean": F.avg(column), "stddev": F.stddev_samp(column), "distinct": F.approx_count_distinct(column),
    }  # fmt: skip
    return made[function]


def interval(ms: int) -> str:
    """Return a duration in Spark SQL's syntax."""
    return f"{ms} milliseconds"
