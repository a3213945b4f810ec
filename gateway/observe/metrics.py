"""Metrics: what the parts of the gateway count themselves, turned into Prometheus families when somebody asks.

Nothing here is called per message. A part keeps plain integers and gives them out by `statistics()`, an immutable
struct; `Metrics` reads it at scrape time. A field's name is its metric's name, by these rules:

- `trivium_<source>_<field>`; a struct inside a struct adds its field's name in between;
- a field that ends in `_total`, or that the source names as a counter, is a counter; any other number is a gauge;
- units stand in names as Prometheus wants them: `_s` becomes `_seconds`, `_ms` too (and the value is divided);
- a mapping (topic -> number or struct, or topic -> partition -> number) becomes a label, or two, each of at most
  `LABEL_VALUES` values, the rest summed in `other`;
- a `Histogram` becomes a histogram; what is no number is left out.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

log = structlog.get_logger(__name__)

PREFIX: Final = "trivium"
LABEL_VALUES: Final = 200  # topics are few by design, and a scrape must stay small all the same
OTHER: Final = "other"
MAPPING_LABELS: Final = ("topic", "partition")
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Counts by bounds. Cheap enough for once per Kafka batch; not meant for once per message."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        """Args: bounds: upper bounds, ascending, inclusive; what is above the last one is counted too."""
        if list(bounds) != sorted(set(bounds)):
            raise ValueError("bounds must ascend")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, in the unit of the bounds, `times` times."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """The counts up to each bound, as Prometheus writes them."""
        sums: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            sums.append((bound, float(running)))
        return sums


class _Source(msgspec.Struct, frozen=True):
    name: str
    read: Callable[[], Any]
    labels: Labels
    counters: frozenset[str]
    mappings: Mapping[str, tuple[str, ...]]


class _Samples(msgspec.Struct):
    """One family on its way: all its samples, of all sources."""

    kind: Callable[..., Metric]
    help: str
    rows: list[tuple[dict[str, str], Any]]


class Metrics(Collector):
    """The process's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._sources: list[_Source] = []
        self._failures: dict[str, int] = {}
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def add_source(
        self,
        name: str,
        read: Callable[[], Any],
        *,
        labels: Mapping[str, str] | None = None,
        counters: Collection[str] = (),
        mappings: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """Register something that counts.

        Args:
            name: the part's name, such as `publisher`; several sources may share one, with different `labels`.
            read: gives a msgspec struct, a mapping or None (nothing to tell now); called at each scrape, in the
                event loop; it must be quick.
            labels: constant labels, such as `{"protocol": "mqtt"}`.
            counters: fields that only grow although their name does not end in `_total`.
            mappings: for fields that are mappings, the labels that their keys become, outermost first; `topic` and
                `partition` by default.
        """
        fixed = tuple(sorted((labels or {}).items()))
        self._sources.append(_Source(name, read, fixed, frozenset(counters), dict(mappings or {})))

    def render(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: the sources say what there is."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Ask every source. One that fails is left out and counted; the others are not touched."""
        families: dict[str, _Samples] = {}
        for source in self._sources:
            reading = _Reading(source)
            try:
                value = source.read()
                if value is not None:
                    reading.take((PREFIX, source.name), dict(source.labels), value)
            except Exception as error:
                if source.name not in self._failures:
                    log.exception("statistics failed", source=source.name, error=type(error).__name__)
                self._failures[source.name] = self._failures.get(source.name, 0) + 1
                continue
            for name, samples in reading.families.items():
                families.setdefault(name, _Samples(samples.kind, samples.help, [])).rows.extend(samples.rows)
        for name, samples in sorted(families.items()):
            yield _family(name, samples)
        failures = CounterMetricFamily(
            f"{PREFIX}_scrape_failures", "Sources that could not be read.", labels=["source"]
        )
        for name, count in self._failures.items():
            failures.add_metric([name], count)
        yield failures


class _Reading:
    """The families that one source's statistics become."""

    def __init__(self, source: _Source) -> None:
        self.families: dict[str, _Samples] = {}
        self._source = source

    def take(self, path: tuple[str, ...], labels: dict[str, str], value: Any) -> None:
        """Take the fields of a struct, or of a mapping that stands for one."""
        if isinstance(value, msgspec.Struct):
            value = {field: getattr(value, field) for field in value.__struct_fields__}
        for field, inner in value.items():
            names = self._source.mappings.get(field, MAPPING_LABELS)
            self._take_field((*path, field), labels, inner, names)

    def _take_field(self, path: tuple[str, ...], labels: dict[str, str], value: Any, names: tuple[str, ...]) -> None:
        field = path[-1]
        if isinstance(value, Mapping):
            for key, inner in _bounded(value).items():
                text = key.value if isinstance(key, enum.Enum) else key
                self._take_field(path, {**labels, names[0]: str(text)}, inner, names[1:])
        elif isinstance(value, msgspec.Struct):
            self.take(path, labels, value)
        elif isinstance(value, Histogram):
            name, _ = _named("_".join(path))
            self._add(name, HistogramMetricFamily, labels, (value.buckets(), value.total))
        elif isinstance(value, (int, float)):
            name, divisor = _named("_".join(path))
            if field.endswith("_total") or field in self._source.counters:
                # A gauge `connections` and a counter `connections_total` may stand side by side.
                self._add(f"{name.removesuffix('_total')}_total", CounterMetricFamily, labels, value / divisor)
            else:
                self._add(name, GaugeMetricFamily, labels, value / divisor)

    def _add(self, name: str, kind: Callable[..., Metric], labels: dict[str, str], value: Any) -> None:
        text = name.removeprefix(f"{PREFIX}_").replace("_", " ").capitalize() + "."
        self.families.setdefault(name, _Samples(kind, text, [])).rows.append((labels, value))


def _named(name: str) -> tuple[str, int]:
    """The name with Prometheus' unit, and what the value is divided by."""
    stem, total = (name.removesuffix("_total"), "_total") if name.endswith("_total") else (name, "")
    if stem.endswith("_ms"):
        return f"{stem.removesuffix('_ms')}_seconds{total}", 1000
    if stem.endswith("_s"):
        return f"{stem.removesuffix('_s')}_seconds{total}", 1
    return name, 1


def _bounded(values: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """At most `LABEL_VALUES` keys: the first ones by name, and the sum of the rest (numbers only)."""
    if len(values) <= LABEL_VALUES:
        return values
    ordered = sorted(values, key=str)
    kept = {key: values[key] for key in ordered[: LABEL_VALUES - 1]}
    numbers = [values[key] for key in ordered[LABEL_VALUES - 1 :] if isinstance(values[key], (int, float))]
    return {**kept, OTHER: sum(numbers)} if numbers else kept


def _family(name: str, samples: _Samples) -> Metric:
    """One family; a label that only some of its sources have is empty for the others."""
    names = sorted({label for labels, _ in samples.rows for label in labels})
    family: Any = samples.kind(name, samples.help, labels=names)
    for labels, value in samples.rows:
        values = [labels.get(label, "") for label in names]
        if samples.kind is HistogramMetricFamily:
            family.add_metric(values, buckets=value[0], sum_value=value[1])
        else:
            family.add_metric(values, value)
    found: Metric = family
    return found
