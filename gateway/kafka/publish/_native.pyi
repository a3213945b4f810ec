from collections.abc import Sequence
from typing import Any

from gateway.kafka.publish.partitioner import Accepted
from mapping.record import Record

def partition_of(key: bytes, partitions: int, /) -> int:
    """Return the partition that the Java client's default partitioner chooses for `key`."""

def by_partition(
    records: list[Record],
    tokens: list[Any],  # parallel to `records`
    start: int,  # index of the first record, which exists
    accepted: Accepted,
    /,
) -> tuple[int, dict[int, tuple[list[Record], list[Any]]]]:
    """Group records of one topic by partition, from `start` on, keeping their order.

    It stops before a record of another topic, with its own partition, a timestamp that the topic refuses or too many
    headers, or whose partition is not chosen.

    Returns:
        The index where it stopped, and by partition the records and tokens.
    """

class RecordBuffer:
    """Appends records to a bytearray, as in a Kafka batch (message format 2)."""

    count: int  # records written
    first: int  # timestamp of the first record; the others are encoded as differences from it
    last: int  # the latest timestamp

    def __init__(self, out: bytearray, limit: int) -> None:
        """`limit` is the largest size of `out` in bytes, but the first record always fits. Only it may resize `out`."""

    def append(
        self, timestamp: int, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]], /
    ) -> int:
        """Write a record.

        Returns:
            Its size in bytes, or 0 when it does not fit and was not written.

        Raises:
            OverflowError: the timestamp (milliseconds), or its difference from the first one, does not fit in 64 bits,
                or the record's length in 32.
            UnicodeEncodeError: a header's name cannot be encoded as UTF-8.
        """

    def append_records(self, timestamp: int, records: list[Record], start: int, most: int, /) -> tuple[int, int]:
        """Write the records from `start` on, as `append` does; `timestamp` is for those without one of their own.

        It stops when `most` bytes are reached (the last record may exceed them), or before a record that does not fit
        or cannot be written; `append` returns or raises the reason.

        Returns:
            How many were written, and their size in bytes.
        """
