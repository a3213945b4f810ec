"""The presence topic of two gateways, as Kafka, MQTT, AMQP and HTTP clients see it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from proton.utils import BlockingConnection

from gateway.embedded.broker import EmbeddedBroker
from gateway.process.listeners import Listener, make_amqp, make_mqtt, make_rest
from gateway.settings.config import Address
from protocols.mqtt import packets
from protocols.mqtt.packets import Subscription
from tests.support.assembled import Assembled, assembled
from tests.support.mqtt import PahoClient, RawClient
from tests.support.one_task import in_one_task
from tests.support.waiting import wait_until

TOPIC = f"presence-{uuid.uuid4().hex[:8]}"
LOCAL = Address("127.0.0.1:0")
CONTROL = {"Content-Type": "application/vnd.kafka.v2+json"}
RECORDS = {"Content-Type": "application/vnd.kafka.json.v2+json"}
Connect = Callable[..., Awaitable[RawClient]]


class Gateway(NamedTuple):
    """One of two gateways, with its listeners."""

    made: Assembled
    listeners: dict[str, Listener]

    @property
    def owner(self) -> str:
        return self.made.state.mqtt.sessions.owner

    def address(self, protocol: str) -> tuple[str, int]:
        host, _, port = self.listeners[protocol].bound.rpartition(":")
        return host, int(port)


@contextlib.asynccontextmanager
async def running(bootstrap: str, topic: str = TOPIC) -> AsyncIterator[Gateway]:
    local = {"address": LOCAL}
    async with (
        assembled(bootstrap, create=True, presence={"topic": topic}, mqtt=local, amqp=local, http=local) as made,
        contextlib.AsyncExitStack() as stack,
    ):
        parts = made.process, made.security, made.log, made.state
        listeners: dict[str, Listener] = {
            "mqtt": make_mqtt(made.process, made.security, made.state),
            "amqp": make_amqp(*parts),
            "http": make_rest(*parts),
        }
        for listener in listeners.values():
            await listener.start()
            stack.push_async_callback(listener.stop, 2.0)
            stack.callback(listener.stop_receiving)
        yield Gateway(made, listeners)


@pytest.fixture(scope="module")
async def both(bootstrap: str) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """Two gateways in the test's own process."""
    async with in_one_task(running(bootstrap)) as one, in_one_task(running(bootstrap)) as other:
        yield one, other


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connect clients, and drop them at the end."""
    clients: list[RawClient] = []

    async def one(to: Gateway, client_id: str, **options: Any) -> RawClient:
        clients.append(await RawClient.connect(to.address("mqtt"), client_id, **options))
        return clients[-1]

    yield one
    for client in clients:
        client.drop()


@pytest.fixture
def name() -> str:
    return f"c-{uuid.uuid4().hex[:10]}"


class Told:
    """All records of the topic, read by a plain Kafka client."""

    def __init__(self) -> None:
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.headers: dict[str, bytes] = {}

    async def follow(self, bootstrap: str, topic: str) -> None:
        async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest") as consumer:
            async for record in consumer:
                self.headers = dict(record.headers)
                self.records.setdefault(record.key.decode(), []).append(json.loads(record.value or b"null"))

    def last(self, key: str) -> dict[str, Any]:
        """The last record of a key; empty when there is none yet."""
        return self.records.get(key, [{}])[-1]

    def states(self, key: str) -> list[tuple[str, str | None]]:
        """Each state of a key, and what ended it."""
        return [(one["state"], one.get("reason", {}).get("by")) for one in self.records.get(key, ())]


@contextlib.asynccontextmanager
async def following(bootstrap: str, topic: str) -> AsyncIterator[Told]:
    told = Told()
    task = asyncio.create_task(told.follow(bootstrap, topic))
    yield told
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def told(bootstrap: str, both: tuple[Gateway, Gateway]) -> AsyncIterator[Told]:
    async with following(bootstrap, TOPIC) as told:
        yield told


async def test_a_subscriber_sees_who_is_there_and_who_comes_and_goes(
    both: tuple[Gateway, Gateway], connect: Connect, told: Told, name: str
) -> None:
    """The last state of each client is a retained message; changes are delivered as they are stored."""
    one, other = both
    client = await connect(one, name, clean_start=False, session_expiry_interval=30)
    await wait_until(lambda: told.states(f"mqtt/{name}") == [("online", None)])
    assert told.headers["content-type"] == b"application/json"
    watcher = await PahoClient(other.address("mqtt")).connect()
    await wait_until(lambda: f"mqtt/{name}" in other.made.state.presence.ledger.known)
    assert await watcher.subscribe(f"{TOPIC}/mqtt/{name}") == 1
    await wait_until(lambda: watcher.messages)
    online = json.loads(watcher.messages[0].payload)
    assert watcher.messages[0].retain
    assert watcher.messages[0].properties.ContentType == "application/json"
    port = client._writer.get_extra_info("sockname")[1]
    assert online == {
        "state": "online", "client": name, "principal": "anonymous", "protocol": "mqtt", "address": f"127.0.0.1:{port}",
        "gateway": one.owner, "since": online["since"], "epoch": 1, "session": {"kept": True, "expiry": 30},
    }  # fmt: skip
    client.send(packets.Disconnect(0x04))
    await wait_until(lambda: len(watcher.messages) == 2)
    offline = json.loads(watcher.messages[1].payload)
    assert not watcher.messages[1].retain
    assert offline == online | {
        "state": "offline", "since": offline["since"], "reason": {"by": "client", "code": 4}
    }  # fmt: skip
    late = await PahoClient(one.address("mqtt"), protocol=4).connect()
    await wait_until(lambda: not one.made.state.presence.ledger.known[f"mqtt/{name}"].online)
    await late.subscribe(f"{TOPIC}/mqtt/+")
    await wait_until(lambda: any(json.loads(each.payload) == offline for each in late.messages))
    for each in (watcher, late):
        await each.close()


@pytest.mark.clause("MQTT-3.1.4-3")
@pytest.mark.parametrize("turned", [False, True])
async def test_a_client_id_has_one_connection_over_all_gateways(
    both: tuple[Gateway, Gateway], connect: Connect, told: Told, name: str, turned: bool
) -> None:
    """A second CONNECT with clean session closes the first at the other gateway, without an offline record."""
    one, other = reversed(both) if turned else both
    first = await connect(one, name)
    await wait_until(lambda: f"mqtt/{name}" in other.made.state.presence.ledger.known)
    second = await connect(other, name)
    said = await first.expect_end()
    assert [each.reason_code for each in said if isinstance(each, packets.Disconnect)] == [0x8E]
    await wait_until(lambda: len(told.states(f"mqtt/{name}")) == 2)
    second.send(packets.Disconnect())
    await wait_until(lambda: len(told.states(f"mqtt/{name}")) == 3)
    assert [(each["state"], each["gateway"], each["epoch"]) for each in told.records[f"mqtt/{name}"]] == [
        ("online", one.owner, 1), ("online", other.owner, 2), ("offline", other.owner, 2)
    ]  # fmt: skip


async def test_of_two_that_connect_in_the_same_moment_one_stays(
    both: tuple[Gateway, Gateway], connect: Connect, told: Told, name: str
) -> None:
    """Both gateways keep the same one, and the topic ends with it."""
    names = [f"{name}-{number}" for number in range(20)]
    pairs = [await asyncio.gather(*(connect(each, client) for each in both)) for client in names]
    for client, pair in zip(names, pairs, strict=True):
        ends = [asyncio.create_task(each.expect_end()) for each in pair]
        done, left = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert len(done) == 1
        stays = both[ends.index(left.pop())]
        await wait_until(lambda key=f"mqtt/{client}", owner=stays.owner: told.last(key).get("gateway") == owner)
        last = told.last(f"mqtt/{client}")
        assert (last["state"], last["epoch"]) == (
            "online",
            max(each["epoch"] for each in told.records[f"mqtt/{client}"]),
        )
        for each, end in zip(pair, ends, strict=True):
            each.drop()
            await asyncio.gather(end, return_exceptions=True)
    await wait_until(lambda: all(told.last(f"mqtt/{client}")["state"] == "offline" for client in names))


async def test_a_client_id_that_another_principal_has_elsewhere_is_refused(
    both: tuple[Gateway, Gateway], bootstrap: str, connect: Connect, name: str
) -> None:
    """As long as its gateway is alive; here a plain Kafka client writes the record."""
    one, _ = both
    theirs = {
        "state": "online", "client": name, "principal": "somebody else", "protocol": "mqtt", "address": "h:1",
        "gateway": f"{name}/1", "since": 0, "epoch": 5, "session": {"kept": False, "expiry": 0},
    }  # fmt: skip
    beat = {"incarnation": "1", "at": int(time.time() * 1000)}
    known = one.made.state.presence.ledger.known

    async def tell(producer: AIOKafkaProducer, **changed: Any) -> None:
        value = json.dumps(theirs | changed).encode()
        await producer.send_and_wait(TOPIC, value, key=f"mqtt/{name}".encode())
        await wait_until(lambda: f"mqtt/{name}" in known and known[f"mqtt/{name}"].value == value)

    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        await producer.send_and_wait("__trivium_sessions", json.dumps(beat).encode(), key=f"gateway/{name}".encode())
        await wait_until(lambda: one.made.state.mqtt.sessions.gateways.is_alive(f"{name}/1"))
        await tell(producer)
        assert (await connect(one, name)).connack.reason_code == 0x87
        await tell(producer, state="offline")
        assert (await connect(one, name)).connack.reason_code == 0
    await wait_until(lambda: (known[f"mqtt/{name}"].epoch, known[f"mqtt/{name}"].gateway) == (6, one.owner))


async def test_how_connections_end(both: tuple[Gateway, Gateway], connect: Connect, told: Told, name: str) -> None:
    """The record has the side that ended the connection, and the protocol's code."""
    gateway = both[0]
    lost, silent, wrong = [
        await connect(gateway, f"{name}-{how}", keep_alive=alive)
        for how, alive in (("lost", 60), ("silent", 1), ("wrong", 60))
    ]
    lost.drop()
    wrong.send(packets.Connect(wrong.version, name))
    former = await connect(gateway, f"{name}-former")
    await wait_until(lambda: told.states(f"mqtt/{name}-former"))
    await connect(gateway, f"{name}-former")
    await former.expect_end()
    await silent.expect_end()
    expected = {"lost": ("client", None), "silent": ("timeout", 0x8D), "wrong": ("server", 0x82)}

    def reasons(how: str) -> list[tuple[str, int | None]]:
        found = told.records.get(f"mqtt/{name}-{how}", ())
        return [(each["reason"]["by"], each["reason"].get("code")) for each in found if each["state"] == "offline"]

    await wait_until(lambda: all(reasons(how) == [ended] for how, ended in expected.items()))
    await wait_until(lambda: told.states(f"mqtt/{name}-former")[-1][0] == "online")
    assert set(reasons("former")) <= {("takeover", 0x8E)}


