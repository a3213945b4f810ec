"""Two results beside each other: what differs, and whether that is more than noise. Arithmetic only."""

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
    """How much of one is the other.

    Attributes:
        middle: the median of the ratios of all pairs of rounds (Hodges and Lehmann's estimate).
        low: where the interval begins.
        high: where it ends.
        confidence: of the interval; less than `CONFIDENCE` when there are too few rounds for that.
    """

    middle: float
    low: float
    high: float
    confidence: float

    @property
    def is_noise(self) -> bool:
        """Whether 1 is among what it may be."""
        return self.low <= 1.0 <= self.high


@functools.cache
def _ways(first: int, second: int, above: int) -> int:
    """In how many orders of so many and so many values just `above` pairs have the first's value above the second's."""
    if above < 0 or above > first * second:
        return 0
    if first == 0 or second == 0:
        return int(above == 0)
    return _ways(first - 1, second, above - second) + _ways(first, second - 1, above)


def ratio(before: Sequence[float], after: Sequence[float]) -> Ratio | None:
    """`after` as a ratio of `before`, with the interval that belongs to the test of Mann and Whitney.

    It takes nothing for granted about how rounds are spread, but that they are independent. None: there is nothing to
    compare, or a 0 among them.
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
    """A row for each measure that both have."""
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
    """In a word."""
    if found.is_noise:
        return "no difference seen"
    return "better" if (found.middle > 1) == (name in HIGHER_IS_BETTER) else "worse"


def doubts(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Why the two may not be comparable, as sentences."""
    found = []
    if before["knee"] is not None or after["knee"] is not None:
        found.append("a ramp's steps are no rounds: compare two runs at a rate")
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
        found.append(f"{few} rounds say little: an interval of {CONFIDENCE:.0%} needs four in each")
    return found
