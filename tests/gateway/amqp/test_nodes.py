"""Temporary queues and topics: request and reply between proton clients."""

from __future__ import annotations

from typing import Any

import pytest
from proton import Delivery, Message
from proton.utils import BlockingConnection, LinkDetached

from gateway.amqp.server import AmqpServer
from protocols.amqp import outcomes
from tests.support.amqp import TIMEOUT, Temporary, as_client, body_of, data
from tests.support.waiting import wait_until


@pytest.fixture
async def reply_topic(new_topic: Any) -> str:
    name: str = await new_topic(partitions=3)
    return name


@pytest.fixture
async def listener(start_listener: Any, reply_topic: str) -> AmqpServer:
    found: AmqpServer = await start_listener(amqp={"reply_topic": reply_topic})
    return found


def serve(connection: BlockingConnection, requests: Any) -> None:
    """Answer one request at its reply-to."""
    request = requests.receive(TIMEOUT)
    reply = data(body_of(request).upper(), address=request.reply_to, correlation_id=request.correlation_id)
    connection.create_sender(None).send(reply)
    requests.accept()


async def test_request_and_reply(listener: AmqpServer, new_topic: Any, reply_topic: str) -> None:
    topic = await new_topic(partitions=1)

    def work(connection: BlockingConnection) -> list[tuple[bytes, Any]]:
        worker = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT)
        requests = worker.create_receiver(f"queue://{topic}", credit=10)
        replies = connection.create_receiver(None, dynamic=True, credit=10)
        address = replies.link.remote_source.address
        assert address.startswith(f"{reply_topic}/")
        assert len(address) >= len(reply_topic) + 33
        sender = connection.create_sender(topic)
        found = []
        for number in range(2):
            sender.send(data(b"job %d" % number, reply_to=address, correlation_id=f"c{number}"))
            serve(worker, requests)
            message = replies.receive(TIMEOUT)
            found.append((body_of(message), message.correlation_id))
            replies.accept()
        worker.close()
        return found

    assert await as_client(listener, work) == [(b"JOB 0", "c0"), (b"JOB 1", "c1")]
    await wait_until(lambda: listener.statistics().nodes == 0)  # the gateway sees the connection's end a little later


async def test_a_queue_made_by_a_sender(listener: AmqpServer) -> None:
    """As in JMS: it keeps messages that arrive before a receiver attaches, and offers returned ones again."""

    def work(connection: BlockingConnection) -> tuple[list[bytes], Message]:
        maker = connection.create_sender(None, options=Temporary("temporary-queue"))
        address = maker.link.remote_target.address
        for number in range(20):
            maker.send(data(b"%d" % number))
        receiver = connection.create_receiver(f"queue://{address}", credit=5)
        found = []
        for _ in range(20):
            found.append(body_of(receiver.receive(TIMEOUT)))
            receiver.accept()
        maker.send(data(b"again"))
        receiver.receive(TIMEOUT)
        receiver.fetcher.unsettled[0].local.failed = True
        receiver.settle(Delivery.MODIFIED)
        message = receiver.receive(TIMEOUT)
        receiver.accept()
        return found, message

    found, message = await as_client(listener, work)
    assert found == [b"%d" % number for number in range(20)]
    assert (body_of(message), message.delivery_count) == (b"again", 1)


async def test_receivers_of_a_queue_take_turns_and_of_a_topic_do_not(listener: AmqpServer) -> None:
    def work(connection: BlockingConnection, kind: str) -> list[list[bytes]]:
        maker = connection.create_sender(None, options=Temporary(kind))
        address = maker.link.remote_target.address
        receivers = [connection.create_receiver(address, credit=10, name=f"r{number}") for number in range(2)]
        for number in range(4):
            maker.send(data(b"%d" % number))
        wanted = 4 if kind == "temporary-queue" else 8
        connection.wait(
            lambda: sum(len(receiver.fetcher.incoming) for receiver in receivers) == wanted, timeout=TIMEOUT
        )
        return [[body_of(message) for message, _ in receiver.fetcher.incoming] for receiver in receivers]

    assert await as_client(listener, lambda connection: work(connection, "temporary-queue")) == [
        [b"0", b"2"],
        [b"1", b"3"],
    ]
    every = [b"0", b"1", b"2", b"3"]
    assert await as_client(listener, lambda connection: work(connection, "temporary-topic")) == [every, every]


async def test_a_lost_receiver_of_a_queue_gives_back(listener: AmqpServer) -> None:
    def work(connection: BlockingConnection) -> list[bytes]:
        maker = connection.create_sender(None, options=Temporary("temporary-queue"))
        address = maker.link.remote_target.address
        maker.send(data(b"x"))
        first = connection.create_receiver(address, credit=1, name="first")
        found = [body_of(first.receive(TIMEOUT))]
        first.close()
        second = connection.create_receiver(address, credit=1, name="second")
        found.append(body_of(second.receive(TIMEOUT)))
        second.accept()
        return found

    assert await as_client(listener, work) == [b"x", b"x"]


async def test_a_node_is_its_connections_and_goes_with_its_link(listener: AmqpServer) -> None:
    def work(connection: BlockingConnection) -> None:
        maker = connection.create_sender(None, options=Temporary())
        address = maker.link.remote_target.address
        other = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT)
        with pytest.raises(LinkDetached, match=outcomes.UNAUTHORIZED_ACCESS):
            other.create_receiver(address)
        other.close()
        receiver = connection.create_receiver(address, credit=1)
        assert listener.statistics().nodes == 1
        with pytest.raises(LinkDetached, match=outcomes.RESOURCE_DELETED):
            maker.close()
        assert receiver.link.state & receiver.link.REMOTE_CLOSED
        with pytest.raises(LinkDetached):
            connection.create_receiver(address, name="late")

    await as_client(listener, work)
    await wait_until(lambda: listener.statistics().nodes == 0)


async def test_without_the_reply_topic(start_listener: Any) -> None:
    listener = await start_listener(amqp={"reply_topic": "no-such-replies"})

    def work(connection: BlockingConnection) -> None:
        with pytest.raises(LinkDetached, match=outcomes.NOT_FOUND):
            connection.create_receiver(None, dynamic=True)

    await as_client(listener, work)
    await wait_until(lambda: listener.statistics().nodes == 0)
