"""Running mean and standard deviation of a series of values (Welford's method); no value is stored."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """Mean and deviation of the values so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # the sum of the squared distances from the mean

    @property
    def deviation(self) -> float:
        """The sample standard deviation; 0 for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def is_beyond(self, value: float, deviations: float, after: int) -> bool:
        """Whether `value` is more than `deviations` deviations from the mean; False before `after` values."""
        return self.count >= after and abs(value - self.mean) > deviations * self.deviation

    def with_value(self, value: float) -> Self:
        """Return the statistics with `value` added. A value that would make `squares` infinite is ignored."""
        count = self.count + 1
        distance = value - self.mean
        mean = self.mean + distance / count
        squares = self.squares + distance * (value - mean)
        return replace(self, count=count, mean=mean, squares=squares) if math.isfinite(squares) else self
