"""No principal can use another's groups, consumers and sessions by their names, in any protocol."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from proton import UNDESCRIBED, Array, Data, Message, Terminus, symbol
from proton.reactor import DurableSubscription, ReceiverOption
from proton.utils import BlockingConnection, LinkDetached
from pwdlib.hashers.argon2 import Argon2Hasher

from protocols.mqtt.packets import Suback, Subscribe, Subscription
from protocols.mqtt.reasons import ReasonCode
from tests.support.amqp import TIMEOUT, body_of
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

pytestmark = pytest.mark.part("live websockets")

T = TypeVar("T")
NewTopic = Callable[..., Awaitable[str]]
V2 = {"Content-Type": "application/vnd.kafka.v2+json"}
TEAM = f"team-{uuid.uuid4().hex[:8]}"  # all may use groups with this prefix, but only bob may delete them
SHUT = f"shut-{uuid.uuid4().hex[:8]}"
CONFIG = """
[kafka]
create_topics = true
[security]
allow_anonymous = false
password_file = "{path}"
failed_attempt_delay_s = 0
[[security.access]]
group = "{team}*"
action = "read"
[[security.access]]
principal = "bob"
group = "{team}*"
action = "delete"
[[security.access]]
group = "{shut}"
allow = false
"""

PARTIAL = """
[kafka]
create_topics = true
[security]
allow_anonymous = false
password_file = "{path}"
failed_attempt_delay_s = 0
[[security.access]]
principal = "ann"
[[security.access]]
principal = "bob"
topic = "{topic}/#"
"""


@pytest.fixture(scope="module")
async def gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    """A gateway with users and no rules for topics: all may read and write all topics."""
    directory = tmp_path_factory.mktemp("names")
    hasher = Argon2Hasher(time_cost=1, memory_cost=1024)
    path = directory / "passwords"
    path.write_text("".join(f"{name}:{hasher.hash(name)}\n" for name in ("ann", "bob")))
    process = GatewayProcess(directory, bootstrap, config=CONFIG.format(path=path, team=TEAM, shut=SHUT))
    yield await process.start()
    assert await process.stop() == 0


@pytest.fixture
async def ann(gateway: GatewayProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with http(gateway, "ann") as session:
        yield session


@pytest.fixture
async def bob(gateway: GatewayProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with http(gateway, "bob") as session:
        yield session


def http(gateway: GatewayProcess, user: str) -> aiohttp.ClientSession:
    """Make a client of this user; "" means anonymous."""
    host, port = gateway.address("http")
    fields = {"Authorization": aiohttp.encode_basic_auth(user, user)} if user else {}
    return aiohttp.ClientSession(f"http://{host}:{port}", headers=fields)


async def ask(session: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    async with session.request(method, path, data=data, headers=V2 if body is not None else {}) as answer:
        raw = await answer.read()
        return answer.status, json.loads(raw) if raw else None


async def amqp(
    gateway: GatewayProcess, user: str, work: Callable[[BlockingConnection], T], container: str | None = None
) -> T:
    """Run `work` with a connection of this user, in a thread."""

    def run() -> T:
        host, port = gateway.address("amqp")
        connection = BlockingConnection(
            f"amqp://{host}:{port}",
            timeout=TIMEOUT,
            user=user,
            password=user,
            allowed_mechs="PLAIN",
            allow_insecure_mechs=True,
            container_id=container,
        )
        try:
            return work(connection)
        finally:
            connection.close()

    return await asyncio.to_thread(run)


class Shared(ReceiverOption):
    """A shared subscription for all containers."""

    def apply(self, receiver: Any) -> None:
        receiver.source.capabilities.put_object(Array(UNDESCRIBED, Data.SYMBOL, symbol("shared"), symbol("global")))


class ByName(ReceiverOption):
    """An attach without an address, which names its terminus only by the link's name."""

    def apply(self, receiver: Any) -> None:
        receiver.source.type = Terminus.UNSPECIFIED


