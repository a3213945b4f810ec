"""MQTT 5's features of messages and connections, between independent libraries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.interop.mqtt.clients import EVERY, HIVEMQ, MQTTJS, PAHO, VERSION_5, Kind, each
from tests.interop.mqtt.conftest import NewClient
from tests.interop.mqtt.drivers import WAIT_S, Client

PAIRS = [("a", "1"), ("b", "2"), ("a", "3"), ("", "no name"), ("größe", ""), ("b", "2")]


def as_held(pairs: list[tuple[str, str]], *kinds: Kind) -> list[tuple[str, str]]:
    """Return user properties in the order that survives; MQTT.js groups them by name, in both directions."""
    names = list(dict(pairs)) if MQTTJS in kinds else [None]
    return [pair for name in names for pair in pairs if name is None or pair[0] == name]


@pytest.mark.parametrize("kind", **each(VERSION_5))
async def test_every_property_of_a_message_reaches_every_library(
    new_client: NewClient, branch: str, kind: Kind
) -> None:
    publisher = await new_client(kind)
    subscribers = {other: await new_client(other) for other in VERSION_5}
    for subscriber in subscribers.values():
        await subscriber.subscribe(f"{branch}/a", qos=1)
    properties: dict[str, Any] = {
        "payload_format_indicator": 1,
        "content_type": "text/plain; charset=utf-8",
        "response_topic": f"{branch}/answer",
        "correlation_data": b"\x00\xfe binary",
        "message_expiry_interval": 1000,
        "user_properties": PAIRS,
    }
    assert await publisher.publish(f"{branch}/a", "grüße".encode(), **properties) == 0
    for other, subscriber in subscribers.items():
        [seen] = await subscriber.received(1)
        found = {name: value for name, value in seen.properties.items() if name in properties}
        assert 900 <= found.pop("message_expiry_interval") <= 1000
        own = found.pop("user_properties")
        assert found == {name: properties[name] for name in found.keys() | list(properties)[:4]}, other
        assert own == as_held(PAIRS, kind, other), other


@pytest.mark.parametrize(
    ("asking", "answering"),
    [(MQTTJS, HIVEMQ), (HIVEMQ, PAHO), (PAHO, MQTTJS)],
    ids=str,
)
async def test_request_and_response(new_client: NewClient, branch: str, asking: Kind, answering: Kind) -> None:
    server = await new_client(answering)
    await server.subscribe(f"{branch}/requests", qos=1)
    client = await new_client(asking, connected=False)
    connack = await client.connect(properties={"request_response_information": 1})
    base = connack.properties["response_information"]
    assert client.name in base
    await client.subscribe(f"{base}/#", qos=1)
    correlation = branch.encode()
    asked = {"response_topic": f"{base}/here", "correlation_data": correlation}
    assert await client.publish(f"{branch}/requests", b"6 x 7", **asked) == 0

    [request] = await server.received(1)
    answer = {"correlation_data": request.properties["correlation_data"]}
    assert await server.publish(request.properties["response_topic"], b"42", **answer) == 0
    [response] = await client.received(1)
    assert (response.payload, response.properties["correlation_data"]) == (b"42", correlation)


@pytest.mark.parametrize("kind", **each([MQTTJS, HIVEMQ]))
async def test_aliases_assigned_by_a_library(new_client: NewClient, branch: str, kind: Kind) -> None:
    watcher = await new_client(PAHO)
    await watcher.subscribe(f"{branch}/#", qos=1)
    client = await new_client(kind, send_aliases=True)
    names = [f"{branch}/{'long' * 10}/{number % 3}" for number in range(30)]
    for name in names:
        assert await client.publish(name, name.encode()) == 0
    seen = await watcher.received(30)
    assert all(one.topic.encode() == one.payload for one in seen)
    assert sorted(one.topic for one in seen) == sorted(names)


async def test_aliases_set_by_hand(new_client: NewClient, branch: str) -> None:
    client = await new_client(PAHO)
    await client.subscribe(f"{branch}/#", qos=1)
    for topic, payload in ((f"{branch}/a", b"1"), ("", b"2"), (f"{branch}/b", b"3"), ("", b"4")):
        assert await client.publish(topic, payload, topic_alias=1) == 0
        await client.received(int(payload))
    names = [one.topic.removeprefix(f"{branch}/") for one in client.messages]
    assert names == ["a", "a", "b", "b"]


@pytest.mark.parametrize("kind", **each([MQTTJS, HIVEMQ]))
async def test_aliases_assigned_by_the_gateway(new_client: NewClient, branch: str, kind: Kind) -> None:
    publisher = await new_client(PAHO)
    client = await new_client(kind, properties={"topic_alias_maximum": 2})
    await client.subscribe(f"{branch}/#", qos=1)
    names = [f"{branch}/{'long' * 10}/{number % 4}" for number in range(40)]
    answers = [publisher.send(name, name.encode()) for name in names]
    await asyncio.wait_for(asyncio.gather(*answers), WAIT_S)
    seen = await client.received(40)
    assert all(one.topic.encode() == one.payload for one in seen)
    assert sorted(one.topic for one in seen) == sorted(names)
    if kind == MQTTJS:  # the other library does not expose them
        assert {one.properties.get("topic_alias") for one in seen} >= {1, 2}


@pytest.mark.parametrize("kind", **each(VERSION_5))
async def test_a_receive_maximum_of_one(new_client: NewClient, branch: str, kind: Kind) -> None:
    """MQTT.js and HiveMQ's client close the connection if more messages are in flight."""
    publisher = await new_client(PAHO)
    client = await new_client(kind, properties={"receive_maximum": 1})
    await client.subscribe(f"{branch}/+", qos=2)
    answers = [publisher.send(f"{branch}/a", b"%d" % number, 1 + number % 2) for number in range(50)]
    await asyncio.wait_for(asyncio.gather(*answers), WAIT_S)
    assert [int(one.payload) for one in await client.received(50)] == list(range(50))
    assert client.closed == []


