"""Reads what arrived and says what is lost, doubled or out of order: the judge of every acknowledgement."""

from __future__ import annotations

import collections
from collections.abc import AsyncGenerator, Container
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer
from aiokafka.structs import ConsumerRecord

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

    def missing(self, there: Container[Number]) -> list[Number]:
        """What was acknowledged and is not there."""
        return [
            number
            for sender, sequences in self.acknowledged.items()
            for sequence in sorted(sequences)
            if (number := Number(sender, sequence)) not in there
        ]


class Arrivals:
    """Messages of a run as one reader saw them.

    Attributes:
        counts: how often each came.
        reordered: first arrivals below an earlier one of their sender in the same partition.
        foreign: messages that are not of the run.
    """

    def __init__(self, numbering: Numbering) -> None:
        self.counts: collections.Counter[Number] = collections.Counter()
        self.reordered = 0
        self.foreign = 0
        self._numbering = numbering
        self._highest: dict[tuple[int, int], int] = {}

    def take(self, payload: bytes | None, partition: int = 0) -> bool:
        """A message came; whether it is of the run. `partition`: within which order is judged."""
        number = self._numbering.read(payload)
        if number is None:
            self.foreign += 1
            return False
        self.add(number, partition)
        return True

    def add(self, number: Number, partition: int = 0) -> None:
        """The same, for one whose number is known."""
        self.counts[number] += 1
        if self.counts[number] > 1:
            return
        if number.sequence < self._highest.get((number.sender, partition), -1):
            self.reordered += 1
        else:
            self._highest[number.sender, partition] = number.sequence

    @property
    def total(self) -> int:
        """How many different messages arrived."""
        return len(self.counts)

    @property
    def duplicated(self) -> int:
        """How many came again."""
        return self.counts.total() - len(self.counts)

    def judge(self, ledger: Ledger) -> Verdict:
        """Hold what arrived against what was acknowledged."""
        lost = len(ledger.missing(self.counts))
        extra = self.total - (ledger.total - lost)
        return Verdict(ledger.total, self.total, lost, self.duplicated, self.reordered, extra)


async def stored(
    bootstrap: str, topic: str, isolation: str = "read_uncommitted", *, partition_bytes: int = 1 << 20
) -> AsyncGenerator[ConsumerRecord[bytes, bytes]]:
    """The records of a topic, from its beginning to the end it has now; LookupError when there is no such topic.

    `partition_bytes`: of a partition in one fetch.
    """
    # Without a group the consumer is given every partition of the topic at its start.
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        isolation_level=isolation,
        max_partition_fetch_bytes=partition_bytes,
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
    """What a topic has of a run.

    Each sender must have kept to one key (or one partition), or reordering between partitions shows as such; unless
    order is judged in each partition for itself, since the topic was given more of them.
    """
    arrivals = Arrivals(numbering)
    async for record in stored(bootstrap, topic):
        arrivals.take(record.value, record.partition if by_partition else 0)
    return arrivals


async def read_places(bootstrap: str, topic: str, numbering: Numbering, isolation: str) -> dict[Number, list[str]]:
    """Where each message of the run is stored."""
    places: dict[Number, list[str]] = {}
    async for record in stored(bootstrap, topic, isolation):
        number = numbering.read(record.value)
        if number is not None:
            exchange = b"".join(value for name, value in record.headers if name == "mqtt.exchange")
            place = f"{record.partition}/{record.offset} at {record.timestamp / 1000:.3f}"
            places.setdefault(number, []).append(f"{place} {exchange.decode()}".strip())
    return places
