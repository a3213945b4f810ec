"""The headers that say where a record comes from: of dead letters and of replayed records."""

from __future__ import annotations

from typing import Final

ERROR: Final = "error"
"""Of a dead letter: why it is one. It stands before the others."""
ORIGIN_TOPIC: Final = "origin.topic"
ORIGIN_PARTITION: Final = "origin.partition"
ORIGIN_OFFSET: Final = "origin.offset"
ORIGIN_TIMESTAMP: Final = "origin.timestamp"
"""Kafka's timestamp of the record, epoch milliseconds."""
ORIGIN_LENGTH: Final = "origin.length"
"""Bytes of the value of a dead letter that was cut."""
ORIGIN_REPLAY: Final = "origin.replay"
"""The name of the replay that wrote a record."""
