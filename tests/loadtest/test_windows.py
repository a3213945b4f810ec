"""The verdicts of the comparison of windows."""

from __future__ import annotations

from typing import Any

from loadtest.scenarios.tables import check_windows


def row(name: str, rate: float, milliseconds: float) -> dict[str, Any]:
    return {"": f"slow, {name}", "per second": rate, "p50 ms": milliseconds, "p99 ms": 2 * milliseconds}


FIXED = [row("fixed 100", 400, 10), row("fixed 1000", 1000, 100), row("fixed 5000", 990, 500)]


def test_a_window_near_the_best_rate_with_half_the_latency_is_good() -> None:
    assert check_windows([*FIXED, row("adaptive", 951, 249)]) == []


def test_slow_or_late_windows_are_reported() -> None:
    assert check_windows([*FIXED, row("adaptive", 949, 251)]) == [
        "slow: 949 per second; a fixed window reaches 1,000",
        "slow: p50 ms of 251 ms; that of a window of 5000 is 500 ms",
        "slow: p99 ms of 502 ms; that of a window of 5000 is 1000 ms",
    ]
