"""Write the Grafana dashboards and the Prometheus rules in `deploy` from the metrics' declarations.

Called as `python -m tools.dashboards` (`make tables`); a test fails if a file is out of date. A panel names metrics;
their queries, units and descriptions follow from their declarations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from telemetry.metrics import DescribedMetric, describe
from tools import alerts
from tools.tables import ROOT, SOURCES

DEPLOY: Final = ROOT / "deploy"
HEADER: Final = "# Written by `make tables` from tools/alerts.py; what to do about each is in docs/operations.md.\n"
DECLARED: Final = {
    metric.name: metric
    for sources in SOURCES.values()
    for name, struct in sources.items()
    for metric in describe(name, struct)
}
PROCESS: Final = (
    DescribedMetric("process_cpu_seconds_total", "counter", (), "CPU time"),
    DescribedMetric("process_resident_memory_bytes", "gauge", (), "resident memory"),
    DescribedMetric("process_open_fds", "gauge", (), "open files"),
)
"""Metrics of Prometheus' Python client."""
KNOWN: Final = {**DECLARED, **{metric.name: metric for metric in PROCESS}}
QUANTILE: Final = 0.99


class Panel(NamedTuple):
    """Some metrics in one graph, optionally split by a label of theirs, `by`."""

    title: str
    metrics: tuple[str, ...]  # without `trivium_`, except those of `PROCESS`
    by: tuple[str, ...] = ()


class Board(NamedTuple):
    """A dashboard: rows of panels, and the label of its selection variable."""

    uid: str
    title: str
    chosen: str
    rows: dict[str, tuple[Panel, ...]]


