"""Counts the demo's readings and acknowledgements and computes the result expected for each window."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any, Final, NamedTuple

from loadtest.report import Latencies
from loadtest.spark.readings import WINDOW_MS, starts

PROTOCOLS: Final = ("mqtt", "amqp", "http")
KEPT_WINDOWS: Final = 100_000  # five hours of the demo, 30 MB


class Reading(NamedTuple):
    """A reading: temperature in degrees, time in epoch milliseconds."""

    sensor: str
    temperature: float
    time: int

    def to_json(self) -> bytes:
        """The message body."""
        return json.dumps({"temperature": self.temperature, "time": self.time, "sent": self.time}).encode()


class Window(NamedTuple):
    """Result of one window of one sensor."""

    maximum: float
    readings: int


class Traffic:
    """Counters of one protocol's clients. Sent minus acknowledged minus failed is unanswered."""

    def __init__(self) -> None:
        self.sent = 0
        self.acknowledged = 0
        self.failed = 0
        self.received = 0  # results that contain a reading of this run
        self.latencies = Latencies()  # from sending a reading to the first result that contains it
        self.newest: dict[str, int] = {}  # sensor -> time of the newest reading in a result


class Accounts:
    """Compares the readings sent with their acknowledgements and with Spark's results.

    Args:
        sensors: the demo's own sensors; results of others belong to readings the user sent by hand.
    """

    def __init__(self, sensors: Collection[str]) -> None:
        self.traffic = {protocol: Traffic() for protocol in PROTOCOLS}
        self.came_back = asyncio.Event()  # set when a receiver gets the first result of this run
        self.guest: dict[str, Any] | None = None  # newest result of a sensor that is not the demo's own
        self._sensors = frozenset(sensors)
        self._began: int | None = None  # time of the first reading
        self._dropped = 0
        self._expected: dict[tuple[str, int], Window] = {}
        self._results: dict[tuple[str, int], Window] = {}
        self._not_right: set[tuple[str, int]] = set()

    def sent(self, protocol: str, reading: Reading) -> None:
        """Count a reading that is being sent, and add it to every window it falls into."""
        self.traffic[protocol].sent += 1
        if self._began is None:
            self._began = reading.time
        if len(self._expected) > KEPT_WINDOWS:
            self._drop_oldest()
        for start in starts(reading.time):
            window = (reading.sensor, start + WINDOW_MS)
            known = self._expected.get(window, Window(reading.temperature, 0))
            self._expected[window] = Window(max(known.maximum, reading.temperature), known.readings + 1)
            self._compare(window)

    def answered(self, protocol: str, *, well: bool) -> None:
        """Count the gateway's answer to a reading."""
        if well:
            self.traffic[protocol].acknowledged += 1
        else:
            self.traffic[protocol].failed += 1

    def received(self, protocol: str, result: dict[str, Any], now_ms: float) -> None:
        """Count a result that a receiver got. Results of earlier runs and of other sensors are ignored."""
        sensor, latest = result["sensor"], result.get("latest")
        if sensor not in self._sensors or self._began is None or latest is None or latest < self._began:
            return
        traffic = self.traffic[protocol]
        traffic.received += 1
        if latest > traffic.newest.get(sensor, 0):
            traffic.newest[sensor] = latest
            traffic.latencies.record(max(0.0, now_ms - latest) / 1000)
        self.came_back.set()

    def result(self, result: dict[str, Any]) -> None:
        """Take a result of Spark's. Of several results of a window, the one with the highest count is the newest.

        A window without a reading of this run belongs to an earlier run on the same topics and is ignored.
        """
        sensor, end = str(result["sensor"]), int(result["end"])
        if sensor not in self._sensors:
            self.guest = result
            return
        window = (sensor, end)
        if window not in self._expected:
            return
        known = self._results.get(window)
        if known is None or result["count"] >= known.readings:
            self._results[window] = Window(float(result["maximum"]), int(result["count"]))
            self._compare(window)

    def _drop_oldest(self) -> None:
        """Remove the older half of the windows, correct ones only. A demo may run for days."""
        for window in list(self._expected)[: KEPT_WINDOWS // 2]:
            if window not in self._not_right:
                del self._expected[window], self._results[window]
                self._dropped += 1

    def _compare(self, window: tuple[str, int]) -> None:
        if self._results.get(window) == self._expected[window]:
            self._not_right.discard(window)
        else:
            self._not_right.add(window)

    @property
    def windows(self) -> int:
        """Number of windows that contain a reading."""
        return self._dropped + len(self._expected)

    @property
    def open_windows(self) -> int:
        """Number of windows whose result is missing or wrong."""
        return len(self._not_right)

    @property
    def unacknowledged(self) -> int:
        """Number of readings without a positive acknowledgement."""
        return sum(traffic.sent - traffic.acknowledged for traffic in self.traffic.values())

    @property
    def complete(self) -> bool:
        """True if every protocol sent and received, every reading was acknowledged, and every window is correct."""
        return (
            all(traffic.sent and traffic.received for traffic in self.traffic.values())
            and self.unacknowledged == 0
            and self.open_windows == 0
        )

    def faults(self) -> list[str]:
        """Describe what is missing; empty if `complete`."""
        found = []
        for protocol, traffic in self.traffic.items():
            if not traffic.sent:
                found.append(f"{protocol.upper()}: no reading was sent")
            elif not traffic.received:
                found.append(f"{protocol.upper()}: no result came back")
            if missing := traffic.sent - traffic.acknowledged:
                found.append(f"{protocol.upper()}: {missing} of {traffic.sent} readings were not acknowledged")
        for sensor, end in sorted(self._not_right)[:3]:
            expected, result = self._expected[sensor, end], self._results.get((sensor, end))
            said = "nothing" if result is None else f"maximum {result.maximum} of {result.readings}"
            found.append(
                f"{sensor}, window ending at {end}: expected maximum {expected.maximum} of {expected.readings}, "
                f"Spark returned {said}"
            )
        if self.open_windows > 3:
            found.append(f"and {self.open_windows - 3} more windows")
        return found
