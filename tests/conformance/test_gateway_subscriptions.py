"""Subscriptions in the running gateway: sections 3.8 to 3.11, and the delivery rules of 3.3.4."""

from __future__ import annotations

import pytest

from protocols.mqtt import packets
from protocols.mqtt.packets import Subscription
from tests.conformance.conftest import Connect, kept

BOTH = pytest.mark.parametrize("version", [5, 4], ids=["5.0", "3.1.1"])


@pytest.mark.clause("MQTT-3.8.4-1", "MQTT-3.8.4-2", "MQTT-3.8.4-5", "MQTT-3.8.4-6", "MQTT-3.8.4-7", "MQTT-3.9.3-1")
@pytest.mark.clause("MQTT311-3.8.4-1", "MQTT311-3.8.4-2", "MQTT311-3.8.4-4", "MQTT311-3.8.4-5", "MQTT311-3.9.3-1")
@pytest.mark.clause("MQTT-2.2.1-6", "MQTT311-2.3.1-7")
@BOTH
async def test_one_suback_for_many_filters(connect: Connect, place: str, version: int) -> None:
    client = await connect(version=version)
    asked = tuple(Subscription(f"{place}/{name}", qos) for name, qos in (("a", 2), ("b", 0), ("c/#", 1), ("+", 0)))
    client.send(packets.Subscribe(0xABCD, asked))
    assert await client.expect(packets.Suback) == packets.Suback(0xABCD, (2, 0, 1, 0))
    for topic, qos in ((f"{place}/a", 2), (f"{place}/b", 0), (f"{place}/c/d", 1), (f"{place}/e", 0)):
        sender = await connect()
        await sender.publish(topic, b"", 2)
        message = await client.message()
        assert (message.topic, message.qos) == (topic, qos)


@pytest.mark.clause("MQTT-3.8.4-8", "MQTT311-3.8.4-6", "MQTT-3.3.2-3", "MQTT311-3.3.2-3")
@BOTH
async def test_delivery_has_the_lower_qos_of_message_and_filter(connect: Connect, place: str, version: int) -> None:
    subscribers = [await connect(version=version) for _ in range(3)]
    for granted, one in enumerate(subscribers):
        assert (await one.subscribe(Subscription(f"{place}/x/+", granted))).reason_codes == (granted,)
    sender = await connect(version=version)
    for qos in range(3):
        await sender.publish(f"{place}/y/{qos}", b"not for them", qos)
        await sender.publish(f"{place}/x/{qos}", b"", qos)
    for granted, one in enumerate(subscribers):
        messages = await one.messages(3)
        assert [(m.topic, m.qos) for m in messages] == [(f"{place}/x/{qos}", min(qos, granted)) for qos in range(3)]


@pytest.mark.clause("MQTT-3.3.4-2", "MQTT-3.3.4-3", "MQTT-3.3.4-4", "MQTT311-3.3.5-1")
@BOTH
async def test_overlapping_filters(connect: Connect, place: str, version: int) -> None:
    client, sender = await connect(version=version), await connect()
    for number, (topic_filter, qos) in enumerate([("#", 0), ("+", 2), ("a", 1)], 1):
        properties = {"subscription_identifiers": (number,)} if version == 5 and number != 3 else {}
        await client.subscribe(Subscription(f"{place}/{topic_filter}", qos), **properties)
    await sender.publish(f"{place}/a", b"one", 2)
    await sender.publish(f"{place}/end", b"two", 2)
    one, two = await client.messages(2)
    assert [(one.payload, one.qos), (two.payload, two.qos)] == [(b"one", 2), (b"two", 2)]  # one copy of each
    if version == 5:
        assert one.properties is not None
        assert sorted(one.properties.subscription_identifiers) == [1, 2]


@pytest.mark.clause("MQTT-3.8.3-3")
async def test_no_local(connect: Connect, place: str) -> None:
    client, other = await connect(), await connect()
    await client.subscribe(Subscription(f"{place}/a", 1, no_local=True))
    await client.publish(f"{place}/a", b"mine")
    await other.publish(f"{place}/a", b"yours")
    assert (await client.message()).payload == b"yours"


@pytest.mark.clause("MQTT-3.8.4-3", "MQTT311-3.8.4-3")
@BOTH
async def test_a_second_subscription_replaces_the_first(connect: Connect, place: str, version: int) -> None:
    client, sender = await connect(version=version), await connect()
    for qos in (0, 2, 1):
        assert (await client.subscribe(Subscription(f"{place}/a", qos))).reason_codes == (qos,)
    for payload in (b"one", b"two"):
        await sender.publish(f"{place}/a", payload, 2)
    assert [(m.payload, m.qos) for m in await client.messages(2)] == [(b"one", 1), (b"two", 1)]


@pytest.mark.clause("MQTT-3.8.4-4", "MQTT311-3.8.4-3")
@BOTH
async def test_replacing_a_subscription_loses_nothing(connect: Connect, place: str, version: int) -> None:
    client, sender = await connect(version=version), await connect()
    await client.subscribe(f"{place}/a")
    for number in range(40):
        sender.send(packets.Publish(f"{place}/a", b"%d" % number, 1, packet_id=number + 1))
        if number % 10 == 5:
            client.send(packets.Subscribe(client.new_id(), (Subscription(f"{place}/a", number % 3),)))
    seen = []
    while len(seen) < 40:
        packet = await client.receive()
        if type(packet) is packets.Publish:
            seen.append(int(packet.payload))
            if packet.qos == 1:
                client.send(packets.Puback(packet.packet_id))
    assert seen == list(range(40))


