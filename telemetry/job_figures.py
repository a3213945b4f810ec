"""Reads the state of Spark jobs' queries from their metrics. Needs no Spark."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

PREFIX: Final = "trivium_spark_"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one query, from its metrics. None means unknown, or not applicable to the job."""

    job: str
    query: str
    trigger: str  # micro-batch, real-time, catching-up; empty before the first
    rows: int
    rows_per_second: float
    lag: int | None
    batch: int | None
    batch_s: float | None
    late: int | None
    malformed: int | None
    dead_letters: int | None
    state_rows: int | None
    state_bytes: int | None
    watermark_lag_s: float | None
    last_batch: float | None  # Unix time
    restarts: int


def figures(text: str) -> tuple[Figures, ...]:
    """Return the queries in a text in Prometheus' format; ValueError if it is not valid."""
    values: dict[tuple[str, str], dict[str, float]] = {}
    triggers: dict[tuple[str, str], str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith(PREFIX):
                continue
            if not math.isfinite(sample.value):
                raise ValueError(f"{sample.name} is no number")
            labels = sample.labels
            query = (labels.get("job", ""), labels.get("query", ""))
            name = sample.name.removeprefix(PREFIX)
            if name == "trigger":
                if sample.value:
                    triggers[query] = labels.get("trigger", "")
                continue
            kinds = values.setdefault(query, {})
            kinds[name] = kinds.get(name, 0.0) + sample.value
    return tuple(_figures(job, query, triggers.get((job, query), ""), kinds) for (job, query), kinds in values.items())


def _figures(job: str, query: str, trigger: str, values: Mapping[str, float]) -> Figures:
    def whole(name: str) -> int | None:
        return round(values[name]) if name in values else None

    return Figures(
        job=job,
        query=query,
        trigger=trigger,
        rows=whole("rows_total") or 0,
        rows_per_second=values.get("rows_per_second", 0.0),
        lag=whole("lag"),
        batch=whole("batch"),
        batch_s=values.get("batch_duration_seconds"),
        late=whole("late_total"),
        malformed=whole("malformed_total"),
        dead_letters=whole("dead_letters_total"),
        state_rows=whole("state_rows"),
        state_bytes=whole("state_bytes"),
        watermark_lag_s=values.get("watermark_lag_seconds"),
        last_batch=values.get("last_batch_timestamp_seconds"),
        restarts=whole("restarts_total") or 0,
    )
