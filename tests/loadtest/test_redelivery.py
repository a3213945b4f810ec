"""What was delivered again after a kill, and whether it may."""

from __future__ import annotations

import math

import pytest

from loadtest.clients.kept.lasting import Delivery, Place
from loadtest.engine.redelivery import Again, Group, Kill, Outage
from loadtest.numbering import Numbering

NUMBERING = Numbering("aaaaaaaa")
PLACE = Place(1, 7)


def came(group: Group, born: int, at: float, accepted: float | None = None) -> None:
    delivery = Delivery(NUMBERING.payload(0, 7, 40), PLACE, born, at)
    group.take(delivery)
    if accepted is not None:
        group.accepted(delivery, accepted)


def judged(
    *deliveries: tuple[int, float, float | None], kills: tuple[Kill, ...] = (), outages: tuple[Outage, ...] = ()
) -> list[Again]:
    group = Group("g", NUMBERING)
    for delivery in deliveries:
        came(group, *delivery)
    return group.again(kills, outages)


def test_messages_that_came_once_are_fine() -> None:
    assert judged((0, 1.0, 1.1)) == []


@pytest.mark.parametrize(("committed", "below"), [({}, False), ({1: 7}, False), ({1: 8}, True), ({0: 99}, False)])
def test_a_redelivery_below_the_commit_is_reported(committed: dict[int, int], below: bool) -> None:
    kills = (Kill(5.0, {"g": committed}),)
    assert judged((0, 1.0, 4.5), (1, 9.0, 9.1), kills=kills) == [Again(PLACE, 0.5, below)]


def test_an_unaccepted_message_may_be_redelivered() -> None:
    kills = (Kill(5.0, {"g": {}}), Kill(8.0, {"g": {}}))
    assert judged((0, 1.0, None), (2, 9.0, 9.1), kills=kills) == [Again(PLACE, None, False)]


def test_the_age_excludes_outages_and_counts_from_the_acceptance() -> None:
    kills = (Kill(10.0, {"g": {}}),)
    (again,) = judged((0, 1.0, 2.0), (1, 12.0, None), kills=kills)
    assert again.age == 8.0
    (again,) = judged((0, 1.0, 2.0), (1, 12.0, None), kills=kills, outages=(Outage(3.0, 9.5), Outage(11.0, 20.0)))
    assert again.age == 1.5


def test_a_redelivery_by_the_same_gateway_needs_a_reason() -> None:
    (again,) = judged((0, 1.0, 2.0), (0, 3.0, None))
    assert again.age == math.inf
    (again,) = judged((0, 1.0, 2.0), (0, 9.0, None), outages=(Outage(2.5, 8.0),))
    assert again.age == 0.5
    (again,) = judged((0, 1.0, 2.0), (0, 9.0, None), outages=(Outage(1.5, 8.0),))
    assert again.age == 0.0


def test_messages_that_were_never_sent_are_counted() -> None:
    group = Group("g", NUMBERING)
    group.take(Delivery(b"somebody else's", PLACE, 0, 1.0))
    assert (group.arrivals.foreign, group.arrivals.total) == (1, 0)
