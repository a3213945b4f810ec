"""One record batch on its way to Kafka, with the tickets of the records in it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence, Set
from typing import Any, Final

from aiokafka.record.default_records import DefaultRecordBatch

from flowcontrol.budget import Budget, ConnectionBudget
from gateway.kafka.contracts import Owner
from gateway.kafka.driver.batch_builder import WrittenBatch
from gateway.kafka.publish.batch_format import HEADER, Codec, Records
from mapping.record import Record

WITHDRAWN: Final = "another gateway has the session"
HEADER_BYTES: Final = HEADER.size
"""The header of a record batch (magic 2), which `max.message.bytes` counts too."""
ACCOUNTED_BYTES: Final = 16384
"""A batch reports to the budgets at the latest after this many bytes, and at the end of each loop turn: the
budgets' level is exact between turns and lags by at most this much per partition within one."""


class _Nobody:
    """Owner of nothing: the first record of a batch always begins a share."""


NOBODY: Final = _Nobody()


class Share:
    """The tickets of one owner in one batch.

    Attributes:
        taken: bytes and records that `budget` was told of.
    """

    __slots__ = ("budget", "bytes", "owner", "runs", "taken_bytes", "taken_records", "tokens")

    def __init__(self, owner: Owner | None, budget: ConnectionBudget | None) -> None:
        self.owner = owner  # whom to tell; None: nobody wants to know
        # the owner's own budget (its attribute `budget`), beside those of the topic and the process
        self.budget = budget
        self.tokens: list[Any] = []  # in order of submission
        # pairs of first and behind-last position in the batch; together as long as `tokens`
        self.runs: list[tuple[int, int]] = []
        self.bytes = 0  # size of the records in closed runs
        self.taken_bytes = 0
        self.taken_records = 0

    def offsets(self, base: int) -> Sequence[int]:
        """The offsets beside `tokens` in a batch that begins at `base`; -1 each when Kafka did not say."""
        if base < 0:
            return [-1] * len(self.tokens)
        if len(self.runs) == 1:
            first, behind = self.runs[0]
            return range(base + first, base + behind)
        return [base + position for first, behind in self.runs for position in range(first, behind)]


def stands_for(owner: Owner | None) -> int:
    """The id of whoever an owner stands for (its attribute `owner`), or of the owner."""
    return id(getattr(owner, "owner", owner))


