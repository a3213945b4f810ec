"""Interpreting a receiving link's source: the end of a topic, a queue, a named consumer group, or a subscription.

| source | consumer group | starts |
|---|---|---|
| address `T` | none: the end of the log | now |
| capability `queue`, or an address `queue://T`, `/queues/T` | `T` | at the topic's beginning |
| the same with distribution-mode `copy` (a browser) | none: a reader of the log | at the queue's committed position |
| a queue `T/K` | `T/K`, only records with key `K` | at the topic's beginning |
| address `T/group.id/G` | `G` | at the topic's beginning |
| address `T::S` | `S` | now |
| a durable source (terminus-durability, or expiry policy `never`) | `container-id:link-name` | now |
| the same with capability `shared` | the same, for several links; the name ends at `|` | now |
| and with capability `global` | `link-name` up to `|`, for all containers | now |
| `shared` without durability | the same with `:volatile`, until its last link is detached | now |

Filters (`gateway.amqp.filters`) select records, and set the start position of a reader of the log. A position or a
partition turns a queue into such a reader, too (RabbitMQ's streams are addressed like that). A named group and a
subscription have positions of their own, so a filter with another one is refused.

"Now" and "beginning" apply to a group that has committed nothing. The names are those of Qpid JMS and Artemis.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.amqp.filters import Condition, Filters, both, read_filters
from gateway.kafka.read.start_positions import Start, StartPosition
from gateway.security.rights.filters import matches
from gateway.settings.protocols import AddressRule
from mapping.amqp.addresses import GROUP_LIMIT, AddressError, SourceAddress, is_plain, parse_source
from mapping.record import Received
from mapping.tenants import Names
from protocols.amqp.links import Filter, Link, Terminus
from protocols.amqp.outcomes import INVALID_FIELD, NOT_ALLOWED, NOT_IMPLEMENTED

SHARED: Final = "shared"
GLOBAL: Final = "global"
QUEUE: Final = "queue"
TOPIC: Final = "topic"
NEVER: Final = "never"
NAME_END: Final = "|"  # ends the name of a shared subscription; the rest of the link name distinguishes its links
GLOBAL_SUFFIX: Final = "|global"
VOLATILE_SUFFIX: Final = ":volatile"
SELECTION_DIGITS: Final = 16  # of the digest of what a subscription selects


class LinkSource(msgspec.Struct, frozen=True):
    """A receiving link's source as Trivium serves it."""

    topic: str  # the Kafka topic
    group: str | None = None  # the consumer group; None reads from the end of the log
    at_end: bool = False  # a new group starts at the end
    subscription: bool = False  # the group is a subscription, which a detach with closed=true deletes
    exclusive: bool = False  # a subscription for one link at a time; another attach steals it
    volatile: bool = False  # a subscription that ends with its last link, however that ends
    capabilities: tuple[str, ...] = ()  # the requested capabilities that the source has
    partition: int | None = None  # without a group: read only this partition
    start: Start | None = None  # without a group: the start position; None is now
    condition: Condition | None = None  # selects records; None selects all
    filters: tuple[Filter, ...] = ()  # the peer's filters that are applied
    key: bytes | None = None  # of a queue: only records with this key
    browses: str | None = None  # the queue whose unsettled records a browser is shown

    @property
    def selection(self) -> str:
        """What a subscription selects: its topic and filters."""
        filters = [(entry.name, entry.descriptor, entry.value) for entry in self.filters]
        return hashlib.sha256(repr((self.topic, sorted(filters, key=repr))).encode()).hexdigest()[:SELECTION_DIGITS]

    @property
    def kept_for_others(self) -> Condition | None:
        """Which records stay in the queue if no receiver selects them; None (subscriptions) drops them."""
        if self.group is None or self.at_end:
            return None
        key = self.key
        return everything if key is None else lambda record: record.key == key

    def with_tenant(self, names: Names) -> LinkSource:
        """Return the source with the tenant's prefix in all names (`mapping.tenants`)."""
        if not names.prefix:
            return self
        own = self.condition  # a selector may read the topic's name, which must not show the prefix
        return msgspec.structs.replace(
            self,
            topic=names.topic(self.topic),
            group=None if self.group is None else names.group(self.group),
            browses=None if self.browses is None else names.group(self.browses),
            condition=None if own is None else lambda record: own(names.shown(record)),
        )


def everything(_record: Received) -> bool:
    """Select every record."""
    return True


class AddressTypes:
    """Decides by the setting `amqp.addresses` whether a plain address is a queue: the first matching pattern counts."""

    def __init__(self, rules: Sequence[AddressRule]) -> None:
        self._rules = [(rule.pattern.split("/"), rule.type == QUEUE) for rule in rules]

    def is_queue(self, address: str | None) -> bool:
        """Whether the rules make a plain address a queue."""
        if not self._rules or not is_plain(address):
            return False
        levels = (address or "").split("/")
        return next((queue for pattern, queue in self._rules if matches(pattern, levels)), False)


