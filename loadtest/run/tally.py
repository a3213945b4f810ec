"""Compares the acknowledged messages of a load test with Kafka, using one byte per message."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Mapping, Sequence

from loadtest.run.shapes import DUE
from loadtest.verify import Verdict, stored


class Tally:
    """Counts how often each message of a run was found in Kafka.

    Args:
        sent: the number of messages each sender has sent.
    """

    def __init__(self, sent: Mapping[int, int]) -> None:
        self._counts = {sender: bytearray(count) for sender, count in sent.items()}
        self._highest: dict[tuple[int, int], int] = collections.defaultdict(lambda: -1)
        self._reordered = 0

    def found(self, sender: int, sequence: int, partition: int) -> None:
        """Count a stored message, and check its order among its sender's messages in the partition."""
        counts = self._counts[sender]
        counts[sequence] = min(255, counts[sequence] + 1)
        if counts[sequence] > 1:
            return
        if sequence < self._highest[sender, partition]:
            self._reordered += 1
        else:
            self._highest[sender, partition] = sequence

    def verdict(self, acknowledged: Mapping[int, Iterable[Sequence[int]]]) -> Verdict:
        """Return the verdict; `acknowledged` has ranges (first, end exclusive) of sequence numbers for each sender."""
        runs = [(self._counts[sender], run) for sender, some in acknowledged.items() for run in some]
        acknowledged_count = sum(behind - first for _, (first, behind) in runs)
        lost = sum(counts.count(0, first, behind) for counts, (first, behind) in runs)
        there = sum(len(counts) - counts.count(0) for counts in self._counts.values())
        again = sum(map(sum, self._counts.values())) - there
        return Verdict(acknowledged_count, there, lost, again, self._reordered, there - (acknowledged_count - lost))


async def read(bootstrap: str, topic: str, run: str, tally: Tally) -> None:
    """Count the run's messages in a topic."""
    wanted = run.encode()
    async with contextlib.aclosing(stored(bootstrap, topic)) as records:
        async for record in records:
            match = DUE.search(record.value or b"")
            if match is not None and match[1] == wanted:
                tally.found(int(match[2]), int(match[3]), record.partition)