def refused(connection: BlockingConnection, address: str | None, *options: Any, name: str | None = None) -> str | None:
    """Attach a receiver, which must be refused; return the condition."""
    with pytest.raises(LinkDetached) as caught:
        connection.create_receiver(address, credit=1, name=name, options=list(options))
    return caught.value.condition


async def mqtt(gateway: GatewayProcess, user: str, client_id: str | None = None, **options: Any) -> RawClient:
    return await RawClient.connect(gateway.address("mqtt"), client_id, username=user, password=user.encode(), **options)


async def subscribe(client: RawClient, topic_filter: str) -> int:
    client.send(Subscribe(client.new_id(), (Subscription(topic_filter, 1),)))
    return int((await client.expect(Suback)).reason_codes[0])


async def exists(admin: AIOKafkaAdminClient, group: str) -> bool:
    (answer,) = await admin.describe_consumer_groups([group])
    return bool(answer.groups[0][2] != "Dead")


async def commit(bootstrap: str, topic: str, group: str) -> None:
    """Commit a position for the group, as a native Kafka client."""
    async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False) as client:
        await wait_until(client.assignment)
        await client.commit(dict.fromkeys(client.assignment(), 0))


def unique() -> str:
    return f"n-{uuid.uuid4().hex[:10]}"


async def every_way(gateway: GatewayProcess, session: aiohttp.ClientSession, user: str, topic: str, group: str) -> Any:
    """Try to read in a group by every protocol; return each protocol's answer."""

    def over_amqp(connection: BlockingConnection) -> list[str | None]:
        durable = [DurableSubscription(), Shared()]
        return [
            refused(connection, f"{topic}/group.id/{group}"),
            refused(connection, f"{topic}::{group}"),
            refused(connection, topic, *durable, name=f"{group}|2"),
        ]

    client = await mqtt(gateway, user)
    answers: list[Any] = await amqp(gateway, user, over_amqp)
    answers.append(await subscribe(client, f"$share/{group}/{topic}/#"))
    client.drop()
    answers.append((await ask(session, "POST", f"/consumers/{group}", {"format": "json"}))[0])
    answers.append((await ask(session, "POST", f"/v2/consumers/{group}", {"format": "json"}))[0])
    answers.append((await ask(session, "GET", f"/topics/{topic}/stream?group={group}"))[0])
    async with session.ws_connect("/stream", protocols=["trivium.v1"]) as socket:
        await socket.send_json({"type": "subscribe", "id": "s", "topic": topic, "group": group})
        answers.append((await socket.receive_json()).get("error_code"))
    return answers


DENIED = ["amqp:unauthorized-access"] * 3 + [ReasonCode.NOT_AUTHORIZED, 403, 403, 403, 403]


async def until_deleted(admin: AIOKafkaAdminClient, group: str) -> None:
    async with asyncio.timeout(TIMEOUT):
        while await exists(admin, group):
            pass


async def test_a_durable_link_belongs_to_its_principal(
    gateway: GatewayProcess,
    ann: aiohttp.ClientSession,
    bob: aiohttp.ClientSession,
    new_topic: NewTopic,
    admin: AIOKafkaAdminClient,
) -> None:
    topic, container = await new_topic(partitions=1), unique()
    group = f"{container}:alarms"

    def make(connection: BlockingConnection) -> None:
        receiver = connection.create_receiver(topic, credit=1, name="alarms", options=DurableSubscription())
        connection.create_sender(topic).send(Message(body=b"1", inferred=True))
        receiver.receive(TIMEOUT)
        receiver.accept()
        receiver.link.detach()

    def steal(connection: BlockingConnection) -> str | None:
        return refused(connection, topic, DurableSubscription(), name="alarms")

    def steal_by_name(connection: BlockingConnection) -> str | None:
        return refused(connection, None, ByName(), name="alarms")

    def end(connection: BlockingConnection) -> None:
        connection.create_receiver(None, credit=1, name="alarms", options=ByName()).close()

    await amqp(gateway, "ann", make, container)
    for attempt in (steal, steal_by_name):
        assert await amqp(gateway, "bob", attempt, container) == "amqp:unauthorized-access"
    assert await every_way(gateway, bob, "bob", topic, group) == DENIED
    assert await exists(admin, group)
    await amqp(gateway, "ann", end, container)
    await until_deleted(admin, group)
    await amqp(gateway, "bob", make, container)  # it is free now, and belongs to the first client that uses it
    assert await every_way(gateway, ann, "ann", topic, group) == DENIED


