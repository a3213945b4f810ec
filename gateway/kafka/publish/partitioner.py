"""Choose the partition of a key as the Java client does, so that all producers agree, and group records by it.

The hash is murmur2 as in `org.apache.kafka.common.utils.Utils.murmur2`; tests/vectors/murmur2.json has the Java
client's results.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.kafka.publish._native import by_partition, partition_of

__all__ = ["Accepted", "by_partition", "partition_of"]


class Accepted(NamedTuple):
    """What a topic accepts in a run of records."""

    partitions: int  # the number of its partitions
    keyless: int  # the partition of records without a key; -1 if it is not chosen yet
    oldest: int  # the earliest timestamp, in milliseconds
    latest: int
    headers: int  # the most headers of a record
