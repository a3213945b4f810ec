"""The access list for MQTT topics that have other names in Kafka, by mapping rules or the catch-all topic."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
from aiokafka import AIOKafkaProducer

from protocols.mqtt.packets import Puback, Publish, Suback, Subscribe, Subscription
from protocols.mqtt.reasons import ReasonCode
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

RUN = uuid.uuid4().hex[:8]
SITE = f"site {RUN}"  # no Kafka name: the catch-all's
CONFIG = f"""
[kafka]
create_topics = true
[mqtt]
partial_subscriptions = {{partial}}
[[mapping.rules]]
mqtt = "plant-{RUN}/{{{{machine}}}}/#"
topic = "machines-{RUN}"
[[security.access]]
topic = "plant-{RUN}/safe/#"
allow = false
[[security.access]]
topic = "plant-{RUN}/#"
[[security.access]]
topic = "{SITE}/#"
[[security.access]]
kafka = "raw-{RUN}/open/#"
"""


@pytest.fixture(scope="module", params=["true", "false"])
async def gateway(
    bootstrap: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[GatewayProcess, bool]]:
    """A gateway, and whether it grants filters that are partly denied."""
    directory = tmp_path_factory.mktemp("rights")
    process = await GatewayProcess(directory, bootstrap, config=CONFIG.format(partial=request.param)).start()
    yield process, request.param == "true"
    assert await process.stop() == 0


@pytest.fixture
async def client(gateway: tuple[GatewayProcess, bool]) -> AsyncIterator[RawClient]:
    made = await RawClient.connect(gateway[0].address("mqtt"))
    yield made
    made.drop()


async def subscribe(client: RawClient, *filters: str) -> list[int]:
    client.send(Subscribe(client.new_id(), tuple(Subscription(one, 1) for one in filters)))
    return list((await client.expect(Suback)).reason_codes)


async def publish(client: RawClient, topic: str, payload: bytes = b"x", *, retain: bool = False) -> int:
    packet_id = client.new_id()
    client.send(Publish(topic, payload, qos=1, packet_id=packet_id, retain=retain))
    return int((await client.answer(Puback, packet_id)).reason_code)  # its own copy may come before


async def test_what_is_granted_is_delivered(gateway: tuple[GatewayProcess, bool], client: RawClient) -> None:
    denied = f"plant-{RUN}/safe/key"
    topics = [f"plant-{RUN}/m1/temp", f"{SITE}/temp", f"raw-{RUN}/open/x"]
    assert await subscribe(client, *topics) == [1, 1, 1]
    assert (
        await subscribe(client, denied, f"raw-{RUN}/shut", f"machines-{RUN}/#", "elsewhere/#")
        == [ReasonCode.NOT_AUTHORIZED] * 4
    )
    for topic in topics:
        assert await publish(client, topic) == 0
        assert (await client.expect(Publish)).topic == topic
    assert await publish(client, denied) == ReasonCode.NOT_AUTHORIZED
    assert await publish(client, f"raw-{RUN}/shut") == ReasonCode.NOT_AUTHORIZED


async def test_a_denied_leaf_is_taken_out_or_refuses_the_filter(
    gateway: tuple[GatewayProcess, bool], client: RawClient, bootstrap: str
) -> None:
    """A native Kafka client, which may, writes to the denied topic, with the MQTT topic in a header."""
    process, partial = gateway
    filters = [f"plant-{RUN}/#", f"plant-{RUN}/+/key", f"$share/s-{RUN}/plant-{RUN}/#"]
    assert await subscribe(client, f"plant-{RUN}/m1/#", f"{SITE}/#") == [1, 1]
    for one in filters:
        assert await subscribe(client, one) == [1 if partial else ReasonCode.NOT_AUTHORIZED], one
    other = await RawClient.connect(process.address("mqtt"))
    assert await publish(other, f"plant-{RUN}/m1/key", b"first") == 0
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        header = [("mqtt.topic", f"plant-{RUN}/safe/key".encode())]
        key = b"plant-%b/m1/key" % RUN.encode()  # in the same partition, so before the last one
        await producer.send_and_wait(f"machines-{RUN}", b"secret", key=key, headers=header)
    assert await publish(other, f"plant-{RUN}/m1/key", b"last", retain=True) == 0
    seen = []
    while not seen or seen.count(b"last") < (2 if partial else 1):
        seen.append((await client.expect(Publish)).payload)
    assert b"secret" not in seen
    late = await RawClient.connect(process.address("mqtt"))
    wanted = f"plant-{RUN}/#" if partial else f"plant-{RUN}/m1/#"
    assert await subscribe(late, wanted) == [1]
    retained = await late.expect(Publish)
    assert (retained.payload, retained.retain) == (b"last", True)
    assert await publish(late, f"plant-{RUN}/m1/key", b"", retain=True) == 0
    other.drop()
    late.drop()
