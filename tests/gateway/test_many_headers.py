"""A message with more than `mapping.max_headers` is refused in the words of its protocol, and disturbs nothing else."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import aiohttp
import pytest
from proton import Message
from proton.utils import BlockingConnection, SendException

from protocols.mqtt import packets
from protocols.mqtt.properties import Properties
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.topics import read_all

MOST = 1000
MORE = MOST + 64 + 1  # with those of the gateway
VERY_MANY = 200_000
QUOTA_EXCEEDED = 0x97


def pairs(count: int) -> tuple[tuple[str, str], ...]:
    return tuple((f"n{number % 10}", "v") for number in range(count))


@pytest.mark.parametrize("qos", [1, 2])
async def test_mqtt(gateway: GatewayProcess, bootstrap: str, new_topic: Any, qos: int) -> None:
    topic = await new_topic(partitions=1)
    client = await RawClient.connect(gateway.address("mqtt"))
    assert await client.publish(f"{topic}/a", b"good", qos, user_properties=pairs(MOST)) == 0
    assert await client.publish(f"{topic}/a", b"bad", qos, user_properties=pairs(MORE)) == QUOTA_EXCEEDED
    assert await client.publish(f"{topic}/a", b"bad", qos, user_properties=pairs(VERY_MANY)) == QUOTA_EXCEEDED
    assert await client.publish(f"{topic}/a", b"bad", qos, True, user_properties=pairs(MORE)) == QUOTA_EXCEEDED
    assert await client.publish(f"{topic}/a", b"last", qos) == 0
    assert [record.value for record in await read_all(bootstrap, topic)] == [b"good", b"last"]
    client.drop()


async def test_mqtt_in_other_packets(gateway: GatewayProcess) -> None:
    """A will is refused with its CONNECT: nobody could be told later."""
    will = packets.Will("t/a", b"", 0, False, Properties(user_properties=pairs(MORE)))
    refused = await RawClient.connect(gateway.address("mqtt"), will=will)
    assert refused.connack.reason_code == QUOTA_EXCEEDED
    refused.drop()
    client = await RawClient.connect(gateway.address("mqtt"))
    client.send(packets.Subscribe(1, (packets.Subscription("t/#", 0),), Properties(user_properties=pairs(VERY_MANY))))
    (said,) = await client.expect_end()
    assert isinstance(said, packets.Disconnect)
    assert said.reason_code == QUOTA_EXCEEDED
    client.drop()


@pytest.mark.parametrize("target", ["the topic", "anonymous"])
async def test_amqp(gateway: GatewayProcess, bootstrap: str, new_topic: Any, target: str) -> None:
    topic = await new_topic(partitions=1)

    def send() -> list[str]:
        connection = BlockingConnection(f"amqp://{gateway.addresses['amqp']}", timeout=60)
        sender = connection.create_sender(topic if target == "the topic" else None)
        said = []
        for count in (MOST, MORE, 10_000, 0):
            properties = {f"n{number}": True for number in range(count)}
            try:
                sender.send(Message(address=topic, body=f"{count}", properties=properties))
            except SendException as error:
                said.append(error.state.name)
            else:
                said.append("stored")
        connection.close()
        return said

    assert await asyncio.to_thread(send) == ["stored", "REJECTED", "REJECTED", "stored"]
    assert len(await read_all(bootstrap, topic)) == 2


async def test_http(gateway: GatewayProcess, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)

    def record(count: int) -> dict[str, Any]:
        value = base64.b64encode(b"v").decode()
        return {"value": count, "headers": [{"key": f"n{number}", "value": value} for number in range(count)]}

    headers = {"Content-Type": "application/vnd.kafka.json.v2+json"}
    async with aiohttp.ClientSession(f"http://{gateway.addresses['http']}", headers=headers) as http:
        records = [record(MOST), record(MORE), record(0)]
        async with http.post(f"/topics/{topic}", json={"records": records}) as answer:
            found = (await answer.json(content_type=None))["offsets"]
        assert [one.get("error_code") for one in found] == [None, 422, None]
        assert found[1]["message"] == "more than 1000 headers"
        async with http.post(f"/topics/{topic}", json={"records": [record(MORE)]}) as answer:
            assert answer.status == 422
    assert len(await read_all(bootstrap, topic)) == 2
