"""A source's filters (part 3.5.8): where to begin, which partition, and which records; each in all its spellings.

A filter is known by its descriptor, symbolic or numeric; the name is the peer's own affair. Where a value has no
descriptor (the old Kafka bridge sent them so) the name counts. What is not known here is not applied, and not echoed.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from gateway.kafka.read.start_positions import AtOffset, AtTime, Place, Start
from mapping.amqp.addresses import AddressError
from mapping.amqp.selection import selector
from mapping.record import GW_CLIENT, GW_PROTOCOL, Received
from protocols.amqp.links import Filter
from protocols.amqp.outcomes import INVALID_FIELD
from protocols.amqp.primitives import Timestamp
from protocols.amqp.selectors.parser import SelectorError

Condition = Callable[[Received], bool]


class _Kind(enum.Enum):
    SELECTOR = enum.auto()
    NO_LOCAL = enum.auto()
    OFFSET_SPEC = enum.auto()
    PARTITION = enum.auto()
    OFFSET = enum.auto()


_KINDS: Final[dict[str | int, _Kind]] = {
    "apache.org:selector-filter:string": _Kind.SELECTOR,
    0x0000468C00000004: _Kind.SELECTOR,
    0x000001370000000A: _Kind.SELECTOR,  # Azure's clients
    "apache.org:no-local-filter:list": _Kind.NO_LOCAL,
    0x0000468C00000003: _Kind.NO_LOCAL,
    "rabbitmq:stream-offset-spec": _Kind.OFFSET_SPEC,
    # The AMQP bridge of Strimzi, and what it was called before.
    "io.strimzi:partition-filter:int": _Kind.PARTITION,
    "enmasse:partition-filter:int": _Kind.PARTITION,
    "rhiot.io:partition-filter:int": _Kind.PARTITION,
    "io.strimzi:offset-filter:long": _Kind.OFFSET,
    "enmasse:offset-filter:long": _Kind.OFFSET,
    "rhiot.io:offset-filter:long": _Kind.OFFSET,
}

_EVENT_HUBS: Final = re.compile(
    r"\s*amqp\.annotation\.x-opt-(offset|sequence-number|enqueued-time)\s*(>=?)\s*(?:'(-?[0-9]{1,19})'|(-?[0-9]{1,19}))\s*"
)
_EVENT_HUBS_LATEST: Final = re.compile(r"\s*amqp\.annotation\.x-opt-offset\s*>=?\s*'@latest'\s*")
_PLACES: Final = {"first": Place.BEGINNING, "last": Place.LAST, "next": Place.END}
_AGO: Final = re.compile(r"([0-9]{1,9})([YMDhms])")
_SECONDS: Final = {"Y": 365 * 86400, "M": 30 * 86400, "D": 86400, "h": 3600, "m": 60, "s": 1}
_OFFSETS: Final = 1 << 63  # Kafka's are signed
_PARTITIONS: Final = 1 << 31


class Filters(msgspec.Struct, frozen=True):
    """What a filter set says."""

    start: Start | None = None  # where to begin; None: wherever the source begins
    partition: int | None = None  # receive from this one alone
    condition: Condition | None = None  # tells whether a record is wanted; None: all are
    applied: tuple[Filter, ...] = ()  # the filters that this stands for


def read_filters(filters: Iterable[Filter], container_id: str, now_ms: int) -> Filters:
    """What the filters of a peer's source mean.

    `no-local` leaves out the records of `container_id`; some positions are "ten minutes ago" of `now_ms` (epoch).

    Raises:
        AddressError: amqp:invalid-field, for a value that is no filter's, or two filters of a kind.
    """
    start: Start | None = None
    partition: int | None = None
    selected: Condition | None = None
    foreign: Condition | None = None
    applied: list[Filter] = []
    for one in filters:
        match _KINDS.get(one.name if one.descriptor is None else one.descriptor):
            case _Kind.PARTITION:
                _once(one, partition)
                partition = _number(one, _PARTITIONS)
            case _Kind.OFFSET:
                _once(one, start)
                start = AtOffset(_number(one, _OFFSETS))
            case _Kind.OFFSET_SPEC:
                _once(one, start)
                start = _offset_spec(one, now_ms)
            case _Kind.NO_LOCAL:
                foreign = _not_from(container_id)
            case _Kind.SELECTOR:
                text = _text(one)
                position = _event_hubs_position(text)
                if position is not None:
                    _once(one, start)
                    start = position
                elif text.strip():
                    _once(one, selected)
                    selected = _selector(one, text)
            case None:
                continue
        applied.append(one)
    return Filters(start, partition, both(selected, foreign), tuple(applied))


def _once(one: Filter, former: object) -> None:
    if former is not None:
        raise _invalid(one, "another filter says the same or something else")


def _text(one: Filter) -> str:
    value = one.value
    if isinstance(value, bytes):  # Azure's clients for Python
        value = value.decode(errors="replace")
    if not isinstance(value, str):
        raise _invalid(one, "a selector is a string")
    return value


def _selector(one: Filter, text: str) -> Condition:
    try:
        return selector(text)
    except SelectorError as error:
        raise _invalid(one, str(error)) from None


def _number(one: Filter, limit: int) -> int:
    """An integer of any width, from 0 on."""
    value = one.value
    if type(value) is not int or not 0 <= value < limit:
        raise _invalid(one, "a number from 0 on is expected")
    return value


def _offset_spec(one: Filter, now_ms: int) -> Start:
    """RabbitMQ's: a place, an interval such as `10m`, a timestamp, or an offset."""
    value = one.value
    if isinstance(value, Timestamp):
        return AtTime(int(value))
    if isinstance(value, str):
        place = _PLACES.get(value)
        if place is not None:
            return place
        ago = _AGO.fullmatch(value)
        if ago is None:
            raise _invalid(one, 'a text is "first", "last", "next" or an interval such as "10m"')
        return AtTime(now_ms - int(ago[1]) * _SECONDS[ago[2]] * 1000)
    return AtOffset(_number(one, _OFFSETS))


def _event_hubs_position(text: str) -> Start | None:
    """The position that a selector of Event Hubs' clients is; None when it is another selector.

    An offset below 0 is the beginning. The records are not compared one by one: reading begins there.
    """
    if _EVENT_HUBS_LATEST.fullmatch(text):
        return Place.END
    match = _EVENT_HUBS.fullmatch(text)
    if match is None:
        return None
    number = int(match[3] or match[4]) + (match[2] == ">")
    if number >= _OFFSETS:
        return Place.END
    if match[1] == "enqueued-time":
        return AtTime(number)
    return AtOffset(number) if number > 0 else Place.BEGINNING


def _not_from(container_id: str) -> Condition:
    """Whether a record did not come from this very client."""
    own = container_id.encode()

    def foreign(record: Received) -> bool:
        headers = dict(record.headers)
        return headers.get(GW_CLIENT) != own or headers.get(GW_PROTOCOL) != b"amqp10"

    return foreign


def both(first: Condition | None, second: Condition | None) -> Condition | None:
    """What both select; None is everything."""
    if first is None or second is None:
        return first or second
    return lambda record: first(record) and second(record)


def _invalid(one: Filter, reason: str) -> AddressError:
    return AddressError(INVALID_FIELD, f"filter {one.name[:60]}: {reason}")
