"""Rates: messages and bytes a second, by token buckets that may be in debt. Time is passed in.

What has been sent cannot be unsent: it is spent when it is there, however much it is, and who is in debt waits until
it is paid. So a rate is kept to the last token in the long run, and over any time by more than `burst` only by the one
thing that made the debt.
"""

from __future__ import annotations

import math


class BucketError(Exception):
    """Less than nothing was spent or given back. Our bug, never a peer's."""


class Bucket:
    """Tokens that come at a rate, as long as there are fewer than `burst`.

    Invariant: at most `burst` tokens. What was spent and not given back within any time t, but for the last thing, is
    less than `burst + rate * t`.
    """

    __slots__ = ("_at", "_tokens", "burst", "rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        """A full bucket; `rate` in tokens a second, `now` in seconds of the clock that all calls are told."""
        if not (0 < rate < math.inf and 0 < burst < math.inf):
            raise ValueError(f"a rate and a burst above 0 are needed, got {rate} and {burst}")
        self.rate = rate
        self.burst = burst
        self._tokens = burst
        self._at = now

    def level(self, now: float) -> float:
        """How many tokens there are; below 0: the debt. Time that goes back is no time."""
        if now > self._at:
            self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
            self._at = now
        return self._tokens

    def spend(self, tokens: float, now: float) -> float:
        """Take tokens, whether they are there or not; what is left, below 0: the debt."""
        if tokens < 0:
            raise BucketError(f"cannot spend {tokens} tokens")
        self._tokens = self.level(now) - tokens
        return self._tokens

    def give_back(self, tokens: float, now: float) -> None:
        """Tokens were spent for what did not come about; those above `burst` are lost."""
        if tokens < 0:
            raise BucketError(f"cannot give {tokens} tokens back")
        self._tokens = min(self.burst, self.level(now) + tokens)

    def wait_s(self, now: float, tokens: float = 0.0) -> float:
        """Seconds until there are so many tokens, of `burst` at most, if nothing is spent meanwhile; 0: they are."""
        return max(0.0, (min(tokens, self.burst) - self.level(now)) / self.rate)


class RateLimit:
    """What one sender or receiver may have a second: messages, bytes, or both. The stricter one holds.

    Invariant: those of its two buckets, as far as there are any.
    """

    __slots__ = ("_bytes", "_messages")

    def __init__(self, messages_per_s: float, bytes_per_s: float, burst_s: float, now: float) -> None:
        """So many messages and bytes a second, 0: any; what comes in `burst_s` seconds may come at once."""
        self._messages = _bucket(messages_per_s, max(1.0, messages_per_s * burst_s), now)
        self._bytes = _bucket(bytes_per_s, bytes_per_s * burst_s, now)

    @property
    def rates(self) -> tuple[float, float]:
        """Messages and bytes a second; 0: any."""
        messages, size = self._messages, self._bytes
        return 0 if messages is None else messages.rate, 0 if size is None else size.rate

    @property
    def bursts(self) -> tuple[float, float]:
        """Messages and bytes that may come at once; infinity: any."""
        messages, size = self._messages, self._bytes
        return math.inf if messages is None else messages.burst, math.inf if size is None else size.burst

    def spend(self, messages: int, size: int, now: float) -> None:
        """Count messages of `size` bytes together."""
        if self._messages is not None:
            self._messages.spend(messages, now)
        if self._bytes is not None:
            self._bytes.spend(size, now)

    def give_back(self, messages: int, now: float) -> None:
        """Messages were counted that will not come."""
        if self._messages is not None:
            self._messages.give_back(messages, now)

    def wait_s(self, now: float, ahead_s: float = 0.0, mean: float = 0.0) -> float:
        """Seconds until nothing is owed, and what `ahead_s` seconds bring is there, a message of `mean` bytes at least.

        More than a burst is not waited for. Without `ahead_s` it is 0 when nothing is owed.
        """
        waits = [0.0]
        if self._messages is not None:
            waits.append(self._messages.wait_s(now, max(1.0, ahead_s * self._messages.rate) if ahead_s else 0.0))
        if self._bytes is not None:
            waits.append(self._bytes.wait_s(now, max(mean, ahead_s * self._bytes.rate) if ahead_s else 0.0))
        return max(waits)

    def covers(self, messages: int, size: int, now: float) -> bool:
        """Whether nothing would be owed behind so many messages, of `size` bytes together."""
        return (self._messages is None or self._messages.level(now) >= messages) and (
            self._bytes is None or self._bytes.level(now) >= size
        )

    def is_full(self, now: float) -> bool:
        """Whether it is as a new one: it need not be remembered."""
        return all(bucket is None or bucket.level(now) >= bucket.burst for bucket in (self._messages, self._bytes))

    def affordable(self, most: int, mean: float, now: float) -> int:
        """How many messages of some `mean` bytes may be sent now, at most `most`.

        One that is larger than a burst may go when a whole one is there.
        """
        if self._messages is not None:
            most = min(most, math.floor(self._messages.level(now)))
        if self._bytes is not None:
            level = self._bytes.level(now)
            most = min(most, max(int(level >= self._bytes.burst), math.floor(level / max(mean, 1.0))))
        return max(0, most)


def _bucket(rate: float, burst: float, now: float) -> Bucket | None:
    return Bucket(rate, burst, now) if rate else None
