"""The gateway's parts as metric sources: which of their numbers only grow, and what the keys of their mappings mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from gateway.kafka.groups.assignment import GroupStatistics
from gateway.kafka.publish.publisher import LATENCY_MS
from gateway.kafka.publish.publisher import Statistics as PublisherStatistics
from gateway.observe.metrics import Histogram, Metrics

MESSAGES: Final = frozenset(
    {
        "published", "acknowledged", "refused", "delivered", "delivered_acknowledged", "expired", "too_large",
        "dropped", "gaps", "lost_at_qos_0", "failed_connections", "refused_connections",
    }
)  # fmt: skip
COUNTERS: Final[dict[str, frozenset[str]]] = {
    "mqtt": MESSAGES,
    "amqp": frozenset(
        {
            "incoming", "sent", "expired", "too_large_for_peer", "rejected_by_peer", "returned_by_peer", "aborted",
            "dead_letters", "dead_letters_failed",
            "transactions_committed", "transactions_rolled_back", "transactions_timed_out",
            "connections", "refused_logins", "refused_links", "broken",
        }
    ),
    "publisher": frozenset({"records", "state_records", "unowned", "batches", "producers"}),
    "tail": frozenset(
        {"records", "offers", "offered", "dropped", "fell_behind", "gaps", "assignments"},
    ),
    "kafka": frozenset({"commits", "redelivered", "late", "rebalances", "unwanted", "expired"}),
}  # fmt: skip
"""By source: the fields that only grow although their name does not say so."""

LABELS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "amqp": {"incoming": ("outcome",)},
    "http": {"answers_total": ("operation", "status")},
    "publisher": {"records": ("outcome",), "state_records": ("outcome",), "unowned": ("outcome",)},
    "kafka": {"group": ("group",)},
    "failures": {"contained_total": ("place",), "retrying": ("place",)},
}
"""By source and field: what the keys of a mapping are."""


def add_source(metrics: Metrics, name: str, read: Callable[[], Any]) -> None:
    """Register a part by its well-known name.

    Args:
        metrics: the process's metrics.
        name: `mqtt`, `amqp`, `http`, `publisher`, `tail`, `kafka` (the consumer groups), `authentication`,
            `event_loop`, or any other whose fields say by themselves what they are.
        read: the part's `statistics`.
    """
    shape = SHAPES.get(name)
    shaped = read if shape is None else lambda: shape(read())
    metrics.add_source(name, shaped, counters=COUNTERS.get(name, ()), mappings=LABELS.get(name))


def _publisher(statistics: PublisherStatistics) -> dict[str, Any]:
    """The latencies as a histogram, in seconds."""
    fields = {field: getattr(statistics, field) for field in statistics.__struct_fields__}
    histogram = Histogram([bound / 1000 for bound in LATENCY_MS])
    histogram.counts = list(fields.pop("latency"))
    histogram.total = fields.pop("latency_sum_ms") / 1000
    return {**fields, "batch_latency_s": histogram}


def _groups(readers: Sequence[GroupStatistics]) -> dict[str, Any]:
    """By group; a second reader of a group in this process (for other topics) is told apart by its topics."""
    found: dict[str, msgspec.Struct] = {}
    for reader in readers:
        known = reader.group in found
        found[f"{reader.group}:{','.join(reader.topics)}" if known else reader.group] = reader
    return {"group": found}


SHAPES: Final[dict[str, Callable[[Any], Any]]] = {"publisher": _publisher, "kafka": _groups}
