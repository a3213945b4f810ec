"""deploy/prometheus and deploy/grafana query only existing metrics, and each alert has its entry in the docs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector

from gateway.views.pauses import REASONS
from mapping.outcomes import Outcome
from tools import alerts, dashboards

ROOT = Path(__file__).parents[2]
TARGET = {"instance", "job"}  # Prometheus adds these
VALUES = {"reason": set(REASONS), "outcome": {outcome.value for outcome in Outcome}}
BY_PROMETHEUS = {
    "up": (),
    "trivium_scrape_failures_total": ("source",),
    **{family.name: () for family in ProcessCollector(registry=CollectorRegistry()).collect()},
    "process_cpu_seconds_total": (),
}


def known() -> dict[str, set[str]]:
    """Return the labels of every series that can be queried."""
    found = {name: set(labels) for name, labels in BY_PROMETHEUS.items()}
    for metric in dashboards.DECLARED.values():
        labels = set(metric.labels) | ({"query"} if metric.name.startswith("trivium_spark_") else set())
        if metric.kind == "histogram":
            found |= {f"{metric.name}_bucket": labels | {"le"}, f"{metric.name}_sum": labels}
            found[f"{metric.name}_count"] = labels
        else:
            found[metric.name] = labels
    return {name: labels | TARGET for name, labels in found.items()}


KNOWN = known()


def labels_of(expression: Any) -> set[str]:
    """Return the labels of an expression's result; raise AssertionError if it queries an unknown series or label."""
    match expression:
        case promql.VectorSelector():
            assert expression.name in KNOWN, f"there is no metric {expression.name}"
            labels = KNOWN[expression.name]
            for matcher in expression.matchers.matchers:
                assert matcher.name in labels, f"{expression.name} has no label {matcher.name}"
                if "$" not in matcher.value:
                    assert set(matcher.value.split("|")) <= VALUES.get(matcher.name, {matcher.value}), matcher.value
            return labels
        case promql.MatrixSelector():
            return labels_of(expression.vector_selector)
        case promql.AggregateExpr():
            below = labels_of(expression.expr)
            if expression.modifier is None:
                return set()
            assert expression.modifier.type == promql.AggModifierType.By
            assert set(expression.modifier.labels) <= below, expression.modifier.labels
            return set(expression.modifier.labels)
        case promql.BinaryExpr():
            left, right = labels_of(expression.lhs), labels_of(expression.rhs)
            return left & right if left and right else left | right
        case promql.Call():
            return set().union(*(labels_of(argument) for argument in expression.args))
        case promql.ParenExpr() | promql.UnaryExpr():
            return labels_of(expression.expr)
        case promql.NumberLiteral() | promql.StringLiteral():
            return set()
    raise AssertionError(f"not looked into: {type(expression).__name__}")


def asked(text: str) -> set[str]:
    return labels_of(promql.parse(text.replace("$__rate_interval", "5m")))


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def boards() -> Iterator[dict[str, Any]]:
    paths = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
    assert len(paths) == len(dashboards.BOARDS)
    for path in paths:
        yield json.loads(path.read_text(encoding="utf-8"))


def test_the_files_are_up_to_date() -> None:
    for path, text in dashboards.files():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make tables`"


@pytest.mark.parametrize(
    "wrong",
    [
        "trivium_mqtt_conections > 0",
        'trivium_flow_paused{cause="Kafka silent"}',
        'trivium_flow_paused{reason="Kafka asleep"}',
        "sum by (topic) (trivium_mqtt_connections)",
        "histogram_quantile(0.9, rate(trivium_publisher_batch_latency_seconds[5m]))",
    ],
)
def test_a_query_for_something_unknown_is_an_error(wrong: str) -> None:
    with pytest.raises(AssertionError):
        asked(wrong)


def test_alerts_use_existing_metrics_and_labels() -> None:
    for rule in rules():
        labels = asked(rule["expr"])
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels, rule["alert"]


def test_panels_use_existing_metrics_and_labels() -> None:
    for board in boards():
        [_, chosen] = board["templating"]["list"]
        assert asked(re.fullmatch(r"label_values\((\w+), (\w+)\)", chosen["query"])[1]) >= {chosen["name"]}
        panels = [panel for panel in board["panels"] if panel["type"] != "row"]
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        for panel in panels:
            assert panel["targets"], panel["title"]
            for target in panel["targets"]:
                assert f'{chosen["name"]}=~"${chosen["name"]}"' in target["expr"]
                assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= asked(target["expr"]), panel["title"]


def test_every_alert_has_an_entry_and_every_entry_an_alert() -> None:
    page = (ROOT / alerts.RUNBOOK).read_text(encoding="utf-8")
    entries = re.findall(r"^### (Trivium\w+)$", page, re.MULTILINE)
    assert sorted(entries) == sorted(rule["alert"] for rule in rules())
    for rule in rules():
        assert rule["annotations"]["runbook_url"] == f"{alerts.RUNBOOK}#{rule['alert'].lower()}"
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in rules()}
    assert set(severities.values()) == {"critical", "warning"}
