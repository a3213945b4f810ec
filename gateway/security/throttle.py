"""Failed attempts are answered late, and later each time, counted for each address."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Final

from flowcontrol.penalties import Penalties

DELAY_LIMIT_S: Final = 5.0
FORGET_S: Final = 60.0  # without a failure for so long, an address starts anew
ADDRESSES: Final = 10_000
REFUSALS_PER_ADDRESS: Final = 64  # failures being delayed at once; above, nothing of that address is checked


class Throttle:
    """The addresses that failed of late. Nothing is held for a failure but the waiting coroutine."""

    def __init__(self, base_s: float, *, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]) -> None:
        """Slow nobody down yet.

        A first failure costs `base_s` seconds of `clock` (monotonic); 0: no failure costs anything.
        """
        self._base_s = base_s
        self._clock = clock
        self._sleep = sleep
        self._penalties = Penalties(base_s, DELAY_LIMIT_S, forget_s=FORGET_S, names=ADDRESSES)

    def __len__(self) -> int:
        """How many addresses are remembered."""
        return len(self._penalties)

    def is_full(self, address: str) -> bool:
        """Whether so many failures of this address wait already that nothing more of it is to be checked."""
        return self._penalties.waiting(address) >= REFUSALS_PER_ADDRESS

    async def wait_refused(self, address: str, began: float) -> None:
        """Count a failure of an `address_of`, and wait until it may be told.

        The delay counts from `began`, the attempt's beginning, so that it hides how long the check took.
        """
        if self._base_s == 0:
            return
        now = self._clock()
        penalty = self._penalties.fail(address, now)
        try:
            await self._sleep(max(0.0, began + penalty.delay - now))
        finally:
            penalty.waiting -= 1


def peer_of(peername: object) -> str:
    """`HOST:PORT` of a socket's `peername`, an IPv6 host in brackets; "unknown" when the socket was gone already."""
    if not isinstance(peername, tuple):
        return "unknown"
    host, port = peername[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(peer: str) -> str:
    """What failures are counted for: an IPv4 address, or an IPv6 network of 64 bits (a host owns all of it)."""
    host = host_of(peer)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def host_of(peer: str) -> str:
    """The host of `HOST:PORT`."""
    return (peer.rpartition(":")[0] if peer.count(":") else peer).strip("[]")
