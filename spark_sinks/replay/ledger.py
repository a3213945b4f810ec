"""How far each replay is: a compacted topic, written in the same transactions as what is replayed.

So a record is replayed and noted, or neither, whatever is killed when. Nothing else is kept anywhere: no checkpoint.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition

from spark_sinks.replay.items import Place
from spark_sinks.replay.kafka import Topics

LEDGER: Final = "__trivium_replays"
SETTINGS: Final = {"cleanup_policy": "compact", "segment_bytes": str(16 << 20), "retention_ms": "-1"}
_PLACE: Final = TopicPartition(LEDGER, 0)
PATIENCE_S: Final = 120.0
"""How long others' open transactions may hide what was written to the ledger: longer than any of ours lasts."""

Positions = dict[str, dict[int, int]]
"""Topic -> partition -> offset."""


class LedgerError(RuntimeError):
    """The ledger cannot be used; the text says why."""


class Entry(msgspec.Struct, kw_only=True):
    """What the ledger knows of a replay."""

    task: str  # what it is: kind, source and target. A replay of this name that is another's is refused
    began: Positions  # where its first run began
    positions: Positions  # everything before was replayed, or found unfit
    records: int = 0  # replayed
    unfit: int = 0  # could not be replayed
    repeated: int = 0  # left out: the same origin was replayed before
    memo: Any = None  # what else a job remembers


def positions_of(places: dict[Place, int]) -> Positions:
    """As the ledger has them."""
    found: Positions = {}
    for place, offset in sorted(places.items()):
        found.setdefault(place.topic, {})[place.partition] = offset
    return found


def places_of(positions: Positions) -> dict[Place, int]:
    """The other way."""
    return {
        Place(topic, partition): offset
        for topic, partitions in positions.items()
        for partition, offset in partitions.items()
    }


async def prepare(topics: Topics) -> None:
    """Make the ledger's topic unless it is there."""
    await topics.make(LEDGER, **SETTINGS)


async def read(committed: AIOKafkaConsumer, plain: AIOKafkaConsumer, name: str) -> Entry | None:
    """The newest entry of a replay; call it when its transactional producer has started.

    That has ended an earlier run's transaction. Others' open ones may hide what lies behind them, also of ours: so it
    is read up to where the topic ends for everybody.

    Args:
        committed: a started consumer that sees what is committed; its assignment is changed.
        plain: a started one that sees everything, to ask where the topic ends.
        name: the replay's.

    Raises:
        LedgerError: something of somebody else's hides the rest for too long, or an entry cannot be read.
    """
    end = (await plain.end_offsets([_PLACE]))[_PLACE]
    committed.assign([_PLACE])
    await committed.seek_to_beginning(_PLACE)
    found: bytes | None = None
    deadline = time.monotonic() + PATIENCE_S
    while await committed.position(_PLACE) < end:
        for record in (await committed.getmany(_PLACE, timeout_ms=200)).get(_PLACE, ()):
            if record.key == name.encode():
                found = record.value
        if time.monotonic() > deadline:
            raise LedgerError(f"an open transaction of another job hides the end of {LEDGER}; try again later")
    try:
        return None if found is None else msgspec.json.decode(found, type=Entry)
    except msgspec.DecodeError as error:
        raise LedgerError(f"the entry of {name} in {LEDGER} cannot be read: {error}") from error
