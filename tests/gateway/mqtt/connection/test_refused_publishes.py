"""Refused publishes of MQTT 3.1.1, which has no error codes: the connection is closed, or the message is dropped."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from protocols.mqtt.packets import Puback, Pubcomp, Publish, Pubrec, Pubrel
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

RUN = uuid.uuid4().hex[:8]
CONFIG = f"""
[kafka]
create_topics = true
[mqtt]
acknowledge_refused = true
[[security.access]]
topic = "open-{RUN}/#"
[[security.access]]
topic = "open_{RUN}/#"
"""


@pytest.fixture(scope="module")
async def forgiving(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    process = await GatewayProcess(tmp_path_factory.mktemp("forgiving"), bootstrap, config=CONFIG).start()
    yield process
    assert await process.stop() == 0


async def test_what_can_never_be_stored_may_be_acknowledged_to_3_1_1(forgiving: GatewayProcess) -> None:
    client = await RawClient.connect(forgiving.address("mqtt"), version=4)
    for topic in (f"shut-{RUN}/x", f"open-{RUN}/x"):  # it goes on, in order, on the same connection
        first, second = client.new_id(), client.new_id()
        client.send(Publish(topic, b"x", qos=1, packet_id=first))
        client.send(Publish(topic, b"x", qos=2, packet_id=second))
        assert (await client.expect(Puback)).packet_id == first
        assert (await client.expect(Pubrec)).packet_id == second
        client.send(Pubrel(second))
        assert (await client.expect(Pubcomp)).packet_id == second
    client.drop()


async def test_mqtt_5_is_told_all_the_same(forgiving: GatewayProcess) -> None:
    client = await RawClient.connect(forgiving.address("mqtt"))
    for qos, answer in ((1, Puback), (2, Pubrec)):
        packet_id = client.new_id()
        client.send(Publish(f"shut-{RUN}/x", b"x", qos=qos, packet_id=packet_id))
        assert (await client.expect(answer)).reason_code == 0x87
    client.drop()


async def test_a_name_that_collides_is_refused_with_the_name_that_is_there(
    forgiving: GatewayProcess, admin: AIOKafkaAdminClient
) -> None:
    await admin.create_topics([NewTopic(f"open.{RUN}", 1, 1)])
    client = await RawClient.connect(forgiving.address("mqtt"))
    packet_id = client.new_id()
    client.send(Publish(f"open_{RUN}/x", b"x", qos=1, packet_id=packet_id))
    answer = await client.expect(Puback)
    assert answer.reason_code == 0x90
    assert f"open.{RUN}" in str(answer.properties)
    client.drop()
