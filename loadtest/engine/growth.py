"""Tells growth from fluctuation in a series of samples."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Final

SETTLING: Final = 1 / 3
"""The share of a series that does not count: caches fill."""
MOST: Final = 300
"""Samples that are compared in pairs."""

Series = Sequence[tuple[float, float]]
"""A moment in seconds, and a value."""


def growth(series: Series) -> float | None:
    """Return the growth over a series, ignoring a single peak; None if there are too few samples.

    It is the greater of the median slope of all pairs (Theil-Sen) times the span, which detects a steady rise, and the
    last third's median minus the first third's, which detects a step.
    """
    if len(series) < 3:
        return None
    some = series[:: len(series) // MOST + 1]
    slopes = [
        (later[1] - one[1]) / (later[0] - one[0]) for one, later in itertools.combinations(some, 2) if later[0] > one[0]
    ]
    third = len(series) // 3
    first, last = (statistics.median(value for _, value in part) for part in (series[:third], series[-third:]))
    return max(statistics.median(slopes) * (series[-1][0] - series[0][0]), last - first)


def flat(what: str, series: Series, share: float, least: float, settle_s: float | None = None) -> list[str]:
    """Return a problem if a series grows by more than `share` of its median and than `least` once it has settled.

    It has settled after `settle_s`, or after `SETTLING` of its time.
    """
    if not series:
        return []
    begin = settle_s if settle_s is not None else series[0][0] + SETTLING * (series[-1][0] - series[0][0])
    counted = [one for one in series if one[0] >= begin]
    much = growth(counted)
    if much is None:
        return []
    usual = statistics.median(value for _, value in counted)
    if much <= max(least, share * usual):
        return []
    return [f"{what} is not flat: +{much:,.1f} in {series[-1][0] - begin:.0f} s at {usual:,.1f}"]
