"""What the demo shows: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table

from loadtest.demo.accounts import Accounts
from loadtest.demo.fleet import JSON_RECORDS, SENSORS


def paste_lines(addresses: dict[str, Any]) -> list[str]:
    """Three commands to paste, one a protocol."""
    host, _, port = addresses["mqtt"].rpartition(":")
    body = '{"records":[{"key":"my/temp","value":{"temperature":21.5}}]}'
    python = (
        "from proton import Message; from proton.utils import BlockingConnection as C; "
        f"C('amqp://{addresses['amqp']}').create_sender('sensors')"
        ".send(Message(body=b'21.5', inferred=True, annotations={'x-opt-bridge.key': 'my/temp'}))"
    )
    return [
        f"mosquitto_pub -h {host} -p {port} -V 5 -q 1 -t sensors/my/temp -m 21.5",
        f"curl -H 'Content-Type: {JSON_RECORDS}' -d '{body}' http://{addresses['http']}/topics/sensors",
        f'.venv/bin/python -c "{python}"',
    ]


def traffic_table(accounts: Accounts, title: str | None = None) -> Table:
    """Per protocol: readings sent, acknowledged, results received, latency."""
    table = Table(title=title, expand=False)
    table.add_column("protocol")
    for column in ("sent", "acknowledged", "failed", "results", "latency p50 ms", "latency p99 ms"):
        table.add_column(column, justify="right")
    for protocol in SENSORS:
        traffic = accounts.traffic[protocol]
        table.add_row(
            protocol.upper(),
            f"{traffic.sent:,}",
            f"{traffic.acknowledged:,}",
            f"{traffic.failed:,}",
            f"{traffic.received:,}",
            f"{traffic.latencies.milliseconds(50):,.0f}",
            f"{traffic.latencies.milliseconds(99):,.0f}",
        )
    return table


def live(accounts: Accounts, addresses: dict[str, Any], status: dict[str, Any]) -> Group:
    """The whole screen."""
    kafka = f"Kafka {addresses['kafka']}   lag {status.get('lag', '-')} readings"
    progress = f"Spark  {status.get('spark', 'starting')}"
    windows = f"windows right {accounts.windows - accounts.open_windows:,} of {accounts.windows:,}"
    lines = "\n".join(paste_lines(addresses))
    return Group(
        Panel(
            f"MQTT {addresses['mqtt']}   AMQP {addresses['amqp']}   HTTP {addresses['http']}   "
            f"management {addresses['management']}",
            title="Trivium",
        ),
        traffic_table(accounts),
        f"{kafka}\n{progress}\n{windows}",
        Panel(lines, title="try it"),
    )


def plain(console: Console, accounts: Accounts, status: dict[str, Any], seconds: float) -> None:
    """One line, for logs and pipes."""
    parts = []
    for protocol in SENSORS:
        traffic = accounts.traffic[protocol]
        parts.append(
            f"{protocol} sent {traffic.sent} acknowledged {traffic.acknowledged} results {traffic.received} "
            f"p50 {traffic.latencies.milliseconds(50):.0f} ms"
        )
    console.print(
        f"{seconds:6.1f} s  {' | '.join(parts)} | lag {status.get('lag', '-')} | spark {status.get('spark', '-')} | "
        f"windows {accounts.windows - accounts.open_windows}/{accounts.windows}",
        soft_wrap=True,
        highlight=False,
    )
