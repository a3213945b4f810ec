"""A batch of aiokafka whose records are written by somebody else: what its sender asks of a batch, and no more."""

from __future__ import annotations

from typing import Protocol

from aiokafka.producer.message_accumulator import BatchBuilder


class RecordWriter(Protocol):
    """What writes the records: `gateway.kafka.publish.batch_format.Records`; aiokafka's sender asks for these verbs."""

    def set_producer_state(self, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
        """Number the batch in its producer's sequence."""

    def build(self) -> bytearray:
        """The batch, in the form in which Kafka stores it."""

    def size(self) -> int:
        """Bytes so far."""


class WrittenBatch(BatchBuilder):  # type: ignore[misc]  # aiokafka carries no types
    """A batch builder around a writer; `append` of aiokafka is not for use."""

    def __init__(self, writer: RecordWriter, limit: int) -> None:
        """`limit`: bytes."""
        super().__init__(limit, 0)
        self.taken = False  # by the sender, which has numbered it: it has sent it or is about to
        self.may_be_stored = False  # a try has failed in a way that does not tell
        self._builder = writer

    def finish(self, count: int) -> None:
        """No more records than these `count`: make it what aiokafka's producer takes."""
        self._relative_offset = count
        self.close()

    def void(self) -> None:
        """Nobody waits for it any more: aiokafka's sender drops an empty batch instead of sending it (again)."""
        self._relative_offset = 0

    def has_failed(self, may_be_stored: bool) -> None:
        """A try to store it has failed; aiokafka may send it again under its number, so that it is stored once."""
        self.may_be_stored |= may_be_stored

    def stored_form(self) -> bytes:
        """The batch as it was, or would be, sent; it is left as it is."""
        return bytes(self._builder.build() if self._buffer is None else self._buffer)

    def _set_producer_state(self, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
        """Called by aiokafka; its own method takes its own writer for granted."""
        self.taken = True
        self._builder.set_producer_state(producer_id, producer_epoch, base_sequence)
