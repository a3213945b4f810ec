"""Messages of one link that differ in their value only: the first is mapped, the others are like it.

Senders of telemetry write the same annotations before each value. What stands before the value then need not be read
again, and the record's key and headers are the same objects, which
`gateway.kafka.publish.batch_format` writes once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import msgspec

from mapping.record import AMQP_BODY, AMQP_SECTIONS, CREATION_TIME, EXPIRY, Record

_DATA: Final = b"\x00\x53\x75\xa0"
_LONG_DATA: Final = b"\x00\x53\x75\xb0"
_SHORT_LIMIT: Final = 256  # bytes of a value whose length takes one byte
_LONGEST: Final = 2**32 - 1
_PROPERTIES: Final = b"\x00\x53\x73"
_OWN: Final = frozenset({EXPIRY, CREATION_TIME, AMQP_BODY})
"""Headers that depend on the time, or on the value."""


class Template(msgspec.Struct, frozen=True, gc=False):
    """What messages of a run have in common."""

    prefix: bytes  # all bytes before the length of the value
    width: int  # bytes of that length
    record: Record  # the record of one of them

    def values(self, messages: Sequence[bytes], first: int) -> list[bytes]:
        """The values of the messages from `first` on, up to one that is different."""
        prefix, width = self.prefix, self.width
        start = len(prefix) + width
        # A short value in the long form has to be remembered as that: it is not the usual form.
        least, most = (0, _SHORT_LIMIT - 1) if width == 1 else (_SHORT_LIMIT, _LONGEST)
        found: list[bytes] = []
        length, head = -1, prefix
        for data in itertools.islice(messages, first, None):
            if len(data) != length:
                length = len(data)
                if not least <= length - start <= most:
                    break
                head = prefix + (length - start).to_bytes(width, "big")
            if not data.startswith(head):
                break
            found.append(data[start:])
        return found


def template_of(data: bytes, record: Record) -> Template | None:
    """What another message must have in common with this one to become the same record but for the value.

    None for a message with properties, which are nearly always its own, and for one whose record depends on the time
    or has a body of another form than one Data section.
    """
    value = record.value
    if value is None or record.timestamp is not None:
        return None
    size = len(value)
    width, mark = (1, _DATA) if size < _SHORT_LIMIT else (4, _LONG_DATA)
    end = len(data) - size - width
    before = data[: max(0, end - len(mark))]
    if data != b"".join((before, mark, size.to_bytes(width, "big"), value)) or _PROPERTIES in before:
        return None
    for name, content in record.headers:
        # The `amqp.sections` header of such a message is all that stands before its value; a footer would be behind it.
        if name in _OWN or (name == AMQP_SECTIONS and content != before):
            return None
    return Template(data[:end], width, record)
