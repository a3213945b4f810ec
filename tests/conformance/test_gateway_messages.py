"""How the gateway forwards messages: properties, order, and QoS 2 between publisher and subscriber."""

from __future__ import annotations

import pytest

from protocols.mqtt import packets
from protocols.mqtt.packets import Publish
from protocols.mqtt.properties import Properties
from tests.conformance.conftest import Connect, kept

BOTH = pytest.mark.parametrize("version", [5, 4], ids=["5.0", "3.1.1"])


@pytest.mark.clause("MQTT-3.3.2-4", "MQTT-3.3.2-6", "MQTT-3.3.2-15", "MQTT-3.3.2-16", "MQTT-3.3.2-17", "MQTT-3.3.2-18")
@pytest.mark.clause("MQTT-3.3.2-20")
async def test_properties_are_forwarded_unchanged(connect: Connect, place: str) -> None:
    client, sender = await connect(), await connect()
    await client.subscribe(f"{place}/a")
    properties = Properties(
        payload_format_indicator=1,
        message_expiry_interval=100,
        content_type="text/pl\u00e4in; a=b",
        response_topic=f"{place}/answer to $this",
        correlation_data=bytes(range(256)),
        user_properties=(("b", "1"), ("a", "2"), ("b", "1"), ("", ""), ("mqtt.topic", "x"), ("gw.client", "y\n")),
    )
    sender.send(Publish(f"{place}/a", b"x", 1, packet_id=1, properties=properties))
    sender.send(Publish(f"{place}/a", b"y", 1, packet_id=2, properties=Properties(payload_format_indicator=0)))
    one, two = await client.messages(2)
    got = one.properties
    assert got is not None
    assert got.message_expiry_interval is not None
    assert 50 < got.message_expiry_interval <= 100
    for name in (
        "payload_format_indicator", "content_type", "response_topic", "correlation_data", "user_properties",
    ):  # fmt: skip
        assert getattr(got, name) == getattr(properties, name)
    assert two.properties is None or two.properties.payload_format_indicator in (None, 0)  # 0 means the same as absence


@pytest.mark.clause("MQTT-3.3.1-3", "MQTT311-3.3.1-3", "MQTT-4.3.2-5")
@BOTH
async def test_dup_is_not_forwarded(connect: Connect, place: str, version: int) -> None:
    client, sender = await connect(version=version), await connect(version=version)
    await client.subscribe(f"{place}/a")
    for qos in (1, 2):
        sender.send(Publish(f"{place}/a", b"x", qos, dup=True, packet_id=qos))
    assert [(m.qos, m.dup) for m in await client.messages(2)] == [(1, False), (2, False)]


@pytest.mark.clause("MQTT-4.6.0-5", "MQTT-4.6.0-6", "MQTT-4.6.0-2", "MQTT-4.6.0-3", "MQTT-4.6.0-4")
@pytest.mark.clause("MQTT311-4.6.0-2", "MQTT311-4.6.0-3", "MQTT311-4.6.0-4", "MQTT311-4.6.0-5", "MQTT311-4.6.0-6")
@BOTH
@pytest.mark.parametrize("qos", [1, 2])
async def test_order(connect: Connect, place: str, version: int, qos: int) -> None:
    """The gateway also keeps the order of acknowledgements, which 5.0 requires of clients."""
    client, sender = await connect(version=version), await connect(version=version)
    await client.subscribe(f"{place}/#")
    ids = range(1, 101)
    for number in ids:
        sender.send(Publish(f"{place}/{number % 3}", b"%d" % number, qos, packet_id=number))
    if qos == 1:
        assert [(await sender.expect(packets.Puback)).packet_id for _ in ids] == list(ids)
    else:
        assert [(await sender.expect(packets.Pubrec)).packet_id for _ in ids] == list(ids)
        for number in ids:
            sender.send(packets.Pubrel(number))
        assert [(await sender.expect(packets.Pubcomp)).packet_id for _ in ids] == list(ids)
    got = [await client.expect(Publish) for _ in ids]
    assert [int(m.payload) for m in got] == list(ids)
    if qos == 2:
        for m in got:
            client.send(packets.Pubrec(m.packet_id))
        assert [(await client.expect(packets.Pubrel)).packet_id for _ in ids] == [m.packet_id for m in got]


