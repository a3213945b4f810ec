"""The statistics of a job's query: each field is a metric, `trivium_spark_<field>` (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from telemetry.statistics import counter, gauge

SOURCE: Final = "spark"


class QueryStatistics(msgspec.Struct, frozen=True):
    """One query of a job."""

    trigger: Annotated[Mapping[str, int], gauge("1 for the query's present trigger mode", "trigger")]
    rows: Annotated[int, counter("records read")]
    batches: Annotated[int, counter("batches finished; in real time one per checkpoint")]
    rows_per_second: Annotated[float, gauge("records read per second, over the last minute or the newest batch")]
    position: Annotated[
        Mapping[str, Mapping[str, int]], gauge("offset before which all records are read", "topic", "partition")
    ]
    lag: Annotated[
        Mapping[str, Mapping[str, int]],
        gauge("records between the position and the topic's end", "topic", "partition"),
    ]
    late_rows: Annotated[int, counter("rows that the state dropped as late, as Spark counts them")]
    late: Annotated[int | None, counter("late readings sent to the dead letters")]
    late_by_others: Annotated[
        int | None,
        counter("those among them that were in time at their arrival, so that other readings made them late"),
    ]
    malformed: Annotated[int | None, counter("malformed records sent to the dead letters")]
    dead_letters: Annotated[int | None, counter("records sent to the dead letters")]
    batch: Annotated[int | None, gauge("number of the newest batch, continued over restarts")]
    batch_duration_ms: Annotated[int | None, gauge("duration of the newest batch")]
    last_batch_timestamp_s: Annotated[float | None, gauge("when the newest batch ended, Unix time")]
    watermark_lag_ms: Annotated[int | None, gauge("time between the clock and the watermark")]
    state_rows: Annotated[int | None, gauge("rows in the state store")]
    state_bytes: Annotated[int | None, gauge("memory used by the state store")]
    restarts: Annotated[int, counter("earlier starts of the job on its checkpoint, as recorded on this machine")]