async def test_amqp_and_http_clients_are_told_of_and_read_it(
    both: tuple[Gateway, Gateway], connect: Connect, told: Told, name: str
) -> None:
    """A container-id is online while one of its connections is open, at any gateway."""
    one, other = both

    def connect(to: Gateway) -> BlockingConnection:
        return BlockingConnection(f"amqp://{to.listeners['amqp'].bound}", container_id=name, timeout=60)

    connections = [await asyncio.to_thread(connect, each) for each in (one, one, other)]
    key = f"amqp/{name}"
    await wait_until(lambda: [each["gateway"] for each in told.records.get(key, ())] == [one.owner, other.owner])
    receiver = await asyncio.to_thread(connections[0].create_receiver, f"{TOPIC}/group.id/{name}")
    await asyncio.to_thread(connections[2].close)  # the other gateway says offline, and this one knows better
    await wait_until(lambda: told.states(key)[2:] == [("offline", "client"), ("online", None)])
    base = f"http://{one.listeners['http'].bound}"
    async with aiohttp.ClientSession(base) as http:
        async with http.post(f"/consumers/{name}", json={"name": "i"}, headers=CONTROL) as answer:
            assert answer.status == 200
        async with http.get(f"/topics/{TOPIC}/stream", params={"from": "beginning"}) as stream:
            await wait_until(lambda: ("online", None) in told.states("http/stream/anonymous")[-1:])
            async for line in stream.content:
                if line.startswith(b"data:") and name.encode() in line:
                    break
        async with http.delete(f"/consumers/{name}/instances/i") as answer:
            assert answer.status == 204
    await wait_until(lambda: told.states(f"http/consumer/{name}/i") == [("online", None), ("offline", "client")])
    await wait_until(lambda: told.states("http/stream/anonymous")[-1:] == [("offline", "client")])
    keys = set()
    while key not in keys:
        message = await asyncio.to_thread(receiver.receive, 60)
        keys.add(json.loads(bytes(message.body))["protocol"] + "/" + json.loads(bytes(message.body))["client"])
        receiver.accept()
    for connection in connections[:2]:
        await asyncio.to_thread(connection.close)
    await wait_until(lambda: told.states(key)[-1] == ("offline", "client"))