@pytest.mark.clause("MQTT-3.8.4-4", "MQTT311-3.8.4-3")
@BOTH
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_replacing_a_subscription_keeps_what_waits(
    connect: Connect, place: str, client_id: str, version: int, qos: int
) -> None:
    """A client that comes back subscribes again, with another QoS, before it has what was stored meanwhile.

    It gets all of it, over another interruption too, and then new messages once, at the new QoS.
    """
    options = kept(version, **({"receive_maximum": 3} if version == 5 else {}))
    sender, client = await connect(), await connect(client_id, **options)
    await client.subscribe(Subscription(f"{place}/+", 1))
    await client.disconnect()
    for number in range(20):
        await sender.publish(f"{place}/a", b"%d" % number, 1)
    seen: list[bytes] = []
    for count in (5, 20):
        client = await connect(client_id, **options)
        assert (await client.subscribe(Subscription(f"{place}/+", qos))).reason_codes == (qos,)
        while len(seen) < count:
            message = await client.expect(packets.Publish)
            assert message.qos == 1
            seen += [message.payload] * (message.payload not in seen)
            client.send(packets.Puback(message.packet_id))
        if count == 5:
            client.drop()
    assert seen == [b"%d" % number for number in range(20)]
    await sender.publish(f"{place}/b", b"new", 1)
    last = await client.message()
    assert (last.payload, last.qos) == (b"new", min(qos, 1))


@pytest.mark.clause("MQTT-3.10.4-1", "MQTT-3.10.4-2", "MQTT-3.10.4-4", "MQTT-3.10.4-5", "MQTT-3.10.4-6")
@pytest.mark.clause("MQTT-3.11.3-1", "MQTT-3.11.3-2", "MQTT-2.2.1-6", "MQTT311-2.3.1-7")
@pytest.mark.clause("MQTT311-3.10.4-1", "MQTT311-3.10.4-2", "MQTT311-3.10.4-4", "MQTT311-3.10.4-5", "MQTT311-3.10.4-6")
@BOTH
async def test_unsubscribe(connect: Connect, place: str, version: int) -> None:
    client, sender = await connect(version=version), await connect()
    await client.subscribe(f"{place}/a/+", f"{place}/b", f"{place}/c")
    client.send(packets.Unsubscribe(0xABCD, (f"{place}/b", f"{place}/a/x", f"{place}/a/+", f"{place}/C")))
    codes = (0, 0x11, 0, 0x11) if version == 5 else ()
    assert await client.expect(packets.Unsuback) == packets.Unsuback(0xABCD, codes)
    client.send(packets.Unsubscribe(0xABCE, (f"{place}/b",)))
    assert (await client.expect(packets.Unsuback)).packet_id == 0xABCE
    for topic in ("a/x", "b", "c"):
        await sender.publish(f"{place}/{topic}")
    assert (await client.message()).topic == f"{place}/c"
    await client.ping()


@pytest.mark.clause("MQTT-3.10.4-3", "MQTT311-3.10.4-3")
@BOTH
async def test_unsubscribe_completes_deliveries_in_flight(connect: Connect, place: str, version: int) -> None:
    client, sender = await connect(version=version), await connect()
    await client.subscribe(f"{place}/a", f"{place}/end")
    await sender.publish(f"{place}/a", b"one", 2)
    await sender.publish(f"{place}/a", b"two", 1)
    one, two = await client.expect(packets.Publish), await client.expect(packets.Publish)
    await client.unsubscribe(f"{place}/a")
    client.send(packets.Pubrec(one.packet_id))
    assert await client.expect(packets.Pubrel) == packets.Pubrel(one.packet_id)
    client.send(packets.Puback(two.packet_id))
    client.send(packets.Pubcomp(one.packet_id))
    await sender.publish(f"{place}/a", b"three")
    await sender.publish(f"{place}/end")
    assert (await client.message()).topic == f"{place}/end"


@pytest.mark.clause("MQTT-4.7.3-4", "MQTT311-4.7.3-4")
@BOTH
async def test_topics_are_compared_without_normalization(connect: Connect, place: str, version: int) -> None:
    """Upper and lower case, empty levels, blanks, and two Unicode spellings of one letter are all different."""
    client, sender = await connect(version=version), await connect(version=version)
    wanted = [f"{place}/{name}" for name in ("Accounts", "a//b", " ", "caf\u00e9")]
    await client.subscribe(*wanted)
    for name in ("ACCOUNTS", "accounts", "a/b", "a//b/", "", "  ", "cafe\u0301"):
        await sender.publish(f"{place}/{name}", b"not wanted")
    for topic in wanted:
        await sender.publish(topic, b"wanted")
    assert [(m.topic, m.payload) for m in await client.messages(4)] == [(topic, b"wanted") for topic in wanted]


@pytest.mark.parametrize("version", [5, 4])
async def test_a_session_has_thousands_of_subscriptions(
    connect: Connect, place: str, client_id: str, version: int
) -> None:
    """Home Assistant has one for each topic of each entity, in a session that it keeps."""
    client = await connect(client_id, **kept(version))
    for start in range(0, 10_000, 500):
        wanted = [f"{place}/{number}/state" for number in range(start, start + 500)]
        assert (await client.subscribe(*wanted)).reason_codes == (2,) * 500
    more = await client.subscribe(f"{place}/one/too/many")
    assert more.reason_codes == ((0x97,) if version == 5 else (0x80,))
    await client.publish(f"{place}/9999/state", b"on")
    assert (await client.message()).payload == b"on"
