"""A source's filters (part 3.5.8): start position, partition and selection, in the forms of several brokers.

A filter's descriptor, symbolic or numeric, gives its type; the peer chooses the name. If a value has no descriptor, as
from the old Kafka bridge, the name gives the type. An unknown filter is not applied and not echoed in our attach.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from gateway.kafka.read.start_positions import AtOffset, AtTime, Start, StartPosition
from mapping.amqp.addresses import AddressError
from mapping.amqp.selection import selector
from mapping.record import GW_CLIENT, GW_PROTOCOL, Received
from protocols.amqp.links import Filter
from protocols.amqp.outcomes import INVALID_FIELD
from protocols.amqp.primitives import Timestamp
from protocols.amqp.selectors.parser import SelectorError

Condition = Callable[[Received], bool]


class _FilterKind(enum.Enum):
    SELECTOR = enum.auto()
    NO_LOCAL = enum.auto()
    OFFSET_SPEC = enum.auto()
    PARTITION = enum.auto()
    OFFSET = enum.auto()


_KINDS: Final[dict[str | int, _FilterKind]] = {
    "apache.org:selector-filter:string": _FilterKind.SELECTOR,
    0x0000468C00000004: _FilterKind.SELECTOR,
    0x000001370000000A: _FilterKind.SELECTOR,  # Azure's clients
    "apache.org:no-local-filter:list": _FilterKind.NO_LOCAL,
    0x0000468C00000003: _FilterKind.NO_LOCAL,
    "rabbitmq:stream-offset-spec": _FilterKind.OFFSET_SPEC,
    # The AMQP bridge of Strimzi, and what it was called before.
    "io.strimzi:partition-filter:int": _FilterKind.PARTITION,
    "enmasse:partition-filter:int": _FilterKind.PARTITION,
    "rhiot.io:partition-filter:int": _FilterKind.PARTITION,
    "io.strimzi:offset-filter:long": _FilterKind.OFFSET,
    "enmasse:offset-filter:long": _FilterKind.OFFSET,
    "rhiot.io:offset-filter:long": _FilterKind.OFFSET,
}

_EVENT_HUBS: Final = re.compile(
    r"\s*amqp\.annotation\.x-opt-(offset|sequence-number|enqueued-time)\s*(>=?)\s*(?:'(-?[0-9]{1,19})'|(-?[0-9]{1,19}))\s*"
)
_EVENT_HUBS_LATEST: Final = re.compile(r"\s*amqp\.annotation\.x-opt-offset\s*>=?\s*'@latest'\s*")
_PLACES: Final = {"first": StartPosition.BEGINNING, "last": StartPosition.LAST, "next": StartPosition.END}
_AGO: Final = re.compile(r"([0-9]{1,9})([YMDhms])")
_SECONDS: Final = {"Y": 365 * 86400, "M": 30 * 86400, "D": 86400, "h": 3600, "m": 60, "s": 1}
_OFFSETS: Final = 1 << 63  # Kafka's offsets are signed
_PARTITIONS: Final = 1 << 31


class Filters(msgspec.Struct, frozen=True):
    """A parsed filter set."""

    start: Start | None = None  # start position; None means the source's default
    partition: int | None = None  # receive only from this partition
    condition: Condition | None = None  # returns whether a record is selected; None selects all
    applied: tuple[Filter, ...] = ()  # the filters that are applied


def read_filters(filters: Iterable[Filter], container_id: str, now_ms: int) -> Filters:
    """Parse the filters of a peer's source.

    `no-local` excludes the records of `container_id`. Positions such as "ten minutes ago" are relative to `now_ms`
    (epoch).

    Raises:
        AddressError: amqp:invalid-field, for an invalid value, or two filters of one type.
    """
    start: Start | None = None
    partition: int | None = None
    selected: Condition | None = None
    foreign: Condition | None = None
    applied: list[Filter] = []
    for entry in filters:
        match _KINDS.get(entry.name if entry.descriptor is None else entry.descriptor):
            case _FilterKind.PARTITION:
                _refuse_second(entry, partition)
                partition = _number(entry, _PARTITIONS)
            case _FilterKind.OFFSET:
                _refuse_second(entry, start)
                start = AtOffset(_number(entry, _OFFSETS))
            case _FilterKind.OFFSET_SPEC:
                _refuse_second(entry, start)
                start = _offset_spec(entry, now_ms)
            case _FilterKind.NO_LOCAL:
                foreign = _not_from(container_id)
            case _FilterKind.SELECTOR:
                text = _text(entry)
                position = _event_hubs_position(text)
                if position is not None:
                    _refuse_second(entry, start)
                    start = position
                elif text.strip():
                    _refuse_second(entry, selected)
                    selected = _selector(entry, text)
            case None:
                continue
        applied.append(entry)
    return Filters(start, partition, both(selected, foreign), tuple(applied))


def _refuse_second(entry: Filter, former: object) -> None:
    if former is not None:
        raise _invalid(entry, "another filter sets the same")


def _text(entry: Filter) -> str:
    value = entry.value
    if isinstance(value, bytes):  # Azure's clients for Python
        value = value.decode(errors="replace")
    if not isinstance(value, str):
        raise _invalid(entry, "a selector is a string")
    return value


def _selector(entry: Filter, text: str) -> Condition:
    try:
        return selector(text)
    except SelectorError as error:
        raise _invalid(entry, str(error)) from None


def _number(entry: Filter, limit: int) -> int:
    """Return the filter's integer of any width, 0 or greater."""
    value = entry.value
    if type(value) is not int or not 0 <= value < limit:
        raise _invalid(entry, "expected a number of 0 or more")
    return value


