"""What peers that have not logged in yet may make us hold, all of them together, whatever protocol they speak.

What such a peer has sent is counted: the beginning of an MQTT CONNECT, SASL frames, the head of a request and what of
its body comes before the client is judged. Over the limit, the oldest connection of the address that holds the most is
cut off, until there is room: an address that fills the room loses its own. Who has logged in counts elsewhere.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Annotated

import msgspec

from gateway.statistics import counter, gauge


class StrangersStatistics(msgspec.Struct, frozen=True):
    """What is held for strangers now, and how many were cut off since the start."""

    bytes: Annotated[int, gauge("bytes held for connections that have not logged in")]
    connections: Annotated[int, gauge("connections that have not logged in")]
    dropped_total: Annotated[int, counter("connections cut off before they had logged in, because of their budget")]


class Stranger:
    """One connection of somebody who has sent something and has not logged in."""

    __slots__ = ("_strangers", "address", "bytes", "drop", "share")

    def __init__(self, strangers: Strangers, address: str, drop: Callable[[], None]) -> None:
        self._strangers = strangers
        self.address = address
        self.drop = drop
        self.bytes = 0
        self.share: _Share | None = None  # its address's, while it holds something

    def took(self, size: int) -> bool:
        """Count what came; False: the connection was cut off for it."""
        return self._strangers.take(self, size)

    def leave(self) -> None:
        """It has logged in, or is gone."""
        self._strangers.leave(self)


class _Share:
    """What one address holds."""

    __slots__ = ("bytes", "members")

    def __init__(self) -> None:
        self.bytes = 0
        self.members: collections.OrderedDict[Stranger, None] = collections.OrderedDict()  # the oldest first


class Strangers:
    """All of them."""

    def __init__(self, limit_bytes: int) -> None:
        """Nobody is there; `limit_bytes` of all of them together."""
        self._limit = limit_bytes
        self._bytes = 0
        self._shares: dict[str, _Share] = {}
        self._count = self._dropped = 0

    def enter(self, address: str, drop: Callable[[], None]) -> Stranger:
        """Somebody has connected.

        Args:
            address: as by `gateway.security.throttle.address_of`.
            drop: cuts the connection off at once.
        """
        return Stranger(self, address, drop)

    def take(self, stranger: Stranger, size: int) -> bool:
        """See `Stranger.took`."""
        share = stranger.share
        if share is None:
            share = self._shares.get(stranger.address)
            if share is None:
                share = self._shares[stranger.address] = _Share()
            stranger.share = share
            share.members[stranger] = None
            self._count += 1
        stranger.bytes += size
        share.bytes += size
        self._bytes += size
        stays = True
        while self._bytes > self._limit:
            heaviest = max(self._shares.values(), key=_bytes_of)
            victim = next(iter(heaviest.members))
            self.leave(victim)
            self._dropped += 1
            victim.drop()
            stays = stays and victim is not stranger
        return stays

    def leave(self, stranger: Stranger) -> None:
        """See `Stranger.leave`; without effect for one that holds nothing."""
        share = stranger.share
        if share is None:
            return
        stranger.share = None
        del share.members[stranger]
        self._count -= 1
        share.bytes -= stranger.bytes
        self._bytes -= stranger.bytes
        stranger.bytes = 0
        if not share.members:
            del self._shares[stranger.address]

    def statistics(self) -> StrangersStatistics:
        """Counts so far."""
        return StrangersStatistics(bytes=self._bytes, connections=self._count, dropped_total=self._dropped)


def _bytes_of(share: _Share) -> int:
    return share.bytes
