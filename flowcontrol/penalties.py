"""How late failed attempts are answered: later each time, counted for each name, and forgotten after a while."""

from __future__ import annotations

import collections


class Penalty:
    """The failures of one name."""

    __slots__ = ("delay", "failures", "last", "waiting")

    def __init__(self) -> None:
        self.failures = 0
        self.last = 0.0  # when the last one was
        self.delay = 0.0  # of the last one, seconds
        self.waiting = 0  # that were not told yet


class Penalties:
    """The names that failed of late.

    Invariant: at most `names` are remembered, those that failed last; a delay is `base_s * 2**n`, at most `limit_s` but
    never below `base_s`, n being the failures before it without a pause of `forget_s` between two.
    """

    __slots__ = ("_base_s", "_forget_s", "_limit_s", "_names", "_penalties")

    def __init__(self, base_s: float, limit_s: float, *, forget_s: float, names: int) -> None:
        """Nobody has failed. All times are seconds."""
        self._base_s = base_s
        self._limit_s = limit_s
        self._forget_s = forget_s
        self._names = names
        self._penalties: collections.OrderedDict[str, Penalty] = collections.OrderedDict()

    def __len__(self) -> int:
        """How many names are remembered."""
        return len(self._penalties)

    def waiting(self, name: str) -> int:
        """How many failures of a name were not told yet, as far as it is remembered."""
        penalty = self._penalties.get(name)
        return 0 if penalty is None else penalty.waiting

    def fail(self, name: str, now: float) -> Penalty:
        """Count a failure, to be told after the penalty's delay; then the caller takes it out of `waiting`."""
        penalty = self._penalties.get(name)
        if penalty is None:
            penalty = self._penalties[name] = Penalty()
            while len(self._penalties) > self._names:
                self._penalties.popitem(last=False)
        elif now - penalty.last > self._forget_s:
            penalty.failures = 0
        self._penalties.move_to_end(name)
        penalty.delay = max(self._base_s, min(self._limit_s, self._base_s * 2.0 ** min(penalty.failures, 16)))
        penalty.failures += 1
        penalty.last = now
        penalty.waiting += 1
        return penalty
