"""Resumed sessions in detail: windows, options, discarded messages, and changes of the expiry interval."""

from __future__ import annotations

import msgspec
import pytest

from protocols.mqtt import packets
from protocols.mqtt.packets import Publish, Subscription
from protocols.mqtt.properties import Properties
from tests.conformance.conftest import Connect, Settled, kept
from tests.support.mqtt import RawClient

BOTH = pytest.mark.parametrize("version", [5, 4], ids=["5.0", "3.1.1"])


@pytest.mark.clause("MQTT-3.10.4-3", "MQTT-4.4.0-1", "MQTT311-3.10.4-3", "MQTT311-4.4.0-1")
@BOTH
async def test_a_delivery_in_flight_completes_after_unsubscribing(
    connect: Connect, place: str, client_id: str, version: int
) -> None:
    sender = await connect()
    client = await connect(client_id, **kept(version))
    await client.subscribe(f"{place}/a", f"{place}/b")
    for qos in (1, 2):
        await sender.publish(f"{place}/a", b"%d" % qos, qos)
    begun = [await client.expect(Publish) for _ in range(2)]
    await client.unsubscribe(f"{place}/a", f"{place}/b")
    client.drop()
    client = await connect(client_id, **kept(version))
    assert client.connack.session_present
    again = await client.messages(2)
    assert [(m.payload, m.packet_id, m.dup) for m in again] == [(m.payload, m.packet_id, True) for m in begun]
    await client.subscribe(f"{place}/end")
    await sender.publish(f"{place}/a", b"new")
    await sender.publish(f"{place}/end", b"end")
    assert (await client.message()).payload == b"end"


@pytest.mark.clause("MQTT-3.3.4-9", "MQTT-4.9.0-1", "MQTT-4.9.0-2")
async def test_redelivery_respects_the_new_receive_maximum(connect: Connect, place: str, client_id: str) -> None:
    sender = await connect()
    client = await connect(client_id, **kept(5))
    await client.subscribe(f"{place}/a")
    for number in range(6):
        await sender.publish(f"{place}/a", b"%d" % number, 1 + number % 2)
    begun = {m.payload: m.packet_id for m in [await client.expect(Publish) for _ in range(6)]}
    client.drop()
    client = await connect(client_id, **kept(5, receive_maximum=2))
    got = [await client.expect(Publish) for _ in range(2)]
    await client.ping()
    for number in range(6):
        message = got[number]
        assert message.dup
        assert begun.pop(message.payload) == message.packet_id
        client.send(packets.Puback(message.packet_id) if message.qos == 1 else packets.Pubrec(message.packet_id))
        if message.qos == 2:
            await client.expect(packets.Pubrel)
            client.send(packets.Pubcomp(message.packet_id))
        if number < 4:
            got.append(await client.expect(Publish))
            await client.ping()
    assert begun == {}


@pytest.mark.clause("MQTT-3.1.2-24", "MQTT-3.1.2-25")
async def test_a_message_that_is_now_too_large_is_not_resent(connect: Connect, place: str, client_id: str) -> None:
    sender = await connect()
    client = await connect(client_id, **kept(5))
    await client.subscribe(f"{place}/a")
    for payload in (b"x" * 500, b"y"):
        await sender.publish(f"{place}/a", payload, 2)
        await client.expect(Publish)
    client.drop()
    client = await connect(client_id, **kept(5, maximum_packet_size=200))
    assert (await client.message()).payload == b"y"
    # "As if it had completed sending": the client may have the message, and must release its identifier.
    assert await client.expect(packets.Pubrel) == packets.Pubrel(1)
    client.send(packets.Pubcomp(1))
    await sender.publish(f"{place}/a", b"z" * 500)
    await sender.publish(f"{place}/a", b"end")
    assert (await client.message()).payload == b"end"


@pytest.mark.clause("MQTT-3.1.2-5", "MQTT-3.3.4-3", "MQTT-3.8.3-3", "MQTT-3.3.1-13")
async def test_options_and_identifiers_are_resumed(connect: Connect, place: str, client_id: str) -> None:
    sender = await connect()
    client = await connect(client_id, **kept(5))
    options = Subscription(f"{place}/+", 1, no_local=True, retain_as_published=True)
    await client.subscribe(options, subscription_identifiers=(7,))
    await client.subscribe(Subscription(f"{place}/a", 2), subscription_identifiers=(9,))
    await client.disconnect()
    await sender.publish(f"{place}/a", b"one", 2)
    await sender.publish(f"{place}/b", b"two", 2, retain=True)
    client = await connect(client_id, **kept(5))
    one, two = sorted(await client.messages(2), key=lambda m: m.topic)
    assert [(m.payload, m.qos, m.retain) for m in (one, two)] == [(b"one", 2, False), (b"two", 1, True)]
    assert one.properties is not None
    assert two.properties is not None
    assert sorted(one.properties.subscription_identifiers) == [7, 9]
    assert two.properties.subscription_identifiers == (7,)
    await client.publish(f"{place}/c", b"mine")
    await sender.publish(f"{place}/c", b"theirs")
    assert (await client.message()).payload == b"theirs"


@pytest.mark.clause("MQTT-3.3.4-3", "MQTT-3.8.4-8")
async def test_a_retained_message_has_the_identifier_of_the_subscription(
    connect: Connect, settled: Settled, place: str
) -> None:
    client = await connect()
    await client.publish(f"{place}/a", b"kept", 2, retain=True)
    await settled()
    await client.subscribe(Subscription(f"{place}/+", 1), subscription_identifiers=(300,))
    message = await client.message()
    assert (message.qos, message.retain) == (1, True)
    assert message.properties is not None
    assert message.properties.subscription_identifiers == (300,)


