"""The progress of each replay: a compacted topic, written in the same transactions as the replayed records.

So a record and its progress are both stored or both not, whenever a process is killed. There is no other state, and no
checkpoint.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaConsumer

from spark_sinks.replay.items import Place
from spark_sinks.replay.kafka import CommittedReader, LogReader, partitions_of

LEDGER: Final = "__trivium_replays"
SETTINGS: Final = {"cleanup.policy": "compact", "segment.bytes": str(16 << 20), "retention.ms": "-1"}
_PLACE: Final = Place(LEDGER, 0)
PATIENCE_S: Final = 120.0
"""How long other jobs' open transactions may hide entries of the ledger; longer than any of ours lasts."""

Positions = dict[str, dict[int, int]]
"""Topic -> partition -> offset."""


class LedgerError(RuntimeError):
    """The ledger cannot be used; the message says why."""


class LedgerEntry(msgspec.Struct, kw_only=True):
    """The ledger's entry of a replay."""

    task: str  # kind, source and target; the name cannot be used for another task
    began: Positions  # start offsets of the first run
    positions: Positions  # next offsets: all earlier records were replayed or unfit
    records: int = 0  # replayed
    unfit: int = 0  # records that could not be replayed
    repeated: int = 0  # skipped: another dead letter of the same record was replayed
    memo: Any = None  # state of an audit


def positions_of(places: dict[Place, int]) -> Positions:
    """Convert offsets to the ledger's form."""
    positions: Positions = {}
    for place, offset in sorted(places.items()):
        positions.setdefault(place.topic, {})[place.partition] = offset
    return positions


def places_of(positions: Positions) -> dict[Place, int]:
    """Convert offsets from the ledger's form."""
    return {
        Place(topic, partition): offset
        for topic, partitions in positions.items()
        for partition, offset in partitions.items()
    }


async def read(committed: CommittedReader, plain: AIOKafkaConsumer, name: str) -> LedgerEntry | None:
    """Return the newest entry of a replay. Call it after its transactional producer has started.

    Starting the producer ends the transaction of an earlier run. Open transactions of other jobs may hide later
    entries, also ours, so the topic is read up to its end as seen without transactions.

    Args:
        committed: a started consumer; its assignment is changed.
        plain: a started consumer of all records, to look up the topic's end.
        name: the replay's name.

    Raises:
        LedgerError: another job's transaction hides the end for too long, or an entry is not valid or cannot be read.
    """
    [end] = (await plain.end_offsets(partitions_of([_PLACE]))).values()
    content: bytes | None = None
    at = -1
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader = LogReader(committed, {_PLACE: 0}, {_PLACE: end})
            async for record in reader.records():
                if record.key == name.encode():
                    content, at = record.value, record.offset
    except TimeoutError as error:
        raise LedgerError(f"an open transaction of another job hides the end of {LEDGER}; try again later") from error
    if hidden := [gap for gap in reader.unreadable() if gap.first > at]:
        raise LedgerError(f"the newest entry of {name} may be in what nothing can read: {hidden[0]}")
    try:
        return None if content is None else msgspec.json.decode(content, type=LedgerEntry)
    except msgspec.DecodeError as error:
        raise LedgerError(f"the entry of {name} in {LEDGER} is not valid: {error}") from error
