"""A gateway is frozen until another one has taken over its client's session, and then continues."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from gateway.embedded.broker import EmbeddedBroker
from protocols.mqtt import packets
from protocols.mqtt.packets import Publish, Version
from protocols.mqtt.properties import Properties
from tests.support.frozen import freeze
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.topics import read_all

KEPT: dict[str, Any] = {"clean_start": False, "session_expiry_interval": 600}
CONFIG = "[kafka]\ncreate_topics = true\n"
STORED, QUEUED, UNREAD = 11, 12, 13
"""Packet identifiers; when the gateway freezes, their messages are in flight to Kafka, queued, and in the socket."""


@pytest.mark.clause("MQTT-3.1.4-3", "MQTT-4.3.3-10")
@pytest.mark.parametrize("kafka_dies", [False, True], ids=["kafka-goes-on", "kafka-is-killed"])
async def test_a_frozen_gateway_repeats_no_work_after_it_wakes(
    stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess], kafka_dies: bool
) -> None:
    """It neither delivers a message again nor stores one again, and it closes its connection with a reason.

    Kafka stores the records in flight when it continues, or never if it is killed.
    """
    kafka = stoppable.bootstrap_servers
    frozen = await new_gateway(kafka, config=CONFIG, name="frozen").start()
    other = await new_gateway(kafka, config=CONFIG, name="other").start()
    place = f"frozen{uuid.uuid4().hex[:8]}"
    old = await RawClient.connect(frozen.address("mqtt"), place, **KEPT)
    await old.subscribe(f"{place}/out")
    assert await old.publish(f"{place}/in", b"first", 2) == 0
    try:
        freeze(stoppable.pid)
        for packet_id in (STORED, QUEUED):
            old.send(Publish(f"{place}/in", b"%d" % packet_id, 2, packet_id=packet_id))
            await old.ping()  # the gateway has read both and sent the first to Kafka
        freeze(frozen.pid)
        if kafka_dies:
            await stoppable.kill()
            await stoppable.start()
        os.kill(stoppable.pid, signal.SIGCONT)
        old.send(Publish(f"{place}/in", b"%d" % UNREAD, 2, packet_id=UNREAD))
        sender = await RawClient.connect(other.address("mqtt"))
        assert await sender.publish(f"{place}/out", b"hello", 2) == 0
        new = await taken_over(other, place)
        assert new.connack.session_present
        assert (await new.message()).payload == b"hello"
        for packet_id in (STORED, QUEUED, UNREAD):
            new.send(Publish(f"{place}/in", b"%d" % packet_id, 2, dup=True, packet_id=packet_id))
            assert (await new.answer(packets.Pubrec, packet_id)).reason_code == 0
            new.send(packets.Pubrel(packet_id))
            assert await new.answer(packets.Pubcomp, packet_id) == packets.Pubcomp(packet_id)
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
        os.kill(stoppable.pid, signal.SIGCONT)
    said = await old.expect_end()
    assert [type(packet).__name__ for packet in said] == ["Disconnect"]
    assert said == [packets.Disconnect(0x8E, said[0].properties)]  # type: ignore[union-attr]
    stays = await RawClient.connect(frozen.address("mqtt"), **KEPT)
    assert await stays.publish(f"{place}/in", b"last", 2) == 0, "it serves again"
    await new.ping()  # its client was not disturbed
    for client in (old, sender, new, stays):
        client.drop()
    assert await frozen.stop() == 0
    assert await other.stop() == 0
    values = [record.value for record in await read_all(kafka, place)]
    assert values.count(b"hello") == 1
    values.remove(b"hello")
    assert sorted(values) == sorted([b"first", b"11", b"12", b"13", b"last"])


async def taken_over(other: GatewayProcess, client_id: str) -> RawClient:
    """Connect until the other gateway considers the frozen one dead."""
    expiry = Properties(session_expiry_interval=600)
    while True:
        client = await RawClient.open(other.address("mqtt"))
        client.send(packets.Connect(Version.V5, client_id, clean_start=False, properties=expiry))
        client.connack = await client.expect(packets.Connack)
        if not client.connack.reason_code:
            return client
        assert client.connack.reason_code == 0x88
        client.drop()
