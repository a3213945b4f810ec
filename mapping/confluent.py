"""Records as Confluent's REST proxy, version 2, shows them. Pure."""

from __future__ import annotations

import msgspec

from mapping.record import Received
from mapping.rest import from_record
from protocols.rest.media import Format
from protocols.rest.responses import RecordItem


def without_headers(record: Received, embedded: Format) -> RecordItem:
    """A stored record as it stands in an answer; UndecodableError as from `from_record`.

    The dialect has no headers. Its timestamp is Karapace's; Confluent's clients overlook it.
    """
    item = from_record(record, embedded)
    if item.headers is msgspec.UNSET:
        return item
    return RecordItem(item.topic, item.key, item.value, item.partition, item.offset, item.timestamp, msgspec.UNSET)
