"""Retained messages in the running gateway: section 3.3.1.3 of both standards."""

from __future__ import annotations

import pytest

from protocols.mqtt.packets import Subscription
from tests.conformance.conftest import Connect, Settled

BOTH = pytest.mark.parametrize("version", [5, 4], ids=["5.0", "3.1.1"])


@pytest.mark.clause("MQTT-3.3.1-5", "MQTT-3.3.1-9", "MQTT-3.3.1-12")
@pytest.mark.clause("MQTT311-3.3.1-5", "MQTT311-3.3.1-6", "MQTT311-3.3.1-7", "MQTT311-3.3.1-8", "MQTT311-3.3.1-9")
@pytest.mark.clause("MQTT311-3.1.2-7")
@BOTH
async def test_the_last_message_is_retained(connect: Connect, settled: Settled, place: str, version: int) -> None:
    established = await connect(version=version)
    await established.subscribe(f"{place}/#")
    sender = await connect(version=version)
    for payload, qos in ((b"one", 2), (b"two", 1), (b"three", 0)):
        await sender.publish(f"{place}/a", payload, qos, retain=True)
        assert ((m := await established.message()).payload, m.qos, m.retain) == (payload, qos, False)
    await sender.publish(f"{place}/b/c", b"four", 2, retain=True)
    await established.message()
    await sender.disconnect()  # retained messages are not part of the session
    await settled()
    new = await connect(version=version)
    await new.subscribe(f"{place}/#")
    got = await new.messages(2)
    assert sorted((m.topic, m.payload, m.qos, m.retain) for m in got) == [
        (f"{place}/a", b"three", 0, True),
        (f"{place}/b/c", b"four", 2, True),
    ]
    await new.ping()


@pytest.mark.clause("MQTT-3.3.1-6", "MQTT-3.3.1-7", "MQTT311-3.3.1-10", "MQTT311-3.3.1-11")
@BOTH
async def test_an_empty_message_clears_the_topic(connect: Connect, settled: Settled, place: str, version: int) -> None:
    established, sender = await connect(version=version), await connect(version=version)
    await established.subscribe(f"{place}/a")
    for topic, payload in (("a", b"one"), ("a", b""), ("b", b"")):
        await sender.publish(f"{place}/{topic}", payload, 1, retain=True)
    assert [(m.payload, m.retain) for m in await established.messages(2)] == [(b"one", False), (b"", False)]
    await sender.publish(f"{place}/end", b"two", 1, retain=True)
    await settled()
    new = await connect(version=version)
    await new.subscribe(f"{place}/+")
    assert (await new.message()).payload == b"two"
    await new.ping()


@pytest.mark.clause("MQTT-3.3.1-8", "MQTT311-3.3.1-12")
@BOTH
async def test_other_messages_do_not_change_it(connect: Connect, settled: Settled, place: str, version: int) -> None:
    sender = await connect(version=version)
    await sender.publish(f"{place}/a", b"kept", 1, retain=True)
    for payload in (b"ordinary", b""):
        for topic in ("a", "b"):
            await sender.publish(f"{place}/{topic}", payload, 1)
    await settled()
    new = await connect(version=version)
    await new.subscribe(f"{place}/+")
    assert ((m := await new.message()).payload, m.retain) == (b"kept", True)
    await new.ping()


@pytest.mark.clause("MQTT-3.3.1-9", "MQTT-3.3.1-10", "MQTT-3.3.1-11", "MQTT-3.8.4-4")
async def test_retain_handling(connect: Connect, settled: Settled, place: str) -> None:
    sender = await connect()
    await sender.publish(f"{place}/a", b"kept", 1, retain=True)
    await settled()
    client = await connect()
    for handling, is_sent in ((1, True), (1, False), (0, True), (0, True), (2, False), (1, False)):
        await client.subscribe(Subscription(f"{place}/a", 1, retain_handling=handling))
        if is_sent:
            assert ((m := await client.message()).payload, m.retain) == (b"kept", True)
        await client.ping()
    await client.unsubscribe(f"{place}/a")
    await client.subscribe(Subscription(f"{place}/a", 1, retain_handling=2))
    await client.ping()
    await sender.publish(f"{place}/a", b"new", 1)
    assert (await client.message()).payload == b"new"


@pytest.mark.clause("MQTT311-3.8.4-3")
async def test_every_subscribe_of_311_gets_retained_messages(connect: Connect, settled: Settled, place: str) -> None:
    client = await connect(version=4)
    await client.publish(f"{place}/a", b"kept", 1, retain=True)
    await settled()
    for qos in (0, 1, 1):
        await client.subscribe(Subscription(f"{place}/a", qos))
        assert ((m := await client.message()).payload, m.retain, m.qos) == (b"kept", True, qos)


@pytest.mark.clause("MQTT-3.3.1-12", "MQTT-3.3.1-13")
async def test_retain_as_published(connect: Connect, place: str) -> None:
    client, sender = await connect(), await connect()
    await client.subscribe(Subscription(f"{place}/as", 0, retain_as_published=True), Subscription(f"{place}/not", 0))
    for name in ("as", "not"):
        for retain in (True, False):
            await sender.publish(f"{place}/{name}", b"x", 1, retain)
    assert [m.retain for m in await client.messages(4)] == [True, False, False, False]
