"""What keeps state in Python between micro-batches, in Spark's workers. Arithmetic: `running_statistics.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, ValueState

from spark_sinks.running_statistics import RunningStatistics
from spark_sinks.spec.parts import Threshold

STATE = "count bigint, mean double, squares double"
MEAN = "_mean_"
DEVIATION = "_deviation_"
BEYOND = "_beyond"
"""Of a reading that is an alarm already, by its bounds."""


class Deviations(StatefulProcessor):
    """Of one device's readings those that are alarms, with mean and deviation before them where they are beyond these.

    A reading is judged by those before it in the log, then counts itself.

    Args:
        thresholds: of columns that have `deviations`.
        columns: of a reading that is an alarm; `MEAN` and `DEVIATION` of each limited column are behind them.
        forget_ms: how long a device must be silent for its state to be forgotten.
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
        """See `StatefulProcessor`."""
        self._states = {name: handle.getValueState(name, STATE, self._forget_ms) for name in self._limits}

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
        """See `StatefulProcessor`; the rows of a batch come in any order."""
        running = {name: RunningStatistics(*(state.get() or ())) for name, state in self._states.items()}
        for row in sorted(rows, key=lambda one: (one["topic"], one["partition"], one["offset"], one["_place"])):
            found = {}
            for name, (deviations, after) in self._limits.items():
                value = row[name]
                if value is None:
                    continue
                before = running[name]
                if before.is_beyond(value, deviations, after):
                    found[name] = before
                running[name] = before.with_value(value)
            if found or row[BEYOND]:
                made = {name: row[name] for name in self._columns}
                for name in self._limits:
                    one = found.get(name)
                    made[MEAN + name] = None if one is None else one.mean
                    made[DEVIATION + name] = None if one is None else one.deviation
                yield Row(**made)
        for name, state in self._states.items():
            if running[name].count:
                state.update((running[name].count, running[name].mean, running[name].squares))

    def close(self) -> None:
        """See `StatefulProcessor`."""
