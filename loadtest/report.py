"""The measurements of a run (rates, percentiles, the verifier's findings) as a table and as JSON."""

from __future__ import annotations

import array
import collections
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from hdrh.histogram import HdrHistogram
from rich.console import Console
from rich.table import Table

PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9, 100.0)
WIDTH: Final = 140  # of a table with one line per row
_LONGEST_US: Final = 600_000_000


class Latencies:
    """Latencies in microseconds with three significant digits, up to ten minutes.

    They are collected in an array and counted on demand, because the histogram's bookkeeping would slow the load down.
    """

    def __init__(self) -> None:
        self._histogram = histogram()
        self._aside = array.array("d")
        self.record = self._aside.append  # seconds; avoids a method call, which is half the cost
        self.extend = self._aside.extend

    def take(self) -> HdrHistogram:
        """Return all latencies so far, in microseconds, and start with an empty histogram."""
        taken, self._histogram = self._counted(), histogram()
        return taken

    def merge(self, other: Latencies) -> None:
        """Add all latencies of another object."""
        self._histogram.add(other._counted())

    @property
    def count(self) -> int:
        """The number of latencies."""
        return int(self._counted().get_total_count())

    def milliseconds(self, percentile: float) -> float:
        """Return the latency in ms that `percentile` percent do not exceed; 0 if there are none."""
        return _milliseconds(self._counted(), percentile)

    def summary(self) -> dict[str, float]:
        """Return the percentiles by name, in ms."""
        return {f"p{percentile:g}": self.milliseconds(percentile) for percentile in PERCENTILES}

    def _counted(self) -> HdrHistogram:
        for microseconds, count in collections.Counter([round(seconds * 1e6) for seconds in self._aside]).items():
            self._histogram.record_value(min(_LONGEST_US, max(1, microseconds)), count)
        del self._aside[:]
        return self._histogram


def _milliseconds(one: HdrHistogram, percentile: float) -> float:
    return float(one.get_value_at_percentile(percentile)) / 1000 if one.get_total_count() else 0.0


def percentiles(one: HdrHistogram) -> dict[str, float]:
    """Return the percentiles of a histogram by name, in ms."""
    return {f"p{percentile:g} ms": _milliseconds(one, percentile) for percentile in PERCENTILES}


def histogram() -> HdrHistogram:
    """Return an empty histogram for microseconds."""
    return HdrHistogram(1, _LONGEST_US, 3)


class Report:
    """The table of one run."""

    def __init__(self, title: str, *, lines: bool = False) -> None:
        """With `lines` each row is printed as a line, otherwise as a column, which suits many measures of few runs."""
        self.title = title
        self._lines = lines
        self.rows: list[dict[str, Any]] = []

    def add(self, **columns: Any) -> None:
        """Add a row; columns may differ from row to row."""
        self.rows.append(columns)

    def to_json(self) -> str:
        """Return one JSON object."""
        return json.dumps({"title": self.title, "rows": self.rows}, indent=2)

    def print(self, console: Console | None = None) -> None:
        """Print the table."""
        measures = list(dict.fromkeys(column for row in self.rows for column in row))
        cells = [[_text(row.get(measure, "")) for measure in measures] for row in self.rows]
        if self._lines:
            heads, lines = measures, cells
        else:
            heads = [""] * (len(self.rows) + 1)
            lines = [list(line) for line in zip(measures, *cells, strict=True)]
        table = Table(title=self.title)
        for number, head in enumerate(heads):
            table.add_column(head, justify="right" if number else "left")
        for line in lines:
            table.add_row(*line)
        (console or Console(width=WIDTH if self._lines else None)).print(table)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


_STYLE: Final = (
    "body{font:15px/1.5 sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;font-size:13px;margin:1em 0}"
    "td,th{border:1px solid #bbb;padding:.2em .5em;text-align:left}"
    ".bad{color:#b00}svg{max-width:100%;height:auto}"
)


def html_page(
    title: str, note: str, sections: Iterable[tuple[str, Iterable[str]]], problems: Iterable[str] = ()
) -> str:
    """Return a self-contained page: headings with tables and drawings, which are already HTML."""
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>',
        f"<h1>{escape(title)}</h1><p>{escape(note)}</p>",
        *(f'<p class="bad">{escape(problem)}</p>' for problem in problems),
    ]
    for heading, contents in sections:
        parts += [f"<h2>{escape(heading)}</h2>", *contents]
    return "\n".join(parts) + "\n</html>\n"


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows, which may differ in their columns, as a table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_text(row.get(name, '')))}</td>" for name in names) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
