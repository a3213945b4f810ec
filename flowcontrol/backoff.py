"""Delays between attempts: exponential up to a cap, with jitter. Randomness comes from the caller."""

from __future__ import annotations

import math
from collections.abc import Callable


class Backoff:
    """The delay before attempt n: `base * factor**n`, at most `cap`, less a random part of it.

    Jitter only shortens a delay, so `cap` always holds, and clients that failed together do not retry together.

    Invariant: a delay is above 0 (unless `jitter` is 1), at most `cap`, and without jitter never shorter than the one
    before.
    """

    __slots__ = ("_base", "_cap", "_factor", "_jitter", "_random", "_steps")

    def __init__(
        self,
        base: float,
        cap: float,
        *,
        random: Callable[[], float],
        factor: float = 2.0,
        jitter: float = 0.2,
    ) -> None:
        """Set the parameters.

        Args:
            base: seconds before the first retry (attempt 0).
            cap: the longest delay in seconds.
            random: returns a float in [0, 1), such as `random.random`.
            factor: growth from one attempt to the next, above 1.
            jitter: the largest part of a delay that is taken off at random, 0 to 1.

        Raises:
            ValueError: a value is out of its range, or `base` exceeds `cap`.
        """
        if not (0 < base <= cap and factor > 1 and 0 <= jitter <= 1):
            raise ValueError(f"no backoff with {base=}, {cap=}, {factor=}, {jitter=}")
        self._base = base
        self._cap = cap
        self._factor = factor
        self._jitter = jitter
        self._random = random
        # From this attempt on the delay is `cap`; known in advance so that no power overflows.
        self._steps = math.ceil(math.log(cap / base, factor))

    def delay(self, attempt: int) -> float:
        """Return the seconds to wait after failure number `attempt`, counted from 0.

        Raises:
            ValueError: `attempt` is negative.
        """
        if attempt < 0:
            raise ValueError(f"attempt {attempt} is negative")
        whole = self._cap if attempt >= self._steps else min(self._cap, self._base * self._factor**attempt)
        return whole * (1 - self._jitter * self._random())