async def test_an_open_link_is_not_stolen(gateway: GatewayProcess, new_topic: NewTopic) -> None:
    topic, container = await new_topic(partitions=1), unique()
    attached, tried = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def receive(connection: BlockingConnection) -> bytes:
        receiver = connection.create_receiver(topic, credit=1, name="alarms", options=DurableSubscription())
        loop.call_soon_threadsafe(attached.set)
        asyncio.run_coroutine_threadsafe(tried.wait(), loop).result(TIMEOUT)
        connection.create_sender(topic).send(Message(body=b"mine", inferred=True))
        return body_of(receiver.receive(TIMEOUT))

    receiving = asyncio.create_task(amqp(gateway, "ann", receive, container))
    await asyncio.wait_for(attached.wait(), TIMEOUT)
    steal: Callable[[BlockingConnection], Any] = lambda one: refused(one, topic, DurableSubscription(), name="alarms")  # noqa: E731
    assert await amqp(gateway, "bob", steal, container) == "amqp:unauthorized-access"
    tried.set()
    assert await receiving == b"mine"


@pytest.mark.parametrize("first", ["amqp", "mqtt", "http"])
async def test_a_group_belongs_to_its_first_user(
    gateway: GatewayProcess,
    ann: aiohttp.ClientSession,
    bob: aiohttp.ClientSession,
    new_topic: NewTopic,
    first: str,
) -> None:
    topic, group = await new_topic(partitions=1), unique()
    if first == "amqp":
        await amqp(gateway, "ann", lambda one: one.create_receiver(f"{topic}/group.id/{group}", credit=1).close())
    elif first == "mqtt":
        client = await mqtt(gateway, "ann")
        assert await subscribe(client, f"$share/{group}/{topic}/#") == 1
        client.drop()
    else:
        assert (await ask(ann, "POST", f"/consumers/{group}", {"format": "json"}))[0] == 200
    assert await every_way(gateway, bob, "bob", topic, group) == DENIED
    assert (await ask(ann, "POST", f"/consumers/{group}", {"format": "json"}))[0] == 200


async def test_an_http_consumer_belongs_to_its_principal(
    gateway: GatewayProcess, ann: aiohttp.ClientSession, bob: aiohttp.ClientSession, new_topic: NewTopic
) -> None:
    topic, group = await new_topic(partitions=1), TEAM + unique()  # a group that all may use
    assert (await ask(ann, "POST", f"/consumers/{group}", {"name": "c", "format": "json"}))[0] == 200
    assert (await ask(bob, "POST", f"/consumers/{group}", {"name": "c", "format": "json"}))[0] == 409
    place = [{"topic": topic, "partition": 0, "offset": 0}]
    for method, path, body in (
        ("POST", "subscription", {"topics": [topic]}),
        ("GET", "subscription", None),
        ("DELETE", "subscription", None),
        ("POST", "assignments", {"partitions": [{"topic": topic, "partition": 0}]}),
        ("GET", "records", None),
        ("POST", "offsets", {"offsets": place}),
        ("POST", "positions", {"offsets": place}),
        ("POST", "positions/beginning", {"partitions": [{"topic": topic, "partition": 0}]}),
        ("DELETE", "", None),
    ):
        url = f"/consumers/{group}/instances/c/{path}".rstrip("/")
        assert (await ask(bob, method, url, body))[0] == 403, path
    assert (await ask(ann, "DELETE", f"/consumers/{group}/instances/c"))[0] == 204


