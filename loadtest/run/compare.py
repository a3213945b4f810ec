"""Compares two results, and tells differences from noise. Arithmetic only."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

CONFIDENCE: Final = 0.95
HIGHER_IS_BETTER: Final = frozenset({"per second"})
MEASURES: Final = ("per second", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "cpu us", "memory MiB")


class Ratio(NamedTuple):
    """The ratio of two measurements.

    Attributes:
        middle: the median of the ratios of all pairs of rounds (Hodges-Lehmann estimator).
        low: lower end of the interval.
        high: upper end of the interval.
        confidence: of the interval; less than `CONFIDENCE` if there are too few rounds.
    """

    middle: float
    low: float
    high: float
    confidence: float

    @property
    def is_noise(self) -> bool:
        """Whether the interval contains 1."""
        return self.low <= 1.0 <= self.high


@functools.cache
def _ways(first: int, second: int, above: int) -> int:
    """Count the orders of `first` and `second` values in which `above` pairs have the first group's value on top."""
    if above < 0 or above > first * second:
        return 0
    if first == 0 or second == 0:
        return int(above == 0)
    return _ways(first - 1, second, above - second) + _ways(first, second - 1, above)


def ratio(before: Sequence[float], after: Sequence[float]) -> Ratio | None:
    """Return `after` as a ratio of `before`, with the confidence interval of the Mann-Whitney test.

    The test assumes nothing about the distribution of rounds except independence. None if either is empty or has a 0.
    """
    if not before or not after or min(*before, *after) <= 0:
        return None
    pairs = sorted(one / other for one in after for other in before)
    orders = math.comb(len(before) + len(after), len(after))
    outside = at = 0
    for place in range((len(pairs) + 1) // 2):
        more = outside + _ways(len(before), len(after), place)
        if place and 2 * more > (1 - CONFIDENCE) * orders:
            break
        outside, at = more, place
    return Ratio(statistics.median(pairs), pairs[at], pairs[-1 - at], max(0.0, 1 - 2 * outside / orders))


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each measure that both results have."""
    rows: list[dict[str, Any]] = []
    for name in MEASURES:
        some, others = ([one[name] for one in result["rounds"] if one.get(name)] for result in (before, after))
        found = ratio(some, others)
        if found is None:
            continue
        rows.append({
            "": name,
            "before": statistics.median(some),
            "after": statistics.median(others),
            "ratio": round(found.middle, 3),
            "interval": f"{found.low:.3f} to {found.high:.3f}",
            "confidence": f"{found.confidence:.0%}",
            "judgement": judgement(name, found),
        })  # fmt: skip
    return rows


def judgement(name: str, found: Ratio) -> str:
    """Return the judgement in words."""
    if found.is_noise:
        return "no difference seen"
    return "better" if (found.middle > 1) == (name in HIGHER_IS_BETTER) else "worse"


def doubts(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return why the two may not be comparable, as sentences."""
    found = []
    if before["knee"] is not None or after["knee"] is not None:
        found.append("the steps of a ramp are not rounds: compare two runs at a fixed rate")
    machines = [result["environment"]["machine"] for result in (before, after)]
    if machines[0] != machines[1]:
        found.append(f"the machines differ: {machines[0]} and {machines[1]}")
    names = [
        name for name, value in before["scenario"].items()
        if name not in {"target", "name", "processes"} and after["scenario"].get(name) != value
    ]  # fmt: skip
    if names:
        found.append(f"the scenarios differ: {', '.join(names)}")
    few = min(len(before["rounds"]), len(after["rounds"]))
    if few < 4:
        found.append(f"{few} rounds are too few: an interval of {CONFIDENCE:.0%} needs four in each result")
    return found
