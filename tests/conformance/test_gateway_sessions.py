"""Client identifiers and sessions in the running gateway: sections 3.1, 3.2, 4.1, 4.4 and 4.5."""

from __future__ import annotations

import contextlib

import pytest

from protocols.mqtt import packets
from protocols.mqtt.packets import Publish, Subscription, Will
from protocols.mqtt.properties import Properties
from tests.conformance.conftest import Connect, kept

BOTH = pytest.mark.parametrize("version", [5, 4], ids=["5.0", "3.1.1"])


@pytest.mark.clause("MQTT-3.1.3-5", "MQTT311-3.1.3-5", "MQTT-4.2-1", "MQTT311-7.1.1-1")
@BOTH
@pytest.mark.parametrize(
    "client_id", ["0", "Z", "0123456789abcdefghijklm", "nopqrstuvwxyzABCDEFGHIJ", "KLMNOPQRSTUVWXYZ"]
)
async def test_client_identifiers_that_must_be_accepted(connect: Connect, version: int, client_id: str) -> None:
    client = await connect(client_id, version=version)
    assert client.connack.reason_code == 0
    assert client.granted.assigned_client_identifier is None
    await client.ping()


@pytest.mark.clause("MQTT-3.1.3-6", "MQTT-3.1.3-7", "MQTT-3.2.2-16")
async def test_an_assigned_client_identifier_resumes_the_session(connect: Connect, place: str) -> None:
    first, second = await connect("", session_expiry_interval=60), await connect("", session_expiry_interval=60)
    names = [client.granted.assigned_client_identifier for client in (first, second)]
    assert all(names)
    assert names[0] != names[1]
    await first.subscribe(f"{place}/a")
    await second.ping()  # neither has taken the other over
    await first.disconnect()
    again = await connect(names[0], **kept(5))
    assert again.connack.session_present
    await second.publish(f"{place}/a", b"x")
    assert (await again.message()).payload == b"x"


@pytest.mark.clause("MQTT311-3.1.3-6")
async def test_clients_without_an_identifier_have_separate_sessions(connect: Connect, place: str) -> None:
    first, second = await connect("", version=4), await connect("", version=4)
    await first.subscribe(f"{place}/a")
    await second.publish(f"{place}/a", b"x")
    assert (await first.message()).payload == b"x"
    await second.ping()


@pytest.mark.clause("MQTT-3.1.2-4", "MQTT-3.1.2-5", "MQTT-3.1.2-6", "MQTT-3.1.2-23", "MQTT-3.1.3-2", "MQTT-3.1.4-4")
@pytest.mark.clause("MQTT-3.2.2-2", "MQTT-3.2.2-3", "MQTT-4.5.0-1")
@pytest.mark.clause("MQTT311-3.1.2-4", "MQTT311-3.1.2-5", "MQTT311-3.1.2-6", "MQTT311-3.1.3-2", "MQTT311-3.1.4-3")
@pytest.mark.clause("MQTT311-3.2.2-1", "MQTT311-3.2.2-2", "MQTT311-3.2.2-3", "MQTT311-4.1.0-1", "MQTT311-4.5.0-1")
@BOTH
async def test_a_session_is_resumed_until_it_ends(connect: Connect, place: str, client_id: str, version: int) -> None:
    sender = await connect()
    client = await connect(client_id, **kept(version))
    assert (client.connack.reason_code, client.connack.session_present) == (0, False)
    await client.subscribe(Subscription(f"{place}/1", 1), Subscription(f"{place}/2", 2))
    await client.disconnect()
    await sender.publish(f"{place}/1", b"one", 1)
    await sender.publish(f"{place}/2", b"two", 2)

    client = await connect(client_id, **kept(version))
    assert (client.connack.reason_code, client.connack.session_present) == (0, True)
    assert [(m.payload, m.qos, m.dup) for m in await client.messages(2)] == [(b"one", 1, False), (b"two", 2, False)]
    client.drop()
    await sender.publish(f"{place}/1", b"three", 1)

    client = await connect(client_id, **kept(version, clean_start=True))
    assert (client.connack.reason_code, client.connack.session_present) == (0, False)
    await client.subscribe(f"{place}/end")
    await sender.publish(f"{place}/1", b"four", 1)
    await sender.publish(f"{place}/end", b"", 1)
    assert (await client.message()).topic == f"{place}/end"
    if version == 4:  # Clean Session: the session ends with its connection
        await client.disconnect()
        client = await connect(client_id, **kept(version))
        assert not client.connack.session_present