async def test_another_clients_group_can_be_joined_but_not_deleted(
    gateway: GatewayProcess, bootstrap: str, new_topic: NewTopic, admin: AIOKafkaAdminClient
) -> None:
    topic, group = await new_topic(partitions=1), unique()
    await commit(bootstrap, topic, group)

    def close(connection: BlockingConnection) -> None:
        durable = [DurableSubscription(), Shared()]
        connection.create_receiver(topic, credit=1, name=group, options=durable).close()
        # A second attach waits until the first link has left and its terminus was handled.
        connection.create_receiver(topic, credit=1, name=group, options=durable).close()

    await amqp(gateway, "ann", close)
    assert await exists(admin, group)


async def test_all_readers_of_a_topic_may_use_its_queue(gateway: GatewayProcess, new_topic: NewTopic) -> None:
    topic = await new_topic(partitions=1)
    for user in ("ann", "bob"):

        def work(connection: BlockingConnection, body: bytes = user.encode()) -> bytes:
            connection.create_sender(topic).send(Message(body=body, inferred=True))
            receiver = connection.create_receiver(f"queue://{topic}", credit=1)
            found = body_of(receiver.receive(TIMEOUT))
            receiver.accept()
            return found

        assert await amqp(gateway, user, work) == user.encode()


async def test_a_group_is_not_taken_by_a_topic_of_its_name(
    gateway: GatewayProcess,
    ann: aiohttp.ClientSession,
    bob: aiohttp.ClientSession,
    new_topic: NewTopic,
    admin: AIOKafkaAdminClient,
) -> None:
    """In no protocol; its owner goes on to use it, and to end it."""
    topic, group = await new_topic(partitions=1), unique()
    durable = [DurableSubscription(), Shared()]

    def attach(connection: BlockingConnection) -> None:
        connection.create_receiver(topic, credit=1, name=group, options=durable)

    await amqp(gateway, "ann", attach)
    body, form = {"records": [{"value": 1}]}, {"Content-Type": "application/vnd.kafka.json.v2+json"}
    async with bob.post(f"/topics/{group}", json=body, headers=form) as answer:
        assert answer.status == 200
    assert await every_way(gateway, bob, "bob", topic, group) == DENIED
    assert await amqp(gateway, "bob", lambda one: refused(one, f"queue://{group}")) == "amqp:unauthorized-access"
    await amqp(gateway, "ann", lambda one: one.create_receiver(topic, name=group, options=durable).close())
    await until_deleted(admin, group)


async def test_a_share_does_not_take_the_queue_of_a_topic_that_its_client_may_not_read(
    bootstrap: str, tmp_path: Path
) -> None:
    topic, other = unique(), unique()
    hasher = Argon2Hasher(time_cost=1, memory_cost=1024)
    path = tmp_path / "passwords"
    path.write_text("".join(f"{name}:{hasher.hash(name)}\n" for name in ("ann", "bob")))
    config = PARTIAL.format(path=path, topic=other)
    gateway = await GatewayProcess(tmp_path, bootstrap, config=config).start()
    client = await mqtt(gateway, "bob")
    assert await subscribe(client, f"$share/{topic}/{other}/x") == 1  # the topic is not there yet

    def queue(connection: BlockingConnection) -> bytes:
        connection.create_sender(topic).send(Message(body=b"1", inferred=True))
        receiver = connection.create_receiver(f"queue://{topic}", credit=1)
        found = body_of(receiver.receive(TIMEOUT))
        receiver.accept()
        return found

    client.drop()
    assert await amqp(gateway, "ann", queue) == b"1"
    for user, code in (("ann", ReasonCode.NOT_AUTHORIZED), ("bob", 1)):  # beside the queue, the name is still bob's
        client = await mqtt(gateway, user)
        assert await subscribe(client, f"$share/{topic}/{other}/x") == code
        client.drop()
    assert await gateway.stop() == 0


