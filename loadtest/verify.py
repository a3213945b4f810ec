"""Reads what arrived and says what is lost, doubled or out of order: the judge of every acknowledgement."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer

from loadtest.numbering import Number, Numbering


class Verdict(NamedTuple):
    """What the verifier found. Lost: acknowledged to the sender and not there."""

    acknowledged: int
    stored: int
    lost: int
    duplicated: int
    reordered: int
    unacknowledged_stored: int

    @property
    def honest(self) -> bool:
        """Nothing that was acknowledged is missing."""
        return self.lost == 0

    def row(self) -> dict[str, int]:
        """As columns of a report."""
        return dict(self._asdict())


class Ledger:
    """What the senders were told: the acknowledged sequence numbers of each sender."""

    def __init__(self) -> None:
        self.acknowledged: dict[int, set[int]] = collections.defaultdict(set)

    def acknowledge(self, sender: int, sequence: int) -> None:
        """The sender got a positive acknowledgement for this message."""
        self.acknowledged[sender].add(sequence)

    def acknowledge_run(self, sender: int, first: int, behind: int) -> None:
        """The same for the sequence numbers from `first` to before `behind`."""
        self.acknowledged[sender].update(range(first, behind))

    @property
    def total(self) -> int:
        """How many acknowledgements there are."""
        return sum(len(sequences) for sequences in self.acknowledged.values())


class Arrivals:
    """Messages in the order in which one reader saw them, per sender."""

    def __init__(self) -> None:
        self._seen: dict[int, set[int]] = collections.defaultdict(set)
        self._highest: dict[int, int] = {}
        self.duplicated = 0
        self.reordered = 0

    def add(self, number: Number) -> None:
        """A message was read. A first arrival below an earlier one of its sender is out of order."""
        seen = self._seen[number.sender]
        if number.sequence in seen:
            self.duplicated += 1
            return
        seen.add(number.sequence)
        highest = self._highest.get(number.sender, -1)
        if number.sequence < highest:
            self.reordered += 1
        else:
            self._highest[number.sender] = number.sequence

    @property
    def total(self) -> int:
        """How many different messages arrived."""
        return sum(len(sequences) for sequences in self._seen.values())

    def judge(self, ledger: Ledger) -> Verdict:
        """Hold what arrived against what was acknowledged."""
        acknowledged: Mapping[int, set[int]] = ledger.acknowledged
        lost = sum(len(sequences - self._seen[sender]) for sender, sequences in acknowledged.items())
        extra = sum(len(seen - acknowledged.get(sender, set())) for sender, seen in self._seen.items())
        return Verdict(ledger.total, self.total, lost, self.duplicated, self.reordered, extra)


async def read_topic(bootstrap: str, topic: str, numbering: Numbering) -> Arrivals:
    """Read a topic from its beginning to the end it has now.

    Each sender must have kept to one key (or one partition), or reordering between partitions shows as such.
    """
    # Without a group the consumer is given every partition of the topic at its start.
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest", enable_auto_commit=False
    )
    try:
        await consumer.start()
        partitions = sorted(consumer.assignment())
        if not partitions:
            raise LookupError(f"no topic {topic}")
        ends = await consumer.end_offsets(partitions)
        arrivals = Arrivals()
        while any([await consumer.position(partition) < ends[partition] for partition in partitions]):
            for records in (await consumer.getmany(timeout_ms=1000, max_records=5000)).values():
                for record in records:
                    number = numbering.read(record.value)
                    if number is not None:
                        arrivals.add(number)
        return arrivals
    finally:
        await consumer.stop()
