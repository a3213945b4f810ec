"""Messages that one link sends without keys reach one receiver in the order of sending, whatever the partitions.

The receivers attach afterwards, to a group, so that only the log determines the order.
"""

from __future__ import annotations

import pytest

from tests.interop.amqp.clients import BLOCKING, REACTIVE, RHEA, Kind, each
from tests.interop.amqp.conftest import NewClient, NewJms
from tests.interop.amqp.drivers import ACCEPTED, bodies, text
from tests.interop.amqp.jms import bodies as jms_bodies

AWAITED, TOGETHER = 12, 60
WANTED = [str(number) for number in range(AWAITED + TOGETHER)]


@pytest.mark.parametrize("kind", **each([BLOCKING, REACTIVE, RHEA]))
async def test_one_link_without_keys_is_in_order(new_client: NewClient, own: str, kind: Kind) -> None:
    client = await new_client(kind)
    sender, other = await client.sender(own), await client.sender(own)
    for number in WANTED[:AWAITED]:
        assert await sender.send(text(number)) == [ACCEPTED]
        assert await other.send(text("another's", group_id="another")) == [ACCEPTED]
    assert await sender.send(*map(text, WANTED[AWAITED:])) == [ACCEPTED] * TOGETHER
    receiver = await client.receiver(f"{own}/group.id/g-{own}")
    seen = bodies(await receiver.receive(AWAITED + TOGETHER + AWAITED))
    assert [one for one in seen if one != "another's"] == WANTED


async def test_a_link_that_reconnects_by_name_stays_in_order(new_client: NewClient, own: str) -> None:
    """Across reconnects, while other links attach and stay."""
    crowd = await new_client(RHEA)
    for number in WANTED[:AWAITED]:
        client = await new_client(RHEA, container=f"same {own}")
        sender = await client.sender(own, name="same")
        assert await sender.send(text(number)) == [ACCEPTED]
        await client.close()
        assert await (await crowd.sender(own)).send(text("another's")) == [ACCEPTED]
    receiver = await crowd.receiver(f"{own}/group.id/g-{own}")
    seen = bodies(await receiver.receive(2 * AWAITED))
    assert [one for one in seen if one != "another's"] == WANTED[:AWAITED]


async def test_a_jms_producer_without_keys_is_in_order(new_jms: NewJms, own: str) -> None:
    session = await (await new_jms()).session()
    producer, other = await session.producer(f"queue:{own}"), await session.producer(f"queue:{own}")
    for number in WANTED[:AWAITED]:
        await producer.texts(number)
        await other.texts("another's")
    await producer.texts(*WANTED[AWAITED:])
    consumer = await session.consumer(f"queue:{own}")
    seen = jms_bodies(await consumer.receive(AWAITED + TOGETHER + AWAITED))
    assert [one for one in seen if one != "another's"] == WANTED


async def test_a_jms_session_with_several_producers_is_in_order(new_jms: NewJms, own: str) -> None:
    """Two producers in turn, then a session and a producer for each message, as Spring's JmsTemplate makes them."""
    client = await new_jms()
    session = await client.session()
    both = [await session.producer(f"queue:{own}") for _ in range(2)]
    for number in WANTED[:TOGETHER]:
        await both[int(number) % 2].texts(number)
    for number in WANTED[TOGETHER:]:
        for_one = await client.session()
        await (await for_one.producer(f"queue:{own}")).texts(number)
        await for_one.close()
    consumer = await session.consumer(f"queue:{own}")
    assert jms_bodies(await consumer.receive(len(WANTED))) == WANTED


async def test_a_relay_link_is_in_order_for_each_address(new_client: NewClient, own: str) -> None:
    client = await new_client(RHEA)
    topics = [f"{own}-{number}" for number in range(3)]
    relay = await client.sender()
    for number in WANTED[:AWAITED]:
        for topic in topics:
            assert await relay.send(text(number, to=topic)) == [ACCEPTED]
    for topic in topics:
        receiver = await client.receiver(f"{topic}/group.id/g-{topic}")
        assert bodies(await receiver.receive(AWAITED)) == WANTED[:AWAITED]


async def test_transactions_of_one_link_are_in_order(new_jms: NewJms, own: str) -> None:
    """The transactions are in order; each is a separate batch."""
    client = await new_jms()
    session = await client.session("transacted")
    producer = await session.producer(f"queue:{own}")
    for number in WANTED[:AWAITED]:
        await producer.texts(number)
        await session.do("commit")
    plain = await client.session()
    consumer = await plain.consumer(f"queue:{own}")
    assert jms_bodies(await consumer.receive(AWAITED)) == WANTED[:AWAITED]


async def test_receivers_of_a_group_share_what_one_link_sends(new_client: NewClient, own: str) -> None:
    """Each receives its part in order; messages with the same key go to the same receiver."""
    client = await new_client(RHEA)
    receivers = [await client.receiver(f"{own}/group.id/g-{own}") for _ in range(2)]
    sender = await client.sender(own)
    assert await sender.send(*map(text, WANTED[:AWAITED])) == [ACCEPTED] * AWAITED
    parts = [bodies(await receiver.receive(AWAITED // 2)) for receiver in receivers]
    assert sorted(map(int, parts[0] + parts[1])) == list(range(AWAITED))
    assert all(part == sorted(part, key=int) for part in parts)
    assert await sender.send(*(text(number, group_id="one") for number in WANTED[:AWAITED])) == [ACCEPTED] * AWAITED
    keyed = [bodies(await receiver.received(AWAITED, 2)) for receiver in receivers]
    assert sorted(keyed) == [[], WANTED[:AWAITED]]
