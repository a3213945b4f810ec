"""What was submitted and is not answered yet: bytes and records, counted exactly, with a gate on top.

A budget refuses nothing: credit that was granted is honoured. Its gate tells whoever grants to stop. It never
clamps either: giving back more than was taken is our bug and raises.
"""

from __future__ import annotations

from flowcontrol.gate import Gate


class BudgetError(Exception):
    """More was given back than had been taken: a record was settled twice. Our bug, never a peer's."""


class Budget:
    """Bytes and records in flight, with a limit on each and a gate between the limit and its half.

    The gate shuts when either count reaches its limit and opens when both are at or below half of theirs.

    Attributes:
        parent: counts everything that its children count, in the same call.
        gate: shut: stop asking for more.
        bytes: taken and not given back.
        records: taken and not given back.
    """

    __slots__ = ("bytes", "bytes_limit", "gate", "parent", "records", "records_limit")

    def __init__(self, bytes_limit: int, records_limit: int, parent: Budget | None = None) -> None:
        if bytes_limit < 1 or records_limit < 1:
            raise ValueError(f"limits must be positive, got {bytes_limit} bytes and {records_limit} records")
        self.bytes_limit = bytes_limit
        self.records_limit = records_limit
        self.parent = parent
        self.gate = Gate(bytes_limit, bytes_limit // 2)
        self.bytes = 0
        self.records = 0

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
        if self.bytes * 2 <= self.bytes_limit and self.records * 2 <= self.records_limit:
            self.gate.change(True)