@pytest.mark.clause("MQTT-4.3.3-10", "MQTT-4.3.3-12", "MQTT-4.3.3-8", "MQTT-4.3.3-11", "MQTT311-4.3.3-2")
@BOTH
async def test_qos_2_is_delivered_once(connect: Connect, place: str, version: int) -> None:
    client, sender = await connect(version=version), await connect(version=version)
    await client.subscribe(f"{place}/a")
    for round_ in (b"one", b"two"):
        for dup in (False, True, True):
            sender.send(Publish(f"{place}/a", round_, 2, dup=dup, packet_id=7))
            assert await sender.expect(packets.Pubrec) == packets.Pubrec(7)
        for _ in range(2):  # the second finds no message, but is answered too
            sender.send(packets.Pubrel(7))
            assert (await sender.expect(packets.Pubcomp)).packet_id == 7
    await sender.publish(f"{place}/a", b"end", 1)
    assert [m.payload for m in await client.messages(3)] == [b"one", b"two", b"end"]


@pytest.mark.clause("MQTT-4.3.3-10", "MQTT-4.3.3-12", "MQTT311-4.3.3-2", "MQTT311-4.4.0-1", "MQTT-4.1.0-1")
@BOTH
async def test_qos_2_is_delivered_once_over_two_connections(
    connect: Connect, place: str, client_id: str, version: int
) -> None:
    client = await connect(version=version)
    await client.subscribe(f"{place}/a")
    sender = await connect(client_id, **kept(version))
    for packet_id in (7, 8):
        sender.send(Publish(f"{place}/a", b"one", 2, packet_id=packet_id))
        assert await sender.expect(packets.Pubrec) == packets.Pubrec(packet_id)
    sender.send(packets.Pubrel(8))
    await sender.expect(packets.Pubcomp)
    sender.drop()
    sender = await connect(client_id, **kept(version))
    for packet_id in (7, 8):  # 7 is the old message, 8 a new one
        sender.send(Publish(f"{place}/a", b"two", 2, dup=True, packet_id=packet_id))
        assert await sender.expect(packets.Pubrec) == packets.Pubrec(packet_id)
    for packet_id in (7, 8):
        sender.send(packets.Pubrel(packet_id))
        assert await sender.expect(packets.Pubcomp) == packets.Pubcomp(packet_id)
    await client.publish(f"{place}/a", b"end", 0)
    assert [m.payload for m in await client.messages(4)] == [b"one", b"one", b"two", b"end"]


@pytest.mark.clause("MQTT-4.3.3-13", "MQTT-3.3.2-5")
async def test_an_expired_qos_2_message_completes_its_exchange(connect: Connect, place: str) -> None:
    client, sender = await connect(), await connect()
    await client.subscribe(f"{place}/a")
    for qos in (2, 1):
        assert await sender.publish(f"{place}/a", b"late", qos, message_expiry_interval=0) < 0x80
    await sender.publish(f"{place}/a", b"end")
    assert (await client.message()).payload == b"end"


@pytest.mark.clause("MQTT-3.3.4-8", "MQTT-4.9.0-3", "MQTT-3.3.4-10")
async def test_a_full_window_delays_no_other_packet(connect: Connect, place: str) -> None:
    """The gateway's window is full of PUBLISH without PUBREL, the client's of messages without PUBACK."""
    sender = await connect()
    client = await connect(receive_maximum=2)
    await client.subscribe(f"{place}/a")
    for number in range(1, 4):
        await sender.publish(f"{place}/a", b"%d" % number)
    waiting = [await client.expect(Publish) for _ in range(2)]
    full = client.granted.receive_maximum or 65_535
    assert full <= 1000
    for packet_id in range(1, full + 1):
        client.send(Publish(f"{place}/b", b"", 2, packet_id=packet_id))
    assert [(await client.expect(packets.Pubrec)).packet_id for _ in range(full)] == list(range(1, full + 1))
    await client.ping()
    client.send(packets.Subscribe(65_000, (packets.Subscription(f"{place}/c", 0),)))
    assert (await client.expect(packets.Suback)).reason_codes == (0,)
    client.send(packets.Unsubscribe(65_001, (f"{place}/c",)))
    assert (await client.expect(packets.Unsuback)).reason_codes == (0,)
    client.send(Publish(f"{place}/b", b""))
    client.send(packets.Pubrel(1))
    assert await client.expect(packets.Pubcomp) == packets.Pubcomp(1)
    client.send(packets.Puback(waiting[0].packet_id))
    assert (await client.expect(Publish)).payload == b"3"
