"""Time series as SVG: panels below each other, each scaled from 0 to its maximum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final, NamedTuple

COLOURS: Final = ("steelblue", "darkorange", "seagreen", "purple")
_LEFT, _GAP, _RIGHT, _FOOT = 70, 40, 20, 20


class Panel(NamedTuple):
    """Curves with a common scale: (seconds, value) by name."""

    title: str
    curves: Mapping[str, Sequence[tuple[float, float]]]


class Mark(NamedTuple):
    """An event from `begin` to `end`, seconds; a line if both are equal."""

    begin: float
    end: float


def draw(
    panels: Sequence[Panel], end: float, *, note: str, marks: Sequence[Mark] = (), width: int = 900, height: int = 180
) -> str:
    """Return an SVG.

    Args:
        panels: from top to bottom.
        end: end of the time axis, seconds; it starts at 0.
        note: text below the panels.
        marks: drawn in every panel.
        width: of a panel, pixels.
        height: of a panel, pixels.
    """
    end = max(end, 1.0)
    total = len(panels) * (height + _GAP) + _FOOT
    size = f'width="{width + _LEFT + _RIGHT}" height="{total}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, end, marks, top=number * (height + _GAP) + _GAP // 2, width=width, height=height)
    parts.append(f'<text x="{_LEFT}" y="{total - 8}">{escape(note)}</text></svg>')
    return "\n".join(parts) + "\n"


def _panel(panel: Panel, end: float, marks: Sequence[Mark], *, top: int, width: int, height: int) -> list[str]:
    most = max([1.0, *(value for points in panel.curves.values() for _, value in points)]) * 1.1

    def x(at: float) -> float:
        return _LEFT + min(max(at, 0.0), end) / end * width

    parts = []
    for mark in marks:
        size = max(1.0, x(mark.end) - x(mark.begin))
        parts.append(
            f'<rect x="{x(mark.begin):.1f}" y="{top}" width="{size:.1f}" height="{height}" fill="red"'
            f' fill-opacity="{0.12 if size > 1 else 0.7}"/>'
        )
    parts.append(f'<rect x="{_LEFT}" y="{top}" width="{width}" height="{height}" fill="none" stroke="gray"/>')
    parts.append(f'<text x="{_LEFT}" y="{top - 5}">{escape(panel.title)}</text>')
    for share in (0.0, 0.5, 1.0):
        y = top + height * (1 - share)
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.0f}" text-anchor="end">{most * share:,.0f}</text>')
    for number, (name, points) in enumerate(panel.curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(f"{x(at):.1f},{top + height - max(0.0, value) / most * height:.1f}" for at, value in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(panel.curves) > 1:
            parts.append(
                f'<text x="{_LEFT + width - 70 * (len(panel.curves) - number)}" y="{top - 5}"'
                f' fill="{colour}">{escape(name)}</text>'
            )
    return parts
