"""A record batch with the tickets of its records."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Sequence, Set
from typing import Any, Final

import msgspec
from aiokafka.record.default_records import DefaultRecordBatch

from flowcontrol.budget import Budget, ConnectionBudget
from gateway.kafka.contracts import Owner
from gateway.kafka.driver.produce.batch_builder import WrittenBatch
from gateway.kafka.publish.batch_format import HEADER, Codec, Records
from mapping.record import Record

WITHDRAWN: Final = "another gateway has the session"
HEADER_BYTES: Final = HEADER.size
"""The header of a record batch (magic 2), which `max.message.bytes` counts too."""
ACCOUNTED_BYTES: Final = 16384
"""A batch updates the budgets at the latest after this many bytes, and at the end of each event-loop turn: their level
is exact between turns, and behind by at most this much per partition within one."""


_NO_OWNER: Final = object()
"""The owner of an empty run: it is no real owner, so the first record always starts a run."""


class OwnerShare(msgspec.Struct, eq=False):
    """The tickets of one owner in one batch."""

    owner: Owner | None  # None means that no caller needs the outcome
    # the connection's budget (the owner's attribute `budget`), in addition to those of the topic and the process
    budget: ConnectionBudget | None
    protocol: str  # of the client that waits for the outcome (the owner's attribute `protocol`); "" if none does
    tokens: list[Any] = []  # in order of submission
    runs: list[tuple[int, int]] = []  # positions in the batch as half-open ranges; together as long as `tokens`
    bytes: int = 0  # counted in the budgets

    def offsets(self, base: int) -> Sequence[int]:
        """Return the offsets of `tokens` in a batch stored at `base`; all are -1 when Kafka returned no offset."""
        if base < 0:
            return [-1] * len(self.tokens)
        if len(self.runs) == 1:
            first, behind = self.runs[0]
            return range(base + first, base + behind)
        return [base + position for first, behind in self.runs for position in range(first, behind)]


def owner_id(owner: Owner | None) -> int:
    """Return the id of the owner that this one acts for (`Owner.acts_for`)."""
    return id(None if owner is None else owner.acts_for)


class Batch(WrittenBatch):
    """An aiokafka batch builder that also keeps the tickets and updates the budgets.

    The publisher appends through `write` and updates the counts itself; aiokafka's `append` must not be used.

    Attributes:
        write: `Records.append`: `write(timestamp ms, key, value, headers)`; returns the record's size, or 0 when
            the batch is full; the first record always fits.
        add_token: appends to the current run's tokens.
    """

    def __init__(self, limit: int, budget: Budget, codec: Codec | None = None) -> None:
        self._writer = Records(limit, codec)
        self._codec = codec
        super().__init__(self._writer, limit)
        self.limit = limit
        self.budget = budget
        self.write = self._writer.append
        self.bytes = 0  # size of the records
        self.account_at = 0  # call `account` when `bytes` reaches it
        self.owner: Any = _NO_OWNER  # of the current run; see `switch_owner`
        self.born = 0.0  # time of the first record, by the loop's clock
        self.pinned: list[int] = []  # positions of records whose senders named the partition
        self.shares: dict[int, OwnerShare] = {}
        self.withdrawn: Set[int] = frozenset()  # owners (by id) whose records are not resent; see `do_not_resend`
        self._share: OwnerShare | None = None
        self._run_position = 0
        self._counted_bytes = 0  # in the budgets, up to the last record that is counted
        self._counted_records = 0

    def switch_owner(self, owner: Owner | None) -> None:
        """Start a run of records of `owner` at the current position; its first record is not counted yet."""
        self.end_run()
        share = self.shares.get(id(owner))
        if share is None:
            share = OwnerShare(owner, None, "") if owner is None else OwnerShare(owner, owner.budget, owner.protocol)
            self.shares[id(owner)] = share
        self._share = share
        self.owner = owner
        self.add_token = share.tokens.append

    def add_records(self, timestamp: int, records: list[Record], tokens: Sequence[Any], first: int) -> int:
        """Add records of the current run's owner, with their tokens, from `first` on; see `Records.append_records`.

        Returns:
            How many were added. It stops before a record that does not fit or cannot be written.
        """
        share = self._share
        assert share is not None
        begin = first
        while first < len(records):
            count, size = self._writer.append_records(timestamp, records, first, self.account_at - self.bytes)
            if not count:
                break
            share.tokens += tokens[first : first + count]
            self.count += count
            self.bytes += size
            if self.bytes >= self.account_at:
                self.account()
            first += count
        return first - begin

    def senders(self) -> Iterable[Hashable]:
        """Return whose records it has: connections by their budgets, and clients whose requests have none by name."""
        for share in self.shares.values():
            yield share.budget if share.budget is not None or share.owner is None else share.owner.principal

    def end_run(self) -> None:
        """Close the current run. `switch_owner` must be called before the next record."""
        share = self._share
        if share is None:
            return
        self.account()
        if self.count > self._run_position:
            share.runs.append((self._run_position, self.count))
        elif not share.tokens:
            del self.shares[id(share.owner)]  # its first record did not fit
        self._run_position = self.count
        self._share = None
        self.owner = _NO_OWNER

    def account(self) -> None:
        """Count the records since the last call in the budgets. All of them belong to the current run."""
        share, size, records = self._share, self.bytes - self._counted_bytes, self.count - self._counted_records
        self.account_at = self.bytes + ACCOUNTED_BYTES
        if share is not None and records:
            self._note_counted(share, size)
            self.budget.take(size, records)
            if share.budget is not None:
                share.budget.take(size, records, self.budget)

    def _note_counted(self, share: OwnerShare, size: int) -> None:
        share.bytes += size
        self._counted_bytes, self._counted_records = self.bytes, self.count

    def seal(self) -> None:
        """Close the batch, ready for aiokafka's producer."""
        self.end_run()
        self.finish(self.count)

    def release(self) -> None:
        """Release what the batch has taken from the budgets; once, after its tickets were settled."""
        shares = self.shares.values()
        self.budget.give(sum([share.bytes for share in shares]), sum([len(share.tokens) for share in shares]))
        for share in shares:
            if share.budget is not None:
                share.budget.give(share.bytes, len(share.tokens))
        self.shares = {}  # aiokafka may hold on to the batch

    # After a failure the batch must be rebuilt: its bytes have a sequence number that will not be used again.

    def rebuild(self) -> Batch:
        """Return a new batch with the same records and tickets, for another producer. This one is void then."""
        batch = self._rebuild_at(range(self.count))
        self._pass_on_counted(batch)
        return batch

    def halves(self) -> tuple[Batch, Batch]:
        """Return two new batches, in order, to find the record that the broker refuses. This one is void then."""
        middle = self.count // 2
        left, right = self._rebuild_at(range(middle)), self._rebuild_at(range(middle, self.count))
        self._pass_on_counted(left, right)
        return left, right

    def unpack(self, topic: str, partition: int) -> Iterator[tuple[Record, Owner | None, Any]]:
        """Yield the records as they were submitted, with owner and token, in order. `release` the batch afterwards.

        `partition` is the batch's partition; only records whose senders named it get it.
        """
        pinned = frozenset(self.pinned)
        for position, record, share, token in self._contents():
            named = partition if position in pinned else None
            headers = tuple(record.headers)
            yield Record(topic, record.key, record.value, headers, record.timestamp, named), share.owner, token

    def without(self, owners: Set[int]) -> Batch | None:
        """Move the records of all other owners to a new batch, if there are any; keep those of `owners` (by id)."""
        kept = {key: share for key, share in self.shares.items() if owner_id(share.owner) in owners}
        for key in kept:
            del self.shares[key]
        fresh = None
        if self.shares:
            fresh = self._rebuild_at(range(self.count))
            self._pass_on_counted(fresh)
            fresh.withdrawn -= owners
        self.shares = kept
        self.void()
        return fresh

    def do_not_resend(self, owners: Set[int]) -> None:
        """Do not resend these owners' records (by id): another gateway stores them now.

        Exception: a batch that may be stored already and also has other owners' records is resent as it is. That stores
        it once; rebuilt without these records it could be stored twice.
        """
        self.withdrawn |= owners
        self._drop_withdrawn()

    def attempt_failed(self, may_be_stored: bool) -> None:
        """Prepare the batch to be sent again; `withdrawn` owners' records are not."""
        super().attempt_failed(may_be_stored)
        if self.withdrawn:
            self._drop_withdrawn()

    def _drop_withdrawn(self) -> None:
        others = any(owner_id(share.owner) not in self.withdrawn for share in self.shares.values())
        if others and self.may_be_stored:
            self.finish(self.count)
        else:
            self.void()

    def has_records_of(self, owners: Set[int]) -> bool:
        """Whether it has records of one of these owners (by id)."""
        return any(owner_id(share.owner) in owners for share in self.shares.values())

    def _rebuild_at(self, positions: Container[int]) -> Batch:
        batch = Batch(self.limit, self.budget, self._codec)
        batch.born, batch.withdrawn = self.born, self.withdrawn
        pinned = frozenset(self.pinned)
        for position, record, share, token in self._contents():
            if position not in positions:
                continue
            if share.owner is not batch.owner:
                batch.switch_owner(share.owner)
                batch.shares[id(share.owner)].budget = share.budget
            size = batch.write(record.timestamp, record.key, record.value, list(record.headers))
            batch.add_token(token)
            if position in pinned:
                batch.pinned.append(batch.count)
            batch.count += 1
            batch.bytes += size
            batch._note_counted(batch.shares[id(share.owner)], size)  # by the batch that it comes from
        batch.seal()
        return batch

    def _pass_on_counted(self, *successors: Batch) -> None:
        """Pass what this batch has counted in the budgets on, to the byte: a record is smaller at a lower position."""
        for owner, share in self.shares.items():
            *others, last = [successor.shares[owner] for successor in successors if owner in successor.shares]
            last.bytes = share.bytes - sum(part.bytes for part in others)

    def _contents(self) -> Iterator[tuple[int, Any, OwnerShare, Any]]:
        """Yield the records that have a share, in order: position, parsed record, share and token.

        The batch itself does not change: aiokafka may still send it.
        """
        tickets: list[tuple[OwnerShare, Any] | None] = [None] * self.count
        for share in self.shares.values():
            tokens = iter(share.tokens)
            for first, behind in share.runs:
                for position in range(first, behind):
                    tickets[position] = (share, next(tokens))
        records = DefaultRecordBatch(self.stored_form())
        for position, (record, ticket) in enumerate(zip(records, tickets, strict=True)):
            if ticket is not None:
                yield position, record, *ticket
