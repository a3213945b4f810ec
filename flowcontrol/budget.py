"""What was submitted and is not answered yet: bytes and records, counted exactly, and shared between who sends.

**Nobody may have more on the way than is free.** That is max-min fair without a list of who wants what (ADR 0044): n
who want everything end up with the same share, one part in n + 1, and as much stays free for whoever comes; who asks
for less gets it. It needs one comparison. What is free is counted up to seven eighths of the limit; the rest is a
reserve for those who have nothing on the way.

A budget refuses nothing: what was promised is honoured. It never clamps either: giving back more than was taken is our
bug and raises.
"""

from __future__ import annotations

import sys
from typing import Final

from flowcontrol.gate import Gate

RESERVE: Final = 8
"""One part in so many of a budget is for those who have nothing on the way, and to open again after it was full."""

UNCOUNTED: Final = 16 * 1024
"""Bytes that a receiver may hold uncounted."""


class BudgetError(Exception):
    """More was given back than had been taken: a record was settled twice. Our bug, never a peer's."""


class Budget:
    """Bytes and records on the way of all who share them: those of the process, or of a topic.

    Invariant: `bytes` and `records` are what was taken and not given back, here and by every child; neither is
    negative. The gate shuts when one of them reaches its limit, and opens when both are at seven eighths or below.

    Attributes:
        parent: counts everything that its children count, in the same call.
        gate: shut: nobody may send; who has nothing on the way neither.
        bytes: taken and not given back.
        records: taken and not given back.
        promised: bytes that senders may send at any moment, by credit that they use; counted as if they were taken.
    """

    __slots__ = (
        "_most_bytes", "_most_records", "_waiting", "_wake_at", "bytes", "bytes_limit", "gate", "parent",
        "promised", "records", "records_limit",
    )  # fmt: skip

    def __init__(self, bytes_limit: int, records_limit: int, parent: Budget | None = None) -> None:
        if bytes_limit < 1 or records_limit < 1:
            raise ValueError(f"limits must be positive, got {bytes_limit} bytes and {records_limit} records")
        self.bytes_limit = bytes_limit
        self.records_limit = records_limit
        self.parent = parent
        self._most_bytes = bytes_limit - -(-bytes_limit // RESERVE)
        self._most_records = records_limit - -(-records_limit // RESERVE)
        self.gate = Gate(bytes_limit, self._most_bytes)
        self.bytes = 0
        self.records = 0
        self.promised = 0
        self._waiting: dict[ConnectionBudget, None] = {}
        self._wake_at = 0  # free bytes at which one of those who wait may go on

    def take(self, size: int, records: int = 1) -> None:
        """Count `records` records of `size` bytes together as in flight, here and in the parents."""
        if size < 0 or records < 0:
            raise BudgetError(f"cannot take {size} bytes, {records} records")
        self.bytes += size
        self.records += records
        if self.bytes >= self.bytes_limit or self.records >= self.records_limit:
            self.gate.change(False)
        if self.parent is not None:
            self.parent.take(size, records)

    def give(self, size: int, records: int = 1) -> None:
        """Count `records` records of `size` bytes together as answered, here and in the parents.

        Raises:
            BudgetError: more than was taken; nothing is counted then.
        """
        if not 0 <= size <= self.bytes or not 0 <= records <= self.records:
            raise BudgetError(
                f"cannot give back {size} bytes, {records} records of {self.bytes} bytes, {self.records} records"
            )
        self.bytes -= size
        self.records -= records
        if self.parent is not None:
            self.parent.give(size, records)
        # Last, because a callback may submit more.
        if not self.gate.is_open and self.bytes <= self._most_bytes and self.records <= self._most_records:
            self.gate.change(True)
        if self._waiting and self._most_bytes - self.bytes - self.promised >= self._wake_at:
            self._wake()

    def promise(self, size: int) -> None:
        """Count so many bytes as promised, here and in the parents; below zero: as not promised any more.

        Raises:
            BudgetError: less than nothing would be promised; nothing is counted then.
        """
        if self.promised + size < 0:
            raise BudgetError(f"cannot take back a promise of {-size} bytes of {self.promised}")
        self.promised += size
        if self.parent is not None:
            self.parent.promise(size)
        if self._waiting and size < 0 and self._most_bytes - self.bytes - self.promised >= self._wake_at:
            self._wake()

    def allows(self, size: int, records: int) -> bool:
        """Whether somebody may have so much on the way: no more than is free, here and in the parents."""
        return (
            self.bytes + self.promised + size <= self._most_bytes
            and self.records + records <= self._most_records
            and (self.parent is None or self.parent.allows(size, records))
        )

    def fits(self, size: int) -> bool:
        """Whether so many bytes of somebody who has nothing on the way fit in, here and in the parents."""
        return self.bytes + self.promised + size <= self.bytes_limit and (self.parent is None or self.parent.fits(size))

    @property
    def free(self) -> int:
        """How many bytes anybody may have on the way, here and in the parents; none: 0."""
        free = max(0, self._most_bytes - self.bytes - self.promised)
        return free if self.parent is None else min(free, self.parent.free)

    # Those who wait for their share

    def lacks(self, size: int) -> bool:
        """Whether so many bytes are not free here."""
        return self._most_bytes - self.bytes - self.promised < size

    def tightest(self, size: int) -> Budget:
        """This one or a parent: where so many bytes are not free."""
        parent = self.parent
        return self if parent is None or self.lacks(size) or not parent.lacks(size) else parent.tightest(size)

    def enter(self, waiter: ConnectionBudget, size: int) -> None:
        """Have `waiter` look again when `size` bytes are free."""
        self._wake_at = min(self._wake_at, size) if self._waiting else size
        self._waiting[waiter] = None

    def leave(self, waiter: ConnectionBudget) -> None:
        """It does not wait any more."""
        self._waiting.pop(waiter, None)

    @property
    def waiting(self) -> int:
        """How many wait because of this budget."""
        return len(self._waiting)

    def _wake(self) -> None:
        """Have all look again who wait. With less on the way each looks by itself."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            waiter.look()
        free = self._most_bytes - self.bytes - self.promised
        if self._wake_at <= free:  # what somebody lacks is not bytes: no look at everybody for each record
            self._wake_at = min(self._most_bytes, free + self._most_bytes // 16)


class GroupBudget(Budget):
    """A group that counts as one among those who share the parent, such as all topics of a tenant.

    The group may have no more on the way than is free in the parent, and of its members nobody more than is left of
    that: so groups have equal shares, whatever number of senders each has, and senders equal shares of their group's.
    """

    __slots__ = ("_whole",)

    def __init__(self, parent: Budget) -> None:
        super().__init__(parent.bytes_limit, parent.records_limit, parent)
        self._whole = parent

    @property
    def _held(self) -> int:
        return self.bytes + self.promised

    def allows(self, size: int, records: int) -> bool:
        """See `Budget.allows`."""
        return self._whole.allows(self._held + size, self.records + records)

    @property
    def free(self) -> int:
        """See `Budget.free`."""
        return max(0, self._whole.free - self._held)

    def lacks(self, size: int) -> bool:
        """See `Budget.lacks`."""
        return self._whole.lacks(self._held + size)

    def tightest(self, size: int) -> Budget:
        """It is the group's share that is used up."""
        return self

    def enter(self, waiter: ConnectionBudget, size: int) -> None:
        """See `Budget.enter`: what the group gives back is free for it, and the group has less; so half of it does."""
        self._whole.enter(waiter, (self._held + size + self._whole.free) // 2)

    def leave(self, waiter: ConnectionBudget) -> None:
        """See `Budget.leave`."""
        self._whole.leave(waiter)


UNBOUNDED: Final = Budget(sys.maxsize, sys.maxsize)
"""For who is bounded by nothing but what is its own."""


class ConnectionBudget:
    """What one connection has on the way, against its own limit and its share of what others use too.

    The gate shuts when the connection has more on the way than is free in the budgets that it takes from, or as much as
    its own limit; it opens at four fifths of what is free and half of the limit, or with nothing on the way. Where it
    takes from several topics, all that it has on the way is compared with what is free in the one it has last sent to:
    a socket cannot be stopped for one of them.

    Invariant: `bytes` and `records` are what was taken and not given back. With nothing on the way the gate is open.

    Attributes:
        gate: shut: read no more from this connection.
        promised: bytes that its links have credit for, as far as something of them is on the way.
        senders: of its links, how many have something on the way; they share what it may have.
        waits_for: while the gate is shut, the budget of which it has more than its share; None: its own limit.
    """

    __slots__ = (
        "_source", "bytes", "bytes_limit", "gate", "promised", "records", "records_limit", "senders", "waits_for",
    )  # fmt: skip

    def __init__(self, bytes_limit: int, records_limit: int) -> None:
        if bytes_limit < 1 or records_limit < 1:
            raise ValueError(f"limits must be positive, got {bytes_limit} bytes and {records_limit} records")
        self.bytes_limit = bytes_limit
        self.records_limit = records_limit
        self.gate = Gate(bytes_limit, bytes_limit // 2)
        self.bytes = 0
        self.records = 0
        self.promised = 0
        self.senders = 0
        self.waits_for: Budget | None = None
        self._source: Budget | None = None

    def take(self, size: int, records: int = 1, source: Budget | None = None) -> None:
        """Count `records` records of `size` bytes together as on the way.

        `source`: the budget that counts them too, in a call of its own; None: none does yet.
        """
        if size < 0 or records < 0:
            raise BudgetError(f"cannot take {size} bytes, {records} records")
        self.bytes += size
        self.records += records
        if self.gate.is_open and (
            self.bytes >= self.bytes_limit
            or self.records >= self.records_limit
            or (source is not None and not source.allows(self.bytes, self.records))
        ):
            self._source = source
            self._wait()
            self.gate.change(False)

    def give(self, size: int, records: int = 1) -> None:
        """Count `records` records of `size` bytes together as answered.

        Raises:
            BudgetError: more than was taken; nothing is counted then.
        """
        if not 0 <= size <= self.bytes or not 0 <= records <= self.records:
            raise BudgetError(
                f"cannot give back {size} bytes, {records} records of {self.bytes} bytes, {self.records} records"
            )
        self.bytes -= size
        self.records -= records
        if not self.gate.is_open:
            self.look()

    def look(self) -> None:
        """Open the gate if there is enough of everything by now."""
        if self.gate.is_open:
            return
        if not self.records or (
            self.bytes * 2 <= self.bytes_limit
            and self.records * 2 <= self.records_limit
            and (self._source is None or self._source.allows(_spaced(self.bytes), _spaced(self.records)))
        ):
            self._stop_waiting()
            self._source = None
            self.gate.change(True)
        else:
            self._wait()

    def _wait(self) -> None:
        source = self._source
        if source is None or self.bytes >= self.bytes_limit:
            self._stop_waiting()
            return
        needed = _spaced(self.bytes)
        tightest = source.tightest(needed)
        if tightest is not self.waits_for:
            self._stop_waiting()
            self.waits_for = tightest
        tightest.enter(self, needed)

    def _stop_waiting(self) -> None:
        if self.waits_for is not None:
            self.waits_for.leave(self)
            self.waits_for = None


def _spaced(held: int) -> int:
    """What must be free to go on with so much on the way: a quarter more, so that nobody is stopped at once again."""
    return held + held // 4


class Holding(ConnectionBudget):
    """What one receiver holds of what is on its way to all: sent, and neither read nor settled.

    It is told as a whole, when something was sent or settled, not for each message. So that it costs nothing to keep
    up, `UNCOUNTED` bytes are everybody's, whatever others hold: who holds less is not counted, and never waits.

    Invariant: `bytes` is what the receiver held when it was last counted, less than `UNCOUNTED` from what it holds,
    and 0 when it holds less than that. `records` is 1 if it is counted, so that a budget's are its receivers.
    """

    __slots__ = ("_budget",)

    def __init__(self, budget: Budget) -> None:
        """Nothing is held; `budget` is that of all receivers."""
        super().__init__(budget.bytes_limit, budget.records_limit)
        self._budget = budget

    def hold(self, size: int) -> None:
        """The receiver holds `size` bytes now."""
        if size < UNCOUNTED:
            size = 0
        change = size - self.bytes
        if not change or (size and self.gate.is_open and -UNCOUNTED < change < UNCOUNTED):
            return
        if change > 0:
            counted = 0 if self.bytes else 1
            self._budget.take(change, counted)
            self.take(change, counted, self._budget)
        else:
            counted = 0 if size else 1
            self._budget.give(-change, counted)
            self.give(-change, counted)

    @property
    def more(self) -> int:
        """How many more bytes it may hold."""
        return max(0, self._budget.free - self.bytes)
