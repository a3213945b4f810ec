"""How much credit an AMQP sender gets: the link window.

    N      = clamp(floor(capacity / s), 1, W)      s: moving average of message bytes
    grant  = max(0, N - unsettled - credit)    sent only if >= N / 2, or when the credit is used up

W is the smallest window that keeps Kafka busy, found anew with each W settled messages, a round. A partition has one
batch on the way, so what keeps Kafka busy is a full one that follows it, however fast Kafka answers; whoever settles
says whether more waited than that (`crowded`; ADR 0046). A round in which it always did shrinks the window by a
quarter. Any other grows it: twofold until the first crowd, by a step from then on. As all who crowd a partition shrink
by the same part and grow by the same step, equal senders come to equal windows.

The capacity of a link is its connection's share of what is free (`flowcontrol.budget`), divided between those links of
the connection that have something on the way. A link that sends nothing takes nothing from anybody; the first credit of
one is its part if all links were busy.

Credit comes back when Kafka has the record, not when it was read, so the window bounds what is unanswered. Credit
that was granted is never taken back: a smaller flow races with the transfers on their way. Pure arithmetic: what
does not add up raises and is never clamped.
"""

from __future__ import annotations

from typing import Final

from flowcontrol.budget import Budget, ConnectionBudget

WEIGHT: Final = 1 / 16  # of the newest message in the average: follows a change of size within some 50 messages
FIRST_MEAN: Final = 1024.0  # bytes, before the first message
STEP: Final = 32  # messages by which a window grows
SHRINK: Final = 4  # a window that crowds all the time loses one part in so many


class WindowError(Exception):
    """More was settled than had arrived. Our bug, never a peer's."""


class Window:
    """The window of one sender's link.

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
        """A window between `least` and `limit`, that begins with `least`; None: always `limit`."""
        if limit < 1 or (least is not None and least < 1):
            raise ValueError(f"a window of {limit} messages, at least {least}")
        self.limit = limit
        self.least = self.most = limit if least is None else min(limit, least)
        self._settled = 0  # of this round
        self._crowded = 0  # of these
        self._crowds = False  # some round did
        self.unsettled = 0
        self.mean = FIRST_MEAN

    def arrive(self, size: int) -> None:
        """Count a message of `size` bytes that waits for its outcome."""
        if size < 0:
            raise WindowError(f"a message of {size} bytes")
        self.mean += (size - self.mean) * WEIGHT
        self.unsettled += 1

    def arrive_run(self, count: int, size: int) -> None:
        """Count `count` messages of `size` bytes together, as if all had the same."""
        if count < 1 or size < 0:
            raise WindowError(f"{count} messages of {size} bytes")
        each = size / count
        self.mean = each + (self.mean - each) * (1 - WEIGHT) ** count
        self.unsettled += count

    def settle(self, count: int = 1, *, crowded: bool = False) -> None:
        """Count `count` messages as answered; `crowded`: more waited behind them than keeps Kafka busy."""
        if not 0 <= count <= self.unsettled:
            raise WindowError(f"{count} settled, {self.unsettled} unsettled")
        self.unsettled -= count
        self._settled += count
        if crowded:
            self._crowded += count
        if self._settled >= self.most:
            self._adapt()

    def _adapt(self) -> None:
        """The end of a round."""
        self._crowds = self._crowds or self._crowded > 0
        if self._crowded == self._settled:
            self.most = max(self.least, self.most - self.most // SHRINK)
        else:
            self.most = min(self.limit, self.most + (STEP if self._crowds else self.most))
        self._settled = self._crowded = 0

    def size(self, capacity: int) -> int:
        """N: how many messages may be unanswered or on their way with `capacity` bytes for them."""
        return max(1, min(self.most, int(capacity / max(self.mean, 1.0))))

    def top_up(self, credit: int, capacity: int) -> int:
        """How much credit to grant now; 0 when it is not worth a frame.

        Args:
            credit: granted and not yet used.
            capacity: bytes that may be waiting for Kafka because of this link.
        """
        if credit < 0:
            raise WindowError(f"a credit of {credit}")
        size = self.size(capacity)
        grant = size - self.unsettled - credit
        if grant <= 0:
            return 0
        return grant if credit == 0 or grant * 2 >= size else 0


class LinkShare:
    """How much one link may have on the way, by what is free; and the credit that it has been given, as a promise.

    A link is active while something of it is unanswered. The credit of an active link will be used soon: it is counted
    as if it were on the way, so that no more is promised to all together than there is.

    Invariant: `promised` of a budget, and of a connection, is what its active links were promised, and nothing else.
    """

    __slots__ = ("_connection", "_most", "_promised", "_source", "is_active")

    def __init__(self, connection: ConnectionBudget, most: int) -> None:
        """A link of `connection`, which may have `most` bytes on the way whatever is free."""
        self.is_active = False
        self._connection = connection
        self._most = most
        self._source: Budget | None = None
        self._promised = 0

    def capacity(self, source: Budget, held: int, *, links: int) -> int:
        """How many bytes of the link may be on the way or promised.

        What all links of the connection may have is as much as stays free then: half of what is free and theirs.

        Args:
            source: the budget of the topic that it sends to.
            held: bytes of the link that are unanswered.
            links: how many there are in the process, for one that is not active.
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
        """The link has credit for `size` bytes; ask for its capacity before."""
        if not self.is_active:
            size = 0
        change = size - self._promised
        if change and self._source is not None:
            self._source.promise(change)
            self._connection.promised += change
            self._promised = size

    def end(self) -> None:
        """The link is gone."""
        self.promise(0)
        if self.is_active:
            self.is_active = False
            self._connection.senders -= 1
