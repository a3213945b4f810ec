"""Whether a generator was the bottleneck: then its figures are its own, and not the gateway's."""

from __future__ import annotations

from typing import Final, NamedTuple

FULL: Final = 0.9
"""Of a processor: so busy is a process that could not have sent more, or read more, when it should."""
LATE_MS: Final = 10.0
LATE_SHARE: Final = 0.5
"""Of the latency that was measured: so much of it may be the generator's own being late."""


class Share(NamedTuple):
    """How it was with one generator in one step.

    Attributes:
        cpu: of a processor.
        waited: of the time, for a processor: what it would have used besides, had the machine had one.
        late_p99_ms: how late it sent by itself what neither window nor peer kept back; 0 without a rate.
        p99_ms: what it measured.
    """

    cpu: float
    waited: float
    late_p99_ms: float
    p99_ms: float

    @property
    def reason(self) -> str | None:
        """Why its figures are not to be trusted; None: they are."""
        if self.cpu + self.waited >= FULL:
            return f"used {self.cpu:.0%} of a processor, and waited for one {self.waited:.0%} of the time"
        if self.late_p99_ms > max(LATE_MS, LATE_SHARE * self.p99_ms):
            return f"was late by itself: p99 {self.late_p99_ms:.1f} ms of the {self.p99_ms:.1f} ms that it measured"
        return None


class SaturatedError(Exception):
    """The generators were the bottleneck; says which and why."""

    def __init__(self, shares: list[Share]) -> None:
        told = [f"generator {number} {one.reason}" for number, one in enumerate(shares) if one.reason]
        super().__init__(
            "no result: the generators were saturated, so the figures would be theirs: "
            + "; ".join(told)
            + ". Use more processes or another machine, or a lower rate"
        )


def check(shares: list[Share]) -> None:
    """Raise SaturatedError when one of them was."""
    if any(one.reason for one in shares):
        raise SaturatedError(shares)
