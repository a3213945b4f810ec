"""`trivium flow`: shows `/flow` in a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.observe.flow import Snapshot
from gateway.observe.management_client import NoAnswer
from gateway.views.flow import BudgetFlow, ConnectionFlow

PERIOD_S = 1.0
PIPE_COLUMNS = 160  # width if the output is not a terminal
NARROW = 120  # columns below which users and addresses are left out
PAUSED = 8  # rows
TOPICS = 5
EPISODES = 8
_UNITS = ("B", "KiB", "MiB", "GiB")
_STEP = 1024

Document = TypeVar("Document")


def print_once(document: bytes, *, as_json: bool) -> None:
    """Print a document of `/flow`; raises NoAnswer."""
    if as_json:
        print_json(json.loads(document))
        return
    console = terminal()
    console.print(view(decoded(document, Snapshot), None, console.width))


def watch(read: Callable[[], bytes]) -> None:
    """Show the flow live until Ctrl-C. Raises NoAnswer if the first request fails; later requests are retried."""
    console = Console()

    def shown() -> Group:
        return view(decoded(read(), Snapshot), console.height, console.width)

    with Live(shown(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(PERIOD_S)
            try:
                live.update(shown(), refresh=True)
            except NoAnswer as error:
                live.update(plain(f"{error}; trying again"), refresh=True)


def decoded(document: bytes, kind: type[Document]) -> Document:
    """Decode a response of the management port; raises NoAnswer."""
    try:
        return msgspec.json.decode(document, type=kind)
    except msgspec.DecodeError as error:
        raise NoAnswer(f"not a gateway of this version: {error}") from error


def print_json(value: object) -> None:
    """Print a value as one line of JSON, in ASCII, so without escape sequences."""
    print(json.dumps(value), flush=True)  # noqa: T201 - the command's output


def terminal() -> Console:
    """Return the console for standard output, `PIPE_COLUMNS` wide if that is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


def view(snapshot: Snapshot, rows: int | None, columns: int) -> Group:
    """Render the snapshot for `columns`; with `rows`, only the part that fits."""
    process, outgoing, *topics = snapshot.budgets
    parts: list[RenderableType] = [
        Text(
            f"trivium flow {clock(snapshot.at)}  {snapshot.connections_total:,} connections  to Kafka "
            f"{size(process.bytes)} of {size(process.bytes_limit)}, {process.records:,} records  to clients "
            f"{size(outgoing.bytes)} of {size(outgoing.bytes_limit)}",
            no_wrap=True,
            overflow="ellipsis",
        ),
        _paused(snapshot),
    ]
    tail = [_topics(topics), _episodes(snapshot)]
    used = 14 + min(PAUSED, len(snapshot.paused)) + min(TOPICS, len(topics)) + min(EPISODES, len(snapshot.episodes))
    most = len(snapshot.connections) if rows is None else max(3, rows - used)
    return Group(*parts, _clients(snapshot.connections[:most], snapshot.at, wide=columns >= NARROW), *tail)


def _paused(snapshot: Snapshot) -> Table:
    table = _table("Paused now", ("subject", "reason"), ("for",))
    for each in snapshot.paused[:PAUSED]:
        table.add_row(plain(each.subject), each.reason, since(each.since, snapshot.at), style="yellow")
    return _or_nothing(table, "none")


def _clients(connections: list[ConnectionFlow], now: float, *, wide: bool) -> Table:
    """Render the clients: unanswered messages from them, unacknowledged messages to them, and unwritten bytes."""
    numbers = (
        ("to Kafka", "unanswered", "unacknowledged", "unwritten") if wide else ("to Kafka", "in", "out", "unwritten")
    )
    table = _table("Clients", ("client", "protocol", *(("user", "address") if wide else ())), numbers, "paused")
    for each in connections:
        to_kafka = sum(window.unsettled for window in each.windows if window.to_kafka)
        to_client = sum(window.unsettled for window in each.windows if not window.to_kafka)
        reasons = [f"{pause.reason} {since(pause.since, now)}".strip() for pause in each.paused]
        reasons += sorted({window.paused.reason for window in each.windows if window.paused is not None})
        table.add_row(
            plain(each.client),
            each.protocol,
            *((plain(each.principal), each.peer) if wide else ()),
            size(each.bytes),
            f"{to_kafka:,}",
            f"{to_client:,}",
            size(each.unwritten),
            ", ".join(reasons),
            style="yellow" if each.paused else "",
        )
    return _or_nothing(table, "none")


def _topics(topics: list[BudgetFlow]) -> Table:
    table = _table("Topics", ("topic",), ("to Kafka", "of", "records"), "")
    for each in topics[:TOPICS]:
        name = plain(each.name.removeprefix("topic "))
        shut = "" if each.open else "paused"
        table.add_row(name, size(each.bytes), size(each.bytes_limit), f"{each.records:,}", shut)
    return _or_nothing(table, "none in use")


def _episodes(snapshot: Snapshot) -> Table:
    table = _table("Past pauses", ("subject", "reason", "from", "until"), ("paused", "times"))
    for each in snapshot.episodes[:EPISODES]:
        times = (clock(each.began), clock(each.ended), f"{each.paused_s:.2f} s", f"{each.times:,}")
        table.add_row(plain(each.subject), each.reason, *times)
    return _or_nothing(table, "none")


def _table(title: str, texts: tuple[str, ...], numbers: tuple[str, ...], last: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for at, text in enumerate(texts):
        table.add_column(text, no_wrap=True, overflow="ellipsis", ratio=None if at else 1)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    if last is not None:
        table.add_column(last, no_wrap=True, overflow="ellipsis")
    return table


def _or_nothing(table: Table, nothing: str) -> Table:
    if not table.row_count:
        table.add_row(Text(nothing, style="dim"))
    return table


def plain(text: str) -> Text:
    """Return a client's text without markup and control characters."""
    return Text("".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text))


def size(count: float) -> str:
    """Format a number of bytes with a unit."""
    unit = 0
    while count >= _STEP and unit < len(_UNITS) - 1:
        count, unit = count / _STEP, unit + 1
    return f"{count:.1f} {_UNITS[unit]}" if unit and count < 10 else f"{count:.0f} {_UNITS[unit]}"


def since(began: float | None, now: float) -> str:
    """Format the time since `began`; "" if that is unknown."""
    return "" if began is None else f"{max(0.0, now - began):,.1f} s"


def clock(at: float, form: str = "%H:%M:%S") -> str:
    """Format epoch seconds in the local time zone."""
    return datetime.fromtimestamp(at).astimezone().strftime(form)
