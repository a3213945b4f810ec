"""The anonymous relay: each message has its own address."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from proton import Delivery, Message
from proton.reactor import AtMostOnce
from proton.utils import BlockingConnection

from gateway.amqp.server import AmqpServer
from gateway.security.rights.access_rules import ListedRules
from gateway.settings.config import AccessRule, SecurityConfig
from protocols.amqp import outcomes
from tests.gateway.amqp.conftest import amqp_listener
from tests.support.amqp import as_client, data
from tests.support.assembled import assembled
from tests.support.topics import read_all

TIMEOUT = 60


def outcome(connection: BlockingConnection, link: Any, message: Message) -> tuple[int, str | None]:
    """Send a message; return the outcome's state and condition."""
    connection.wait(lambda: link.credit > 0, timeout=TIMEOUT)
    delivery = link.send(message)
    connection.wait(lambda: delivery.settled, timeout=TIMEOUT)
    condition = delivery.remote.condition
    return int(delivery.remote_state), condition.name if condition is not None else None


async def test_each_message_finds_its_topic(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    """In order, also the first ones, whose topic is looked up; a refused message does not detach the link."""
    one, two = await new_topic(partitions=1), await new_topic(partitions=2)
    count = 20

    def send(connection: BlockingConnection) -> list[tuple[int, str | None]]:
        assert "ANONYMOUS-RELAY" in [str(name) for name in connection.conn.remote_offered_capabilities]
        sender = connection.create_sender(None)
        link = sender.link
        connection.wait(lambda: link.credit > 2 * count, timeout=TIMEOUT)
        deliveries = []
        for number in range(count):
            deliveries.append(link.send(data(b"%d" % number, address=one)))
            deliveries.append(link.send(data(b"%d" % number, address=f"topic://{two}/partitions/1")))
        connection.wait(lambda: all(delivery.settled for delivery in deliveries), timeout=TIMEOUT)
        assert {delivery.remote_state for delivery in deliveries} == {Delivery.ACCEPTED}
        return [
            outcome(connection, link, message)
            for message in (
                data(b"nowhere"),
                data(b"unknown", address="no-such-topic"),
                data(b"internal", address="__consumer_offsets"),
                data(b"a group", address=f"{one}/group.id/g"),
                data(b"no such partition", address=f"{two}/partitions/7"),
                data(b"by key", address=f"/topics/{two}/some/key", id="m1"),
            )
        ]

    assert await as_client(listener, send) == [
        (outcomes.REJECTED, outcomes.PRECONDITION_FAILED),
        (outcomes.REJECTED, outcomes.NOT_FOUND),
        (outcomes.REJECTED, outcomes.UNAUTHORIZED_ACCESS),
        (outcomes.REJECTED, outcomes.INVALID_FIELD),
        (outcomes.REJECTED, outcomes.NOT_FOUND),
        (outcomes.ACCEPTED, None),
    ]
    numbers = [b"%d" % number for number in range(count)]
    assert [record.value for record in await read_all(bootstrap, one)] == numbers
    records = await read_all(bootstrap, two)
    assert [record.value for record in records if record.partition == 1 and record.key is None] == numbers
    keyed = [record for record in records if record.value == b"by key"]
    assert [record.key for record in keyed] == [b"some/key"]
    assert dict(keyed[0].headers)["message-id"] == b"m1"


async def test_rights_are_checked_for_each_message(start_listener: Any, new_topic: Any) -> None:
    allowed, denied = await new_topic(), await new_topic()
    listener = await start_listener(security=SecurityConfig(access=(AccessRule(action="publish", topic=allowed),)))

    def send(connection: BlockingConnection) -> list[tuple[int, str | None]]:
        link = connection.create_sender(None).link
        return [outcome(connection, link, data(b"x", address=topic)) for topic in (denied, allowed)]

    assert await as_client(listener, send) == [
        (outcomes.REJECTED, outcomes.UNAUTHORIZED_ACCESS),
        (outcomes.ACCEPTED, None),
    ]


async def test_a_message_to_a_topic_without_the_right_creates_no_topic(
    bootstrap: str, admin: AIOKafkaAdminClient
) -> None:
    denied = f"relay-denied-{uuid.uuid4().hex[:8]}"
    security = SecurityConfig(access=(AccessRule(action="publish", topic="other"),))

    def send(connection: BlockingConnection) -> tuple[int, str | None]:
        return outcome(connection, connection.create_sender(None).link, data(b"x", address=denied))

    async with assembled(bootstrap, create=True) as made, amqp_listener(made, security=security) as listener:
        assert await as_client(listener, send) == (outcomes.REJECTED, outcomes.UNAUTHORIZED_ACCESS)
    assert denied not in await admin.list_topics()


@pytest.mark.parametrize("last_is_revoked", [False, True])
async def test_after_a_change_of_rights_they_are_still_checked_for_each_message(
    start_listener: Any, new_topic: Any, last_is_revoked: bool
) -> None:
    """Whatever the last message's topic was: its rights are not those of the link."""
    last, denied, new = await new_topic(), await new_topic(), await new_topic()
    listener = await start_listener(security=SecurityConfig(access=(AccessRule(action="publish", topic=last),)))
    loop = asyncio.get_running_loop()

    async def change() -> None:
        """What `AccessList.use` does for new rules."""
        (connection,) = listener.departing()
        names = (new,) if last_is_revoked else (last, new)
        rules = ListedRules([AccessRule(action="publish", topic=name) for name in names])
        assert connection.grant.renew(rules.rules_for(connection.grant.identity, None, ""))
        connection.rights_changed()

    def send(connection: BlockingConnection) -> list[tuple[int, str | None]]:
        link = connection.create_sender(None).link
        before = outcome(connection, link, data(b"x", address=last))
        asyncio.run_coroutine_threadsafe(change(), loop).result(TIMEOUT)
        return [before, *(outcome(connection, link, data(b"x", address=topic)) for topic in (last, denied, new))]

    refused = (outcomes.REJECTED, outcomes.UNAUTHORIZED_ACCESS)
    accepted = (outcomes.ACCEPTED, None)
    expected = [accepted, refused if last_is_revoked else accepted, refused, accepted]
    assert await as_client(listener, send) == expected


async def test_messages_that_wait_for_a_topic_outlive_the_connection(
    listener: AmqpServer, bootstrap: str, new_topic: Any
) -> None:
    """The messages' topics are being looked up when the connection is lost; the valid messages are still stored."""
    topic = await new_topic(partitions=1)

    def send(connection: BlockingConnection) -> None:
        link = connection.create_sender(None, options=AtMostOnce()).link
        connection.wait(lambda: link.credit > 1, timeout=TIMEOUT)
        link.send(data(b"x", address="no-such-topic-either"))
        link.send(data(b"x", address=topic))

    await as_client(listener, send)
    async with asyncio.timeout(TIMEOUT):
        while not (records := await read_all(bootstrap, topic)):
            continue
    assert [record.value for record in records] == [b"x"]
    await listener.pumps.close(TIMEOUT)
    assert listener.statistics().senders == 0


async def test_long_addresses_are_not_kept(listener: AmqpServer, new_topic: Any) -> None:
    """An address has a key, which may be as long as a message."""
    topic = await new_topic(partitions=1)

    kept: list[str] = []

    def send(connection: BlockingConnection) -> list[tuple[int, str | None]]:
        link = connection.create_sender(None).link
        keys = (f"{number}" * length for number in range(3) for length in (10, 10_000))
        found = [outcome(connection, link, data(b"x", address=f"{topic}/{key}")) for key in keys]
        kept.extend(to for one in listener.departing() for relay in one._incoming for to in relay._known)
        return found

    assert await as_client(listener, send) == [(outcomes.ACCEPTED, None)] * 6
    assert kept == [f"{topic}/{number}" + f"{number}" * 9 for number in range(3)]
