"""The report of a run: a table as Markdown, and one self-contained HTML page with a plot for each fault."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Final

from loadtest import plot
from loadtest.engine.steady import PROTOCOLS
from loadtest.faults.bench import MIB, Outcome
from loadtest.report import html_page, html_table

TITLE: Final = "Faults under load"


def markdown(outcomes: Sequence[Outcome], note: str) -> str:
    """Return the table and the problems."""
    rows = [outcome.row() for outcome in outcomes]
    names = list(rows[0])
    lines = [f"# {TITLE}", "", note, "", _line(names), "|---" * len(names) + "|"]
    lines += [_line(row.values()) for row in rows]
    for outcome in outcomes:
        lines += ["", f"**{outcome.fault.name}**: {outcome.fault.what}."]
        lines += [f"- {_cell(problem)}" for problem in outcome.problems]
    return "\n".join(lines) + "\n"


def _line(cells: Any) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int | float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def page(outcomes: Sequence[Outcome], note: str) -> str:
    """Return the same with plots."""
    sections = [("All", [html_table([outcome.row() for outcome in outcomes])])]
    for outcome in outcomes:
        problems = [f'<p class="bad">{escape(problem)}</p>' for problem in outcome.problems]
        sections.append((outcome.fault.name, [f"<p>{escape(outcome.fault.what)}.</p>", *problems, _plot(outcome)]))
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
    mark = plot.Mark(outcome.begin, outcome.end)
    return plot.draw(panels, end, note=f"0 to {end:.0f} s; the fault is red", marks=[mark], height=140)
