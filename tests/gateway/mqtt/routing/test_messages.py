"""The packets of a run are encoded once for all of its receivers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.mqtt.routing.messages import Messages
from mapping.record import EXPIRY, MQTT_TOPIC, Headers, Received
from mapping.rules import Rules

NEVER = (EXPIRY, b"99999999999999")


class Run(list[Received]):
    """Counts how often it is gone through."""

    rounds = 0

    def __iter__(self) -> Iterator[Received]:
        self.rounds += 1
        return super().__iter__()


def run_of(*headers: Headers) -> Run:
    named = ((MQTT_TOPIC, b"a/b"),)
    return Run(Received("t", b"a/b", b"x", named + more, 1, 0, number) for number, more in enumerate(headers))


@pytest.mark.parametrize(("headers", "has_packets"), [(((), ()), True), (((), (NEVER,)), False)])
def test_a_run_is_encoded_once_for_each_form(headers: tuple[Headers, ...], has_packets: bool) -> None:
    """Also one that has no packets to share, because a message expires: every receiver asks again."""
    messages, run = Messages(Rules()), run_of(*headers)
    for _ in range(9):
        assert (messages.packets(run, True, False) is not None) is has_packets
    assert run.rounds == 1
    assert (messages.packets(run, False, True) is not None) is has_packets
    assert run.rounds == 2