def source_of(link: Link, container_id: str, now_ms: int, address_types: AddressTypes) -> LinkSource:
    """Interpret the source of a peer's receiving link at `now_ms` (epoch). Raises AddressError."""
    address = parse_source(link.source.address)
    if address_types.is_queue(link.source.address) and not {TOPIC, SHARED}.intersection(link.source.capabilities):
        address = msgspec.structs.replace(address, queue=True)
    queue = address.queue or QUEUE in link.source.capabilities
    if address.key is not None and not queue:
        raise AddressError(NOT_IMPLEMENTED, "only a queue can be received by key; use a selector, or capability queue")
    filters = read_filters(link.source.filters, container_id, now_ms)
    partition = filters.partition if address.partition is None else address.partition
    if filters.partition not in (None, partition):
        raise AddressError(INVALID_FIELD, "the address and a filter name different partitions")
    start, browses = filters.start, None
    if start is None and _is_browser(link.source, address):
        start, browses = StartPosition.BEGINNING, _queue_of(address)
    placed = partition is not None or start is not None
    source = _reader(link, address) if placed else _unfiltered(link, address, container_id)
    keyed: Condition | None = None if address.key is None else lambda record: record.key == address.key
    condition = both(keyed, filters.condition)
    return msgspec.structs.replace(
        source,
        partition=partition,
        start=start,
        condition=condition,
        filters=filters.applied,
        key=address.key,
        browses=browses,
    )


def _queue_of(address: SourceAddress) -> str:
    return address.topic if address.key is None else f"{address.topic}/{address.key.decode()}"


def filters_of_node(link: Link, container_id: str, now_ms: int) -> Filters:
    """Parse the filters of a link that receives from a dynamic node, which has no positions and no partitions.

    Raises:
        AddressError: a filter asks for a position or a partition, or is invalid.
    """
    filters = read_filters(link.source.filters, container_id, now_ms)
    if filters.partition is not None or filters.start is not None:
        raise AddressError(NOT_ALLOWED, "a temporary node has neither positions nor partitions")
    return filters


def _is_browser(asked: Terminus, address: SourceAddress) -> bool:
    """Whether the link browses a queue: it reads the messages and leaves them there."""
    return asked.copies and address.group is None and (address.queue or QUEUE in asked.capabilities)


def _reader(link: Link, address: SourceAddress) -> LinkSource:
    """Return a source that reads the log from a given position or partition and commits nothing."""
    asked = link.source
    if address.group is not None or SHARED in asked.capabilities or _is_durable(asked):
        raise AddressError(
            NOT_ALLOWED,
            "a consumer group has its own position and partitions; receive from the topic, or from T/partitions/N",
        )
    return LinkSource(address.topic, capabilities=supported(asked.capabilities, TOPIC))


def _unfiltered(link: Link, address: SourceAddress, container_id: str) -> LinkSource:
    asked = link.source
    wanted = asked.capabilities
    if address.group is not None:
        return LinkSource(
            address.topic, address.group, at_end=address.subscription, capabilities=supported(wanted, QUEUE)
        )
    if address.queue or QUEUE in wanted:
        return LinkSource(address.topic, _queue_of(address), capabilities=supported(wanted, QUEUE))
    shared = SHARED in wanted
    durable = _is_durable(asked)
    if not shared and not durable:
        return LinkSource(address.topic, capabilities=supported(wanted, TOPIC))
    group = subscription_name(link.name, container_id, shared=shared, everywhere=GLOBAL in wanted)
    if not durable:
        group += VOLATILE_SUFFIX
    return LinkSource(
        address.topic,
        group,
        at_end=True,
        subscription=True,
        exclusive=not shared,
        volatile=not durable,
        capabilities=supported(wanted, TOPIC, SHARED, GLOBAL),
    )


def _is_durable(asked: Terminus) -> bool:
    return asked.durable != 0 or asked.expiry == NEVER


def resumed(link: Link, container_id: str, topic: str) -> LinkSource:
    """Return the durable subscription of an attach with a null source and only a link name (JMS unsubscribes so).

    Raises:
        AddressError: the name is not valid.
    """
    group = subscription_of(link, container_id)
    return LinkSource(topic, group, at_end=True, subscription=True, exclusive=NAME_END not in link.name)


def subscription_of(link: Link, container_id: str) -> str:
    """Return the consumer group of the durable subscription with this link name. Raises AddressError."""
    everywhere = link.name.endswith(GLOBAL_SUFFIX)
    return subscription_name(link.name, container_id, shared=NAME_END in link.name, everywhere=everywhere)


def subscription_name(link_name: str, container_id: str, *, shared: bool, everywhere: bool) -> str:
    """Return the consumer group of a subscription. Raises AddressError."""
    name = link_name.partition(NAME_END)[0] if shared else link_name
    if not name or not (container_id or (shared and everywhere)):
        raise AddressError(INVALID_FIELD, "a subscription needs a container-id and a link name")
    group = name if shared and everywhere else f"{container_id}:{name}"
    if len(group) + len(VOLATILE_SUFFIX) > GROUP_LIMIT:
        raise AddressError(INVALID_FIELD, f"the name of a subscription has at most {GROUP_LIMIT} characters")
    return group


def supported(wanted: tuple[str, ...], *known: str) -> tuple[str, ...]:
    """Return the `wanted` capabilities that are among the `known` ones."""
    return tuple(name for name in known if name in wanted)
