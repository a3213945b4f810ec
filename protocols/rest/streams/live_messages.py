"""The messages of a live WebSocket (subprotocol `trivium.v1`): one JSON object for each text message, tagged by `type`.

Every message of a client has an `id` that the client chooses. Its answer has the same id; the records of a subscription
have the subscription's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from protocols.rest.errors import RestError
from protocols.rest.media import Format
from protocols.rest.positions import LARGEST_OFFSET, WantedPosition, wanted
from protocols.rest.responses import ErrorBody, Stored, encode

SUBPROTOCOL: Final = "trivium.v1"
LARGEST_CREDIT: Final = 2**31 - 1
ID_LIMIT: Final = 256  # characters


_Long = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_OFFSET)]  # as in the parameters of an event stream


class _Message(msgspec.Struct, frozen=True, gc=False, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    id: str


class LiveProduce(_Message, frozen=True, gc=False, tag="produce"):
    """Store records in order; answered by `produced`. `records` has the form it has in a produce request."""

    topic: str
    records: msgspec.Raw
    format: Format = Format.JSON
    partition: int | None = None


class LiveSubscribe(_Message, frozen=True, gc=False, tag="subscribe", rename={"start": "from"}):
    """Get records from now on; answered by `subscribed`."""

    topic: str
    format: Format = Format.JSON  # of keys and values in the records
    # start, offset, timestamp, partition: where to start; like the parameters of an event stream
    start: str | None = None
    offset: _Long | None = None
    timestamp: _Long | None = None
    partition: int | None = None
    group: str | None = None  # join this consumer group; each record must then be acknowledged or released
    key: tuple[str, ...] = ()  # only records with one of these keys
    header: tuple[str, ...] = ()  # only records with all of these headers, each NAME:VALUE
    # how many records may be sent before `credit` allows more; None: only the connection limits them
    credit: int | None = None

    def wanted(self) -> WantedPosition:
        """Return where to start. Raises RestError 422."""
        given = {"from": self.start, "offset": self.offset, "timestamp": self.timestamp, "partition": self.partition}
        return wanted({name: value for name, value in given.items() if value is not None})


class Credit(_Message, frozen=True, gc=False, tag="credit"):
    """Allow more records for the subscription `id`."""

    credit: int


class Acknowledge(_Message, frozen=True, gc=False, tag="ack"):
    """Acknowledge a group's records by their delivery numbers."""

    deliveries: tuple[int, ...]


class Release(_Message, frozen=True, gc=False, tag="release"):
    """Return records to the group; `failed` counts as a failed attempt."""

    deliveries: tuple[int, ...]
    failed: bool = False


class LiveUnsubscribe(_Message, frozen=True, gc=False, tag="unsubscribe"):
    """End the subscription `id`; answered by `unsubscribed`."""


class BadMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that is not valid; the connection stays open. `id` is the message's, if it could be read."""

    error: RestError
    id: str | None = None


ClientMessage = LiveProduce | LiveSubscribe | Credit | Acknowledge | Release | LiveUnsubscribe
_CLIENT: Final = msgspec.json.Decoder(ClientMessage)


class _OnlyId(msgspec.Struct, gc=False):
    id: str | None = None


_ONLY_ID: Final = msgspec.json.Decoder(_OnlyId)


def decode_message(text: str) -> ClientMessage | BadMessage:
    """Decode a text message; never raises."""
    try:
        message: ClientMessage = _CLIENT.decode(text)
    except msgspec.ValidationError as error:
        return BadMessage(RestError(400, f"The message is not valid: {error}"), _id_of(text))
    except (msgspec.DecodeError, UnicodeError) as error:
        return BadMessage(RestError(400, f"The message is not JSON: {error}"))
    except RecursionError:
        return BadMessage(RestError(400, "The message is nested too deeply"))
    if len(message.id) > ID_LIMIT:
        return BadMessage(RestError(400, f"An id has at most {ID_LIMIT} characters"))
    return message


def produced(name: str, results: Sequence[Stored | ErrorBody]) -> bytes:
    """Answer `LiveProduce` with the result of each record, in order."""
    return encode({"type": "produced", "id": name, "offsets": results})


def subscribed(name: str, position: str | None) -> bytes:
    """Answer `LiveSubscribe`; `position` is where it starts, None in a group."""
    return encode({"type": "subscribed", "id": name} | ({} if position is None else {"position": position}))


def unsubscribed(name: str) -> bytes:
    """Answer `LiveUnsubscribe`."""
    return encode({"type": "unsubscribed", "id": name})


def failed(name: str | None, error: RestError) -> bytes:
    """Answer the message with this id with an error; `name` is None if its id could not be read."""
    answer: dict[str, Any] = {"type": "error", "id": name, "error_code": error.status, "message": error.message}
    if error.validation_errors:
        answer["validation_errors"] = error.validation_errors
    return encode(answer)


def gap_message(name: str, partition: int, count: int) -> bytes:
    """Report that retention has deleted `count` records that the subscription requested."""
    return encode({"type": "gap", "id": name, "partition": partition, "lost": count})


def record_message(name: str, line: bytes, position: str) -> bytes:
    """Carry a record of a subscription; `line` is its JSON, `position` the one behind it."""
    return b'{"type":"record","id":%b,"position":"%b","record":%b}' % (encode(name), position.encode(), line)


def delivery_message(name: str, line: bytes, delivery: int, attempts: int) -> bytes:
    """Carry a record of a group, to be acknowledged; it was delivered `attempts` times before."""
    return b'{"type":"record","id":%b,"delivery":%d,"attempts":%d,"record":%b}' % (
        encode(name),
        delivery,
        attempts,
        line,
    )


def _id_of(text: str) -> str | None:
    try:
        identifier = _ONLY_ID.decode(text).id
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return None if identifier is None else identifier[:ID_LIMIT]
