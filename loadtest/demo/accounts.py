"""The demo's books: every reading sent, every acknowledgement, and what Spark must say of each window."""

from __future__ import annotations

import asyncio
import collections
import json
from typing import Any, Final, NamedTuple

from loadtest.report import Latencies

WINDOW_MS: Final = 5000
SLIDE_MS: Final = 1000


class Reading(NamedTuple):
    """One reading as sent: temperature in degrees, time in epoch milliseconds."""

    sensor: str
    temperature: float
    time: int

    def to_json(self) -> bytes:
        """The message body."""
        return json.dumps({"temperature": self.temperature, "time": self.time, "sent": self.time}).encode()


class Expected(NamedTuple):
    """What one window of one sensor must come to."""

    maximum: float
    readings: int


class Traffic:
    """What one protocol's clients did."""

    def __init__(self) -> None:
        self.sent = 0
        self.acknowledged = 0
        self.failed = 0
        self.received = 0
        self.latencies = Latencies()  # from a reading's sending to the first result that contains it
        self._newest: dict[str, int] = {}

    def result(self, result: dict[str, Any], now_ms: float) -> None:
        """A result came to this protocol's receiver."""
        self.received += 1
        sensor, latest = result["sensor"], result.get("latest")
        if latest is not None and latest > self._newest.get(sensor, 0):
            self._newest[sensor] = latest
            self.latencies.record(max(0.0, now_ms - latest) / 1000)


class Accounts:
    """What was acknowledged, held against what Spark said of it."""

    def __init__(self) -> None:
        self.traffic: dict[str, Traffic] = collections.defaultdict(Traffic)
        self.changed = asyncio.Event()  # a result came since it was cleared
        self._expected: dict[tuple[str, int], Expected] = {}
        self._results: dict[tuple[str, int], Expected] = {}

    def sent(self, protocol: str, reading: Reading) -> None:
        """A reading goes out: every window it falls into must count it."""
        self.traffic[protocol].sent += 1
        first = reading.time // SLIDE_MS * SLIDE_MS + SLIDE_MS
        for end in range(first, first + WINDOW_MS, SLIDE_MS):
            window = (reading.sensor, end)
            known = self._expected.get(window)
            if known is None:
                self._expected[window] = Expected(reading.temperature, 1)
            else:
                self._expected[window] = Expected(max(known.maximum, reading.temperature), known.readings + 1)

    def result(self, result: dict[str, Any]) -> None:
        """Spark said something of a window; of several results the one that counts most is the newest."""
        self.changed.set()
        window = (str(result["sensor"]), int(result["end"]))
        if window not in self._expected:
            return  # of an earlier run on the same topics
        known = self._results.get(window)
        if known is None or result["count"] >= known.readings:
            self._results[window] = Expected(float(result["maximum"]), int(result["count"]))

    @property
    def open_windows(self) -> int:
        """Windows that Spark has not yet, or not rightly, accounted for."""
        return sum(self._results.get(window) != expected for window, expected in self._expected.items())

    @property
    def windows(self) -> int:
        """Windows that hold a reading."""
        return len(self._expected)

    @property
    def unacknowledged(self) -> int:
        """Readings without a positive answer."""
        return sum(traffic.sent - traffic.acknowledged for traffic in self.traffic.values())

    @property
    def complete(self) -> bool:
        """Every reading was acknowledged and every window is right."""
        return self.windows > 0 and self.unacknowledged == 0 and self.open_windows == 0
