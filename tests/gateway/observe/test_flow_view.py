"""`trivium flow` in a terminal; with a gateway in tests/faults/test_frozen_flow.py."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gateway.observe.flow import PausedNow, Snapshot
from gateway.observe.flow_view import size, view
from gateway.process.cli import app
from gateway.views.flow import BudgetFlow, ConnectionFlow, FlowWindow
from gateway.views.pauses import NO_CREDIT, PROCESS, PROCESS_BUDGET, Episode, Pause


def snapshot(client: str, connections: int) -> Snapshot:
    found = ConnectionFlow(
        protocol="amqp",
        client=client,
        peer="10.0.0.1:9",
        principal="ann",
        subject=f"amqp {client}",
        bytes=2048,
        bytes_limit=4096,
        records=3,
        unwritten=7,
        windows=[FlowWindow("in", True, "t", 9, 4, 5), FlowWindow("out", False, "t", 0, 0, 6, Pause(NO_CREDIT))],
        windows_total=2,
        paused=[Pause(PROCESS_BUDGET, 90.0)],
    )
    return Snapshot(
        at=100.0,
        connections_total=connections,
        connections=[found] * connections,
        budgets=[
            BudgetFlow(PROCESS, 2048, 4096, 3, 10, False),
            BudgetFlow("outgoing", 512, 8192, 1, 10, True),
            BudgetFlow("topic t", 1024, 4096, 3, 10, True),
        ],
        paused=[PausedNow(PROCESS, PROCESS_BUDGET, 90.0)],
        episodes=[Episode(f"amqp {client}", PROCESS_BUDGET, 1.0, 3.0, 1.5, 4)],
    )


def printed(what: Snapshot, rows: int | None, columns: int = 140) -> str:
    terminal = io.StringIO()
    Console(file=terminal, force_terminal=True, color_system=None, width=columns).print(view(what, rows, columns))
    return terminal.getvalue()


def test_nothing_that_a_client_has_chosen_is_an_order_to_the_terminal() -> None:
    shown = printed(snapshot("\x1b[2J\x9b1m[red]x\u202e", 1), None)
    assert "\x1b[2J" not in shown
    assert "\x9b" not in shown
    assert "\u202e" not in shown
    assert "\ufffd[2J\ufffd1m[red]x\ufffd" in shown


def test_figures_and_reasons() -> None:
    shown = printed(snapshot("press", 1), None)
    (client,) = [line for line in shown.splitlines() if line.startswith("press")]
    assert client.split()[1:] == "amqp ann 10.0.0.1:9 2.0 KiB 5 6 7 B process budget 10.0 s, no credit".split()  # noqa: SIM905
    assert "2.0 KiB of 4.0 KiB, 3 records" in shown


@pytest.mark.parametrize("rows", [24, 50])
def test_what_is_live_fits_the_terminal(rows: int) -> None:
    assert len(printed(snapshot("press", 100), rows).splitlines()) <= rows


def test_in_eighty_columns_the_figures_are_whole() -> None:
    shown = printed(snapshot("press", 1), None, columns=80)
    (client,) = [line for line in shown.splitlines() if line.startswith("press")]
    assert client.split()[:7] == ["press", "amqp", "2.0", "KiB", "5", "6", "7"]
    assert "ann" not in client


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (2048, "2.0 KiB"), (2**40, "1024 GiB")])
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("url", "complaint"),
    [("file:///etc/passwd", "is not an HTTP URL"), ("http://127.0.0.1:1", "http://127.0.0.1:1/flow: ")],
)
def test_a_gateway_that_does_not_answer_is_an_error_of_one_line(url: str, complaint: str) -> None:
    result = CliRunner().invoke(app, ["flow", "--once", "--url", url])
    assert result.exit_code in (1, 2)
    assert complaint in result.output
    assert len(result.output.splitlines()) == 1
