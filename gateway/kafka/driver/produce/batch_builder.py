"""An aiokafka batch whose records are encoded by the gateway: only what aiokafka's sender needs of a batch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

from aiokafka.producer.message_accumulator import BatchBuilder


class RecordWriter(Protocol):
    """Encodes the records: `gateway.kafka.publish.batch_format.Records`. aiokafka's sender calls these methods."""

    def set_producer_state(self, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
        """Set the producer's id and epoch, and the sequence number of the first record."""

    def build(self) -> bytearray:
        """Return the batch in Kafka's storage format."""

    def size(self) -> int:
        """Return the bytes written so far."""


class WrittenBatch(BatchBuilder):  # type: ignore[misc]  # aiokafka carries no types
    """An aiokafka batch builder that wraps a `RecordWriter`; aiokafka's `append` must not be used."""

    def __init__(self, writer: RecordWriter, limit: int) -> None:
        """`limit` is in bytes."""
        super().__init__(limit, 0)
        self.count = 0  # records
        self.numbered = False  # the sender has assigned its sequence number: it has sent the batch or is about to
        self.may_be_stored = False  # an attempt has failed with an error after which the batch may be in the log
        self._builder = writer

    def senders(self) -> Iterable[Hashable]:
        """Return whose records it has: the connections, or clients."""
        raise NotImplementedError

    def finish(self, count: int) -> None:
        """Close the batch with `count` records, ready for aiokafka's producer."""
        self._relative_offset = count
        self.close()

    def void(self) -> None:
        """Make the batch empty: an empty batch is dropped instead of sent (again)."""
        self._relative_offset = 0

    def attempt_failed(self, may_be_stored: bool) -> None:
        """Note a failed attempt. aiokafka may send the batch again under its sequence number, so it is stored once."""
        self.may_be_stored |= may_be_stored

    def stored_form(self) -> bytes:
        """Return the bytes that were, or would be, sent; the batch itself does not change."""
        return bytes(self._builder.build() if self._buffer is None else self._buffer)

    def _set_producer_state(self, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
        """Called by aiokafka, whose own method asserts its own kind of writer."""
        self.numbered = True
        self._builder.set_producer_state(producer_id, producer_epoch, base_sequence)
