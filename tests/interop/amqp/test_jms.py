"""The gateway as seen by a JMS application, with Qpid JMS."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from tests.interop.amqp.conftest import NewJms
from tests.interop.amqp.jms import JmsConsumer, bodies
from tests.interop.driver import RefusedError, Wire, encode
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

KINDS: dict[str, Any] = {
    "text": "gr\u00fc\u00df dich",
    "bytes": {"@binary": encode(b"\0\1\xff")},
    "map": {"text": "t", "whole": 5, "yes": True, "part": 0.5, "raw": {"@binary": encode(b"\2")}},
    "stream": ["one", 2, False, {"@binary": encode(b"3")}, 4.5],
    "object": ["serialized", 7],
    "plain": None,
}


async def test_every_kind_of_message_with_every_header(new_jms: NewJms, own: str) -> None:
    client = await new_jms()
    session = await client.session()
    consumer = await session.consumer(f"topic:{own}")
    producer = await session.producer(f"topic:{own}")
    headers = {
        "correlation_id": "c-1",
        "type": "greeting",
        "reply_to": "queue:answers",
        "priority": 8,
        "ttl": 3_600_000,
        "properties": {"text": "p", "number": 7, "yes": True, "part": 2.5, "JMSXGroupID": "one", "JMSXGroupSeq": 3},
    }
    sent = [{"kind": kind, "body": body, **headers} for kind, body in KINDS.items()]
    ids = await producer.send(*sent)
    seen = await consumer.receive(len(sent))
    for one, number, back in zip(sent, ids, seen, strict=True):
        assert (back["kind"], back.get("body")) == (one["kind"], one["body"])
        assert {key: back["properties"].get(key) for key in headers["properties"]} == headers["properties"]
        fields = ("id", "correlation_id", "type", "reply_to", "priority", "destination", "redelivered", "persistent")
        told = tuple(back[field] for field in fields)
        assert told == (number, "c-1", "greeting", "queue:answers", 8, f"topic:{own}", False, True)
        assert back["delivery_count"] == 1
        assert 3_500_000 < back["expiration"] - back["timestamp"] <= 3_600_000
    await producer.send({"body": "careless", "persistent": False, "priority": 0})
    [careless] = await consumer.receive(1)
    assert (careless["persistent"], careless["priority"], careless["expiration"]) == (False, 0, 0)


async def test_an_expired_message_is_not_delivered(new_jms: NewJms, own: str) -> None:
    session = await (await new_jms()).session()
    producer = await session.producer(f"queue:{own}")
    await producer.texts("short-lived", ttl=1, properties={"JMSXGroupID": "one"})
    await producer.texts("long-lived", properties={"JMSXGroupID": "one"})
    consumer = await session.consumer(f"queue:{own}")
    assert bodies(await consumer.receive(1)) == ["long-lived"]


async def test_a_queue_delivers_each_message_to_one_consumer(new_jms: NewJms, own: str) -> None:
    session = await (await new_jms()).session()
    producer = await session.producer(f"queue:{own}")
    await producer.texts(*map(str, range(6)))
    assert sorted(bodies(await session.browse(f"queue:{own}"))) == list("012345")
    consumer = await session.consumer(f"queue:{own}")
    assert sorted(bodies(await consumer.receive(6))) == list("012345")
    await consumer.close()
    await producer.texts("6")
    consumer = await session.consumer(f"queue:{own}")
    assert bodies(await consumer.receive(1)) == ["6"]
    assert bodies(await session.browse(f"queue:{own}", selector="JMSPriority > 4")) == []


async def test_names_with_dots_are_queues_and_topics(new_jms: NewJms, amqp_gateway: GatewayProcess, own: str) -> None:
    """As most JMS applications have them; MQTT devices send to the queue under the same name."""
    queue, topic = f"queue:orders.new.{own}", f"topic:orders.events.{own}"
    session = await (await new_jms()).session()
    worker, listeners = await session.consumer(queue), [await session.consumer(topic) for _ in range(2)]
    await (await session.producer(queue)).texts("order")
    await (await session.producer(topic)).texts("event")
    assert bodies(await worker.receive(1)) == ["order"]
    for listener in listeners:
        assert bodies(await listener.receive(1)) == ["event"]
    device = await RawClient.connect(amqp_gateway.address("mqtt"))
    assert await device.publish(f"orders.new.{own}/pump", b"from a device") == 0
    device.drop()
    (message,) = await worker.receive(1)
    assert (message["kind"], message["destination"]) == ("bytes", queue)
    transacted = await (await new_jms()).session("transacted")
    await (await transacted.producer(queue)).texts("in a transaction")
    await transacted.do("commit")
    assert bodies(await worker.receive(1)) == ["in a transaction"]


@pytest.mark.parametrize("mode", ["client", "dups_ok", "auto"])
async def test_unacknowledged_messages_are_redelivered(new_jms: NewJms, own: str, mode: str) -> None:
    client = await new_jms()
    session = await client.session(mode)
    producer = await session.producer(f"queue:{own}")
    await producer.texts("0", "1", "2", properties={"JMSXGroupID": "one"})
    consumer = await session.consumer(f"queue:{own}")
    seen = await consumer.receive(2)
    assert bodies(seen) == ["0", "1"]
    if mode == "client":
        await client.do("acknowledge", held=seen[1]["held"])  # with all messages before it
        [third] = await consumer.receive(1)
        assert (third["body"], third["redelivered"]) == ("2", False)
        await session.do("recover")
        [third] = await consumer.receive(1)
        assert (third["body"], third["redelivered"], third["delivery_count"]) == ("2", True, 2)
        await client.do("acknowledge", held=third["held"])
    else:
        assert bodies(await consumer.receive(1)) == ["2"]
    await client.close()
    client = await new_jms()
    session = await client.session()
    consumer = await session.consumer(f"queue:{own}")
    await (await session.producer(f"queue:{own}")).texts("3")
    assert bodies(await consumer.receive(1)) == ["3"]


@pytest.mark.parametrize("topic", [False, True], ids=["queue", "topic"])
async def test_request_and_reply_over_a_temporary_destination(new_jms: NewJms, own: str, topic: bool) -> None:
    asking, answering = await new_jms(), await new_jms()
    service = await answering.session()
    requests = await service.consumer(f"queue:{own}")
    session = await asking.session()
    temporary, address = await session.temporary(topic=topic)
    assert address.startswith(f"temporary-{'topic' if topic else 'queue'}:replies/")
    answers = await session.consumer(temporary)
    [number] = await (await session.producer(f"queue:{own}")).texts("what?", reply_to=temporary)
    [request] = await requests.receive(1)
    assert request["reply_to"] == address
    anywhere = await service.producer()
    await anywhere.texts("that!", to=f"reply:{request['held']}", correlation_id=request["id"])
    [answer] = await answers.receive(1)
    assert (answer["body"], answer["correlation_id"], answer["destination"]) == ("that!", number, address)
    # It is deleted when it has no receiver, and only its own connection may receive from it.
    with pytest.raises(RefusedError):
        await session.do("delete", name=temporary.partition(":")[2])
    await answers.close()
    await session.do("delete", name=temporary.partition(":")[2])
    with pytest.raises(RefusedError):
        await session.consumer(temporary)


async def test_a_durable_subscription_of_jms(new_jms: NewJms, own: str) -> None:
    container = f"client-{uuid.uuid4().hex[:8]}"
    other = await (await new_jms()).session()
    producer = await other.producer(f"topic:{own}")
    group = {"properties": {"JMSXGroupID": "one"}}
    await producer.texts("before it", **group)
    client = await new_jms(id=container)
    session = await client.session()
    consumer = await session.consumer(f"topic:{own}", kind="durable", as_="news")
    await producer.texts("0", **group)
    assert bodies(await consumer.receive(1)) == ["0"]
    await client.close()

    await producer.texts("1", "2", "3", **group)
    await client.connect(id=container)
    session = await client.session()
    consumer = await session.consumer(f"topic:{own}", kind="durable", as_="news")
    assert bodies(await consumer.receive(3)) == ["1", "2", "3"]
    with pytest.raises(RefusedError):  # JMS 2.0 part 6.11.1: not allowed while it has a consumer
        await session.do("unsubscribe", name="news")
    await consumer.close()
    await session.do("unsubscribe", name="news")
    with pytest.raises(RefusedError) as refused:
        await session.do("unsubscribe", name="news")
    assert "InvalidDestinationException" in str(refused.value)

    await producer.texts("after it", **group)
    consumer = await session.consumer(f"topic:{own}", kind="durable", as_="news")
    await producer.texts("new", **group)
    assert bodies(await consumer.receive(1)) == ["new"]
    await consumer.close()
    await session.do("unsubscribe", name="news")


@pytest.mark.parametrize("kind", ["shared", "shared durable"])
@pytest.mark.parametrize("named", [True, False], ids=["one client id", "no client id"])
async def test_a_shared_subscription_of_jms(new_jms: NewJms, own: str, kind: str, named: bool) -> None:
    name = f"s-{uuid.uuid4().hex[:8]}"
    first = await new_jms(**({"id": f"client-{name}"} if named else {}))
    clients = [first, first if named else await new_jms()]
    consumers = []
    for client in clients:
        session = await client.session()
        consumers.append(await session.consumer(f"topic:{own}", kind=kind, as_=name))
    producer = await (await (await new_jms()).session()).producer(f"topic:{own}")
    await producer.texts(*map(str, range(30)))
    seen: list[list[Any]] = [[], []]

    async def take(at: int, consumer: JmsConsumer) -> None:
        while sum(map(len, seen)) < 30:
            seen[at] += bodies(await consumer.some(1, 200))

    await asyncio.wait_for(asyncio.gather(*(take(at, one) for at, one in enumerate(consumers))), 60)
    assert sorted(int(one) for mine in seen for one in mine) == list(range(30))
    assert all(seen), "both have a part"
    for consumer in consumers:
        await consumer.close()
    if kind == "shared durable":
        await consumers[0].session.do("unsubscribe", name=name)


async def test_selectors_and_no_local(new_jms: NewJms, own: str) -> None:
    client, other = await new_jms(), await new_jms()
    session = await client.session()
    selecting = await session.consumer(f"topic:{own}", selector="colour IN ('red', 'blue') AND weight * 2 >= 6")
    foreign = await session.consumer(f"topic:{own}", no_local=True)
    by_header = await session.consumer(f"topic:{own}", selector="JMSCorrelationID = 'c-2' OR JMSType = 'odd'")
    mine = await session.producer(f"topic:{own}")
    theirs = await (await other.session()).producer(f"topic:{own}")
    for producer, whose in ((mine, "mine"), (theirs, "theirs")):
        for colour in ("red", "green", "blue"):
            for weight in (1, 3):
                properties = {"colour": colour, "weight": weight, "JMSXGroupID": "one"}
                number = f"c-{weight if colour == 'green' else 2}"
                await producer.texts(f"{whose} {colour} {weight}", properties=properties, correlation_id=number)
    assert bodies(await selecting.receive(4)) == ["mine red 3", "mine blue 3", "theirs red 3", "theirs blue 3"]
    assert [one.partition(" ")[0] for one in bodies(await foreign.receive(6))] == ["theirs"] * 6
    assert len(await by_header.receive(8)) == 8
    with pytest.raises(RefusedError) as refused:
        await session.consumer(f"topic:{own}", selector="colour = = 'red'")
    assert "InvalidSelectorException" in str(refused.value)


async def test_selectors_share_a_queue(new_jms: NewJms, own: str) -> None:
    """Messages that one consumer does not select stay for others, now or later."""
    client = await new_jms()
    session = await client.session()
    producer = await session.producer(f"queue:{own}")
    red = await session.consumer(f"queue:{own}", selector="colour = 'red'")
    for number in range(5):
        for colour in ("red", "green", "blue"):
            await producer.texts(f"{colour} {number}", properties={"colour": colour}, correlation_id=f"c-{number}")
    assert bodies(await red.receive(5)) == [f"red {number}" for number in range(5)]
    blue = await session.consumer(f"queue:{own}", selector="colour = 'blue'")
    assert sorted(bodies(await blue.receive(5))) == [f"blue {number}" for number in range(5)]
    await client.close()
    session = await (await new_jms()).session()
    by_header = await session.consumer(f"queue:{own}", selector="JMSCorrelationID = 'c-3'")
    assert bodies(await by_header.receive(1)) == ["green 3"]
    rest = await session.consumer(f"queue:{own}")
    assert sorted(bodies(await rest.receive(4))) == ["green 0", "green 1", "green 2", "green 4"]


async def test_a_transacted_session(new_jms: NewJms, own: str) -> None:
    client = await new_jms()
    plain = await client.session()
    transacted = await client.session("transacted")
    watching = await plain.consumer(f"queue:{own}-out")
    group = {"properties": {"JMSXGroupID": "one"}}
    await (await plain.producer(f"queue:{own}")).texts("0", "1", "2", **group)
    taking = await transacted.consumer(f"queue:{own}")
    giving = await transacted.producer(f"queue:{own}-out")

    assert bodies(await taking.receive(2)) == ["0", "1"]
    await giving.texts("rolled back", **group)
    await transacted.do("rollback")
    seen = await taking.receive(3)
    assert [(one["body"], one["redelivered"]) for one in seen[:2]] == [("0", True), ("1", True)]
    assert seen[2]["body"] == "2"
    await giving.texts("committed 0", "committed 1", **group)
    await transacted.do("commit")
    assert bodies(await watching.receive(2)) == ["committed 0", "committed 1"]

    await giving.texts("never committed", **group)
    await client.close()
    client = await new_jms()
    session = await client.session()
    consumer = await session.consumer(f"queue:{own}")
    await (await session.producer(f"queue:{own}")).texts("3", **group)
    assert bodies(await consumer.receive(1)) == ["3"], "the commit took what was received with it"
    watching = await session.consumer(f"queue:{own}-out")
    await (await session.producer(f"queue:{own}-out")).texts("last", **group)
    assert bodies(await watching.receive(1)) == ["last"]


async def test_jms_refuses_features_that_the_gateway_does_not_offer(new_jms: NewJms, own: str) -> None:
    session = await (await new_jms()).session()
    producer = await session.producer(f"topic:{own}")
    with pytest.raises(RefusedError) as refused:
        await producer.texts("later", delay=60_000)
    assert "does not support delayed message delivery" in str(refused.value)
    consumer = await session.consumer(f"topic:{own}")
    await producer.texts("now")
    assert bodies(await consumer.receive(1)) == ["now"]


async def test_two_connections_with_one_client_id(new_jms: NewJms, own: str) -> None:
    """`sole-connection-for-container` is not offered: the second is accepted, and takes over the subscription."""
    name = f"client-{own}"
    first, second = await new_jms(id=name), await new_jms(id=name)
    await (await first.session()).consumer(f"topic:{own}", kind="durable", as_="news")
    session = await second.session()
    consumer = await session.consumer(f"topic:{own}", kind="durable", as_="news")
    await (await session.producer(f"topic:{own}")).texts("to the second")
    assert bodies(await consumer.receive(1)) == ["to the second"]


async def test_a_refused_link_raises_an_exception_in_jms(new_jms: NewJms, own: str) -> None:
    session = await (await new_jms()).session()
    for attach, error in (
        (session.consumer(f"topic:{own}/partitions/99"), "InvalidDestinationException"),
        (session.producer(f"topic:{own}/partitions/99"), "InvalidDestinationException"),
        (session.producer("queue:__consumer_offsets"), "JMSSecurityException"),
    ):
        with pytest.raises(RefusedError) as refused:
            await attach
        assert error in str(refused.value)
    anywhere = await session.producer()
    with pytest.raises(RefusedError) as refused:
        await anywhere.texts("nowhere", to="queue:__consumer_offsets")
    assert "JMSSecurityException" in str(refused.value)


async def test_failover(new_jms: NewJms, amqp_gateway: GatewayProcess, own: str) -> None:
    """The connection is lost twice; Qpid JMS reconnects with all sessions and links, and no message is lost."""
    async with Wire(amqp_gateway.address("amqp")).listening() as wire:
        host, port = wire.address
        client = await new_jms(connected=False)
        await client.connect(
            uri=f"failover:(amqp://{host}:{port})?failover.reconnectDelay=20&failover.maxReconnectDelay=200"
        )
        session = await client.session()
        consumer = await session.consumer(f"queue:{own}")
        producer = await session.producer(f"queue:{own}")
        seen = []
        for turn in range(3):
            await producer.texts(*(f"{turn}-{number}" for number in range(5)))
            seen += bodies(await consumer.receive(5))
            if turn < 2:
                wire.cut()
        # Messages that were acknowledged while the connection broke may be delivered again.
        wanted = {f"{turn}-{number}" for turn in range(3) for number in range(5)}
        while not wanted <= set(seen):
            seen += bodies(await consumer.receive(1))
        assert set(seen) == wanted
        await client.close()
