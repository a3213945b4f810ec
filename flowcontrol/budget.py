"""Budgets of unsettled bytes and records: counted exactly, and shared fairly between senders.

**No sender may have more in flight than is free.** That is max-min fair without a list of demands (ADR 0047): n greedy
senders end up with equal shares of 1 / (n + 1), the same amount stays free for newcomers, and senders that need less
get what they need. It takes one comparison. Free space is counted up to seven eighths of the limit; the rest is a
reserve for senders that have nothing in flight.

A budget refuses nothing: promised credit is honoured. It never clamps either: giving back more than was taken is a bug
of ours and raises.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Final

from flowcontrol.gate import Gate

RESERVE: Final = 8
"""1 / RESERVE of a budget is reserved for senders with nothing in flight; a full budget opens when it is free again."""

UNCOUNTED: Final = 16 * 1024
"""Bytes that a receiver may hold without being counted."""


class BudgetError(Exception):
    """More was given back than had been taken: a record was settled twice. A bug of ours, never the peer's fault."""


def _check_limits(size: int, records: int) -> None:
    if size < 1 or records < 1:
        raise ValueError(f"limits must be positive, got {size} bytes and {records} records")


@dataclass(slots=True, eq=False)
class Budget:
    """The bytes and records in flight of the whole process, of a topic, or of another set of senders.

    Invariant: `bytes` and `records` are what was taken and not given back, here and by every child; neither is
    negative. The gate shuts when one of them reaches its limit, and opens when both are at seven eighths or below.
    """

    bytes_limit: int
    records_limit: int
    parent: Budget | None = None  # counts everything that its children count, in the same call
    gate: Gate = field(default_factory=Gate)  # while it is shut no sender may send, not even one with nothing in flight
    bytes: int = 0  # taken and not given back
    records: int = 0
    promised: int = 0  # bytes of credit that active senders hold and may use at any moment; counted as if taken
    _waiting: dict[ConnectionBudget, None] = field(default_factory=dict)
    _wake_at: int = 0  # free bytes at which at least one waiter may continue
    _most_bytes: int = 0
    _most_records: int = 0

    def __post_init__(self) -> None:
        _check_limits(self.bytes_limit, self.records_limit)
        self._most_bytes = self.bytes_limit - -(-self.bytes_limit // RESERVE)
        self._most_records = self.records_limit - -(-self.records_limit // RESERVE)

    def take(self, size: int, records: int = 1) -> None:
        """Count `records` records with a total of `size` bytes as in flight, here and in the parents."""
        if size < 0 or records < 0:
            raise BudgetError(f"cannot take {size} bytes, {records} records")
        self.bytes += size
        self.records += records
        if self.bytes >= self.bytes_limit or self.records >= self.records_limit:
            self.gate.change(False)
        if self.parent is not None:
            self.parent.take(size, records)

    def give(self, size: int, records: int = 1) -> None:
        """Count `records` records with a total of `size` bytes as settled, here and in the parents.

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
        """Count `size` more bytes as promised, here and in the parents; a negative size takes promises back.

        Raises:
            BudgetError: more would be taken back than was promised; nothing is counted then.
        """
        if self.promised + size < 0:
            raise BudgetError(f"cannot take back a promise of {-size} bytes of {self.promised}")
        self.promised += size
        if self.parent is not None:
            self.parent.promise(size)
        if self._waiting and size < 0 and self._most_bytes - self.bytes - self.promised >= self._wake_at:
            self._wake()

    def allows(self, size: int, records: int) -> bool:
        """Whether one sender may have this much in flight: no more than is free, here and in the parents."""
        return (
            self.bytes + self.promised + size <= self._most_bytes
            and self.records + records <= self._most_records
            and (self.parent is None or self.parent.allows(size, records))
        )

    def fits(self, size: int) -> bool:
        """Whether `size` bytes of a sender with nothing in flight fit in, here and in the parents."""
        return self.bytes + self.promised + size <= self.bytes_limit and (self.parent is None or self.parent.fits(size))

    @property
    def free(self) -> int:
        """How many bytes one sender may have in flight: what is free here and in the parents, at least 0."""
        free = max(0, self._most_bytes - self.bytes - self.promised)
        return free if self.parent is None else min(free, self.parent.free)

    # Connections that wait for their share

    def lacks(self, size: int) -> bool:
        """Whether fewer than `size` bytes are free here."""
        return self._most_bytes - self.bytes - self.promised < size

    def tightest(self, size: int) -> Budget:
        """Return this budget or the parent in which `size` bytes are not free."""
        parent = self.parent
        return self if parent is None or self.lacks(size) or not parent.lacks(size) else parent.tightest(size)

    def add_waiter(self, waiter: ConnectionBudget, size: int) -> None:
        """Call `waiter.recheck` when `size` bytes are free."""
        self._wake_at = min(self._wake_at, size) if self._waiting else size
        self._waiting[waiter] = None

    def remove_waiter(self, waiter: ConnectionBudget) -> None:
        """Remove a waiter, if it waits."""
        self._waiting.pop(waiter, None)

    @property
    def waiting(self) -> int:
        """Number of waiters."""
        return len(self._waiting)

    def _wake(self) -> None:
        """Let all waiters check again. A waiter whose own level falls checks by itself."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            waiter.recheck()
        free = self._most_bytes - self.bytes - self.promised
        if self._wake_at <= free:  # a waiter lacks records, not bytes: do not check all waiters for each record
            self._wake_at = min(self._most_bytes, free + self._most_bytes // 16)


class GroupBudget(Budget):
    """A group that counts as one sender in the parent, such as all topics of a tenant.

    The group may have no more in flight than is free in the parent, and each member no more than is left of that. So
    groups have equal shares, however many senders each has, and senders have equal shares of their group's.
    """

    __slots__ = ("_whole",)

    def __init__(self, parent: Budget) -> None:
        super().__init__(parent.bytes_limit, parent.records_limit, parent)
        self._whole = parent

    @property
    def _held(self) -> int:
        return self.bytes + self.promised

    def allows(self, size: int, records: int) -> bool:
        """Whether this much more fits besides what the group holds."""
        return self._whole.allows(self._held + size, self.records + records)

    @property
    def free(self) -> int:
        """Bytes that are free for the group."""
        return max(0, self._whole.free - self._held)

    def lacks(self, size: int) -> bool:
        """Whether less than `size` bytes is free for the group."""
        return self._whole.lacks(self._held + size)

    def tightest(self, size: int) -> Budget:
        """Return this budget: it is the group's share that is used up."""
        return self

    def add_waiter(self, waiter: ConnectionBudget, size: int) -> None:
        """Let a connection wait for `size` bytes.

        A byte that the group gives back counts twice: more is free, and it holds less.
        """
        self._whole.add_waiter(waiter, (self._held + size + self._whole.free) // 2)

    def remove_waiter(self, waiter: ConnectionBudget) -> None:
        """Stop waiting."""
        self._whole.remove_waiter(waiter)


UNBOUNDED: Final = Budget(sys.maxsize, sys.maxsize)
"""For senders that have only their own limit."""


@dataclass(slots=True, eq=False)
class ConnectionBudget:
    """One connection's bytes and records in flight, limited by its own limit and its share of the common budgets.

    The gate shuts when the connection has more in flight than is free in the budgets that it takes from, or reaches its
    own limit; it opens at four fifths of what is free and half of its limit, or with nothing in flight. If it takes
    from several topics, all its bytes in flight are compared with what is free in the topic it has last sent to: a
    socket cannot be paused for one topic only.

    Invariant: `bytes` and `records` are what was taken and not given back. With nothing in flight the gate is open.
    """

    bytes_limit: int
    records_limit: int
    gate: Gate = field(default_factory=Gate)  # while it is shut, read no more from this connection
    bytes: int = 0
    records: int = 0
    promised: int = 0  # bytes of credit of those of its links that have something in flight
    senders: int = 0  # how many of its links have something in flight; they divide its share
    waits_for: Budget | None = None  # while the gate is shut: the budget whose share is used up; None: its own limit
    _source: Budget | None = None

    def __post_init__(self) -> None:
        _check_limits(self.bytes_limit, self.records_limit)

    def take(self, size: int, records: int = 1, source: Budget | None = None) -> None:
        """Count `records` records with a total of `size` bytes as in flight.

        `source` is the common budget, in which they are counted by a separate call, or None.
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
        """Count `records` records with a total of `size` bytes as settled.

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
            self.recheck()

    def recheck(self) -> None:
        """Open the gate if enough is free now."""
        if self.gate.is_open:
            return
        if not self.records or (
            self.bytes * 2 <= self.bytes_limit
            and self.records * 2 <= self.records_limit
            and (self._source is None or self._source.allows(_with_margin(self.bytes), _with_margin(self.records)))
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
        needed = _with_margin(self.bytes)
        tightest = source.tightest(needed)
        if tightest is not self.waits_for:
            self._stop_waiting()
            self.waits_for = tightest
        tightest.add_waiter(self, needed)

    def _stop_waiting(self) -> None:
        if self.waits_for is not None:
            self.waits_for.remove_waiter(self)
            self.waits_for = None


def _with_margin(held: int) -> int:
    """Return what must be free to continue with `held` in flight: a quarter more, so that the gate does not flap."""
    return held + held // 4


class ReceiverBudget(ConnectionBudget):
    """One receiver's part of all messages in flight to receivers: sent, and neither read nor settled.

    The total is updated by `hold` when something was sent or settled, not for each message. To keep that cheap, every
    receiver may hold `UNCOUNTED` bytes, whatever others hold: with less it is not counted and never waits.

    Invariant: `bytes` differs by less than `UNCOUNTED` from what the receiver holds, and is 0 when it holds less than
    that. `records` is 1 if the receiver is counted, so that a budget's `records` are its receivers.
    """

    __slots__ = ("_budget",)

    def __init__(self, budget: Budget) -> None:
        """`budget` is shared by all receivers."""
        super().__init__(budget.bytes_limit, budget.records_limit)
        self._budget = budget

    def hold(self, size: int) -> None:
        """Set what the receiver holds now to `size` bytes."""
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
        """How many more bytes the receiver may hold."""
        return max(0, self._budget.free - self.bytes)