@pytest.mark.clause("MQTT-3.1.4-3", "MQTT-3.14.2-2", "MQTT311-3.1.4-2")
@BOTH
async def test_a_second_connection_takes_over(connect: Connect, place: str, client_id: str, version: int) -> None:
    first = await connect(client_id, **kept(version))
    await first.subscribe(f"{place}/a")
    second = await connect(client_id, **kept(version))
    assert second.connack.session_present
    said = await first.expect_end()
    if version == 5:
        (closing,) = said
        assert type(closing) is packets.Disconnect
        assert closing.reason_code == 0x8E
        assert closing.properties is None or closing.properties.session_expiry_interval is None
    else:
        assert said == []
    await second.publish(f"{place}/a", b"x", 0)
    assert (await second.message()).payload == b"x"


@pytest.mark.clause("MQTT-4.4.0-1", "MQTT-3.3.1-1", "MQTT-4.3.2-3", "MQTT-4.3.3-3", "MQTT-4.3.3-5", "MQTT-4.3.3-6")
@pytest.mark.clause("MQTT-4.6.0-1", "MQTT-4.6.0-4", "MQTT-4.1.0-1")
@pytest.mark.clause("MQTT311-4.4.0-1", "MQTT311-3.3.1-1", "MQTT311-4.6.0-1", "MQTT311-4.6.0-4", "MQTT311-2.3.1-4")
@pytest.mark.clause("MQTT311-4.3.2-1", "MQTT311-4.3.3-1", "MQTT311-4.1.0-1", "MQTT311-4.1.0-2")
@BOTH
async def test_unacknowledged_messages_are_resent(connect: Connect, place: str, client_id: str, version: int) -> None:
    sender = await connect()
    client = await connect(client_id, **kept(version))
    await client.subscribe(f"{place}/#")
    for number in range(9):
        await sender.publish(f"{place}/a", b"%d" % number, 1 + number % 2)
    first = [await client.expect(Publish) for _ in range(9)]
    assert not any(message.dup for message in first)
    ones, twos = ([m for m in first if m.qos == qos] for qos in (1, 2))
    assert [m.payload for m in ones] == [b"0", b"2", b"4", b"6", b"8"]
    assert [m.payload for m in twos] == [b"1", b"3", b"5", b"7"]
    client.send(packets.Puback(ones[0].packet_id))
    for message in twos[:3]:  # received; the first two are released, and the first is completed
        client.send(packets.Pubrec(message.packet_id))
    released = [await client.expect(packets.Pubrel) for _ in range(3)]
    assert [one.packet_id for one in released] == [message.packet_id for message in twos[:3]]
    client.send(packets.Pubcomp(twos[0].packet_id))
    await client.ping()  # no message is sent again on the same connection
    client.drop()

    client = await connect(client_id, **kept(version))
    assert client.connack.session_present
    again = [await client.receive() for _ in range(7)]
    messages = [one for one in again if type(one) is Publish]
    owed = [m for m in first if m not in (ones[0], *twos[:3])]
    assert [(m.payload, m.qos, m.packet_id, m.dup) for m in messages] == [
        (m.payload, m.qos, m.packet_id, True) for m in owed
    ]
    releases = [one for one in again if type(one) is packets.Pubrel]
    assert [one.packet_id for one in releases] == [message.packet_id for message in twos[1:3]]
    for message in messages:
        client.send(packets.Puback(message.packet_id) if message.qos == 1 else packets.Pubrec(message.packet_id))
    for release in releases:
        client.send(packets.Pubcomp(release.packet_id))
    assert (await client.expect(packets.Pubrel)).packet_id == twos[3].packet_id
    client.send(packets.Pubcomp(twos[3].packet_id))
    await sender.publish(f"{place}/a", b"last", 2)
    last = await client.message()
    assert (last.payload, last.dup) == (b"last", False)


