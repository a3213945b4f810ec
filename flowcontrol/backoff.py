"""Delays between attempts: exponential up to a cap, with jitter. Randomness comes from the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

JITTER: Final = 0.2
"""The largest part of a delay that is taken off at random."""
_DOUBLINGS: Final = 1000  # more would overflow; every delay has reached its cap long before


def backoff_s(attempt: int, *, base: float, cap: float, random: Callable[[], float]) -> float:
    """Return the seconds to wait after failure number `attempt`, counted from 0: `base` doubled each time.

    Jitter only shortens a delay, so `cap` always holds, and clients that failed together do not retry together.
    `random` returns a float in [0, 1), such as `random.random`.
    """
    return min(cap, base * 2.0 ** min(attempt, _DOUBLINGS)) * (1 - JITTER * random())
