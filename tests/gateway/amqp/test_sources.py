"""What the source of a receiving link means, as data."""

from __future__ import annotations

import pytest

from gateway.amqp.addresses import AddressError
from gateway.amqp.sources import Source, resumed, source_of
from protocols.amqp.links import Link, Session, Terminus, TerminusKind

CONTAINER = "plant"
SUBSCRIPTION = Source("t", "plant:alarms", at_end=True, subscription=True, exclusive=True)


def link(name: str = "alarms", address: str | None = "t", **source: object) -> Link:
    terminus = Terminus(TerminusKind.SOURCE, address=address, **source)  # type: ignore[arg-type]
    return Link(None, Session(None), name=name, incoming=False, source=terminus, target=Terminus(TerminusKind.TARGET))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (link(), Source("t")),
        (link(capabilities=("topic",)), Source("t", capabilities=("topic",))),
        (link(capabilities=("queue",)), Source("t", "t", capabilities=("queue",))),
        (link(address="queue://t"), Source("t", "t")),
        (link(address="/queues/t"), Source("t", "t")),
        (link(address="topic://t"), Source("t")),
        (link(address="t/group.id/g"), Source("t", "g")),
        (link(address="queue://t/group.id/g", capabilities=("queue",)), Source("t", "g", capabilities=("queue",))),
        (link(address="t::s"), Source("t", "s", at_end=True)),
        (link(durable=1), SUBSCRIPTION),
        (link(durable=2, expiry="never"), SUBSCRIPTION),
        (link(expiry="never"), SUBSCRIPTION),
        (link(durable=2, capabilities=("queue",)), Source("t", "t", capabilities=("queue",))),
        (
            link("alarms|2", durable=2, capabilities=("shared", "topic")),
            Source("t", "plant:alarms", at_end=True, subscription=True, capabilities=("topic", "shared")),
        ),
        (
            link("alarms|global", durable=2, capabilities=("shared", "global", "topic")),
            Source("t", "alarms", at_end=True, subscription=True, capabilities=("topic", "shared", "global")),
        ),
        (
            link("alarms|volatile1", capabilities=("shared",)),
            Source(
                "t", "plant:alarms:volatile", at_end=True, subscription=True, volatile=True, capabilities=("shared",)
            ),
        ),
    ],
)
def test_meaning(asked: Link, expected: Source) -> None:
    assert source_of(asked, CONTAINER) == expected


@pytest.mark.parametrize(
    ("name", "group"), [("alarms", "plant:alarms"), ("alarms|global", "alarms"), ("alarms|2", "plant:alarms")]
)
def test_by_name_alone(name: str, group: str) -> None:
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
def test_what_has_no_name_is_refused(asked: Link, container: str) -> None:
    with pytest.raises(AddressError):
        source_of(asked, container)