@pytest.mark.clause("MQTT-4.1.0-2", "MQTT-3.1.2-23")
async def test_disconnect_changes_the_session_expiry_interval(connect: Connect, client_id: str) -> None:
    client = await connect(client_id, **kept(5))
    await client.disconnect(session_expiry_interval=0)
    client = await connect(client_id, **kept(5))
    assert not client.connack.session_present
    await client.disconnect(session_expiry_interval=30)
    client = await connect(client_id, **kept(5, session_expiry_interval=0))
    assert client.connack.session_present
    await client.disconnect()
    client = await connect(client_id, **kept(5))
    assert not client.connack.session_present  # the interval of the last connection counts


@pytest.mark.clause("MQTT-3.3.2-7")
async def test_aliases_are_not_resumed(connect: Connect, place: str, client_id: str) -> None:
    client = await connect(client_id, **kept(5, topic_alias_maximum=5))
    assert (client.granted.topic_alias_maximum or 0) > 0
    await client.publish(f"{place}/a", b"", 1, topic_alias=1)
    client.drop()
    client = await connect(client_id, **kept(5))
    client.send(Publish("", b"", 1, packet_id=1, properties=Properties(topic_alias=1)))
    assert (await client.expect(packets.Disconnect)).reason_code == 0x82


@pytest.mark.clause("MQTT-3.1.2-5", "MQTT311-3.1.2-4")
async def test_a_session_is_resumed_with_the_other_version(connect: Connect, place: str, client_id: str) -> None:
    sender = await connect()
    # Receive Maximum 1, so later messages wait in the session even before the gateway notices the lost connection.
    client = await connect(client_id, **kept(5, receive_maximum=1))
    await client.subscribe(Subscription(f"{place}/a", 2), subscription_identifiers=(7,))
    await sender.publish(f"{place}/a", b"one", 2, content_type="text")
    begun = await client.expect(Publish)
    client.drop()
    await sender.publish(f"{place}/a", b"two", 1)
    client = await connect(client_id, **kept(4))
    assert client.connack.session_present
    one, two = await client.messages(2)
    assert (one.payload, one.packet_id, one.dup) == (b"one", begun.packet_id, True)
    assert (two.payload, two.dup) == (b"two", False)


class Publisher:
    """A client that publishes at QoS 2 and keeps its half of the session."""

    def __init__(self, topic: str, count: int) -> None:
        self.topic = topic
        self.waiting = [Publish(topic, b"%d" % number, 2, packet_id=number + 1) for number in range(count)]
        self.sent: dict[int, Publish] = {}
        self.released: dict[int, None] = {}

    def is_done(self) -> bool:
        return not (self.waiting or self.sent or self.released)

    async def work(self, client: RawClient, steps: int) -> None:
        """Continue where the last connection ended, for this number of answers."""
        for message in self.sent.values():
            client.send(msgspec.structs.replace(message, dup=True))
        for packet_id in self.released:
            client.send(packets.Pubrel(packet_id))
        for _ in range(steps):
            while self.waiting and len(self.sent) + len(self.released) < 5:
                message = self.waiting.pop(0)
                self.sent[message.packet_id] = message
                client.send(message)
            if self.is_done():
                return
            answer = await client.receive()
            assert isinstance(answer, packets.Pubrec | packets.Pubcomp)
            if type(answer) is packets.Pubcomp:
                self.released.pop(answer.packet_id, None)
            elif self.sent.pop(answer.packet_id, None) is not None or answer.packet_id in self.released:
                self.released[answer.packet_id] = None
                client.send(packets.Pubrel(answer.packet_id))


class Receiver:
    """A client that receives at QoS 2 and keeps its half of the session."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.unreleased: set[int] = set()

    def is_done(self, count: int) -> bool:
        return len(self.got) == count and not self.unreleased

    async def work(self, client: RawClient, steps: int, count: int) -> None:
        """Answer up to `steps` packets, until everything has arrived."""
        for _ in range(steps):
            if self.is_done(count):
                return
            packet = await client.receive()
            assert isinstance(packet, Publish | packets.Pubrel)
            if type(packet) is Publish:
                if packet.packet_id not in self.unreleased:
                    self.unreleased.add(packet.packet_id)
                    self.got.append(int(packet.payload))
                client.send(packets.Pubrec(packet.packet_id))
            else:
                self.unreleased.discard(packet.packet_id)
                client.send(packets.Pubcomp(packet.packet_id))


@pytest.mark.clause("MQTT-4.3.3-10", "MQTT-4.4.0-1", "MQTT-4.6.0-5", "MQTT311-4.3.3-1", "MQTT311-4.3.3-2")
@pytest.mark.parametrize(("version", "steps"), [(5, 1), (4, 2), (5, 3), (4, 7)])
async def test_exactly_once_over_connections_that_break(
    connect: Connect, place: str, client_id: str, version: int, steps: int
) -> None:
    """Each connection lasts for this number of packets, on both sides."""
    count = 8
    publisher, receiver = Publisher(f"{place}/a", count), Receiver()
    target = await connect(f"{client_id}-target", **kept(version))
    await target.subscribe(f"{place}/a")
    for turn in range(40 * count):
        if turn:
            target = await connect(f"{client_id}-target", **kept(version))
            assert target.connack.session_present
        source = await connect(f"{client_id}-source", **kept(version))
        await publisher.work(source, steps)
        source.drop()
        await receiver.work(target, steps, count)
        target.drop()
        if receiver.is_done(count) and publisher.is_done():
            break
    assert receiver.got == list(range(count))
    assert receiver.is_done(count)
    assert publisher.is_done()
