"""What is counted of a job's query: each field is a metric, `trivium_spark_<field>` (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from gateway.statistics import counter, gauge

SOURCE: Final = "spark"


class QueryStatistics(msgspec.Struct, frozen=True):
    """One query of a job."""

    trigger: Annotated[Mapping[str, int], gauge("1 for how the query reads now", "trigger")]
    rows: Annotated[int, counter("records read")]
    batches: Annotated[int, counter("batches done; in real time there is one per checkpoint")]
    rows_per_second: Annotated[float, gauge("records read a second, of the newest minute or the newest batch")]
    position: Annotated[
        Mapping[str, Mapping[str, int]], gauge("the offset before which all is processed", "topic", "partition")
    ]
    lag: Annotated[
        Mapping[str, Mapping[str, int]],
        gauge(
            "records between the position and the topic's end; in real time as of the checkpoint", "topic", "partition"
        ),
    ]
    late_rows: Annotated[int, counter("rows that the state dropped as late, as Spark counts them")]
    late: Annotated[int | None, counter("readings that came too late, sent to the dead letters")]
    malformed: Annotated[int | None, counter("records that could not be used, sent to the dead letters")]
    dead_letters: Annotated[int | None, counter("records sent to the dead letters")]
    batch: Annotated[int | None, gauge("number of the newest batch, continued over restarts")]
    batch_duration_ms: Annotated[int | None, gauge("how long the newest batch took")]
    last_batch_timestamp_s: Annotated[float | None, gauge("when the newest batch was done, Unix time")]
    watermark_lag_ms: Annotated[int | None, gauge("how long ago, by the clock, the event time was that closes windows")]
    state_rows: Annotated[int | None, gauge("rows of state kept")]
    state_bytes: Annotated[int | None, gauge("memory that the state takes")]
    restarts: Annotated[int, counter("starts of the job on its checkpoint before this one, as this machine knows them")]
