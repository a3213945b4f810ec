"""The partition of a key, as every producer of its topic sees it; and records by their partitions."""

try:
    from gateway.kafka.publish._native import by_partition, partition_of
except ImportError:  # not built, or not wanted: `gateway.native` tells
    from gateway.kafka.publish.murmur2 import by_partition, partition_of

__all__ = ["by_partition", "partition_of"]
