"""Detects that a generator was the bottleneck, so that the figures are not the gateway's."""

from __future__ import annotations

from typing import Final, NamedTuple

FULL: Final = 0.9
"""The share of a processor above which a process may have sent or read too late."""
LATE_MS: Final = 10.0
LATE_SHARE: Final = 0.5
"""The share of the measured latency that may come from the generator being late."""


class Share(NamedTuple):
    """The load of one generator in one step.

    Attributes:
        cpu: share of a processor used.
        waited: share of the time spent waiting for a processor, which it would have used too.
        late_p99_ms: delay that neither the window nor the peer caused; 0 without a rate.
        p99_ms: the latency it measured.
    """

    cpu: float
    waited: float
    late_p99_ms: float
    p99_ms: float

    @property
    def reason(self) -> str | None:
        """Why its figures cannot be trusted; None if they can."""
        if self.cpu + self.waited >= FULL:
            return f"used {self.cpu:.0%} of a processor, and waited for one {self.waited:.0%} of the time"
        if self.late_p99_ms > max(LATE_MS, LATE_SHARE * self.p99_ms):
            return f"sent too late: p99 {self.late_p99_ms:.1f} ms of the measured {self.p99_ms:.1f} ms"
        return None


class SaturatedError(Exception):
    """The generators were the bottleneck; the text names them and the reasons."""

    def __init__(self, shares: list[Share]) -> None:
        reasons = [f"generator {number} {one.reason}" for number, one in enumerate(shares) if one.reason]
        super().__init__(
            "no result: the generators were saturated, so the figures would not be the gateway's: "
            + "; ".join(reasons)
            + ". Use more processes, another machine or a lower rate"
        )


def check(shares: list[Share]) -> None:
    """Raise SaturatedError if a generator was the bottleneck."""
    if any(one.reason for one in shares):
        raise SaturatedError(shares)
