"""Writes records and their ledger entry atomically in one Kafka transaction."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaProducer
from aiokafka.errors import InvalidProducerEpoch, KafkaError, MessageSizeTooLargeError, ProducerFenced
from aiokafka.partitioner import murmur2

from spark_sinks.replay.items import Item, marked
from spark_sinks.replay.kafka import ReplayTarget
from spark_sinks.replay.ledger import LEDGER, LedgerEntry
from spark_sinks.replay.order import target_partition

TRANSACTION_MS: Final = 60_000
"""Kafka aborts a transaction that is open for longer than this."""
LARGEST: Final = 64 << 20


class ReplacedError(RuntimeError):
    """A later run of the same replay has started and replaces this one."""


class Writer:
    """The transactional producer of one replay. Starting another with the same name fences this one.

    Args:
        settings: arguments for aiokafka.
        name: the replay's name.
    """

    def __init__(self, settings: Mapping[str, Any], name: str) -> None:
        self.late = 0  # records older than their topic's retention
        self._name = name
        self._producer = AIOKafkaProducer(
            **settings,
            transactional_id=f"trivium-replay-{name}",
            transaction_timeout_ms=TRANSACTION_MS,
            max_batch_size=256 << 10,
            linger_ms=5,
            max_request_size=LARGEST,
        )

    async def start(self) -> None:
        """Fence an earlier run, and abort the transaction that it left."""
        await self._producer.start()

    async def stop(self) -> None:
        """Close the producer."""
        await self._producer.stop()

    async def commit(self, fill: Callable[[], Awaitable[LedgerEntry]]) -> None:
        """Commit one transaction with the records that `fill` sends and the entry that it returns.

        Raises:
            ReplacedError: another run has started.
            KafkaError: the outcome is unknown; the ledger shows it.
        """
        producer = self._producer
        try:
            await producer.begin_transaction()
            try:
                entry = await fill()
                await producer.send(LEDGER, msgspec.json.encode(entry), self._name.encode())
            except BaseException:
                with contextlib.suppress(KafkaError):  # Kafka or the next run aborts it later
                    await producer.abort_transaction()
                raise
            await producer.commit_transaction()
        except (ProducerFenced, InvalidProducerEpoch) as error:
            raise ReplacedError(f"another run of {self._name} has started and replaces this one") from error

    async def send(
        self, item: Item, target: ReplayTarget, origin_partitions: int | None, *, original_time: bool
    ) -> str | None:
        """Send an item within `commit`; return why its topic cannot accept it, or None."""
        now = round(time.time() * 1000)
        by_key = -1 if item.key is None else (murmur2(item.key) & 0x7FFFFFFF) % target.partitions
        partition = target_partition(item, target.name, target.partitions, origin_partitions, by_key)
        timestamp = target.timestamp(item.timestamp if original_time else None, now)
        self.late += target.forgets(timestamp, now)
        headers = marked(item, self._name)
        if (size := _size(item, headers)) > target.max_message_bytes:
            return f"{target.name} accepts {target.max_message_bytes:,} bytes, but the record has {size:,} with origin"
        try:
            await self._producer.send(
                target.name, item.value, item.key, partition, timestamp_ms=timestamp, headers=headers
            )
        except MessageSizeTooLargeError as error:
            return str(error)
        return None

    async def send_plain(self, topic: str, key: bytes, value: bytes, headers: Sequence[tuple[str, bytes]]) -> None:
        """Send one of the job's own records within `commit`."""
        await self._producer.send(topic, value, key, headers=list(headers))


def _size(item: Item, headers: Sequence[tuple[str, bytes | None]]) -> int:
    """Return an upper limit for the size of a record batch with only this record."""
    size = 61 + 21 + 10 + len(item.key or b"") + len(item.value or b"")
    return size + sum(10 + len(name.encode()) + len(value or b"") for name, value in headers)
