"""The demo's check succeeds only if everything sent was acknowledged and is in the results exactly once."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from loadtest.demo import accounts, view
from loadtest.demo.accounts import Accounts, Reading

NOW = 1_800_000_000_300
ADDRESSES = {
    "mqtt": "127.0.0.1:11883", "amqp": "127.0.0.1:15672", "http": "127.0.0.1:18080",
    "management": "127.0.0.1:18081", "kafka": "127.0.0.1:19092",
}  # fmt: skip
SENSOR_OF = {"mqtt": "kitchen", "amqp": "boiler", "http": "attic"}


class Run:
    """A run's accounts and the readings sent; `spark` produces the results of a correct job."""

    def __init__(self) -> None:
        self.accounts = Accounts(SENSOR_OF.values())
        self.readings: list[Reading] = []

    def send(self, protocol: str, temperature: float, time: int, *, well: bool | None = True) -> None:
        reading = Reading(SENSOR_OF[protocol], temperature, time)
        self.readings.append(reading)
        self.accounts.sent(protocol, reading)
        if well is not None:
            self.accounts.answered(protocol, well=well)

    def results(self) -> list[dict[str, Any]]:
        windows: dict[tuple[str, int], list[Reading]] = {}
        for reading in self.readings:
            for end in range(reading.time - reading.time % 1000 + 1000, reading.time + 5001, 1000):
                windows.setdefault((reading.sensor, end), []).append(reading)
        return [
            {
                "sensor": sensor, "start": end - 5000, "end": end, "count": len(inside),
                "maximum": max(one.temperature for one in inside), "latest": max(one.time for one in inside),
            }
            for (sensor, end), inside in windows.items()
        ]  # fmt: skip

    def spark(self) -> None:
        for result in self.results():
            self.accounts.result(result)
            for protocol in SENSOR_OF:
                self.accounts.received(protocol, result, result["latest"] + 40)


@pytest.fixture
def run() -> Run:
    run = Run()
    for number in range(20):
        for protocol in SENSOR_OF:
            run.send(protocol, 20.0 + number % 7, NOW + 200 * number)
    return run


def test_every_reading_acknowledged_and_every_window_right(run: Run) -> None:
    assert not run.accounts.complete
    run.spark()
    assert run.accounts.complete
    assert run.accounts.faults() == []
    assert run.accounts.windows == 27  # 3 sensors, 4 s of readings, 5 windows each of 5 s


def test_a_reading_that_spark_lost(run: Run) -> None:
    honest = run.results()
    lost = next(result for result in honest if result["count"] > 1)
    for result in honest:
        run.accounts.result({**result, "count": result["count"] - 1} if result is lost else result)
    for protocol in SENSOR_OF:
        run.accounts.received(protocol, lost, NOW + 5000)
    assert not run.accounts.complete
    (fault,) = run.accounts.faults()
    assert fault.startswith(lost["sensor"])
    assert fault.endswith(f"of {lost['count'] - 1}")


def test_a_window_that_spark_never_mentioned(run: Run) -> None:
    run.spark()
    run.send("amqp", 20.0, NOW + 60_000)
    assert not run.accounts.complete
    assert run.accounts.open_windows == 5
    assert len(run.accounts.faults()) == 4  # three, and the number of the others
    assert "Spark returned nothing" in run.accounts.faults()[0]


def test_a_reading_counted_twice(run: Run) -> None:
    run.spark()
    doubled = run.results()[0]
    run.accounts.result({**doubled, "count": doubled["count"] + 1})
    assert not run.accounts.complete


def test_a_wrong_maximum(run: Run) -> None:
    run.spark()
    wrong = run.results()[0]
    run.accounts.result({**wrong, "maximum": wrong["maximum"] + 0.01})
    assert not run.accounts.complete


def test_a_repeated_older_result_changes_nothing(run: Run) -> None:
    run.spark()
    for result in run.results():
        run.accounts.result({**result, "count": 1, "maximum": 0.0} if result["count"] > 1 else result)
    assert run.accounts.complete


@pytest.mark.parametrize("well", [False, None])
def test_a_reading_that_was_refused_or_never_answered(run: Run, well: bool | None) -> None:
    run.send("http", 21.0, NOW + 1000, well=well)
    run.spark()  # it arrived nevertheless
    assert not run.accounts.complete
    assert run.accounts.unacknowledged == 1
    assert run.accounts.faults() == ["HTTP: 1 of 21 readings were not acknowledged"]


def test_a_protocol_without_readings_or_without_results() -> None:
    run = Run()
    run.send("mqtt", 20.0, NOW)
    run.send("amqp", 20.0, NOW)
    for result in run.results():
        run.accounts.result(result)
        run.accounts.received("mqtt", result, NOW + 40)
    assert not run.accounts.complete
    assert run.accounts.faults() == ["AMQP: no result came back", "HTTP: no reading was sent"]


