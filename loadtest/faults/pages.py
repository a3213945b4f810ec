"""The report of a run: one self-contained HTML page with a table, and a plot for each fault."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from loadtest import plot
from loadtest.engine.steady import PROTOCOLS
from loadtest.faults.bench import MIB, Outcome, Plan
from loadtest.report import html_page, html_table

TITLE: Final = "Faults under load"


def page(outcomes: Sequence[Outcome], plan: Plan, note: str) -> str:
    """Return the page."""
    sections = [("All", [html_table([outcome.row() for outcome in outcomes])])]
    for outcome in outcomes:
        problems = [f'<p class="bad">{escape(problem)}</p>' for problem in outcome.problems]
        sections.append((outcome.fault.name, [f"<p>{escape(outcome.fault.what(plan))}</p>", *problems, _plot(outcome)]))
    return html_page(TITLE, note, sections)


def _plot(outcome: Outcome) -> str:
    samples = outcome.samples
    panels = [
        plot.Panel(
            "acknowledged messages per second",
            {one: [(sample.at, sample.rates[one]) for sample in samples] for one in PROTOCOLS},
        ),
        plot.Panel(
            "p99 of latency, ms", {one: [(sample.at, sample.p99[one]) for sample in samples] for one in PROTOCOLS}
        ),
        plot.Panel("gateway's memory, MiB", {"rss": [(sample.at, sample.resident / MIB) for sample in samples]}),
    ]
    end = samples[-1].at if samples else 0.0
    mark = plot.Mark(outcome.course.begin, outcome.course.end)
    return plot.draw(panels, end, note=f"0 to {end:.0f} s; the fault is red", marks=[mark], height=140)
