"""Makes dead letters: copies of undeliverable records in another topic, with the reason and the origin.

Key, value and headers are kept; headers `dead-letter.*` are added, which every protocol shows. The expiry is removed,
as people inspect dead letters later, and so are headers of the exchange between one client and the gateway.
"""

from __future__ import annotations

from typing import Final

import msgspec

from mapping.record import (
    DEAD_LETTER_ATTEMPTS,
    DEAD_LETTER_CONDITION,
    DEAD_LETTER_GROUP,
    DEAD_LETTER_OFFSET,
    DEAD_LETTER_PARTITION,
    DEAD_LETTER_PREFIX,
    DEAD_LETTER_REASON,
    DEAD_LETTER_TOPIC,
    EXPIRY,
    MQTT_EXCHANGE,
    MQTT_RETAIN,
    Headers,
    Received,
    Record,
)

REASON_LIMIT: Final = 1000  # characters of a receiver's text
_DROPPED: Final = (EXPIRY, MQTT_EXCHANGE, MQTT_RETAIN)
TOPIC_FIELD: Final = "{topic}"


class Cause(msgspec.Struct, frozen=True):
    """Why a record is a dead letter."""

    group: str  # the consumer group whose receivers did not accept it
    attempts: int  # number of deliveries
    condition: str  # a receiver's AMQP error, or one of `CONDITION_*`
    reason: str = ""  # one line of text for people


CONDITION_REJECTED: Final = "rejected"  # the receiver gave no error of its own
CONDITION_ATTEMPTS: Final = "too-many-attempts"
CONDITION_UNDELIVERABLE: Final = "undeliverable-here"


def dead_letter_topic(template: str, record: Received) -> str | None:
    """Return the topic for a record's dead letter; None if the record is already in its dead letter topic."""
    name = template.replace(TOPIC_FIELD, record.topic)
    origin = next((value for header, value in record.headers if header == DEAD_LETTER_TOPIC), None)
    if name == record.topic:
        return None
    if origin is not None and template.replace(TOPIC_FIELD, origin.decode(errors="replace")) == record.topic:
        return None
    return name


def refused_letter(record: Record, topic: str, condition: str, reason: str) -> Record:
    """Make the dead letter, for `topic`, of a message that could not be stored in its own topic."""
    kept = tuple((name, value) for name, value in record.headers if name not in _DROPPED)
    added: Headers = (
        (DEAD_LETTER_TOPIC, record.topic.encode()),
        (DEAD_LETTER_CONDITION, condition.encode()),
        (DEAD_LETTER_REASON, reason[:REASON_LIMIT].encode(errors="replace")),
    )
    return Record(topic, record.key, record.value, (*kept, *added))


def dead_letter(record: Received, topic: str, cause: Cause) -> Record:
    """Make the dead letter, for `topic`, of a stored record."""
    kept = [
        (name, value)
        for name, value in record.headers
        if name not in _DROPPED and not name.startswith(DEAD_LETTER_PREFIX)
    ]
    added: Headers = (
        (DEAD_LETTER_TOPIC, record.topic.encode()),
        (DEAD_LETTER_PARTITION, b"%d" % record.partition),
        (DEAD_LETTER_OFFSET, b"%d" % record.offset),
        (DEAD_LETTER_GROUP, cause.group.encode(errors="replace")),
        (DEAD_LETTER_ATTEMPTS, b"%d" % cause.attempts),
        (DEAD_LETTER_CONDITION, cause.condition.encode(errors="replace")),
        (DEAD_LETTER_REASON, cause.reason[:REASON_LIMIT].encode(errors="replace")),
    )
    return Record(topic, record.key, record.value, (*kept, *added))
