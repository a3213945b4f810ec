"""Delays the answer to failed logins; the delay grows with each failure of an address."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from gateway.runtime.recent import Recent

DELAY_LIMIT_S: Final = 5.0
FORGET_S: Final = 60.0  # an address without a failure for this time starts again at the first delay
ADDRESSES: Final = 10_000
REFUSALS_PER_ADDRESS: Final = 64  # delayed answers at a time; above this the address's logins are not checked


class _Failures(msgspec.Struct, eq=False, gc=False):
    """The failures of one address."""

    in_a_row: int = 0  # without a pause of more than `FORGET_S` between two
    last: float = 0.0  # when it failed last
    due: list[float] = []  # when those that are not answered yet may be


class Throttle:
    """The addresses that have failed last. A delayed failure holds nothing but its waiting coroutine.

    It counts as waiting until its answer is due, even if its client has disconnected: otherwise a client could close
    the connection instead of waiting, and guess on.
    """

    def __init__(self, base_s: float, *, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]) -> None:
        """Start with no failures; the last `ADDRESSES` addresses are remembered.

        A failure of an address is delayed by `base_s * 2**n` seconds of `clock` (monotonic), at most `DELAY_LIMIT_S`
        but never below `base_s`, where n is the number of failures in a row before it. 0 turns delays off.
        """
        self._base_s = base_s
        self._clock = clock
        self._sleep = sleep
        self._failures: Recent[str, _Failures] = Recent(ADDRESSES)

    def __len__(self) -> int:
        """Return the number of addresses with recent failures."""
        return len(self._failures)

    def waiting(self, address: str) -> int:
        """Return how many failures of the address are not answered yet; 0 if it is not remembered."""
        failures = self._failures.get(address)
        return 0 if failures is None else len(_later(failures.due, self._clock()))

    def is_full(self, address: str) -> bool:
        """Return whether the address has so many delayed failures that its logins are not checked now."""
        return self.waiting(address) >= REFUSALS_PER_ADDRESS

    async def wait_refused(self, address: str, began: float) -> None:
        """Count a failure of an address (see `address_of`) and wait until it may be answered.

        The delay counts from `began`, the start of the attempt, so that it hides how long the check took.
        """
        if self._base_s == 0:
            return
        now = self._clock()
        failures = self._failures.get(address) or _Failures()
        self._failures[address] = failures
        if now - failures.last > FORGET_S:
            failures.in_a_row = 0
        delay = max(self._base_s, min(DELAY_LIMIT_S, self._base_s * 2.0 ** min(failures.in_a_row, 16)))
        failures.in_a_row += 1
        failures.last = now
        due = began + delay
        failures.due = _later([*failures.due, due], now)
        await self._sleep(max(0.0, due - now))


def _later(times: Sequence[float], now: float) -> list[float]:
    return [time for time in times if time > now]


def peer_of(peername: object) -> str:
    """Format a socket's `peername` as `HOST:PORT`, IPv6 hosts in brackets; "unknown" if it is already closed."""
    if not isinstance(peername, tuple):
        return "unknown"
    host, port = peername[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(peer: str) -> str:
    """Return the key for counting failures: an IPv4 address, or an IPv6 /64 network (one host owns all of it)."""
    host = plain_host(host_of(peer))
    return str(ipaddress.ip_network((host, 64), strict=False)) if ":" in host else host


def plain_host(host: str) -> str:
    """Normalize an address, which others may spell differently, for example with all zeroes of IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    return str(address if mapped is None else mapped)


def host_of(peer: str) -> str:
    """Return the host of `HOST:PORT`."""
    return (peer.rpartition(":")[0] if peer.count(":") else peer).strip("[]")
