from gateway.kafka.publish.record_buffer import RecordBuffer as RecordBuffer
