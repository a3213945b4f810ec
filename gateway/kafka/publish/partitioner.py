"""Choose the partition of a key, as the Java client does, and group records by partition; in C if it was built."""

from gateway.kafka.publish.murmur2 import Accepted

try:
    from gateway.kafka.publish._native import by_partition, partition_of
except ImportError:  # not built or switched off; see `gateway.native`
    from gateway.kafka.publish.murmur2 import by_partition, partition_of

__all__ = ["Accepted", "by_partition", "partition_of"]
