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

from telemetry.statistics import counter, gauge


class StrangersStatistics(msgspec.Struct, frozen=True):
    """Bytes and connections of strangers now, and connections that were aborted since the start."""

    bytes: Annotated[int, gauge("bytes held for connections that have not logged in")]
    connections: Annotated[int, gauge("connections that have not logged in")]
    dropped_total: Annotated[int, counter("connections aborted before the login, because of the budget for them")]


class _Share(msgspec.Struct, eq=False):
    """The bytes and connections of one address."""

    bytes: int = 0
    # the oldest first
    members: collections.OrderedDict[Stranger, None] = msgspec.field(default_factory=collections.OrderedDict)


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
        """Count received bytes; over the limit, abort the oldest connections of the address with most bytes.

        Returns False if this connection was aborted.
        """
        strangers, share = self._strangers, self.share
        if share is None:
            share = self.share = strangers.shares.setdefault(self.address, _Share())
            share.members[self] = None
            strangers.count += 1
        self.bytes += size
        share.bytes += size
        strangers.bytes += size
        stays = True
        while strangers.bytes > strangers.limit:
            heaviest = max(strangers.shares.values(), key=lambda share: share.bytes)
            victim = next(iter(heaviest.members))
            victim.leave()
            strangers.dropped += 1
            victim.drop()
            stays = stays and victim is not self
        return stays

    def leave(self) -> None:
        """Stop counting: the peer has logged in or disconnected."""
        strangers, share = self._strangers, self.share
        if share is None:
            return
        self.share = None
        del share.members[self]
        strangers.count -= 1
        share.bytes -= self.bytes
        strangers.bytes -= self.bytes
        self.bytes = 0
        if not share.members:
            del strangers.shares[self.address]


class Strangers:
    """All connections that have not logged in."""

    def __init__(self, limit_bytes: int) -> None:
        """Allow `limit_bytes` for all connections together."""
        self.limit = limit_bytes
        self.bytes = self.count = self.dropped = 0
        self.shares: dict[str, _Share] = {}  # by address

    def enter(self, address: str, drop: Callable[[], None]) -> Stranger:
        """Register a new connection; `address` is from `address_of`, `drop` aborts the connection."""
        return Stranger(self, address, drop)

    def statistics(self) -> StrangersStatistics:
        """Return the counts so far."""
        return StrangersStatistics(bytes=self.bytes, connections=self.count, dropped_total=self.dropped)
