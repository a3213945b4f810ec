"""The mean and deviation of values that come one by one (Welford's method): no value is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """Of the values so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # the sum of the squared distances from the mean

    @property
    def deviation(self) -> float:
        """Standard deviation of the sample; 0 below two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def is_beyond(self, value: float, deviations: float, after: int) -> bool:
        """Whether a value is further than so many deviations from the mean, once there are `after` values."""
        return self.count >= after and abs(value - self.mean) > deviations * self.deviation

    def with_value(self, value: float) -> Self:
        """With one value more; a value so large that the squares would be infinite is left out."""
        count = self.count + 1
        distance = value - self.mean
        mean = self.mean + distance / count
        squares = self.squares + distance * (value - mean)
        return replace(self, count=count, mean=mean, squares=squares) if math.isfinite(squares) else self
