"""Metrics: converts the counters of the gateway's parts to Prometheus families at scrape time.

Nothing here is called per message. Each part keeps plain integers and returns them from `statistics()` as a struct
whose fields declare their metrics (`telemetry.statistics`). Names follow from the fields:

- `trivium_<source>_<field>`; a nested struct adds its field's name in between;
- units follow Prometheus' conventions: `_s` and `_ms` become `_seconds` (the value is divided);
- a counter ends in `_total`, whether the field does or not;
- a mapping (topic -> number or struct, or topic -> partition -> number) becomes one label or two, each with at most
  `LABEL_VALUES` values; the rest is summed as `other`;
- None values and fields without a declaration are left out.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import structlog
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from telemetry.statistics import Declared, Histogram, Kind, fields

log = structlog.get_logger(__name__)

PREFIX: Final = "trivium"
LABEL_VALUES: Final = 200  # topics are few by design, but a scrape must stay small in any case
OTHER: Final = "other"
FAMILIES: Final[dict[Kind, Callable[..., Metric]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}

Read = Callable[[], msgspec.Struct | None]
"""Returns a struct of declared fields, or None for no metrics."""
Row = tuple[dict[str, str], Any]
"""Labels and value of a sample."""
_Sample = tuple[str, Declared, Row]
"""A sample with the name and the declaration of its metric."""


class Metrics(Collector):
    """The process's metrics, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._sources: list[tuple[str, Read, dict[str, str]]] = []
        self._failures: dict[str, int] = {}
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def add_source(self, name: str, read: Read, *, labels: Mapping[str, str] | None = None) -> None:
        """Register a source. Several sources may share a name, with different constant `labels`.

        `read` runs in the event loop at each scrape and must be fast.
        """
        self._sources.append((name, read, dict(labels or {})))

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return self.rendered_for("")[0]

    def rendered_for(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in the format that an Accept header prefers, OpenMetrics or text, and its media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type

    def figures(self, names: Collection[str]) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Return the labels and values of the metrics with these names."""
        samples: dict[str, list[tuple[dict[str, str], float]]] = {name: [] for name in names}
        for family in self.collect():
            for sample in family.samples:
                if sample.name in samples:
                    samples[sample.name].append((dict(sample.labels), sample.value))
        return samples

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the families are known only when the sources are read."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Read every source. A source that fails is left out and counted."""
        families: dict[str, tuple[Declared, list[Row]]] = {}
        for source, read, labels in self._sources:
            try:
                value = read()
                samples = [] if value is None else list(_samples((PREFIX, source), labels, value))
            except Exception as error:
                if source not in self._failures:
                    log.exception("statistics failed", source=source, error=type(error).__name__)
                self._failures[source] = self._failures.get(source, 0) + 1
                continue
            for name, declared, row in samples:
                families.setdefault(name, (declared, []))[1].append(row)
        for name, (declared, rows) in sorted(families.items()):
            yield _family(name, declared, rows)
        failures = CounterMetricFamily(
            f"{PREFIX}_scrape_failures", "Sources that could not be read.", labels=["source"]
        )
        for name, count in self._failures.items():
            failures.add_metric([name], count)
        yield failures


def _samples(path: tuple[str, ...], labels: dict[str, str], struct: msgspec.Struct) -> Iterator[_Sample]:
    """Yield the samples of a struct's declared fields and of its nested structs."""
    for field in fields(type(struct)):
        yield from _samples_of((*path, field.name), labels, getattr(struct, field.name), field.declared)


def _samples_of(
    path: tuple[str, ...], labels: dict[str, str], value: Any, declared: Declared | None, depth: int = 0
) -> Iterator[_Sample]:
    if isinstance(value, msgspec.Struct):
        yield from _samples(path, labels, value)
    elif declared is None or value is None:
        return
    elif isinstance(value, Mapping):
        for key, inner in _bounded(value).items():
            text = key.value if isinstance(key, enum.Enum) else key
            yield from _samples_of(path, {**labels, declared.labels[depth]: str(text)}, inner, declared, depth + 1)
    else:
        name, divisor = metric_name(path, declared)
        sample = (value.buckets(), value.total) if isinstance(value, Histogram) else value / divisor
        yield name, declared, (labels, sample)


def metric_name(path: Sequence[str], declared: Declared) -> tuple[str, int]:
    """Return the metric's name with Prometheus' unit and suffix, and the divisor of the value."""
    name, divisor = "_".join(path).removesuffix("_total"), 1
    if name.endswith("_ms"):
        name, divisor = f"{name.removesuffix('_ms')}_seconds", 1000
    elif name.endswith("_s"):
        name = f"{name.removesuffix('_s')}_seconds"
    # A gauge `connections` and a counter `connections_total` may both exist.
    return f"{name}_total" if declared.kind == "counter" else name, divisor


class DescribedMetric(msgspec.Struct, frozen=True):
    """A metric as listed in `docs/metrics.md`."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str


def describe(source: str, struct: type[msgspec.Struct]) -> Iterator[DescribedMetric]:
    """Yield the metrics of a source that returns such structs, in field order."""
    return _described((PREFIX, source), (), struct)


def _described(
    path: tuple[str, ...], labels: tuple[str, ...], struct: type[msgspec.Struct]
) -> Iterator[DescribedMetric]:
    for field in fields(struct):
        here, declared = (*path, field.name), field.declared
        below = labels + (declared.labels if declared is not None else ())
        if field.struct is not None:
            yield from _described(here, below, field.struct)
        elif declared is not None and declared.kind is not None:
            yield DescribedMetric(metric_name(here, declared)[0], declared.kind, below, declared.meaning)


def _bounded(values: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Limit a mapping to `LABEL_VALUES` keys: the first ones by name, and the sum of the rest (numbers only)."""
    if len(values) <= LABEL_VALUES:
        return values
    ordered = sorted(values, key=str)
    kept = {key: values[key] for key in ordered[: LABEL_VALUES - 1]}
    numbers = [values[key] for key in ordered[LABEL_VALUES - 1 :] if isinstance(values[key], (int, float))]
    return {**kept, OTHER: sum(numbers)} if numbers else kept


def _family(name: str, declared: Declared, rows: Sequence[Row]) -> Metric:
    """Build one family. A label that only some sources have is empty for the others."""
    names = sorted({label for labels, _ in rows for label in labels})
    assert declared.kind is not None
    family: Any = FAMILIES[declared.kind](name, f"{declared.meaning[0].upper()}{declared.meaning[1:]}.", labels=names)
    for labels, value in rows:
        values = [labels.get(label, "") for label in names]
        if declared.kind == "histogram":
            family.add_metric(values, buckets=value[0], sum_value=value[1])
        else:
            family.add_metric(values, value)
    metric: Metric = family
    return metric