class Batch(WrittenBatch):
    """A batch builder of aiokafka that also keeps the tickets and tells the budgets.

    The publisher appends through `write` and keeps the counts here; `append` of aiokafka is not for use.

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
        self.count = 0  # records in it
        self.bytes = 0  # their size
        self.mark = 0  # when `bytes` reaches it, call `account`
        self.owner: Any = NOBODY  # the owner of the current run; see `switch_owner`
        self.born = 0.0  # when the first record came, in the loop's clock
        self.pinned: list[int] = []  # the positions of records whose senders named the partition
        self.shares: dict[int, Share] = {}
        self.unwanted: Set[int] = frozenset()  # owners (by id) of whom nothing is sent again; see `not_again`
        self._share: Share | None = None
        self._run_position = 0
        self._run_bytes = 0
        self._taken_bytes = 0
        self._taken_records = 0

    def switch_owner(self, owner: Owner | None) -> None:
        """Begin a run of records of `owner` at the current position; its first record is not counted yet."""
        self.end_run()
        share = self.shares.get(id(owner))
        if share is None:
            share = Share(owner, getattr(owner, "budget", None))
            self.shares[id(owner)] = share
        self._share = share
        self.owner = owner
        self.add_token = share.tokens.append

    def add_records(self, timestamp: int, records: list[Record], tokens: Sequence[Any], first: int) -> int:
        """Add records of the current run's owner, with their tokens, from `first` on; see `Records.append_records`.

        Returns:
            How many were added, of which the budgets are told; fewer than there are when the next one needs a look.
        """
        share = self._share
        assert share is not None
        begin = first
        while first < len(records):
            count, size = self._writer.append_records(timestamp, records, first, self.mark - self.bytes)
            if not count:
                break
            share.tokens += tokens[first : first + count]
            self.count += count
            self.bytes += size
            if self.bytes >= self.mark:
                self.account()
            first += count
        return first - begin

    def end_run(self) -> None:
        """Close the current run; the next record must `switch_owner` its owner."""
        share = self._share
        if share is None:
            return
        self.account()
        if self.count > self._run_position:
            share.runs.append((self._run_position, self.count))
        elif not share.tokens:
            del self.shares[id(share.owner)]  # its first record did not fit
        share.bytes += self.bytes - self._run_bytes
        self._run_position = self.count
        self._run_bytes = self.bytes
        self._share = None
        self.owner = NOBODY

    def account(self) -> None:
        """Tell the budgets what came since the last time."""
        size = self.bytes - self._taken_bytes
        records = self.count - self._taken_records
        if records:
            self._taken_bytes = self.bytes
            self._taken_records = self.count
            self.budget.take(size, records)
        self.mark = self.bytes + ACCOUNTED_BYTES
        share = self._share
        if share is not None and share.budget is not None:
            size = share.bytes + self.bytes - self._run_bytes - share.taken_bytes
            records = len(share.tokens) - share.taken_records
            if records:
                share.taken_bytes += size
                share.taken_records += records
                share.budget.take(size, records, self.budget)

    def seal(self) -> None:
        """No more records: make it what aiokafka takes."""
        self.end_run()
        self.finish(self.count)

    def release(self) -> None:
        """Give back to the budgets everything that was taken; once, after the tickets were settled."""
        self.budget.give(self._taken_bytes, self._taken_records)
        self._taken_bytes = self._taken_records = 0
        for share in self.shares.values():
            if share.budget is not None:
                share.budget.give(share.taken_bytes, share.taken_records)
        self.shares = {}  # aiokafka may hold on to the batch

    # After a failure: the bytes are stamped with a sequence that will not be used again, so build anew.

    def again(self) -> Batch:
        """The same records and tickets in a fresh batch, for another producer. This one is void then."""
        batch = self._rebuilt(range(self.count))
        self._pass_on_taken(batch)
        return batch

    def halves(self) -> tuple[Batch, Batch]:
        """Two fresh batches, in order, to find the record that the broker refuses. This one is void then."""
        middle = self.count // 2
        left, right = self._rebuilt(range(middle)), self._rebuilt(range(middle, self.count))
        self._pass_on_taken(left, right)
        return left, right

    def apart(self, topic: str, partition: int) -> Iterator[tuple[Record, Owner | None, Any]]:
        """Its records with owner and token, in order, as they were submitted; `release` it when they are taken.

        `partition` is where it was to go: that of the records whose senders named it, the others have none.
        """
        pinned = frozenset(self.pinned)
        for position, (record, (owner, _, token)) in enumerate(zip(self._records(), self._tickets(), strict=True)):
            named = partition if position in pinned else None
            headers = tuple(record.headers)
            yield Record(topic, record.key, record.value, headers, record.timestamp, named), owner, token

    def _records(self) -> DefaultRecordBatch:
        """What it holds. aiokafka may still send it: it is left as it is."""
        return DefaultRecordBatch(self.stored_form())

    def without(self, owners: Set[int]) -> Batch | None:
        """The records of others than these owners (by id) in a fresh batch, if there are any; theirs are left here."""
        theirs = {key: share for key, share in self.shares.items() if stands_for(share.owner) in owners}
        for key in theirs:
            del self.shares[key]
        fresh = None
        if self.shares:
            fresh = self._rebuilt({place for one in self.shares.values() for run in one.runs for place in range(*run)})
            self._pass_on_taken(fresh)
            self._taken_bytes = sum(share.bytes for share in theirs.values())
            self._taken_records = sum(len(share.tokens) for share in theirs.values())
            fresh._taken_bytes -= self._taken_bytes
            fresh.unwanted -= owners
        self.shares = theirs
        self.void()
        return fresh

    def not_again(self, owners: Set[int]) -> None:
        """These owners' records (by id) are somebody else's to store: what was sent is answered, and not sent again.

        Unless it may be stored already and has records of others, too: sent again it is there once, built anew without
        these it could be there twice.
        """
        self.unwanted |= owners
        self._drop_unwanted()

    def has_failed(self, may_be_stored: bool) -> None:
        """See `WrittenBatch`; what is unwanted is not sent again."""
        super().has_failed(may_be_stored)
        if self.unwanted:
            self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        others = any(stands_for(share.owner) not in self.unwanted for share in self.shares.values())
        if others and self.may_be_stored:
            self.finish(self.count)
        else:
            self.void()

    def has_of(self, owners: Set[int]) -> bool:
        """Whether it has records of one of these owners (by id)."""
        return any(stands_for(share.owner) in owners for share in self.shares.values())

    def _rebuilt(self, positions: Container[int]) -> Batch:
        batch = Batch(self.limit, self.budget, self._codec)
        batch.born, batch.unwanted = self.born, self.unwanted
        tickets = list(self._tickets())
        pinned = frozenset(self.pinned)
        for position, record in enumerate(self._records()):
            if position not in positions:
                continue
            owner, budget, token = tickets[position]
            if owner is not batch.owner:
                batch._resume(owner, budget)
            size = batch.write(record.timestamp, record.key, record.value, list(record.headers))
            batch.add_token(token)
            if position in pinned:
                batch.pinned.append(batch.count)
            batch.count += 1
            batch.bytes += size
        batch._mark_taken()
        batch.seal()
        return batch

    def _resume(self, owner: Owner | None, budget: ConnectionBudget | None) -> None:
        self._mark_taken()
        self.switch_owner(owner)
        assert self._share is not None
        self._share.budget = budget

    def _pass_on_taken(self, *successors: Batch) -> None:
        """What this batch took is theirs to give back, to the byte: the same record is smaller further in front."""
        rest = self._taken_bytes
        for successor in successors[:-1]:
            rest -= successor._taken_bytes
        successors[-1]._taken_bytes = rest
        for owner, share in self.shares.items():
            parts = [successor.shares[owner] for successor in successors if owner in successor.shares]
            rest = share.taken_bytes
            for part in parts[:-1]:
                rest -= part.taken_bytes
            parts[-1].taken_bytes = rest

    def _mark_taken(self) -> None:
        """Count as taken what the budgets know already."""
        self._taken_bytes, self._taken_records = self.bytes, self.count
        share = self._share
        if share is not None:
            share.taken_bytes = share.bytes + self.bytes - self._run_bytes
            share.taken_records = len(share.tokens)

    def _tickets(self) -> Iterator[tuple[Owner | None, ConnectionBudget | None, Any]]:
        """Owner, budget and token per position."""
        tickets: list[Any] = [None] * self.count
        for share in self.shares.values():
            tokens = iter(share.tokens)
            for first, behind in share.runs:
                for position in range(first, behind):
                    tickets[position] = (share.owner, share.budget, next(tokens))
        return iter(tickets)