@pytest.mark.clause("MQTT-4.4.0-2")
async def test_a_refused_message_is_not_resent(connect: Connect, place: str, client_id: str) -> None:
    sender = await connect()
    client = await connect(client_id, **kept(5))
    await client.subscribe(f"{place}/a")
    for qos in (1, 2):
        await sender.publish(f"{place}/a", b"refused", qos)
    one, two = await client.expect(Publish), await client.expect(Publish)
    client.send(packets.Puback(one.packet_id, 0x83))
    client.send(packets.Pubrec(two.packet_id, 0x83))
    await client.ping()
    client.drop()
    client = await connect(client_id, **kept(5))
    await sender.publish(f"{place}/a", b"new")
    message = await client.message()
    assert (message.payload, message.dup) == (b"new", False)


@pytest.mark.clause("MQTT-4.1.0-2", "MQTT-4.1.0-1", "MQTT-3.1.2-8", "MQTT-3.3.2-5", "MQTT-3.3.2-6", "MQTT-4.3.3-7")
async def test_messages_and_sessions_expire_in_time(connect: Connect, place: str, client_id: str) -> None:
    """Expiry of messages and sessions; a will that is due at a session's end shows that a second has passed."""
    watch = await connect()
    await watch.subscribe(f"{place}/will")
    # Receive Maximum 1, so later messages wait in the session even before the gateway notices the lost connection.
    patient = await connect(f"{client_id}-kept", **kept(5, receive_maximum=1))
    await patient.subscribe(f"{place}/a")
    begun: Publish | None = None
    while begun is None:
        await watch.publish(f"{place}/a", b"begun", 2, message_expiry_interval=1)
        with contextlib.suppress(TimeoutError):  # on a busy machine it has already expired
            begun = await patient.expect(Publish, timeout=3)  # it is not acknowledged
    patient.drop()
    await watch.publish(f"{place}/a", b"too late", 2, message_expiry_interval=1)
    await watch.publish(f"{place}/a", b"in time", 2, message_expiry_interval=100)
    lasting = await connect(f"{client_id}-lasting", **kept(5, session_expiry_interval=1))
    await lasting.subscribe(f"{place}/will")
    will = Will(f"{place}/will", b"over", 1, properties=Properties(will_delay_interval=60))
    short = await connect(client_id, **kept(5, session_expiry_interval=1), will=will)
    await short.subscribe(f"{place}/a")
    short.drop()

    assert (await watch.message()).payload == b"over"  # at the session's end, long before the delay
    short = await connect(client_id, **kept(5))
    assert not short.connack.session_present
    assert (await lasting.message()).payload == b"over"  # its connection was open, so its session did not expire
    patient = await connect(f"{client_id}-kept", **kept(5))
    again, rest = await patient.messages(2)
    assert (again.payload, again.dup, again.packet_id) == (b"begun", True, begun.packet_id)
    assert rest.payload == b"in time"
    assert rest.properties is not None
    assert rest.properties.message_expiry_interval is not None
    assert 50 < rest.properties.message_expiry_interval < 100


@pytest.mark.clause("MQTT-3.1.2-28")
async def test_response_information_is_sent_on_request(connect: Connect) -> None:
    for ask in ({}, {"request_response_information": 0}):
        assert (await connect(**ask)).granted.response_information is None
    assert (await connect(request_response_information=1)).granted.response_information is not None


@pytest.mark.clause("MQTT-4.12.0-1", "MQTT-4.12.0-6")
async def test_an_unsupported_authentication_method_is_refused(connect: Connect) -> None:
    client = await connect(authentication_method="NO-SUCH-METHOD")
    assert client.connack.reason_code == 0x8C
    assert await client.expect_end() == []
    client = await connect()
    assert client.granted.authentication_method is None
