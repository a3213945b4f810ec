"""A job's own output: JSON lines for programs, or a table on a terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import msgspec
from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.text import Text

from spark_sinks.run.metrics import JobMetrics
from spark_sinks.run.status import Status, table
from spark_sinks.spark.process import JobConsole
from spark_sinks.spark.progress import Examined, Progress, Totals
from telemetry.job_figures import figures

REFRESHES: Final = 2  # a second


class OutputLines:
    """Writes one JSON object per line to standard output, and messages for people to standard error."""

    def __init__(self, job: str, console: JobConsole) -> None:
        self._job = job
        self._console = console

    def ready(self, trigger: str) -> None:
        """The query has started to read."""
        self._console.report(msgspec.json.encode({"kind": "ready", "job": self._job, "trigger": trigger}))

    def report(self, item: Progress | Examined) -> None:
        """A batch is finished, or was examined for rejected records."""
        self._console.report(msgspec.json.encode(item))

    def say(self, text: str) -> None:
        """Print a line for people."""
        self._console.say(text)

    def summary(self, totals: Mapping[str, Totals]) -> None:
        """The job has ended because it was asked to."""
        self._console.report(msgspec.json.encode({"kind": "summary", "queries": totals}))

    def close(self) -> None:
        """Close the output; there is nothing to close."""


class Screen:
    """The table of `trivium spark status`, updated in place by a thread, with messages for people above it.

    It is drawn from the metrics.
    """

    def __init__(self, job: str, metrics: JobMetrics, terminal: int) -> None:
        self._job = job
        self._metrics = metrics
        self._file = os.fdopen(os.dup(terminal), "w", encoding="utf-8")
        self._live = Live(
            console=Terminal(file=self._file, highlight=False), get_renderable=self._now, refresh_per_second=REFRESHES,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._live.start()

    def _now(self) -> Group:
        queries = figures(self._metrics.render().decode())
        shown = Status(job=self._job, state="runs" if queries else "starts", queries=queries)
        return Group(table([shown]), Text("Ctrl-C stops it.", style="dim"))

    def ready(self, trigger: str) -> None:
        """Say that the job reads."""
        self.say(f"{self._job} reads ({trigger}).")

    def report(self, item: Progress | Examined) -> None:
        """Say nothing: the table already shows it."""

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._live.console.print(Text(text), soft_wrap=True)

    def summary(self, totals: Mapping[str, Totals]) -> None:
        """Print the totals of each query."""
        for query, total in totals.items():
            self.say(f"{query}: {total.rows:,} records in {total.batches:,} batches.")

    def close(self) -> None:
        """End the display; the last table stays on the screen."""
        if not self._file.closed:
            self._live.stop()
            self._file.close()
