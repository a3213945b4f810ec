from gateway.kafka.publish.murmur2 import by_partition as by_partition
from gateway.kafka.publish.murmur2 import partition_of as partition_of
from gateway.kafka.publish.record_buffer import RecordBuffer as RecordBuffer
