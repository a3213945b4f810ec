"""Shared subscriptions in the running gateway: section 4.8.2 of MQTT 5.0."""

from __future__ import annotations

import uuid

import pytest

from protocols.mqtt import packets
from protocols.mqtt.packets import Publish, Subscription
from tests.conformance.conftest import Connect, kept


@pytest.fixture
def share(place: str) -> str:
    """Return the filter of a new group over all topics of the test."""
    return f"$share/g-{uuid.uuid4().hex[:8]}/{place}/#"


@pytest.mark.clause("MQTT-4.8.2-3", "MQTT-3.8.4-8")
@pytest.mark.parametrize("asked", [0, 1, 2])
async def test_the_granted_qos_is_kept(connect: Connect, place: str, share: str, asked: int) -> None:
    member, sender = await connect(), await connect()
    (granted,) = (await member.subscribe(Subscription(share, asked))).reason_codes
    assert granted <= asked
    for qos in range(3):
        await sender.publish(f"{place}/{qos}", b"", qos)
    assert [m.qos for m in await member.messages(3)] == [min(qos, granted) for qos in range(3)]


@pytest.mark.clause("MQTT-4.8.2-6")
async def test_a_message_that_a_member_refuses_goes_to_no_other(connect: Connect, place: str, share: str) -> None:
    first, second, sender = await connect(), await connect(), await connect()
    await first.subscribe(Subscription(share, 2))
    for qos in (1, 2):
        await sender.publish(f"{place}/{qos}", b"refused", qos)
        message = await first.expect(Publish)
        refusal = packets.Puback if message.qos == 1 else packets.Pubrec
        first.send(refusal(message.packet_id, 0x83))
    await first.ping()
    await second.subscribe(Subscription(share, 2))
    await first.disconnect()
    await sender.publish(f"{place}/end", b"end", 1)
    assert (await second.message()).payload == b"end"


@pytest.mark.clause("MQTT-4.8.2-4", "MQTT-4.8.2-5")
@pytest.mark.parametrize("returns", [True, False])
async def test_a_qos_2_delivery_stays_with_its_member(
    connect: Connect, place: str, share: str, client_id: str, returns: bool
) -> None:
    """Only the member that it was sent to may complete it. At QoS 1 another member may get it."""
    sender = await connect()
    first = await connect(client_id, **kept(5))
    await first.subscribe(Subscription(share, 2))
    await sender.publish(f"{place}/a", b"begun", 2)
    begun = await first.expect(Publish)
    second = await connect()
    await second.subscribe(Subscription(share, 2))
    first.drop()
    if returns:
        first = await connect(client_id, **kept(5))
        if begun.qos == 2:
            again = await first.message()
            assert (again.payload, again.packet_id, again.dup) == (b"begun", begun.packet_id, True)
    else:
        first = await connect(client_id)  # Clean Start ends the session
    await first.disconnect(session_expiry_interval=0) if returns else await first.disconnect()
    await sender.publish(f"{place}/end", b"end", 1)
    got = []
    while b"end" not in got:
        got.append((await second.message()).payload)
    assert got == [b"end"] if begun.qos == 2 else got in ([b"begun", b"end"], [b"end"])
