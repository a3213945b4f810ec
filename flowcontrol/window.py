"""How much credit an AMQP sender gets: the link window.

    N      = clamp(floor(capacity / s), 1, W)      s: moving average of message bytes
    grant  = max(0, N - unsettled - credit)    sent only if >= N / 2, or when the credit is used up

W is the smallest window that keeps Kafka busy. It is adapted after every W settled messages, a round. A partition has
one batch in flight, so one full batch waiting behind it keeps Kafka busy, however fast Kafka answers; each settlement
says whether more than that waited (`crowded`; ADR 0046). A round in which all were crowded shrinks the window by a
quarter. Any other round grows it: it doubles until the first crowded message, and grows by a step from then on. All
senders of a crowded partition shrink by the same fraction and grow by the same step, so their windows become equal.

The capacity of a link is its connection's share of the free budget (`flowcontrol.budget`), divided between the links of
the connection that have something in flight. An idle link takes nothing from others; the first credit of a link is its
part as if all links were busy.

Credit is granted again when Kafka has the record, not when the record was read, so the window limits unsettled
messages. Granted credit is never revoked: a smaller flow would race with transfers in flight. Pure arithmetic:
inconsistent counts raise and are never clamped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flowcontrol.budget import Budget, ConnectionBudget

WEIGHT: Final = 1 / 16  # of the newest message in the average, which follows a change of size within some 50 messages
FIRST_MEAN: Final = 1024.0  # bytes, before the first message
STEP: Final = 32  # messages by which a window grows
SHRINK: Final = 4  # a crowded round takes 1 / SHRINK from the window


class WindowError(Exception):
    """More was settled than had arrived. A bug of ours, never the peer's fault."""


class Window:
    """The window of a sender's link.

    Invariant: `least <= most <= limit`.

    Attributes:
        limit: the largest window in messages.
        least: the smallest.
        most: W, the window now.
        unsettled: messages that arrived and are not settled.
        mean: s, the moving average of message bytes.
    """

    __slots__ = ("_crowded", "_crowds", "_settled", "least", "limit", "mean", "most", "unsettled")

    def __init__(self, limit: int, least: int | None = None) -> None:
        """Create a window between `least` and `limit` that starts at `least`; None means always `limit`."""
        if limit < 1 or (least is not None and least < 1):
            raise ValueError(f"a window of {limit} messages, at least {least}")
        self.limit = limit
        self.least = self.most = limit if least is None else min(limit, least)
        self._settled = 0  # in this round
        self._crowded = 0  # crowded ones of these
        self._crowds = False  # a message has been crowded before
        self.unsettled = 0
        self.mean = FIRST_MEAN

    def arrive(self, size: int, count: int = 1) -> None:
        """Count `count` unsettled messages with a total of `size` bytes, as if all had the same size."""
        if count < 1 or size < 0:
            raise WindowError(f"{count} messages of {size} bytes")
        each = size / count
        self.mean = each + (self.mean - each) * (1 - WEIGHT) ** count
        self.unsettled += count

    def settle(self, count: int = 1, *, crowded: bool = False) -> None:
        """Count `count` messages as settled. `crowded` says that more waited behind them than keeps Kafka busy."""
        if not 0 <= count <= self.unsettled:
            raise WindowError(f"{count} settled, {self.unsettled} unsettled")
        self.unsettled -= count
        self._settled += count
        if crowded:
            self._crowded += count
        if self._settled >= self.most:
            self._adapt()

    def _adapt(self) -> None:
        """Adapt the window at the end of a round."""
        self._crowds = self._crowds or self._crowded > 0
        if self._crowded == self._settled:
            self.most = max(self.least, self.most - self.most // SHRINK)
        else:
            self.most = min(self.limit, self.most + (STEP if self._crowds else self.most))
        self._settled = self._crowded = 0

    def size(self, capacity: int) -> int:
        """Return N: how many messages may be unsettled or covered by credit, with `capacity` bytes for them."""
        return max(1, min(self.most, int(capacity / max(self.mean, 1.0))))

    def top_up(self, credit: int, capacity: int) -> int:
        """Return how much credit to grant now; 0 when it is not worth a frame.

        Args:
            credit: granted and not yet used.
            capacity: bytes that this link may have in flight.
        """
        if credit < 0:
            raise WindowError(f"a credit of {credit}")
        size = self.size(capacity)
        grant = size - self.unsettled - credit
        if grant <= 0:
            return 0
        return grant if credit == 0 or grant * 2 >= size else 0


@dataclass(slots=True, eq=False)
class LinkShare:
    """One link's share of the free budget, and its credit, counted as promised.

    A link is active while it has unsettled messages. An active link will use its credit soon, so the credit is counted
    as if it were in flight; otherwise more could be promised to all links together than is free.

    Invariant: `promised` of a budget, and of a connection, is exactly what its active links were promised.
    """

    _connection: ConnectionBudget
    _most: int  # the largest number of bytes that the link may have in flight, however much is free
    is_active: bool = False
    _source: Budget | None = None
    _promised: int = 0

    def capacity(self, source: Budget, held: int, *, links: int) -> int:
        """Return how many bytes of the link may be in flight or promised.

        All links of a connection together may have as much as then stays free: half of the sum of both.

        Args:
            source: the budget of the topic that the link sends to.
            held: unsettled bytes of the link.
            links: number of links in the process, for a link that is not active.
        """
        connection = self._connection
        active = held > 0
        if active is not self.is_active:
            self.is_active = active
            connection.senders += 1 if active else -1
        if source is not self._source:
            self.promise(0)
            self._source = source
        free = source.free
        if active:
            share = (free + connection.bytes + connection.promised) // (2 * connection.senders)
            share = min(share, free + held + self._promised)
        else:
            share = free // (links + 1)
        return max(0, min(self._most, connection.bytes_limit - connection.bytes, share))

    def promise(self, size: int) -> None:
        """Note that the link has credit for `size` bytes. Call `capacity` before."""
        if not self.is_active:
            size = 0
        change = size - self._promised
        if change and self._source is not None:
            self._source.promise(change)
            self._connection.promised += change
            self._promised = size

    def end(self) -> None:
        """Remove a detached link from the counts."""
        self.promise(0)
        if self.is_active:
            self.is_active = False
            self._connection.senders -= 1
