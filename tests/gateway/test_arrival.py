"""A record's Kafka timestamp is its arrival, whatever a client's clock says, by every way in."""

from __future__ import annotations

import time
import uuid

import pytest
from proton import Message
from proton.utils import BlockingConnection

from tests.gateway.test_vouched_headers import post
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.topics import read_all

JSON = "application/vnd.kafka.json.v2+json"
HOUR_MS = 3_600_000


@pytest.mark.parametrize("off_ms", [600_000, -HOUR_MS, -48 * HOUR_MS], ids=["fast", "slow", "days old"])
async def test_a_clients_clock_is_a_header_and_never_the_records_timestamp(
    gateway: GatewayProcess, bootstrap: str, off_ms: int
) -> None:
    topic = f"arrival-{uuid.uuid4().hex[:8]}"
    began = round(time.time() * 1000)
    created = began + off_ms
    host, port = gateway.address("amqp")
    connection = BlockingConnection(f"amqp://{host}:{port}", timeout=60)
    sender = connection.create_sender(topic)
    sender.send(Message(id="jms", body=b"amqp", inferred=True, creation_time=created / 1000))
    connection.close()
    mqtt = await RawClient.connect(gateway.address("mqtt"))
    await mqtt.publish(f"{topic}/mqtt", b"mqtt", user_properties=(("creation-time", str(created)),))
    await mqtt.disconnect()
    assert (await post(gateway, f"/topics/{topic}", JSON, json={"records": [{"value": "http"}]}))[0] == 200
    told = {"records": [{"value": "told", "timestamp": created}]}
    assert (await post(gateway, f"/topics/{topic}", JSON, json=told))[0] == 200
    ended = round(time.time() * 1000)
    found = {record.value.strip(b'"'): record for record in await read_all(bootstrap, topic)}
    assert found.keys() == {b"amqp", b"mqtt", b"http", b"told"}
    assert found[b"told"].timestamp == created  # HTTP names the record's own timestamp
    for way in (b"amqp", b"mqtt", b"http"):
        assert began <= found[way].timestamp <= ended
    assert dict(found[b"amqp"].headers)["creation-time"] == b"%d" % created
    assert b"creation-time" not in dict(found[b"mqtt"].headers)  # a user's own header of this name has another