def test_results_of_an_earlier_run_and_of_guests_are_not_ours(run: Run) -> None:
    earlier = {"sensor": "kitchen", "end": NOW - 60_300, "count": 3, "maximum": 50.0, "latest": NOW - 61_000}
    guest = {"sensor": "my/temp", "end": NOW + 700, "count": 1, "maximum": 21.5}
    for result in (earlier, guest):
        run.accounts.result(result)
        run.accounts.received("mqtt", result, NOW + 5000)
    assert run.accounts.traffic["mqtt"].received == 0
    assert not run.accounts.came_back.is_set()
    assert run.accounts.guest == guest
    run.spark()
    assert run.accounts.came_back.is_set()
    assert run.accounts.complete


def test_latency_is_that_of_the_first_result_with_a_reading(run: Run) -> None:
    result = run.results()[0]
    for delay in (40, 90_000):
        run.accounts.received("mqtt", result, result["latest"] + delay)
    assert run.accounts.traffic["mqtt"].received == 2
    assert run.accounts.traffic["mqtt"].latencies.count == 1
    assert run.accounts.traffic["mqtt"].latencies.milliseconds(100) == pytest.approx(40, rel=0.01)


def test_old_windows_are_forgotten_when_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "KEPT_WINDOWS", 100)
    run = Run()
    run.send("amqp", 1.0, NOW)  # in no result
    run.accounts.received("amqp", {"sensor": "boiler", "latest": NOW}, NOW)
    for second in range(200):
        run.send("mqtt", 20.0, NOW + 1000 * second)
        run.accounts.result({"sensor": "kitchen", "end": NOW + 700 + 1000 * second, "count": min(5, second + 1),
                             "maximum": 20.0})  # fmt: skip
    assert run.accounts.windows == 5 + 204
    assert len(run.accounts._expected) <= 105
    assert not run.accounts.complete
    assert any("boiler" in fault for fault in run.accounts.faults())


def shown(width: int, *renderables: Any) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system="standard", highlight=False)
    for renderable in renderables:
        console.print(renderable)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_view_fits_the_terminal(run: Run, width: int) -> None:
    run.spark()
    for traffic in run.accounts.traffic.values():
        traffic.sent = traffic.acknowledged = traffic.received = 12_345_678
    run.accounts.guest = {"sensor": "my/temp", "maximum": 21.5, "count": 3}
    status = view.Status(lag=1_234_567, batch=12_345, rows=100_000, rows_per_second=123_456.0, duration_s=12.345)
    lines = shown(width, view.live(run.accounts, ADDRESSES, status, 86_400))
    assert len(lines) <= 20
    assert not any("…" in line for line in lines)
    for text in ("12,345,678", "lag 1,234,567 readings", "my/temp: maximum 21.5 of 3", *ADDRESSES.values()):
        assert sum(text in line for line in lines) > 0, text
    assert any(line.startswith("Spark") and line.rstrip().endswith("late 0") for line in lines)


def test_without_a_terminal_there_are_no_control_codes_and_no_broken_lines(run: Run) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, highlight=False)
    for text in view.paste_lines(ADDRESSES):
        view.line(console, text, "red")
    view.plain(console, run.accounts, view.Status(errors=["AMQP receiver: gone"]), 12.3)
    view.summary(console, run.accounts, view.Status())
    assert "\x1b" not in out.getvalue()
    lines = out.getvalue().splitlines()
    assert lines[:3] == view.paste_lines(ADDRESSES)
    assert lines[3].startswith("12.3 s: mqtt in 20 acknowledged 20 out 0 ")
    assert lines[3].endswith("AMQP receiver: gone")


METRICS = """
# TYPE trivium_spark_rows_total counter
trivium_spark_rows_total{job="m",query="m"} 7.0
# TYPE trivium_spark_lag gauge
trivium_spark_lag{job="m",partition="0",query="m",topic="sensors"} 40.0
trivium_spark_lag{job="m",partition="1",query="m",topic="sensors"} 4.0
"""
BATCH = """
trivium_spark_rows_per_second{job="m",query="m"} 70.4
trivium_spark_batch{job="m",query="m"} 2.0
trivium_spark_batch_duration_seconds{job="m",query="m"} 0.099
trivium_spark_late_total{job="m",query="m"} 4.0
"""


def test_the_jobs_metrics_make_the_status() -> None:
    status = view.Status()
    assert status.spark == "running, no micro-batch finished yet"
    status.take(METRICS)
    assert (status.lag, status.spark) == (44, "running, no micro-batch finished yet")
    status.take(METRICS + BATCH)
    assert status.spark == "7 rows, 70/s; micro-batch 2 took 0.1 s, late 4"
