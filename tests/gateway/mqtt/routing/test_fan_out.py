"""One publisher and subscribers of every kind: what each of them receives of a burst."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from protocols.mqtt import packets
from protocols.mqtt.packets import Subscription, Version
from protocols.mqtt.properties import Properties
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.mqtt_packets import encode_packet

NewTopic = Callable[..., Awaitable[str]]
COUNT = 240
SMALL = 200


def burst(topic: str) -> list[packets.Publish]:
    """Messages to three topics, mostly to one; some are large, expire, or have properties."""
    found = []
    for number in range(COUNT):
        payload = b"%d." % number + b"x" * (300 if number % 10 == 3 else 20)
        name = f"{topic}/a" if number % 12 else f"{topic}/b"
        properties = None
        if number % 13 == 5:
            properties = Properties(message_expiry_interval=3600)
        elif number % 17 == 6:
            properties = Properties(user_properties=(("number", str(number)),))
        elif 60 <= number < 100:
            properties = Properties(user_properties=(("unit", "C"), ("unit", "\u00b0")))
        found.append(packets.Publish(name, payload, 1, False, False, number + 1, properties))
    return found


def users(message: packets.Publish) -> tuple[tuple[str, str], ...]:
    return message.properties.user_properties if message.properties is not None else ()


async def test_a_burst_reaches_every_kind_of_subscriber_in_order_and_once(
    gateway: GatewayProcess, new_topic: NewTopic
) -> None:
    topic = await new_topic(partitions=1)
    address, name = gateway.address("mqtt"), uuid.uuid4().hex[:8]
    kinds: list[tuple[int, int, dict[str, Any], dict[str, Any]]] = [
        (5, 0, {}, {}),
        (5, 0, {}, {}),
        (4, 0, {}, {}),
        (5, 1, {}, {}),
        (5, 0, {}, {"subscription_identifiers": (7,)}),
        (5, 0, {"topic_alias_maximum": 2}, {}),
        (5, 0, {"maximum_packet_size": SMALL}, {}),
    ]
    clients = []
    for number, (version, qos, options, properties) in enumerate(kinds):
        client = await RawClient.connect(address, f"fan-{name}-{number}", version=version, **options)
        await client.subscribe(Subscription(f"{topic}/#", qos), **properties)
        clients.append(client)
    publisher = await RawClient.connect(address, f"fan-{name}-publisher")
    sent = burst(topic)
    publisher.send_bytes(b"".join(encode_packet(one, Version.V5) for one in sent))

    async def check(client: RawClient, small: bool) -> None:
        wanted = [one.payload for one in sent if not small or len(one.payload) < SMALL]
        got = await client.messages(len(wanted))
        assert [one.payload for one in got] == wanted
        if client.version is Version.V5 and not small:
            assert [users(one) for one in got] == [users(one) for one in sent]

    await asyncio.gather(
        *(check(client, "maximum_packet_size" in kind[2]) for client, kind in zip(clients, kinds, strict=True))
    )
    for one in sent:
        assert (await publisher.expect(packets.Puback)).packet_id == one.packet_id
    for client in clients:
        await client.ping()  # and nothing else came
    for client in (*clients, publisher):
        client.drop()
