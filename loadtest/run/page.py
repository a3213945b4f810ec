"""The result of a load test as a table, and as one self-contained HTML page."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from loadtest import plot
from loadtest.report import Report, html_page, html_table

PERCENTILES: Final = ("p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "p100 ms")
_COLUMNS: Final = (
    "rate", "per second", *PERCENTILES, "cpu us", "memory MiB", "backlog", "good",
)  # fmt: skip


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each round, and the medians."""
    found = [
        {"": f"round {number}", **{name: one[name] for name in _COLUMNS if one.get(name) is not None}}
        | {f"delivery {name}": value for name, value in one.get("delivery", {}).items() if name in PERCENTILES[:3:2]}
        for number, one in enumerate(result["rounds"], 1)
    ]
    if len(found) > 1 and result["knee"] is None:
        found.append({"": "median", **{name: value for name, value in result["summary"].items() if name in found[0]}})
    return found


def facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a reader of the figures must know."""
    around = result["environment"]
    knee, verdict, deliveries = result["knee"], result["verdict"], result["deliveries"]
    found = []
    if knee is not None:
        found.append((
            "knee",
            "no rate was served well" if knee["rate"] is None else
            f"{knee['rate']:,.0f} messages/s with p99 within {knee['p99_ms']:g} ms and no growing backlog;"
            f" {knee['too much'] or float('nan'):,.0f} was too much",
        ))  # fmt: skip
    found += [
        (
            "verified",
            "no: the acknowledged messages were not read back from Kafka" if verdict is None else
            f"{verdict['acknowledged']:,} acknowledged, {verdict['stored']:,} stored; lost {verdict['lost']},"
            f" doubled {verdict['duplicated']}, out of order {verdict['reordered']}",
        ),
        (
            "generators",
            f"{len(result['generators'])} processes, at most "
            + ", ".join(f"{one['cpu']:.0%} (+ {one['waited']:.0%} waiting)" for one in result["generators"])
            + " of a processor",
        ),
        ("latency", "from the time a message was due to its acknowledgement"
         if result["rounds"][0]["rate"] else "from sending a message to its acknowledgement"),
        ("machine", f"{around['machine']}; {around['system']}; load {around['load before']} before"),
        ("versions", ", ".join(f"{name} {version}" for name, version in around["versions"].items())),
        ("commit", around["commit"] or "unknown"),
    ]  # fmt: skip
    if deliveries is not None:
        found.insert(1, ("delivered", f"{deliveries['received']:,} of {deliveries['expected']:,}"))
    return found


def report(result: Mapping[str, Any]) -> Report:
    """Return the report for the terminal."""
    made = Report(f"{result['name']}, {result['when']}", lines=True)
    for row in rows(result):
        made.add(**row)
    return made


def page(result: Mapping[str, Any]) -> str:
    """Return the HTML page: problems, facts, table, time series, scenario."""
    series: Sequence[Mapping[str, Any]] = result["series"]
    panels = [
        plot.Panel("acknowledged per second", {"rate": _curve(series, "per second")}),
        plot.Panel("latency, ms", {name: _curve(series, name) for name in ("p50 ms", "p99 ms")}),
    ]
    if any(one["memory MiB"] is not None for one in series):
        panels.append(plot.Panel("gateway's memory, MiB", {"rss": _curve(series, "memory MiB")}))
    if any(one["cpu s"] is not None for one in series):
        used = [
            (later["at"], (later["cpu s"] - one["cpu s"]) / max(0.01, later["at"] - one["at"]))
            for one, later in itertools.pairwise(series)
            if one["cpu s"] is not None and later["cpu s"] is not None
        ]
        panels.append(plot.Panel("gateway, % of a processor", {"cpu": [(at, 100 * share) for at, share in used]}))
    end = series[-1]["at"] if series else 0.0
    sections = [
        ("Result", [html_table([{"": name, " ": text} for name, text in facts(result)]), html_table(rows(result))]),
        ("Course", [plot.draw(panels, end, note=f"0 to {end:.0f} s, warm-up included", height=140)]),
        (
            "Scenario",
            [html_table([_flat(one) for one in (result["scenario"]["send"] + result["scenario"]["receive"])])],
        ),
    ]
    return html_page(f"{result['name']}: load test", result["when"], sections, result["problems"])


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(value) for name, value in table.items()}


def _curve(series: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(one["at"], one[name]) for one in series if one[name] is not None]
