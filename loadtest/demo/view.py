"""The demo's output: a live view on a terminal, plain lines elsewhere, and the summary."""

from __future__ import annotations

import dataclasses
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from loadtest.demo.accounts import Accounts
from loadtest.demo.fleet import JSON_RECORDS


@dataclasses.dataclass
class Status:
    """Latest values of the Spark job's metrics, and the clients' errors."""

    lag: int | None = None
    batch: int | None = None
    rows: int = 0
    rows_per_second: float = 0.0
    duration_s: float = 0.0
    late: int = 0
    errors: list[str] = dataclasses.field(default_factory=list)

    def take(self, metrics: str) -> None:
        """Update from the job's metrics in Prometheus' text format. Before the first micro-batch most are missing."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        if "trivium_spark_lag" in values:
            self.lag = round(values["trivium_spark_lag"])
        if "trivium_spark_batch" in values:
            self.batch = round(values["trivium_spark_batch"])
            self.rows = round(values["trivium_spark_rows_total"])
            self.rows_per_second = values["trivium_spark_rows_per_second"]
            self.duration_s = values["trivium_spark_batch_duration_seconds"]
            self.late = round(values["trivium_spark_late_total"])

    @property
    def spark(self) -> str:
        """A line about the job's last micro-batch."""
        if self.batch is None:
            return "running, no micro-batch finished yet"
        return (
            f"{self.rows:,} rows, {self.rows_per_second:,.0f}/s; micro-batch {self.batch:,} took "
            f"{self.duration_s:.1f} s, late {self.late}"
        )


def addresses_line(addresses: dict[str, Any]) -> str:
    """The addresses of the listeners."""
    return "   ".join(
        f"{name} {addresses[key]}" for name, key in (("MQTT", "mqtt"), ("AMQP", "amqp"), ("HTTP", "http"))
    )


def other_addresses_line(addresses: dict[str, Any]) -> str:
    """The addresses of Kafka and of the metrics."""
    return f"Kafka {addresses['kafka']}   metrics http://{addresses['management']}/metrics"


def paste_lines(addresses: dict[str, Any]) -> list[str]:
    """Three commands to copy, one per protocol."""
    host, _, port = addresses["mqtt"].rpartition(":")
    body = '{"records":[{"key":"my/temp","value":{"temperature":22.5}}]}'
    python = (
        "from proton import Message; from proton.utils import BlockingConnection as C; "
        f'C("{addresses["amqp"]}").create_sender("sensors").send(Message(b"23.5", inferred=True, group_id="my/temp"))'
    )
    return [
        f"mosquitto_pub -h {host} -p {port} -q 1 -t sensors/my/temp -m 21.5",
        f"curl -H 'Content-Type: {JSON_RECORDS}' -d '{body}' http://{addresses['http']}/topics/sensors",
        f".venv/bin/python -c '{python}'",
    ]


def traffic_table(accounts: Accounts, title: str | None = None) -> Table:
    """Build the table of readings, acknowledgements, results and end-to-end latencies per protocol."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for column in ("readings in", "acknowledged", "results out", "p50 ms", "p99 ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for protocol, traffic in accounts.traffic.items():
        table.add_row(
            protocol.upper(),
            f"{traffic.sent:,}",
            f"{traffic.acknowledged:,}",
            f"{traffic.received:,}",
            f"{traffic.latencies.milliseconds(50):,.0f}",
            f"{traffic.latencies.milliseconds(99):,.0f}",
        )
    return table


def correct_windows(accounts: Accounts) -> str:
    """Format the number of correct windows."""
    return f"{accounts.windows - accounts.open_windows:,} of {accounts.windows:,}"


def live(accounts: Accounts, addresses: dict[str, Any], status: Status, seconds: float) -> Group:
    """Build the live view: 14 lines, 72 columns."""
    lines = [
        ("Kafka", "lag not known yet" if status.lag is None else f"lag {status.lag:,} readings"),
        ("Spark", status.spark),
        ("Correct windows", f"{correct_windows(accounts)} (the newest are still open)"),
        ("Your readings", _guest(accounts)),
        *(("Error", error) for error in status.errors),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in lines:
        table.add_row(name, Text(text, style="red" if name == "Error" else ""))
    return Group(
        Text(addresses_line(addresses)),
        Text(other_addresses_line(addresses)),
        traffic_table(accounts),
        Text("p50, p99: from sending a reading to receiving a result that contains it", style="dim"),
        table,
        Text(f"Running for {seconds:,.0f} s. Press Ctrl-C to stop.", style="dim"),
    )


def plain(console: Console, accounts: Accounts, status: Status, seconds: float) -> None:
    """Print the state on one line, for logs and pipes."""
    parts = [
        f"{protocol} in {traffic.sent} acknowledged {traffic.acknowledged} out {traffic.received} "
        f"p50 {traffic.latencies.milliseconds(50):.0f} ms"
        for protocol, traffic in accounts.traffic.items()
    ]
    lag = "unknown" if status.lag is None else status.lag
    right = correct_windows(accounts)
    parts += [f"Kafka lag {lag}", f"Spark {status.spark}", f"correct windows {right}", *status.errors]
    if accounts.guest is not None:
        parts.append(f"your readings {_guest(accounts)}")
    line(console, f"{seconds:.1f} s: {' | '.join(parts)}")


def summary(console: Console, accounts: Accounts, status: Status) -> None:
    """Print the summary at the end of the run."""
    console.print(traffic_table(accounts, "Summary"))
    line(
        console,
        f"Correct windows: {correct_windows(accounts)}. Unacknowledged: {accounts.unacknowledged}. "
        f"Late: {status.late}.",
    )


def line(console: Console, text: str, style: str = "") -> None:
    """Print a line unwrapped. The terminal wraps it, so it can still be copied as one line."""
    console.print(Text(text, style=style), soft_wrap=True)


def _guest(accounts: Accounts) -> str:
    guest = accounts.guest
    if guest is None:
        return "none yet; try one of the commands above"
    return f"{guest['sensor']}: maximum {guest['maximum']} of {guest['count']} within 5 s"