@pytest.mark.parametrize(("kind", "qos"), [(PAHO, 1), (HIVEMQ, 1), (HIVEMQ, 2)], ids=str)
async def test_unacknowledged_messages_stop_delivery(new_client: NewClient, branch: str, kind: Kind, qos: int) -> None:
    publisher = await new_client(PAHO)
    client = await new_client(kind, hold=True, properties={"receive_maximum": 3})
    for one in (client, publisher):
        await one.subscribe(f"{branch}/+", qos=qos)
    answers = [publisher.send(f"{branch}/a", b"%d" % number, qos) for number in range(10)]
    await asyncio.wait_for(asyncio.gather(*answers), WAIT_S)
    await publisher.received(10)
    for count, expected in ((2, 5), (3, 8), (3, 10)):
        await client.received(expected - count if expected < 10 else 8)
        assert len(client.messages) == (expected - count if expected < 10 else 8)
        await client.acknowledge(count)
    assert [int(one.payload) for one in await client.received(10)] == list(range(10))


@pytest.mark.parametrize("kind", **each(VERSION_5))
async def test_a_message_above_the_client_s_maximum_is_not_sent(new_client: NewClient, branch: str, kind: Kind) -> None:
    publisher = await new_client(PAHO)
    client = await new_client(kind, properties={"maximum_packet_size": 2000})
    await client.subscribe(f"{branch}/+", qos=2)
    for payload in (b"1", b"2" * 5000, b"3"):
        assert await publisher.publish(f"{branch}/a", payload, 2) == 0
    assert [one.payload for one in await client.received(2)] == [b"1", b"3"]
    assert client.closed == []


@pytest.mark.parametrize("kind", **each(VERSION_5))
async def test_every_library_reads_connack_s_properties(new_client: NewClient, kind: Kind) -> None:
    client = await new_client(kind, connected=False)
    asked = {"session_expiry_interval": 0xFFFFFFFF}
    connack = await client.connect(client_id="", keep_alive=65535, properties=asked)
    assert connack.reason == 0
    assert connack.properties["assigned_client_identifier"]
    assert connack.properties["server_keep_alive"] == 1200
    assert connack.properties["session_expiry_interval"] == 604_800
    assert connack.properties["receive_maximum"] == 256
    assert connack.properties["topic_alias_maximum"] == 64
    assert connack.properties["maximum_packet_size"] == 2 * 1024 * 1024
    await client.disconnect(session_expiry_interval=0)


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_no_client_id(new_client: NewClient, branch: str, kind: Kind) -> None:
    client = await new_client(kind, client_id="")
    await client.subscribe(f"{branch}/a")
    assert await client.publish(f"{branch}/a", b"from nobody") == 0
    await client.received(1)


@pytest.mark.parametrize("kind", **each(VERSION_5))
async def test_no_local_and_unsubscribing_from_nothing(new_client: NewClient, branch: str, kind: Kind) -> None:
    own: Client = await new_client(kind)
    other = await new_client(kind)
    await own.subscribe(f"{branch}/+", no_local=True)
    assert await own.publish(f"{branch}/a", b"own") == 0
    assert await other.publish(f"{branch}/a", b"other's") == 0
    assert [one.payload for one in await own.received(1)] == [b"other's"]
    assert await own.unsubscribe(f"{branch}/+", f"{branch}/never") == [0, 0x11]


async def test_subscription_identifiers_of_overlapping_filters(new_client: NewClient, branch: str) -> None:
    client = await new_client(MQTTJS)
    await client.subscribe(f"{branch}/+", qos=0, properties={"subscription_identifier": 7})
    await client.subscribe(f"{branch}/a", qos=1, properties={"subscription_identifier": 268_435_455})
    assert await client.publish(f"{branch}/a", b"", 2) == 0
    assert await client.publish(f"{branch}/b", b"", 2) == 0
    seen = {one.topic[-1]: one for one in await client.received(2)}
    assert sorted(seen["a"].properties["subscription_identifiers"]) == [7, 268_435_455]
    assert (seen["a"].qos, seen["b"].qos) == (1, 0)
    assert seen["b"].properties["subscription_identifiers"] == [7]