async def test_rules_override_owners(
    gateway: GatewayProcess,
    ann: aiohttp.ClientSession,
    bob: aiohttp.ClientSession,
    new_topic: NewTopic,
    admin: AIOKafkaAdminClient,
) -> None:
    topic, group = await new_topic(partitions=1), TEAM + unique()
    durable = [DurableSubscription(), Shared()]

    def use(connection: BlockingConnection) -> None:
        receiver = connection.create_receiver(topic, credit=1, name=group, options=durable)
        connection.create_sender(topic).send(Message(body=b"1", inferred=True))
        receiver.receive(TIMEOUT)
        receiver.accept()
        receiver.close()

    await amqp(gateway, "bob", lambda one: one.create_receiver(f"{topic}/group.id/{group}", credit=1).close())
    await amqp(gateway, "ann", lambda one: one.create_receiver(f"{topic}/group.id/{group}", credit=1).close())
    await amqp(gateway, "bob", use)
    await until_deleted(admin, group)
    for session, user in ((ann, "ann"), (bob, "bob")):
        assert await every_way(gateway, session, user, topic, SHUT) == DENIED


async def test_a_session_belongs_to_its_principal(gateway: GatewayProcess) -> None:
    client_id = unique()
    first = await mqtt(gateway, "ann", client_id, session_expiry_interval=60)
    second = await mqtt(gateway, "bob", client_id, clean_start=True)
    assert second.connack.reason_code == ReasonCode.NOT_AUTHORIZED
    assert await subscribe(first, f"{unique()}/x") == 1  # it was not disturbed
    first.drop()
    third = await mqtt(gateway, "bob", client_id)
    assert third.connack.reason_code == ReasonCode.NOT_AUTHORIZED
    again = await mqtt(gateway, "ann", client_id, clean_start=False)
    assert again.connack.session_present
    for client in (second, third, again):
        client.drop()


async def test_an_idempotency_key_belongs_to_its_principal(
    gateway: GatewayProcess, ann: aiohttp.ClientSession, bob: aiohttp.ClientSession, new_topic: NewTopic
) -> None:
    topic = await new_topic(partitions=1)
    offsets = []
    for session in (ann, bob):
        fields = {"Content-Type": "application/vnd.kafka.json.v2+json", "Idempotency-Key": '"k"'}
        body = json.dumps({"records": [{"value": 1}]})
        async with session.post(f"/topics/{topic}", data=body, headers=fields) as answer:
            assert answer.status == 200
            offsets.append((await answer.json(content_type=None))["offsets"][0]["offset"])
    assert offsets == [0, 1]


async def test_a_temporary_node_belongs_to_its_connection(gateway: GatewayProcess) -> None:
    def work(connection: BlockingConnection) -> str:
        node = connection.create_receiver(None, dynamic=True, credit=1)
        address = node.link.remote_source.address
        done = asyncio.run_coroutine_threadsafe(amqp(gateway, "bob", lambda one: refused(one, address)), loop)
        return str(done.result(TIMEOUT))

    loop = asyncio.get_running_loop()
    assert await amqp(gateway, "ann", work) == "amqp:unauthorized-access"


async def test_owners_of_names_survive_a_restart(bootstrap: str, tmp_path: Path) -> None:
    """When anonymous clients are no longer allowed, their names are free."""
    groups = unique(), unique()
    path = tmp_path / "passwords"
    hasher = Argon2Hasher(time_cost=1, memory_cost=1024)
    path.write_text("".join(f"{name}:{hasher.hash(name)}\n" for name in ("ann", "bob")))
    config = CONFIG.format(path=path, team=TEAM, shut=SHUT)
    before = config.replace("allow_anonymous = false", "allow_anonymous = true")
    process = await GatewayProcess(tmp_path, bootstrap, config=before).start()
    for group, session in zip(groups, (http(process, "ann"), http(process, "")), strict=True):
        async with session:
            assert (await ask(session, "POST", f"/consumers/{group}", {"format": "json"}))[0] == 200
    assert await process.stop() == 0
    process = await GatewayProcess(tmp_path, bootstrap, config=config).start()
    async with http(process, "bob") as bob:
        asked = [await ask(bob, "POST", f"/consumers/{group}", {"format": "json"}) for group in groups]
    assert [status for status, _ in asked] == [403, 200]
    assert await process.stop() == 0
