"""Rate limits in messages and bytes a second, by token buckets that may go into debt. Time is passed in.

A message that was received cannot be unsent: its tokens are spent on arrival, however many, and a sender in debt waits
until the debt is paid. So a rate holds exactly in the long run, and a burst is exceeded only by the one message that
made the debt. A largest debt bounds how long others wait for what one client did; what is above it is forgiven.
"""

from __future__ import annotations

import math


class BucketError(Exception):
    """A negative amount was spent or given back. A bug of ours, never the peer's fault."""


class Bucket:
    """A token bucket that fills at `rate`, up to `burst` tokens.

    Invariant: there are at most `burst` tokens, and at least `-most_debt`. What was spent and not given back within any
    time t, without the last message and what was forgiven, is less than `burst + rate * t`.
    """

    __slots__ = ("_at", "_most_debt", "_tokens", "burst", "rate")

    def __init__(self, rate: float, burst: float, now: float, most_debt: float = math.inf) -> None:
        """Create a full bucket. `rate` is in tokens a second; all calls get `now` in seconds of the same clock."""
        if not (0 < rate < math.inf and 0 < burst < math.inf and most_debt > 0):
            raise ValueError(f"a rate, a burst and a debt above 0 are needed, got {rate}, {burst} and {most_debt}")
        self._most_debt = most_debt
        self.rate = rate
        self.burst = burst
        self._tokens = burst
        self._at = now

    def level(self, now: float) -> float:
        """Return the number of tokens, negative when in debt. A clock that goes back adds nothing."""
        if now > self._at:
            self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
            self._at = now
        return self._tokens

    def spend(self, tokens: float, now: float) -> float:
        """Spend tokens, available or not. Returns how many are left, negative when in debt."""
        if tokens < 0:
            raise BucketError(f"cannot spend {tokens} tokens")
        self._tokens = max(self.level(now) - tokens, -self._most_debt)
        return self._tokens

    def give_back(self, tokens: float, now: float) -> None:
        """Give back tokens that were spent in vain; those above `burst` are lost."""
        if tokens < 0:
            raise BucketError(f"cannot give {tokens} tokens back")
        self._tokens = min(self.burst, self.level(now) + tokens)

    def wait_s(self, now: float, tokens: float = 0.0) -> float:
        """Return the seconds until there are `tokens` tokens, or a full burst, if none are spent meanwhile."""
        return max(0.0, (min(tokens, self.burst) - self.level(now)) / self.rate)


class RateLimit:
    """Limits one sender or receiver to a rate of messages, of bytes, or both; the stricter one applies."""

    __slots__ = ("_bytes", "_messages")

    def __init__(
        self,
        messages_per_s: float,
        bytes_per_s: float,
        burst_s: float,
        now: float,
        most_debt: tuple[float, float] = (math.inf, math.inf),
    ) -> None:
        """A rate of 0 means no limit. A burst may be as large as `burst_s` seconds at the rate.

        `most_debt` is in messages and bytes.
        """
        messages, size = most_debt
        self._messages = _bucket(messages_per_s, max(1.0, messages_per_s * burst_s), now, messages)
        self._bytes = _bucket(bytes_per_s, bytes_per_s * burst_s, now, size)

    @property
    def rates(self) -> tuple[float, float]:
        """Messages and bytes a second; 0 means no limit."""
        messages, size = self._messages, self._bytes
        return 0 if messages is None else messages.rate, 0 if size is None else size.rate

    @property
    def bursts(self) -> tuple[float, float]:
        """The largest bursts, in messages and bytes; infinity means no limit."""
        messages, size = self._messages, self._bytes
        return math.inf if messages is None else messages.burst, math.inf if size is None else size.burst

    def spend(self, messages: int, size: int, now: float) -> None:
        """Count messages with a total of `size` bytes."""
        if self._messages is not None:
            self._messages.spend(messages, now)
        if self._bytes is not None:
            self._bytes.spend(size, now)

    def give_back(self, messages: int, now: float) -> None:
        """Take back the count of messages that will not be sent."""
        if self._messages is not None:
            self._messages.give_back(messages, now)

    def wait_s(self, now: float, ahead_s: float = 0.0, mean: float = 0.0) -> float:
        """Return the seconds until there is no debt.

        With `ahead_s`, until there are also the tokens of that many seconds, but at least for a message of `mean` bytes
        and at most a burst.
        """
        waits = [0.0]
        if self._messages is not None:
            waits.append(self._messages.wait_s(now, max(1.0, ahead_s * self._messages.rate) if ahead_s else 0.0))
        if self._bytes is not None:
            waits.append(self._bytes.wait_s(now, max(mean, ahead_s * self._bytes.rate) if ahead_s else 0.0))
        return max(waits)

    def covers(self, messages: int, size: int, now: float) -> bool:
        """Whether `messages` messages with a total of `size` bytes would leave no debt."""
        return (self._messages is None or self._messages.level(now) >= messages) and (
            self._bytes is None or self._bytes.level(now) >= size
        )

    def is_full(self, now: float) -> bool:
        """Whether it is in the state of a new one, so that it need not be kept."""
        return all(bucket is None or bucket.level(now) >= bucket.burst for bucket in (self._messages, self._bytes))

    def affordable(self, most: int, mean: float, now: float) -> int:
        """Return how many messages of about `mean` bytes may be sent now, at most `most`.

        A message that is larger than a burst may be sent when the bucket is full.
        """
        if self._messages is not None:
            most = min(most, math.floor(self._messages.level(now)))
        if self._bytes is not None:
            level = self._bytes.level(now)
            most = min(most, max(int(level >= self._bytes.burst), math.floor(level / max(mean, 1.0))))
        return max(0, most)


def _bucket(rate: float, burst: float, now: float, most_debt: float) -> Bucket | None:
    return Bucket(rate, burst, now, most_debt) if rate else None
