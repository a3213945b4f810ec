"""The records of the presence topic: a client is online since when and where, or offline and why.

A record's key is `PROTOCOL/NAME`. Of two records of a key the one with the higher epoch is valid, of equal epochs the
later in the log: a late offline record has the epoch of its connection, which is lower than that of the next one.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from gateway.views.presence import Count, Ended, SessionKept
from mapping.record import CONTENT_TYPE, Headers

DESCRIPTION: Final[Headers] = ((CONTENT_TYPE, b"application/json"),)


class PresenceRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The online state of a client."""

    state: Literal["online", "offline"]
    client: str  # client id, container-id or consumer; for HTTP's streams the principal
    principal: str
    protocol: Literal["mqtt", "amqp", "http"]
    address: str  # the client's, HOST:PORT
    gateway: str  # the process with the connection, as `id/incarnation`, like a session's owner
    since: Count  # epoch milliseconds, by the writing gateway's clock
    epoch: Count  # counts the connections of the key, and repeated reports
    session: SessionKept = SessionKept()
    reason: Ended | None = None  # if offline


_DECODER: Final = msgspec.json.Decoder(PresenceRecord)
encode = msgspec.json.encode


def decode(value: bytes) -> PresenceRecord | None:
    """Decode a record; return None if it is invalid."""
    try:
        return _DECODER.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