def _offset_spec(entry: Filter, now_ms: int) -> Start:
    """Parse RabbitMQ's stream offset: `first`, `last`, `next`, an interval such as `10m`, a timestamp, or an offset."""
    value = entry.value
    if isinstance(value, Timestamp):
        return AtTime(int(value))
    if isinstance(value, str):
        start = _PLACES.get(value)
        if start is not None:
            return start
        ago = _AGO.fullmatch(value)
        if ago is None:
            raise _invalid(entry, 'a string must be "first", "last", "next" or an interval such as "10m"')
        return AtTime(now_ms - int(ago[1]) * _SECONDS[ago[2]] * 1000)
    return AtOffset(_number(entry, _OFFSETS))


def _event_hubs_position(text: str) -> Start | None:
    """Return the start position if a selector is one that Event Hubs' clients use for it, else None.

    A negative offset is the beginning. The selector is not evaluated for records: reading starts at the position.
    """
    if _EVENT_HUBS_LATEST.fullmatch(text):
        return StartPosition.END
    match = _EVENT_HUBS.fullmatch(text)
    if match is None:
        return None
    number = int(match[3] or match[4]) + (match[2] == ">")
    if number >= _OFFSETS:
        return StartPosition.END
    if match[1] == "enqueued-time":
        return AtTime(number)
    return AtOffset(number) if number > 0 else StartPosition.BEGINNING


def _not_from(container_id: str) -> Condition:
    """Return a condition that excludes the records of this client."""
    own = container_id.encode()

    def foreign(record: Received) -> bool:
        headers = dict(record.headers)
        return headers.get(GW_CLIENT) != own or headers.get(GW_PROTOCOL) != b"amqp10"

    return foreign


def both(first: Condition | None, second: Condition | None) -> Condition | None:
    """Combine two conditions with AND; None selects everything."""
    if first is None or second is None:
        return first or second
    return lambda record: first(record) and second(record)


def _invalid(entry: Filter, reason: str) -> AddressError:
    return AddressError(INVALID_FIELD, f"filter {entry.name[:60]}: {reason}")
