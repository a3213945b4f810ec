"""`trivium clients` and `trivium kick`: prints the responses of `/clients` in a terminal."""

from __future__ import annotations

import json
from datetime import datetime

import msgspec
from rich.table import Table

from gateway.observe.clients import ClientsPage
from gateway.observe.flow_view import clock, decoded, plain, print_json, since, size, terminal
from gateway.views.clients import ClientView

DETAIL_COLUMN = 14


class _ViewClosed(msgspec.Struct):
    closed: int


def closed_in(document: bytes) -> int:
    """Return how many clients a DELETE has closed; raises NoAnswer."""
    return decoded(document, _ViewClosed).closed


def print_clients(document: bytes, *, whole: bool, as_json: bool) -> None:
    """Print a page of the list, or with `whole` every detail of the clients; raises NoAnswer."""
    if as_json:
        print_json(json.loads(document))
        return
    page = decoded(document, ClientsPage)
    console = terminal()
    if whole:
        for view in page.clients:
            console.print(_details(view))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("id", "kind", "user", "address", "since"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for view in page.clients:
        table.add_row(plain(view.id), view.kind, plain(view.principal), view.address, _when(view.since))
    console.print(table)
    if page.next is not None:
        console.print(plain(f"more: --after '{page.next}'"))


def _details(view: ClientView) -> Table:
    """Return a table with one line per known detail."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(width=DETAIL_COLUMN)
    table.add_column(overflow="fold")
    connected = f"since {_when(view.since)} from {view.address}" if view.since is not None else "no"
    facts = [("id", view.id), ("kind", view.kind), ("user", view.principal), ("connected", connected)]
    facts += [("protocol", f"{view.protocol} {view.version}".strip())]
    if view.session is not None:
        facts.append(("session", _session(view)))
    if view.flow is not None:
        now = datetime.now().astimezone().timestamp()
        paused = ", ".join(f"{pause.reason} {since(pause.since, now)}".strip() for pause in view.flow.paused)
        facts.append(("paused", paused or "no"))
        facts.append(("to Kafka", f"{size(view.flow.bytes)} of {size(view.flow.bytes_limit)}"))
        facts.append(("unwritten", size(view.flow.unwritten)))
        for window in view.flow.windows:
            way = "to Kafka" if window.to_kafka else "to the client"
            counts = f"granted {window.granted:,}, unused credit {window.outstanding:,}, unsettled {window.unsettled:,}"
            facts.append(("window", f"{window.name} {window.topic} ({way}): {counts}"))
    for subscription in view.subscriptions:
        qos = "" if subscription.qos is None else f" QoS {subscription.qos}"
        way = "sends to" if subscription.to_kafka else "receives"
        facts.append((way, f"{subscription.name}{qos}{f' ({subscription.topic})' if subscription.topic else ''}"))
    if view.subscriptions_total > len(view.subscriptions):
        facts.append(("", f"and {view.subscriptions_total - len(view.subscriptions):,} more"))
    for name, text in facts:
        table.add_row(name, plain(text))
    return table


def _session(view: ClientView) -> str:
    session = view.session
    assert session is not None
    if not session.kept:
        return "ends with the connection"
    parts = ["kept forever" if session.expiry_s is None else f"kept for {session.expiry_s:,} s without a connection"]
    if session.gone_at is not None:
        parts.append(f"disconnected since {_when(session.gone_at)}")
    parts.append(f"{session.in_flight:,} in flight")
    if session.lag is not None:
        parts.append(f"{session.lag:,} records behind")
    if session.gateway:
        parts.append(f"at gateway {session.gateway}")
    return ", ".join(parts)


def _when(at: float | None) -> str:
    return "" if at is None else clock(at, "%Y-%m-%d %H:%M:%S")
