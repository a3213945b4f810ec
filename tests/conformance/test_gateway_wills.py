"""Wills in the running gateway: sections 3.1.2.5 to 3.1.2.7, 3.1.3.2 and 3.14.4 of both standards."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from protocols.mqtt import packets
from protocols.mqtt.packets import Publish, Will
from protocols.mqtt.properties import Properties
from tests.conformance.conftest import Connect, kept
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

BOTH = pytest.mark.parametrize("version", [5, 4], ids=["5.0", "3.1.1"])


async def watching(connect: Connect, place: str, **options: Any) -> RawClient:
    client = await connect(**options)
    await client.subscribe(f"{place}/#")
    return client


async def only(watch: RawClient, place: str, *payloads: bytes) -> None:
    """Check that exactly these wills arrive before a message that is published now."""
    await watch.publish(f"{place}/end", b"end", 0)
    assert [m.payload for m in await watch.messages(len(payloads) + 1)] == [*payloads, b"end"]


async def retained_for(client: RawClient) -> Publish | None:
    """Return the first message that the client gets; None if there is none for some seconds."""
    try:
        return await client.message(timeout=5)
    except TimeoutError:
        return None


@pytest.mark.clause("MQTT-3.1.2-7", "MQTT-3.1.2-8", "MQTT-3.1.2-14", "MQTT-3.1.2-15", "MQTT-3.1.2-10")
@pytest.mark.clause("MQTT311-3.1.2-8", "MQTT311-3.1.2-16", "MQTT311-3.1.2-17", "MQTT311-3.1.2-10", "MQTT311-3.1.2-12")
@BOTH
@pytest.mark.parametrize("retain", [False, True])
async def test_a_will_is_published_once(
    connect: Connect, place: str, client_id: str, version: int, retain: bool
) -> None:
    watch = await watching(connect, place, version=version)
    client = await connect(client_id, **kept(version), will=Will(f"{place}/will", b"gone", 2, retain))
    client.drop()
    will = await watch.message()
    assert (will.topic, will.payload, will.qos, will.retain) == (f"{place}/will", b"gone", 2, False)
    late = await connect(version=version)
    await late.subscribe(f"{place}/will")
    if retain:
        # `watch` may have the message before Kafka's answer, from which on it is retained.
        while (m := await retained_for(late)) is None:
            late = await connect(version=version)
            await late.subscribe(f"{place}/will")
        assert (m.payload, m.retain) == (b"gone", True)
    await late.ping()
    client = await connect(client_id, **kept(version))  # without a will
    client.drop()
    again = await connect(client_id, **kept(version))
    assert again.connack.session_present
    await again.ping()
    await only(watch, place)


@pytest.mark.clause("MQTT-3.14.4-3", "MQTT-3.1.2-8", "MQTT-3.1.2-10", "MQTT311-3.14.4-3", "MQTT311-3.1.2-10")
@BOTH
async def test_normal_disconnect_discards_the_will(connect: Connect, place: str, client_id: str, version: int) -> None:
    watch = await watching(connect, place)
    client = await connect(client_id, **kept(version), will=Will(f"{place}/will", b"gone", 1))
    await client.disconnect()
    client = await connect(client_id, **kept(version))
    client.drop()
    await connect(client_id, **kept(version))
    await only(watch, place)


@pytest.mark.clause("MQTT-3.1.2-8", "MQTT-3.14.4-3")
@pytest.mark.parametrize("code", [0x04, 0x80, 0x98])
async def test_a_disconnect_with_another_code_publishes_the_will(connect: Connect, place: str, code: int) -> None:
    watch = await watching(connect, place)
    client = await connect(will=Will(f"{place}/will", b"gone", 1))
    await client.disconnect(code)
    assert (await watch.message()).payload == b"gone"
    await only(watch, place)


@pytest.mark.clause("MQTT-3.1.2-8", "MQTT311-3.1.2-8")
@BOTH
async def test_a_protocol_error_publishes_the_will(connect: Connect, place: str, version: int) -> None:
    watch = await watching(connect, place)
    client = await connect(version=version, will=Will(f"{place}/will", b"gone", 1))
    client.send_bytes(b"\x36\x00")
    await client.expect_end()
    assert (await watch.message()).payload == b"gone"


@pytest.mark.clause("MQTT-3.1.3-9", "MQTT-3.1.2-8")
async def test_new_connection_within_the_delay_prevents_the_will(connect: Connect, place: str, client_id: str) -> None:
    watch = await watching(connect, place)
    delayed = Will(f"{place}/will", b"gone", 1, properties=Properties(will_delay_interval=4))
    client = await connect(client_id, **kept(5), will=delayed)
    client.drop()
    client = await connect(client_id, **kept(5))
    assert client.connack.session_present
    # A later will of another session with the same delay shows when the first would have been published.
    other = await connect(**kept(5), will=Will(f"{place}/other", b"other", 1, properties=delayed.properties))
    other.drop()
    assert (await watch.message()).payload == b"other"
    await only(watch, place)


@pytest.mark.clause("MQTT-3.1.2-8", "MQTT-3.1.4-3")
async def test_clean_start_ends_the_session_and_sends_the_will(connect: Connect, place: str, client_id: str) -> None:
    watch = await watching(connect, place)
    delayed = Will(f"{place}/will", b"gone", 1, properties=Properties(will_delay_interval=60))
    client = await connect(client_id, **kept(5), will=delayed)
    await connect(client_id, **kept(5, clean_start=True))
    await client.expect_end()
    assert (await watch.message()).payload == b"gone"


@pytest.mark.clause("MQTT311-3.1.2-12")
@BOTH
async def test_without_a_will_nothing_is_published(connect: Connect, place: str, client_id: str, version: int) -> None:
    watch = await watching(connect, place)
    client = await connect(client_id, **kept(version))
    client.drop()
    await connect(client_id, **kept(version))
    await only(watch, place)


@pytest.mark.clause("MQTT-3.1.3-10", "MQTT-3.1.2-9")
async def test_a_will_has_its_properties(connect: Connect, place: str) -> None:
    watch = await watching(connect, place)
    properties = Properties(
        payload_format_indicator=1,
        message_expiry_interval=100,
        content_type="text/plain",
        response_topic=f"{place}/answer",
        correlation_data=b"\0\xff",
        user_properties=(("b", "1"), ("a", "2"), ("b", "1")),
    )
    client = await connect(will=Will(f"{place}/will", b"gone", 1, properties=properties))
    client.drop()
    got = (await watch.message()).properties
    assert got is not None
    assert got.user_properties == properties.user_properties
    assert (got.payload_format_indicator, got.content_type) == (1, "text/plain")
    assert (got.response_topic, got.correlation_data) == (f"{place}/answer", b"\0\xff")
    assert got.message_expiry_interval is not None
    assert 50 < got.message_expiry_interval <= 100


@BOTH
@pytest.mark.parametrize("topic", ["$SYS/x", "$SYS/broker/uptime", "$share/g/x"])
async def test_a_will_to_the_servers_own_topics_is_refused(gateway: GatewayProcess, version: int, topic: str) -> None:
    client = await RawClient.open(gateway.address("mqtt"), version)
    client.send(packets.Connect(client.version, f"w-{uuid.uuid4().hex[:8]}", will=Will(topic, b"x")))
    said = await client.expect_end()
    client.drop()
    assert [type(packet) for packet in said] == ([packets.Connack] if version == 5 else [])
    assert [packet.reason_code for packet in said if isinstance(packet, packets.Connack)] == [0x90][: len(said)]


@BOTH
async def test_a_bridges_will_to_its_state_is_accepted(connect: Connect, client_id: str, version: int) -> None:
    will = Will(f"$SYS/broker/connection/{client_id}/state", b"0", 1, True)
    client = await connect(client_id, version=version, will=will)
    assert client.connack.reason_code == 0
