"""Compares acknowledged messages with those that arrived: which are lost, duplicated or out of order."""

from __future__ import annotations

import collections
from collections.abc import AsyncGenerator, Container
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer
from aiokafka.structs import ConsumerRecord

from loadtest.numbering import Number, Numbering


class Verdict(NamedTuple):
    """The verifier's result. A message is lost if it was acknowledged to its sender but is not there."""

    acknowledged: int
    stored: int
    lost: int
    duplicated: int
    reordered: int
    unacknowledged_stored: int

    def row(self) -> dict[str, int]:
        """Return the columns of a report."""
        return dict(self._asdict())

    def problems(self, *, once: bool = False, ordered: bool = True) -> list[str]:
        """Return the violations: of what was acknowledged, and if it is promised, of once and of the order."""
        found = [
            (self.lost, f"of {self.acknowledged} acknowledged messages are lost"),
            (once * self.duplicated, "messages are stored more than once"),
            (ordered * self.reordered, f"of {self.stored} messages are out of order"),
        ]
        problems = [f"{count} {what}" for count, what in found if count]
        return problems if self.acknowledged else [*problems, "nothing was acknowledged"]


class Ledger:
    """The acknowledged sequence numbers of each sender."""

    def __init__(self) -> None:
        self.acknowledged: dict[int, set[int]] = collections.defaultdict(set)

    def acknowledge(self, sender: int, sequence: int) -> None:
        """Record that a message was acknowledged to its sender."""
        self.acknowledged[sender].add(sequence)

    def acknowledge_run(self, sender: int, first: int, behind: int) -> None:
        """Record the sequence numbers from `first` to before `behind`."""
        self.acknowledged[sender].update(range(first, behind))

    @property
    def total(self) -> int:
        """The number of acknowledged messages."""
        return sum(len(sequences) for sequences in self.acknowledged.values())

    def missing(self, there: Container[Number]) -> list[Number]:
        """Return the acknowledged messages that are not in `there`."""
        return [
            number
            for sender, sequences in self.acknowledged.items()
            for sequence in sorted(sequences)
            if (number := Number(sender, sequence)) not in there
        ]


class Arrivals:
    """The messages of a run that one reader received.

    Attributes:
        counts: how often each message arrived.
        reordered: messages that first arrived after a later one of their sender in the same partition.
        foreign: messages of other runs.
    """

    def __init__(self, numbering: Numbering) -> None:
        self.counts: collections.Counter[Number] = collections.Counter()
        self.reordered = 0
        self.foreign = 0
        self._numbering = numbering
        self._highest: dict[tuple[int, int], int] = {}

    def take(self, payload: bytes | None, partition: int = 0) -> bool:
        """Count a message; return whether it is of the run. Order is checked within each `partition`."""
        number = self._numbering.read(payload)
        if number is None:
            self.foreign += 1
            return False
        self.add(number, partition)
        return True

    def add(self, number: Number, partition: int = 0) -> None:
        """Count a message whose number is known."""
        self.counts[number] += 1
        if self.counts[number] > 1:
            return
        if number.sequence < self._highest.get((number.sender, partition), -1):
            self.reordered += 1
        else:
            self._highest[number.sender, partition] = number.sequence

    @property
    def total(self) -> int:
        """The number of different messages."""
        return len(self.counts)

    @property
    def duplicated(self) -> int:
        """The number of repeated messages."""
        return self.counts.total() - len(self.counts)

    def verdict(self, ledger: Ledger) -> Verdict:
        """Compare the messages with the acknowledged ones."""
        lost = len(ledger.missing(self.counts))
        extra = self.total - (ledger.total - lost)
        return Verdict(ledger.total, self.total, lost, self.duplicated, self.reordered, extra)


async def stored(
    bootstrap: str, topic: str, isolation: str = "read_uncommitted"
) -> AsyncGenerator[ConsumerRecord[bytes, bytes]]:
    """Yield the records of a topic up to its present end; LookupError if it does not exist."""
    # Without a group the consumer is assigned all of the topic's partitions when it starts.
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        isolation_level=isolation,
    )
    try:
        await consumer.start()
        partitions = sorted(consumer.assignment())
        if not partitions:
            raise LookupError(f"no topic {topic}")
        ends = await consumer.end_offsets(partitions)
        while any([await consumer.position(partition) < ends[partition] for partition in partitions]):
            for records in (await consumer.getmany(timeout_ms=1000, max_records=5000)).values():
                for record in records:
                    yield record
    finally:
        await consumer.stop()


async def read_topic(bootstrap: str, topic: str, numbering: Numbering, *, by_partition: bool = False) -> Arrivals:
    """Read the messages of a run from a topic.

    Each sender must use a single key or partition, or else different partitions look like reordering. With
    `by_partition` order is checked within each partition, for a topic whose partitions were increased.
    """
    arrivals = Arrivals(numbering)
    async for record in stored(bootstrap, topic):
        arrivals.take(record.value, record.partition if by_partition else 0)
    return arrivals


async def read_places(bootstrap: str, topic: str, numbering: Numbering, isolation: str) -> dict[Number, list[str]]:
    """Return where each message of the run is stored."""
    places: dict[Number, list[str]] = {}
    async for record in stored(bootstrap, topic, isolation):
        number = numbering.read(record.value)
        if number is not None:
            exchange = b"".join(value for name, value in record.headers if name == "mqtt.exchange")
            place = f"{record.partition}/{record.offset} at {record.timestamp / 1000:.3f}"
            places.setdefault(number, []).append(f"{place} {exchange.decode()}".strip())
    return places