async def test_no_client_writes_it(both: tuple[Gateway, Gateway], connect: Connect, name: str) -> None:
    """Neither by MQTT, retained or not, nor by HTTP: only gateways write to the topic."""
    one, _ = both
    client = await connect(one, name)
    assert await client.publish(f"{TOPIC}/mqtt/x", b"{}") == 0x87
    assert await client.publish(f"{TOPIC}/mqtt/x", b"{}", retain=True) == 0x87
    async with aiohttp.ClientSession(f"http://{one.listeners['http'].bound}") as http:
        records = {"records": [{"key": "mqtt/x", "value": {}}]}
        async with http.post(f"/topics/{TOPIC}", json=records, headers=RECORDS) as answer:
            assert answer.status == 403, await answer.text()
    await client.subscribe(Subscription(f"{TOPIC}/mqtt/x", 1))
    client.send(packets.Pingreq())
    await client.expect(packets.Pingresp)
    assert one.made.state.mqtt.retained.get(f"{TOPIC}/mqtt/x") is None


async def test_while_kafka_is_away_clients_are_served_and_the_last_states_come_later(
    stoppable: EmbeddedBroker, connect: Connect, name: str
) -> None:
    """No client waits for presence: many connect and disconnect, and one record has the final state."""
    topic = f"presence-{name}"
    bootstrap = stoppable.bootstrap_servers
    async with running(bootstrap, topic) as gateway, following(bootstrap, topic) as told:
        await connect(gateway, f"{name}-stays")
        await wait_until(lambda: told.states(f"mqtt/{name}-stays"))
        os.kill(stoppable.pid, signal.SIGSTOP)
        try:
            for _ in range(10):
                again = await connect(gateway, f"{name}-again")
                await again.disconnect()
            await connect(gateway, f"{name}-back")
        finally:
            os.kill(stoppable.pid, signal.SIGCONT)
        keys = {"stays": "online", "again": "offline", "back": "online"}

        def right() -> bool:
            return all(told.states(f"mqtt/{name}-{who}")[-1:] and told.states(f"mqtt/{name}-{who}")[-1][0] == state
                       for who, state in keys.items())  # fmt: skip

        await wait_until(right)
        assert len(told.states(f"mqtt/{name}-again")) <= 2  # not ten times two