BOARDS: Final = (
    Board(
        "trivium-fleet",
        "Trivium: fleet",
        "instance",
        {
            "Connections": (
                Panel("Connections", ("mqtt_connections", "amqp_open_connections", "http_connections")),
                Panel("New connections", ("mqtt_connections_total", "amqp_connections_total", "http_requests_total")),
                Panel("MQTT sessions", ("mqtt_sessions_connected", "mqtt_sessions_stored", "mqtt_subscriptions")),
                Panel("Bytes of MQTT sessions", ("mqtt_sessions_stored_bytes",)),
                Panel("AMQP links", ("amqp_senders", "amqp_receivers", "amqp_transactions")),
                Panel(
                    "Open streams and WebSockets", ("http_streams_open", "http_live_open", "http_consumers_instances")
                ),
                Panel("Connections by listener", ("listener_connections",), ("listener",)),
                Panel("Still to be drained", ("drain_connections",)),
            ),
            "Messages": (
                Panel("From MQTT clients", ("mqtt_messages_published_total", "mqtt_messages_acknowledged_total")),
                Panel("From AMQP clients", ("amqp_incoming_total",), ("outcome",)),
                Panel("Records over HTTP", ("http_produce_records_total", "http_uploads_records_total")),
                Panel(
                    "To clients",
                    (
                        "mqtt_messages_delivered_total",
                        "amqp_sent_total",
                        "http_consumers_records_total",
                        "http_streams_events_total",
                    ),
                ),
                Panel("HTTP responses", ("http_answers_total",), ("status",)),
                Panel(
                    "Refused and dropped",
                    (
                        "mqtt_messages_refused_total",
                        "mqtt_messages_dropped_total",
                        "mqtt_messages_gaps_total",
                        "http_load_refused_total",
                    ),
                ),
            ),
            "Logins": (
                Panel(
                    "Logins",
                    ("authentication_accepted_total", "authentication_refused_total", "authentication_throttled_total"),
                ),
                Panel("Connections that have not logged in", ("strangers_connections", "authentication_waiting")),
                Panel(
                    "Refused connections",
                    ("mqtt_messages_refused_connections_total", "amqp_refused_logins_total", "strangers_dropped_total"),
                ),
            ),
            "Processes": (
                Panel("CPU time", ("process_cpu_seconds_total",)),
                Panel("Memory", ("process_resident_memory_bytes", "retained_bytes")),
                Panel("Open files", ("process_open_fds", "descriptors_limit")),
                Panel("Event loop delay", ("event_loop_worst_lag_seconds", "event_loop_lag_seconds")),
                Panel("Unexpected failures", ("failures_contained_total",), ("place",)),
                Panel("Versions", ("build_info",), ("version",)),
            ),
        },
    ),
    Board(
        "trivium-flow",
        "Trivium: flow",
        "instance",
        {
            "Pauses": (
                Panel("Paused now, by reason", ("flow_paused",), ("reason",)),
                Panel("Time paused", ("flow_paused_seconds_total",), ("reason",)),
                Panel("Pauses", ("flow_pauses_total",), ("reason",)),
            ),
            "Budgets": (
                Panel("In flight to Kafka", ("publisher_bytes_in_flight", "budget_limit_bytes")),
                Panel("By topic", ("budget_topic_bytes",), ("topic",)),
                Panel("In flight to clients", ("budget_outgoing_bytes", "budget_outgoing_limit_bytes")),
                Panel("Receivers", ("budget_outgoing_receivers", "budget_outgoing_waiting")),
            ),
            "Unanswered": (
                Panel(
                    "From clients",
                    ("mqtt_unanswered", "amqp_unanswered", "http_produce_active", "http_live_unanswered"),
                ),
                Panel("To clients", ("mqtt_unacknowledged", "amqp_unsettled")),
                Panel("Credit of AMQP senders", ("amqp_credit", "amqp_window", "amqp_waiting_links")),
                Panel(
                    "Refused by rate and load limits",
                    ("limits_refused_total", "http_load_refused_total", "http_load_refused_clients_total"),
                ),
            ),
        },
    ),
    Board(
        "trivium-kafka",
        "Trivium: Kafka",
        "instance",
        {
            "Into Kafka": (
                Panel("Answered by Kafka", ("publisher_records_total",), ("outcome",)),
                Panel("Stored, by topic", ("publisher_stored_total",), ("topic",)),
                Panel("Batch latency", ("publisher_batch_latency_seconds",)),
                Panel("Acknowledged within", ("publisher_acknowledged_seconds",)),
                Panel("Age when delivered", ("delivery_delay_seconds",)),
                Panel("Batches", ("publisher_batches_total", "publisher_producers_total")),
                Panel("Topics created and refused", ("topics_topics_made_total", "topics_topics_refused_total")),
                Panel("Unsafe topics", ("replication_unsafe_topics",)),
            ),
            "From Kafka": (
                Panel("Lag: live reader", ("live_reader_lag",), ("topic",)),
                Panel("Lag: groups", ("kafka_group_lag",), ("group",)),
                Panel("Lag: internal topics", ("state_table_lag",), ("table",)),
                Panel("Records delivered", ("live_reader_records_total", "live_reader_catch_up_offered_total")),
                Panel("Subscribers catching up", ("live_reader_catch_up_subscribers", "live_reader_fell_behind_total")),
                Panel("Partitions without a leader", ("live_reader_leaderless", "http_consumers_leaderless")),
                Panel("Redelivered", ("kafka_group_redelivered_total",), ("group",)),
                Panel("Deleted before delivery", ("live_reader_gaps_total", "live_reader_catch_up_gaps_total")),
                Panel("Not readable", ("unreadable_batches_total", "unreadable_offsets_total")),
            ),
            "Login": (
                Panel(
                    "Connections to Kafka",
                    ("kafka_login_refused_total", "kafka_login_renewed_total", "kafka_login_token_failures_total"),
                ),
                Panel("Client certificate expires", ("kafka_login_certificate_ends",)),
            ),
        },
    ),
    Board(
        "trivium-spark",
        "Trivium: Spark jobs",
        "query",
        {
            "Progress": (
                Panel("Records read", ("spark_rows_total", "spark_rows_per_second")),
                Panel("Lag", ("spark_lag",), ("topic",)),
                Panel("Batch duration", ("spark_batch_duration_seconds",)),
                Panel("Event-time delay", ("spark_watermark_lag_seconds",)),
            ),
            "Problems": (
                Panel(
                    "Dead letters",
                    (
                        "spark_dead_letters_total",
                        "spark_malformed_total",
                        "spark_late_total",
                        "spark_late_by_others_total",
                        "spark_late_rows_total",
                    ),
                ),
                Panel("Starts", ("spark_restarts_total",)),
            ),
            "State": (
                Panel("Rows", ("spark_state_rows",)),
                Panel("Memory", ("spark_state_bytes",)),
            ),
        },
    ),
)


