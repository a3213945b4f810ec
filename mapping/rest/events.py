"""Maps CloudEvents to Kafka records. Pure."""

from __future__ import annotations

from typing import Final

from mapping.record import CONTENT_TYPE, Header, Headers, Record
from protocols.rest.cloud_events import CloudEvent

ATTRIBUTE_PREFIX: Final = "ce_"
KEY: Final = "partitionkey"  # the partitioning extension


def event_record(event: CloudEvent, topic: str, standard: Headers, trace: Headers) -> Record:
    """Map a valid event to the binary mode of CloudEvents' Kafka Protocol Binding (section 3.2).

    `standard` has the headers that each record gets, without a content type.
    """
    headers: list[Header] = [(ATTRIBUTE_PREFIX + name, value.encode()) for name, value in event.attributes.items()]
    if event.content_type is not None:
        headers.append((CONTENT_TYPE, event.content_type.encode("utf-8", "surrogateescape")))
    key = event.attributes.get(KEY)
    return Record(topic, None if key is None else key.encode(), event.data, (*headers, *standard, *trace))
