"""What a run measured: rates, percentiles, and the verifier's findings, as a table and as JSON."""

from __future__ import annotations

import array
import itertools
import json
from typing import Any, Final

from hdrh.histogram import HdrHistogram
from rich.console import Console
from rich.table import Table

PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9, 100.0)
WIDTH: Final = 140  # of a table with rows as lines
_LONGEST_US: Final = 600_000_000


class Latencies:
    """Latencies in microseconds, three significant digits, up to ten minutes.

    They are put aside as they come and counted when asked for: the histogram's bookkeeping would slow the load down.
    """

    def __init__(self) -> None:
        self._histogram = HdrHistogram(1, _LONGEST_US, 3)
        self._aside = array.array("d")
        self._many: list[tuple[float, int]] = []
        self.record = self._aside.append  # seconds; the method call is half of what it costs

    def record_many(self, seconds: float, count: int) -> None:
        """The same latency `count` times."""
        self._many.append((seconds, count))

    def merge(self, other: Latencies) -> None:
        """Add all of another's."""
        self._histogram.add(other._counted())

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self._counted().get_total_count())

    def milliseconds(self, percentile: float) -> float:
        """The latency in ms that `percentile` percent do not exceed; 0 when there are none."""
        histogram = self._counted()
        if not histogram.get_total_count():
            return 0.0
        return float(histogram.get_value_at_percentile(percentile)) / 1000

    def summary(self) -> dict[str, float]:
        """The percentiles by name, in ms."""
        return {f"p{percentile:g}": self.milliseconds(percentile) for percentile in PERCENTILES}

    def _counted(self) -> HdrHistogram:
        for seconds, count in itertools.chain(zip(self._aside, itertools.repeat(1)), self._many):
            self._histogram.record_value(min(_LONGEST_US, max(1, round(seconds * 1e6))), count)
        del self._aside[:]
        self._many.clear()
        return self._histogram


class Report:
    """The rows of one run."""

    def __init__(self, title: str, *, lines: bool = False) -> None:
        """With `lines` a row is printed as a line; otherwise as a column, since there are more measures than runs."""
        self.title = title
        self._lines = lines
        self.rows: list[dict[str, Any]] = []

    def add(self, **columns: Any) -> None:
        """Add a row; columns may differ from row to row."""
        self.rows.append(columns)

    def to_json(self) -> str:
        """One JSON object."""
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
