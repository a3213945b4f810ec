"""The messages of a live WebSocket (subprotocol `trivium.v1`): one JSON object a text message, told apart by `type`.

Every message of a client has an `id` of its choice. The answer to it has the same; the records of a subscription have
the subscription's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from protocols.rest.errors import RestError
from protocols.rest.media import Format
from protocols.rest.positions import Wanted, wanted
from protocols.rest.responses import ErrorBody, Stored, encode

SUBPROTOCOL: Final = "trivium.v1"
LARGEST_CREDIT: Final = 2**31 - 1
ID_LIMIT: Final = 256  # characters


class _Message(msgspec.Struct, frozen=True, gc=False, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    id: str


class Produce(_Message, frozen=True, gc=False, tag="produce"):
    """Store records, in order; answered by `produced`. `records` is what the body of a produce request has there."""

    topic: str
    records: msgspec.Raw
    format: Format = Format.JSON
    partition: int | None = None


class Subscribe(_Message, frozen=True, gc=False, tag="subscribe", rename={"start": "from"}):
    """Get records from now on; answered by `subscribed`."""

    topic: str  # its name
    format: Format = Format.JSON  # how keys and values stand in the records
    # start, offset, timestamp, partition: where to begin; as the parameters of a stream of events
    start: str | None = None
    offset: int | None = None
    timestamp: int | None = None
    partition: int | None = None
    group: str | None = None  # take a share of this consumer group: each record is acknowledged or released then
    key: tuple[str, ...] = ()  # only records with one of these keys
    header: tuple[str, ...] = ()  # only records with all of these headers, each NAME:VALUE
    # how many records may come before `credit` allows more; None: as many as the connection takes
    credit: int | None = None

    def wanted(self) -> Wanted:
        """Where to begin. Raises RestError 422."""
        given = {"from": self.start, "offset": self.offset, "timestamp": self.timestamp, "partition": self.partition}
        return wanted({name: value for name, value in given.items() if value is not None})


class Credit(_Message, frozen=True, gc=False, tag="credit"):
    """So many records more may come for the subscription `id`."""

    credit: int


class Acknowledge(_Message, frozen=True, gc=False, tag="ack"):
    """The records of a group with these delivery numbers are dealt with."""

    deliveries: tuple[int, ...]


class Release(_Message, frozen=True, gc=False, tag="release"):
    """They go back to the group; `failed` counts as an attempt that failed."""

    deliveries: tuple[int, ...]
    failed: bool = False


class Unsubscribe(_Message, frozen=True, gc=False, tag="unsubscribe"):
    """End the subscription `id`; answered by `unsubscribed`."""


class BadMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that is none of these; the connection goes on. `id` is its own, where it could be read."""

    error: RestError
    id: str | None = None


ClientMessage = Produce | Subscribe | Credit | Acknowledge | Release | Unsubscribe
_CLIENT: Final = msgspec.json.Decoder(ClientMessage)


class _OnlyId(msgspec.Struct, gc=False):
    id: str | None = None


_ONLY_ID: Final = msgspec.json.Decoder(_OnlyId)


def decode_message(text: str) -> ClientMessage | BadMessage:
    """What a text message says; never an exception."""
    try:
        message: ClientMessage = _CLIENT.decode(text)
    except msgspec.ValidationError as error:
        return BadMessage(RestError(400, f"The message is not as it should be: {error}"), _id_of(text))
    except (msgspec.DecodeError, UnicodeError) as error:
        return BadMessage(RestError(400, f"The message is not JSON: {error}"))
    except RecursionError:
        return BadMessage(RestError(400, "The message is nested too deeply"))
    if len(message.id) > ID_LIMIT:
        return BadMessage(RestError(400, f"An id has at most {ID_LIMIT} characters"))
    return message


def produced(name: str, results: Sequence[Stored | ErrorBody]) -> bytes:
    """The fate of each record of `Produce`, in order."""
    return encode({"type": "produced", "id": name, "offsets": results})


def subscribed(name: str, position: str | None) -> bytes:
    """The subscription is there; `position` is where it begins, None in a group."""
    return encode({"type": "subscribed", "id": name} | ({} if position is None else {"position": position}))


def unsubscribed(name: str) -> bytes:
    """The subscription is over."""
    return encode({"type": "unsubscribed", "id": name})


def failed(name: str | None, error: RestError) -> bytes:
    """Something was refused: the message with this id; None when it had none that could be read."""
    answer: dict[str, Any] = {"type": "error", "id": name, "error_code": error.status, "message": error.message}
    if error.validation_errors:
        answer["validation_errors"] = error.validation_errors
    return encode(answer)


def lost(name: str, partition: int, count: int) -> bytes:
    """Retention had deleted records that the subscription asked for."""
    return encode({"type": "gap", "id": name, "partition": partition, "lost": count})


def carried(name: str, line: bytes, position: str) -> bytes:
    """A record of a subscription; `line` is its JSON, `position` is behind it."""
    return b'{"type":"record","id":%b,"position":"%b","record":%b}' % (encode(name), position.encode(), line)


def shared(name: str, line: bytes, delivery: int, attempts: int) -> bytes:
    """A record of a subscription in a group, to be acknowledged; `attempts` were made before."""
    return b'{"type":"record","id":%b,"delivery":%d,"attempts":%d,"record":%b}' % (
        encode(name),
        delivery,
        attempts,
        line,
    )


def _id_of(text: str) -> str | None:
    try:
        found = _ONLY_ID.decode(text).id
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return None if found is None else found[:ID_LIMIT]
