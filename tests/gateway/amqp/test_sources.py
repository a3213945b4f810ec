"""Interpreting the source of a receiving link."""

from __future__ import annotations

import pytest

from gateway.amqp.sources import AddressTypes, LinkSource, resumed, source_of
from gateway.kafka.read.start_positions import AtOffset, StartPosition
from mapping.amqp.addresses import AddressError
from protocols.amqp.links import AmqpSession, Filter, Link, Terminus, TerminusKind
from protocols.amqp.outcomes import INVALID_FIELD, NOT_ALLOWED, NOT_IMPLEMENTED

CONTAINER = "plant"
NOW = 1_700_000_000_000
PLAIN = AddressTypes(())  # no address is a queue by configuration
SUBSCRIPTION = LinkSource("t", "plant:alarms", at_end=True, subscription=True, exclusive=True)


def link(name: str = "alarms", address: str | None = "t", **source: object) -> Link:
    terminus = Terminus(TerminusKind.SOURCE, address=address, **source)  # type: ignore[arg-type]
    return Link(
        None, 0, AmqpSession(None), name=name, incoming=False, source=terminus, target=Terminus(TerminusKind.TARGET)
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (link(), LinkSource("t")),
        (link(capabilities=("topic",)), LinkSource("t", capabilities=("topic",))),
        (link(capabilities=("queue",)), LinkSource("t", "t", capabilities=("queue",))),
        (link(address="queue://t"), LinkSource("t", "t")),
        (link(address="queue://t", copies=True), LinkSource("t", start=StartPosition.BEGINNING, browses="t")),
        (link(capabilities=("queue",), copies=True), LinkSource("t", start=StartPosition.BEGINNING, browses="t")),
        (link(address="t/group.id/g", copies=True), LinkSource("t", "g")),
        (link(copies=True), LinkSource("t")),
        (link(durable=1, copies=True), SUBSCRIPTION),
        (link(address="/queues/t"), LinkSource("t", "t")),
        (link(address="topic://t"), LinkSource("t")),
        (link(address="t/group.id/g"), LinkSource("t", "g")),
        (link(address="queue://t/group.id/g", capabilities=("queue",)), LinkSource("t", "g", capabilities=("queue",))),
        (link(address="t::s"), LinkSource("t", "s", at_end=True)),
        (link(durable=1), SUBSCRIPTION),
        (link(durable=2, expiry="never"), SUBSCRIPTION),
        (link(expiry="never"), SUBSCRIPTION),
        (link(durable=2, capabilities=("queue",)), LinkSource("t", "t", capabilities=("queue",))),
        (
            link("alarms|2", durable=2, capabilities=("shared", "topic")),
            LinkSource("t", "plant:alarms", at_end=True, subscription=True, capabilities=("topic", "shared")),
        ),
        (
            link("alarms|global", durable=2, capabilities=("shared", "global", "topic")),
            LinkSource("t", "alarms", at_end=True, subscription=True, capabilities=("topic", "shared", "global")),
        ),
        (
            link("alarms|volatile1", capabilities=("shared",)),
            LinkSource(
                "t", "plant:alarms:volatile", at_end=True, subscription=True, volatile=True, capabilities=("shared",)
            ),
        ),
    ],
)
def test_sources(asked: Link, expected: LinkSource) -> None:
    assert source_of(asked, CONTAINER, NOW, PLAIN) == expected


FIRST = Filter("offset", "rabbitmq:stream-offset-spec", "first", (b"", b""))
FIFTH = Filter("offset", "io.strimzi:offset-filter:long", 5, (b"", b""))
THIRD = Filter("io.strimzi:partition-filter:int", None, 3, (b"", b""))
OTHER = Filter("other", "unknown", 3, (b"", b""))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (link(address="t/partitions/3"), LinkSource("t", partition=3)),
        (link(address="/topics/t/partitions/3"), LinkSource("t", partition=3)),
        (link(address="t/ConsumerGroups/$Default/Partitions/3"), LinkSource("t", partition=3)),
        (link(filters=(THIRD, OTHER)), LinkSource("t", partition=3, filters=(THIRD,))),
        (link(address="t/partitions/3", filters=(THIRD,)), LinkSource("t", partition=3, filters=(THIRD,))),
        (link(filters=(THIRD, FIFTH)), LinkSource("t", partition=3, start=AtOffset(5), filters=(THIRD, FIFTH))),
        (link(address="/queues/t", filters=(FIRST,)), LinkSource("t", start=StartPosition.BEGINNING, filters=(FIRST,))),
        (
            link(capabilities=("queue", "topic"), filters=(FIRST,)),
            LinkSource("t", start=StartPosition.BEGINNING, filters=(FIRST,), capabilities=("topic",)),
        ),
        (link(address="t/group.id/g", filters=(OTHER,)), LinkSource("t", "g")),
    ],
)
def test_positions_and_partitions(asked: Link, expected: LinkSource) -> None:
    assert source_of(asked, CONTAINER, NOW, PLAIN) == expected


def test_selectors_go_with_every_source() -> None:
    selector = Filter("jms-selector", 0x0000468C00000004, "a = 1", (b"", b""))
    for asked in (link(), link(address="t/group.id/g"), link(durable=2), link(filters=(FIRST,))):
        filters = (*asked.source.filters, selector)
        found = source_of(link(filters=filters, address=asked.source.address), CONTAINER, NOW, PLAIN)
        assert found.condition is not None
        assert found.filters == filters


@pytest.mark.parametrize(
    ("asked", "condition"),
    [
        (link(address="t/group.id/g", filters=(FIRST,)), NOT_ALLOWED),
        (link(address="t/group.id/g", filters=(THIRD,)), NOT_ALLOWED),
        (link(address="t::s", filters=(FIRST,)), NOT_ALLOWED),
        (link(durable=2, filters=(FIRST,)), NOT_ALLOWED),
        (link(capabilities=("shared",), filters=(FIRST,)), NOT_ALLOWED),
        (link(address="t/partitions/2", filters=(THIRD,)), INVALID_FIELD),
        (link(filters=(FIRST, FIFTH)), INVALID_FIELD),
        (link(address="t/key"), NOT_IMPLEMENTED),
    ],
)
def test_what_cannot_be_combined(asked: Link, condition: str) -> None:
    with pytest.raises(AddressError) as caught:
        source_of(asked, CONTAINER, NOW, PLAIN)
    assert caught.value.error.condition == condition


@pytest.mark.parametrize(
    ("name", "group"), [("alarms", "plant:alarms"), ("alarms|global", "alarms"), ("alarms|2", "plant:alarms")]
)
def test_an_attach_with_only_a_link_name(name: str, group: str) -> None:
    assert resumed(link(name, None), CONTAINER, "t").group == group


@pytest.mark.parametrize(
    ("asked", "container"),
    [
        (link(durable=2), ""),
        (link("", durable=2), CONTAINER),
        (link("n" * 249, durable=2), CONTAINER),
        (link("|global", capabilities=("shared", "global")), ""),
        (link(address="t::"), CONTAINER),
        (link(address="t::" + "s" * 250), CONTAINER),
        (link(address=None), CONTAINER),
    ],
)
def test_missing_names_are_refused(asked: Link, container: str) -> None:
    with pytest.raises(AddressError):
        source_of(asked, container, NOW, PLAIN)
