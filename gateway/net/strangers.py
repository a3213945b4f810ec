"""Limits the bytes held for all peers that have not logged in yet, whatever protocol they speak.

The bytes that such a peer has sent are counted: the start of an MQTT CONNECT, SASL frames, the head of an HTTP request,
and the part of its body that comes before the login. Over the limit, the oldest connection of the address that holds
most is aborted, until the bytes are below the limit: an address that fills the limit loses its own connections. Other
budgets count the bytes of clients that have logged in.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Annotated

import msgspec

from gateway.statistics import counter, gauge


class StrangersStatistics(msgspec.Struct, frozen=True):
    """Bytes and connections of strangers now, and connections that were aborted since the start."""

    bytes: Annotated[int, gauge("bytes held for connections that have not logged in")]
    connections: Annotated[int, gauge("connections that have not logged in")]
    dropped_total: Annotated[int, counter("connections aborted before the login, because of the budget for them")]


class Stranger:
    """One connection that has sent bytes and has not logged in."""

    __slots__ = ("_strangers", "address", "bytes", "drop", "share")

    def __init__(self, strangers: Strangers, address: str, drop: Callable[[], None]) -> None:
        self._strangers = strangers
        self.address = address
        self.drop = drop
        self.bytes = 0
        self.share: _Share | None = None  # its address's, while this connection holds bytes

    def received(self, size: int) -> bool:
        """Count received bytes. False means that the connection was aborted for them."""
        return self._strangers.count(self, size)

    def leave(self) -> None:
        """Stop counting: the peer has logged in or disconnected."""
        self._strangers.leave(self)


class _Share(msgspec.Struct, eq=False):
    """The bytes and connections of one address."""

    bytes: int = 0
    # the oldest first
    members: collections.OrderedDict[Stranger, None] = msgspec.field(default_factory=collections.OrderedDict)


class Strangers:
    """All connections that have not logged in."""

    def __init__(self, limit_bytes: int) -> None:
        """Allow `limit_bytes` for all connections together."""
        self._limit = limit_bytes
        self._bytes = 0
        self._shares: dict[str, _Share] = {}
        self._count = self._dropped = 0

    def enter(self, address: str, drop: Callable[[], None]) -> Stranger:
        """Register a new connection; `address` is from `address_of`, `drop` aborts the connection."""
        return Stranger(self, address, drop)

    def count(self, stranger: Stranger, size: int) -> bool:
        """Count bytes of a connection; over the limit, abort the oldest connections of the address with most bytes."""
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
            heaviest = max(self._shares.values(), key=lambda share: share.bytes)
            victim = next(iter(heaviest.members))
            self.leave(victim)
            self._dropped += 1
            victim.drop()
            stays = stays and victim is not stranger
        return stays

    def leave(self, stranger: Stranger) -> None:
        """Stop counting the bytes of a connection."""
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
        """Return the counts so far."""
        return StrangersStatistics(bytes=self._bytes, connections=self._count, dropped_total=self._dropped)
