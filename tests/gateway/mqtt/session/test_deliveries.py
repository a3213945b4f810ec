"""Deliveries of a session, without a gateway: the journal is answered by hand."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.kafka.contracts import Result
from gateway.mqtt.counters import Counters
from gateway.mqtt.routing.messages import Messages
from gateway.mqtt.routing.router import Match
from gateway.mqtt.session.deliveries import Deliveries, DeliveryParts
from gateway.mqtt.session.inflight import InflightMessages
from gateway.mqtt.session.journal import Journal
from gateway.mqtt.session.subscriptions import Subscriptions
from mapping.outcomes import Outcome
from mapping.record import MQTT_QOS, MQTT_TOPIC, Received
from mapping.rules import Rules
from protocols.mqtt.packets import Version


class Client:
    """A connection that takes everything."""

    is_open = takes_more = True
    window = 10
    version = Version.V5

    def __init__(self) -> None:
        self.sent: list[int | None] = []

    def may_receive(self, topic: str, record: Received) -> bool:
        return True

    def send(self, message: Any, qos: int, *, packet_id: int | None = None, **_: Any) -> int | None:
        self.sent.append(packet_id)
        return packet_id


class Share:
    """A membership in a group."""

    def __init__(self) -> None:
        self.settled: list[Received] = []

    def done(self, record: Received) -> None:
        self.settled.append(record)


async def test_a_message_of_a_group_that_was_left_before_it_was_sent_is_another_member_s() -> None:
    """At QoS 2 it waits for the journal meanwhile; sent here too, it would arrive twice."""
    writes: list[Any] = []
    journal, client, share = Journal(writes.append, lambda: None), Client(), Share()
    parts = DeliveryParts(Messages(Rules()), None, Counters(), lambda: 0, set())  # type: ignore[arg-type]
    deliveries = Deliveries("c", InflightMessages(), journal, Subscriptions(), lambda: None, parts)
    deliveries.client = client  # type: ignore[assignment]
    record = Received("t", b"t", b"x", ((MQTT_TOPIC, b"t"), (MQTT_QOS, b"2")), 0, 0, 7)
    deliveries.send_shared(record, Match(2, False, ()), share)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    deliveries.give_up(share)  # type: ignore[arg-type]
    writes[0].settle([None], [0], Result(Outcome.STORED, 0))
    assert (client.sent, share.settled) == ([], [])
    assert deliveries.inflight is not None
    assert not len(deliveries.inflight)
    assert deliveries.capacity == client.window
