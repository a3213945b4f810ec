"""Find the offset to commit when deliveries settle out of order: the end of the contiguous settled prefix.

Offsets are tracked in the order in which they are read, and settled in any order. Gaps between offsets are normal in
Kafka (compaction, transaction markers), so the prefix is counted over the tracked offsets, never by adding one to the
offset that was settled last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


class UntrackedOffsetError(ValueError):
    """An offset was settled that is not outstanding: it was never tracked, or is settled already."""


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The outstanding offsets of one partition, and the offset to commit.

    Invariant: all tracked offsets below `committable` are settled, and the first one from there on is outstanding.
    `committable` never decreases. Each offset settles once.
    """

    _order: deque[int] = field(default_factory=deque)  # tracked offsets after the prefix, in order
    _open: set[int] = field(default_factory=set)  # those of them that are not settled
    _committable: int | None = None

    def track(self, *offsets: int) -> None:
        """Add offsets, each above all tracked before.

        Raises:
            ValueError: one is not, and none was added; the caller has mixed up its reads.
        """
        last = self._order[-1] if self._order else (self._committable or 0) - 1
        for offset in offsets:
            if offset <= last:
                raise ValueError(f"offset {offset} tracked after {last}")
            last = offset
        self._order.extend(offsets)
        self._open.update(offsets)

    def settle(self, offset: int) -> None:
        """Settle one offset, as `settle_all` does."""
        try:
            self._open.remove(offset)
        except KeyError:
            raise UntrackedOffsetError(f"offset {offset} is not outstanding") from None
        self._advance()

    def settle_all(self, offsets: Sequence[int]) -> None:
        """Settle several different offsets, in any order.

        Raises:
            UntrackedOffsetError: one of them is not outstanding; nothing changes.
        """
        if not self._open.issuperset(offsets):
            raise UntrackedOffsetError(f"not all of the offsets {offsets[:3]}... are outstanding")
        self._open.difference_update(offsets)
        self._advance()

    def _advance(self) -> None:
        """Move `committable` to the end of the settled prefix."""
        order, still_open = self._order, self._open
        while order and order[0] not in still_open:
            self._committable = order.popleft() + 1

    @property
    def open(self) -> Collection[int]:
        """The outstanding offsets, in no particular order."""
        return self._open

    @property
    def end(self) -> int:
        """The offset after the last tracked one; 0 when there were none."""
        return self._order[-1] + 1 if self._order else self._committable or 0

    @property
    def outstanding(self) -> int:
        """Number of outstanding offsets."""
        return len(self._open)

    @property
    def span(self) -> int:
        """Number of offsets kept in memory: from the first outstanding one on, settled or not."""
        return len(self._order)

    @property
    def committable(self) -> int | None:
        """The offset to commit, or None while the first tracked offset is outstanding."""
        return self._committable
