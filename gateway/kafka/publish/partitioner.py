"""The partition of a key, as every producer of its topic sees it."""

try:
    from gateway.kafka.publish._native import partition_of
except ImportError:  # not built, or not wanted: `gateway.native` tells
    from gateway.kafka.publish.murmur2 import partition_of

__all__ = ["partition_of"]
