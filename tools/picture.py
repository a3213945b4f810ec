"""Draw docs/architecture.svg from docs/architecture.toml: rows of boxes, and vertical arrows between boxes.

Called as `python -m tools.picture` (`make picture`); tests/packaging/test_docs.py fails if the picture is out of date.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final, Literal

import msgspec

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = ROOT / "docs" / "architecture.toml"
PICTURE: Final = ROOT / "docs" / "architecture.svg"

COLUMNS: Final = 12
COLUMN: Final = 80  # width, including the gap
GAP: Final = 16  # between the boxes of a row
MARGIN: Final = 20
GUTTER: Final = 120  # left margin for the labels of rows
BETWEEN: Final = 40  # between rows, for the arrows
FOOT: Final = 40  # for the legend
LINE: Final = 16
COLOURS: Final = {"io": "#dbe9f6", "pure": "#e3f1dd", "outside": "#f1ece0"}
LEGEND: Final = (("io", "does I/O or waits"), ("pure", "pure: no socket, clock or chance"), ("outside", "not ours"))


class Box(msgspec.Struct, forbid_unknown_fields=True):
    """One box; `code` lists the files and directories that it represents."""

    id: str
    columns: tuple[int, int]
    title: str
    lines: tuple[str, ...] = ()
    kind: Literal["io", "pure", "outside"] = "io"
    code: tuple[str, ...] = ()


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """Boxes side by side, and the lines of their label."""

    label: tuple[str, ...]
    box: tuple[Box, ...]


class Arrow(msgspec.Struct, forbid_unknown_fields=True):
    """An arrow from the lower edge of the first box to the upper edge of the second."""

    between: tuple[str, str]
    label: str = ""
    direction: Literal["both", "down", "up"] = "both"


class Drawing(msgspec.Struct, forbid_unknown_fields=True):
    """The text source."""

    row: tuple[Row, ...]
    arrow: tuple[Arrow, ...]


class _Place(msgspec.Struct):
    """Position and size of a box."""

    left: int
    top: int
    width: int
    height: int


def read(source: Path = SOURCE) -> Drawing:
    """Read the text source; raises msgspec.ValidationError."""
    return msgspec.convert(tomllib.loads(source.read_text(encoding="utf-8")), Drawing)


def draw(drawing: Drawing) -> str:
    """Return the picture as SVG; raises ValueError if boxes overlap or an arrow's boxes are not above each other."""
    places, labels, height = _layout(drawing.row)
    width = 2 * MARGIN + GUTTER + COLUMNS * COLUMN - GAP
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' font-family="sans-serif" font-size="13" text-anchor="middle">'
        ),
        "<title>Trivium: from the clients' sockets to Kafka and back</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    parts += [_text(MARGIN, line, label, anchor="start", colour="#666", size=11) for label, line in labels]
    for arrow in drawing.arrow:
        parts += _arrow(arrow, places)
    for row in drawing.row:
        for box in row.box:
            parts += _box(box, places[box.id])
    parts += _legend(width, height)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _layout(rows: Sequence[Row]) -> tuple[dict[str, _Place], list[tuple[str, int]], int]:
    """Return the position of each box, the labels' lines with their heights, and the picture's height."""
    places: dict[str, _Place] = {}
    labels = []
    top = MARGIN
    for row in rows:
        height = LINE * (1 + max(len(box.lines) for box in row.box)) + 14
        first_line = top + (height - LINE * (len(row.label) - 1)) // 2 + 4
        labels += [(label, first_line + number * LINE) for number, label in enumerate(row.label)]
        taken: set[int] = set()
        for box in row.box:
            first, last = box.columns
            columns = set(range(first, last + 1))
            if not columns or columns & taken or not columns <= set(range(1, COLUMNS + 1)) or box.id in places:
                raise ValueError(f"{box.id}: its columns are not free, or another box has its id")
            taken |= columns
            places[box.id] = _Place(MARGIN + GUTTER + (first - 1) * COLUMN, top, len(columns) * COLUMN - GAP, height)
        top += height + BETWEEN
    return places, labels, top - BETWEEN + FOOT + MARGIN


def _box(box: Box, place: _Place) -> Iterator[str]:
    yield (
        f'<rect x="{place.left}" y="{place.top}" width="{place.width}" height="{place.height}" rx="5"'
        f' fill="{COLOURS[box.kind]}" stroke="#8a8a8a"/>'
    )
    middle, line = place.left + place.width // 2, place.top + LINE + 3
    yield _text(middle, line, box.title, weight="bold")
    for number, text in enumerate(box.lines, 1):
        yield _text(middle, line + number * LINE, text, size=12)


def _arrow(arrow: Arrow, places: dict[str, _Place]) -> Iterator[str]:
    above, below = (places[name] for name in arrow.between)
    left, right = max(above.left, below.left), min(above.left + above.width, below.left + below.width)
    start, end = above.top + above.height, below.top
    if left >= right or start >= end:
        raise ValueError(f"{arrow.between}: not above each other")
    x = (left + right) // 2
    yield f'<line x1="{x}" y1="{start}" x2="{x}" y2="{end}" stroke="#555"/>'
    if arrow.direction != "up":
        yield f'<path d="M{x - 4} {end - 8}L{x} {end}L{x + 4} {end - 8}z" fill="#555"/>'
    if arrow.direction != "down":
        yield f'<path d="M{x - 4} {start + 8}L{x} {start}L{x + 4} {start + 8}z" fill="#555"/>'
    if arrow.label:
        yield _text(x + 6, (start + end) // 2 + 4, arrow.label, anchor="start", colour="#555", size=11)


def _legend(width: int, height: int) -> Iterator[str]:
    step = (width - 2 * MARGIN) // len(LEGEND)
    for number, (kind, text) in enumerate(LEGEND):
        x, y = MARGIN + number * step, height - MARGIN - 12
        yield f'<rect x="{x}" y="{y}" width="16" height="12" fill="{COLOURS[kind]}" stroke="#8a8a8a"/>'
        yield _text(x + 22, y + 11, text, anchor="start", size=11)


def _text(
    x: int, y: int, text: str, *, anchor: str = "", colour: str = "", size: int | None = None, weight: str = ""
) -> str:
    given = {"text-anchor": anchor, "fill": colour, "font-size": size, "font-weight": weight}
    written = "".join(f' {name}="{value}"' for name, value in given.items() if value)
    return f'<text x="{x}" y="{y}"{written}>{escape(text, quote=False)}</text>'


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(draw(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