def metric_of(name: str) -> DescribedMetric:
    """Find a metric by its name in a panel; raises ValueError if there is none."""
    metric = KNOWN.get(f"trivium_{name}", KNOWN.get(name))
    if metric is None:
        raise ValueError(f"there is no metric {name}")
    return metric


def query(metric: DescribedMetric, chosen: str, by: tuple[str, ...]) -> str:
    """Return the PromQL query for a metric, restricted to the selected instances or queries."""
    if not set(by) <= set(metric.labels):
        raise ValueError(f"{metric.name} has the labels {metric.labels}, not {by}")
    labels = ", ".join((chosen, *by))
    match metric.kind:
        case "counter":
            return f'sum by ({labels}) (rate({metric.name}{{{chosen}=~"${chosen}"}}[$__rate_interval]))'
        case "gauge":
            return f'sum by ({labels}) ({metric.name}{{{chosen}=~"${chosen}"}})'
        case "histogram":
            rate = f'rate({metric.name}_bucket{{{chosen}=~"${chosen}"}}[$__rate_interval])'
            return f"histogram_quantile({QUANTILE}, sum by ({labels}, le) ({rate}))"


def unit(metric: DescribedMetric) -> str:
    """Return Grafana's name of the metric's unit."""
    if metric.name.endswith("_ends"):
        return "dateTimeFromNow"
    if "bytes" in metric.name:
        return "bytes"
    if "seconds" in metric.name:
        return "percentunit" if metric.kind == "counter" else "s"  # seconds per second
    return "cps" if metric.kind == "counter" else "short"


def panel(drawn: Panel, chosen: str, number: int, place: dict[str, int]) -> dict[str, Any]:
    """Return a drawn in Grafana's format."""
    metrics = [metric_of(name) for name in drawn.metrics]
    words = {metric.name: metric.name.removeprefix("trivium_").removesuffix("_total") for metric in metrics}
    labels = " ".join(f"{{{{{label}}}}}" for label in (*drawn.by, chosen))
    scale = 1000 if unit(metrics[0]) == "dateTimeFromNow" else 1  # Grafana expects milliseconds
    return {
        "id": number,
        "type": "timeseries" if scale == 1 else "stat",
        "title": drawn.title,
        "description": "\n".join(f"{metric.name}: {metric.meaning}" for metric in metrics),
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit(metrics[0]), "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}} if scale == 1 else {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": query(metric, chosen, drawn.by) + (f" * {scale}" if scale != 1 else ""),
                "legendFormat": labels if len(metrics) == 1 else f"{words[metric.name]} {labels}",
            }
            for index, metric in enumerate(metrics)
        ],
    }


def dashboard(board: Board) -> dict[str, Any]:
    """Return a dashboard for import into Grafana, with three panels per line."""
    panels: list[dict[str, Any]] = []
    down = 0
    for title, row in board.rows.items():
        place = {"h": 1, "w": 24, "x": 0, "y": down}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        down += 1
        for index, one in enumerate(row):
            place = {"h": 8, "w": 8, "x": 8 * (index % 3), "y": down + 8 * (index // 3)}
            panels.append(panel(one, board.chosen, len(panels) + 1, place))
        down += 8 * -(-len(row) // 3)
    known = "trivium_build_info" if board.chosen == "instance" else "trivium_spark_rows_total"
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["trivium"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                {
                    "name": board.chosen,
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": f"label_values({known}, {board.chosen})",
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }


def files() -> Iterator[tuple[Path, str]]:
    """Yield each file with its text."""
    for board in BOARDS:
        name = board.uid.removeprefix("trivium-")
        yield DEPLOY / "grafana" / f"{name}.json", json.dumps(dashboard(board), indent=1) + "\n"
    text = HEADER + yaml.safe_dump(alerts.rules(), sort_keys=False, width=200, allow_unicode=True)
    yield DEPLOY / "prometheus" / "alerts.yaml", text
    # A chart can only include files from its own directory.
    yield DEPLOY / "helm" / "trivium" / "files" / "alerts.yaml", text


def main() -> None:
    """Write all files."""
    for path, text in files():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
