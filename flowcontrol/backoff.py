"""Delays between attempts: exponential up to a cap, with jitter. Randomness comes from the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

JITTER: Final = 0.2
"""The largest part of a delay that is taken off at random."""
_DOUBLINGS: Final = 1000  # more would overflow; every delay has reached its cap long before


class Backoff:
    """The delay before attempt n: `base * 2**n`, at most `cap`, less a random part of it.

    Jitter only shortens a delay, so `cap` always holds, and clients that failed together do not retry together.

    Invariant: a delay is above 0, at most `cap`, and without jitter never shorter than the one before.
    """

    __slots__ = ("_base", "_cap", "_random")

    def __init__(self, base: float, cap: float, *, random: Callable[[], float]) -> None:
        """Set the parameters.

        Args:
            base: seconds before the first retry (attempt 0).
            cap: the longest delay in seconds.
            random: returns a float in [0, 1), such as `random.random`.

        Raises:
            ValueError: `base` is not above 0, or exceeds `cap`.
        """
        if not 0 < base <= cap:
            raise ValueError(f"no backoff with {base=}, {cap=}")
        self._base = base
        self._cap = cap
        self._random = random

    def delay(self, attempt: int) -> float:
        """Return the seconds to wait after failure number `attempt`, counted from 0.

        Raises:
            ValueError: `attempt` is negative.
        """
        if attempt < 0:
            raise ValueError(f"attempt {attempt} is negative")
        return min(self._cap, self._base * 2.0 ** min(attempt, _DOUBLINGS)) * (1 - JITTER * self._random())
