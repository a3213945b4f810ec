"""The headers of dead letters and replayed records that name their origin."""

from __future__ import annotations

from typing import Final

ERROR: Final = "error"
"""Why a record is a dead letter. This header comes before the others."""
ORIGIN_TOPIC: Final = "origin.topic"
ORIGIN_PARTITION: Final = "origin.partition"
ORIGIN_OFFSET: Final = "origin.offset"
ORIGIN_TIMESTAMP: Final = "origin.timestamp"
"""Kafka's timestamp of the record, epoch milliseconds."""
ORIGIN_LENGTH: Final = "origin.length"
"""The original value's size in bytes, if a dead letter was cut to fit its topic."""
ORIGIN_REPLAY: Final = "origin.replay"
"""The name of the replay that wrote a record."""
