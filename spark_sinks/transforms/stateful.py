"""A stateful processor in Python, run by Spark's workers. `running_statistics.py` does the math."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, ValueState

from spark_sinks.spec.parts import Threshold
from spark_sinks.transforms.running_statistics import RunningStatistics

STATE = "count bigint, mean double, squares double"
MEAN = "_mean_"
DEVIATION = "_deviation_"
BEYOND = "_beyond"
"""Whether a reading is an alarm already, by its thresholds."""


class Deviations(StatefulProcessor):
    """Selects one device's alarms, and adds the mean and deviation of the earlier values where a value is beyond them.

    Each reading is compared with the readings before it in the log, and then counted.

    Args:
        thresholds: by column; those with `deviations` are checked here.
        columns: the columns of an alarm. `MEAN` and `DEVIATION` of each checked column follow them.
        forget_ms: how long a device must be silent before its state is deleted.
    """

    def __init__(self, thresholds: Mapping[str, Threshold], columns: tuple[str, ...], forget_ms: int) -> None:
        self._limits = {
            name: (threshold.deviations, threshold.after)
            for name, threshold in thresholds.items()
            if threshold.deviations is not None
        }
        self._columns = columns
        self._forget_ms = forget_ms
        self._states: dict[str, ValueState] = {}

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open each threshold's state."""
        self._states = {name: handle.getValueState(name, STATE, self._forget_ms) for name in self._limits}

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
        """Yield the alarms of a batch. Its rows come in any order, so they are sorted by offset."""
        running = {name: RunningStatistics(*(state.get() or ())) for name, state in self._states.items()}
        for row in sorted(rows, key=lambda one: (one["topic"], one["partition"], one["offset"], one["_place"])):
            seen = {}
            for name, (deviations, after) in self._limits.items():
                value = row[name]
                if value is None:
                    continue
                before = running[name]
                if before.is_beyond(value, deviations, after):
                    seen[name] = before
                running[name] = before.with_value(value)
            if seen or row[BEYOND]:
                made = {name: row[name] for name in self._columns}
                for name in self._limits:
                    one = seen.get(name)
                    made[MEAN + name] = None if one is None else one.mean
                    made[DEVIATION + name] = None if one is None else one.deviation
                yield Row(**made)
        for name, state in self._states.items():
            if running[name].count:
                state.update((running[name].count, running[name].mean, running[name].squares))

    def close(self) -> None:
        """Nothing is open."""
