"""Delay the answers to failed attempts: longer with each failure of a name, until the name is forgotten."""

from __future__ import annotations

import collections


class Penalty:
    """The failures of one name."""

    __slots__ = ("delay", "failures", "last", "waiting")

    def __init__(self) -> None:
        self.failures = 0
        self.last = 0.0  # time of the last failure
        self.delay = 0.0  # of the last failure, in seconds
        self.waiting = 0  # failures that are not answered yet


class Penalties:
    """The names that have failed recently.

    Invariant: the last `names` names are remembered. A delay is `base_s * 2**n`, at most `limit_s` but never below
    `base_s`, where n is the number of failures before it without a pause of more than `forget_s` between two.
    """

    __slots__ = ("_base_s", "_forget_s", "_limit_s", "_names", "_penalties")

    def __init__(self, base_s: float, limit_s: float, *, forget_s: float, names: int) -> None:
        """All times are in seconds."""
        self._base_s = base_s
        self._limit_s = limit_s
        self._forget_s = forget_s
        self._names = names
        self._penalties: collections.OrderedDict[str, Penalty] = collections.OrderedDict()

    def __len__(self) -> int:
        """Return the number of remembered names."""
        return len(self._penalties)

    def waiting(self, name: str) -> int:
        """Return how many failures of a name are not answered yet; 0 if it is not remembered."""
        penalty = self._penalties.get(name)
        return 0 if penalty is None else penalty.waiting

    def fail(self, name: str, now: float) -> Penalty:
        """Count a failure. The caller answers it after the penalty's delay, and then decrements `waiting`."""
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
