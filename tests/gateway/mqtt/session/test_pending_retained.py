"""A kept session gets its remaining retained messages after a reconnect, whatever ended the connection."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.mqtt.session.pending_retained import Pending, RetainedQueue
from gateway.mqtt.state.records import PendingRetained, SessionSubscription
from gateway.process.listeners import make_mqtt
from gateway.settings.config import Address
from protocols.mqtt import packets
from protocols.mqtt.packets import Publish, Subscription
from tests.support.assembled import assembled
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

KEPT: dict[str, Any] = {"clean_start": False, "session_expiry_interval": 60, "receive_maximum": 2}


def subscription(topic_filter: str) -> SessionSubscription:
    return SessionSubscription(Subscription(topic_filter, 1))


def add(queue: RetainedQueue, progress: PendingRetained, found: list[tuple[str, tuple[int, int]]]) -> None:
    pending = queue.add(subscription(progress.topic_filter), progress)
    pending.found.extend(found)
    queue.send(pending)


def first(queue: RetainedQueue) -> Pending:
    pending = queue.first
    assert pending is not None
    return pending


def test_what_is_owed_is_a_place() -> None:
    queue = RetainedQueue()
    one, two, empty = (queue.expect(name) for name in ("a/+", "b/+", "c/+"))
    add(queue, one, [("a/1", (0, 7)), ("a/2", (0, 9)), ("a/3", (1, 2))])
    add(queue, two, [("b/1", (0, 3))])
    add(queue, empty, [])
    assert queue.progress == (PendingRetained("a/+"), PendingRetained("b/+"))
    queue.add_again("x", subscription("x"), 5)
    queue.pop()
    queue.pop()
    assert queue.progress == (PendingRetained("a/+", 0, 9), PendingRetained("b/+"))
    again = RetainedQueue(queue.progress)
    assert again.first is None
    queue.pop()
    assert queue.progress == (PendingRetained("b/+"),)
    queue.pop()
    assert queue.progress == ()
    assert first(queue).packet_id == 5
    queue.pop()
    assert not queue


def test_what_was_unsubscribed_is_not_owed() -> None:
    queue = RetainedQueue([PendingRetained("a/+", 0, 9), PendingRetained("b/+")])
    for progress in queue.progress:
        add(queue, progress, [("x", (0, 10)), ("y", (0, 11))])
    queue.add_again("a/+", subscription("a/+"), 5)
    queue.forget("a/+")
    assert queue.progress == (PendingRetained("b/+"),)
    queue.pop()
    assert first(queue).subscription.options.topic_filter == "b/+"
    queue.pop()
    assert first(queue).subscription.options.topic_filter == "a/+"
    queue.clear()
    assert not queue


def test_nothing_is_sent_before_all_is_found() -> None:
    queue = RetainedQueue()
    progress = queue.expect("a/#")
    searched = queue.add(subscription("a/#"), progress)
    add(queue, queue.expect("b"), [("b", (0, 3))])
    searched.found.append(("a/1", (0, 7)))
    assert queue.first is None
    queue.send(searched)
    assert queue.first is searched
    queue.pop()
    assert first(queue).found[0][0] == "b"
    left = queue.add(subscription("c/#"), queue.expect("c/#"))
    queue.forget("c/#")
    assert left.is_dropped
    queue.clear()
    assert queue.progress == (PendingRetained("b"),)


def test_the_cost_of_many_subscriptions_grows_with_their_number() -> None:
    queue = RetainedQueue()
    waiting = [queue.add(subscription(f"{number}"), queue.expect(f"{number}")) for number in range(20_000)]
    started = time.process_time()
    for pending in reversed(waiting):
        queue.send(pending)
    assert not queue
    assert time.process_time() - started < 2  # seconds more when each was searched for


async def some_retained(gateway: GatewayProcess, name: str, qos: int) -> list[bytes]:
    """Five retained messages, published in this order."""
    sender = await RawClient.connect(gateway.address("mqtt"))
    payloads = [b"%d" % number for number in range(5)]
    for payload in payloads:
        await sender.publish(f"{name}/{payload.decode()}", payload, qos, retain=True)
    sender.drop()
    return payloads


async def rest(client: RawClient, qos: int, seen: list[Publish]) -> list[bytes]:
    """The messages after a reconnect, acknowledged one by one, up to the last of five."""
    got: list[bytes] = []
    again = {message.packet_id: message.payload for message in seen}
    while len(got) < 5:
        packet = await client.receive(30)
        if isinstance(packet, packets.Pubrel):
            client.send(packets.Pubcomp(packet.packet_id))
            continue
        assert isinstance(packet, Publish)
        assert packet.retain
        assert packet.dup is (packet.packet_id in again)
        assert again.pop(packet.packet_id, packet.payload) == packet.payload
        got.append(packet.payload)
        client.send((packets.Puback if qos == 1 else packets.Pubrec)(packet.packet_id))
    await client.publish(f"{uuid.uuid4().hex}/a", b"")
    assert not any(isinstance(packet, Publish) for packet in client._aside)
    return got


@pytest.mark.clause("MQTT-4.4.0-1", "MQTT-3.3.1-9")
@pytest.mark.parametrize("qos", [1, 2])
async def test_they_are_sent_after_a_reconnect(gateway: GatewayProcess, qos: int) -> None:
    name = f"progress-{uuid.uuid4().hex[:8]}"
    payloads = await some_retained(gateway, name, qos)
    client = await RawClient.connect(gateway.address("mqtt"), name, **KEPT)
    await client.subscribe(Subscription(f"{name}/+", qos))
    seen = [await client.expect(Publish), await client.expect(Publish)]
    assert len({message.payload for message in seen}) == 2
    client.drop()
    client = await RawClient.connect(gateway.address("mqtt"), name, **KEPT)
    assert client.connack.session_present
    assert sorted(await rest(client, qos, seen)) == payloads
    await client.unsubscribe(f"{name}/+")
    client.drop()


@pytest.mark.clause("MQTT-3.10.4-2")
async def test_not_for_what_was_unsubscribed(gateway: GatewayProcess) -> None:
    name = f"progress-{uuid.uuid4().hex[:8]}"
    await some_retained(gateway, name, 1)
    client = await RawClient.connect(gateway.address("mqtt"), name, **KEPT)
    await client.subscribe(Subscription(f"{name}/+", 1))
    seen = [await client.expect(Publish), await client.expect(Publish)]
    await client.unsubscribe(f"{name}/+")
    client.drop()
    client = await RawClient.connect(gateway.address("mqtt"), name, **KEPT)
    again = [await client.message(), await client.message()]
    assert sorted(message.payload for message in again) == sorted(message.payload for message in seen)
    await client.publish(f"{name}/x", b"")
    await client.ping()
    client.drop()


async def test_also_when_the_gateway_was_killed(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess], tmp_path: Path
) -> None:
    """At QoS 2 none of them comes twice: the progress is stored with the identifier before the message is sent."""
    options = ("--data-dir", str(tmp_path / "data"))
    gateway = await new_gateway(bootstrap, *options, config="[kafka]\ncreate_topics = true\n").start()
    name = f"progress-{uuid.uuid4().hex[:8]}"
    payloads = await some_retained(gateway, name, 2)
    client = await RawClient.connect(gateway.address("mqtt"), name, **KEPT)
    await client.subscribe(Subscription(f"{name}/+", 2))
    seen = [await client.expect(Publish), await client.expect(Publish)]
    await gateway.kill()
    client.drop()
    await gateway.start()
    client = await RawClient.connect(gateway.address("mqtt"), name, **KEPT)
    assert client.connack.session_present
    assert sorted(await rest(client, 2, seen)) == payloads
    client.drop()


async def test_subscribing_again_and_again_keeps_no_more_than_two_searches(bootstrap: str) -> None:
    """A client that acknowledges nothing could fill the memory: each SUBSCRIBE asks for all messages again."""
    name = f"progress-{uuid.uuid4().hex[:8]}"
    async with assembled(bootstrap, create=True, mqtt={"address": Address("127.0.0.1:0")}) as made:
        server = make_mqtt(made.process, made.security, made.state)
        await server.start()
        host, _, port = server.bound.rpartition(":")
        address = host, int(port)
        sender = await RawClient.connect(address)
        for number in range(5):
            await sender.publish(f"{name}/{number}", b"x", retain=True)
        client = await RawClient.connect(address, name, **KEPT)
        for _ in range(50):
            await client.subscribe(Subscription(f"{name}/+", 1))
        deliveries = made.state.mqtt.sessions.live[name].deliveries
        await wait_until(lambda: deliveries._retained is not None and deliveries._retained.first is not None)
        assert len(deliveries._retained._pending) <= 2
        assert len(deliveries.pending_retained) <= 2
        seen = {(await client.message()).topic for _ in range(10)}
        assert len(seen) == 5
        client.drop()
        sender.drop()
        server.stop_accepting()
        await server.stop(2.0)
