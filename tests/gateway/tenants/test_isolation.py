"""Tenants in a running gateway: messages cross all three protocols within a tenant, and never reach another tenant."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import aiohttp
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from proton import ConnectionException, LinkException, Message
from proton.utils import BlockingConnection, LinkDetached
from pwdlib.hashers.argon2 import Argon2Hasher

from protocols.mqtt.packets import Suback, Subscribe, Subscription, Will
from protocols.mqtt.reasons import ReasonCode
from tests.support.amqp import TIMEOUT, body_of
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient, RawClient
from tests.support.waiting import wait_until

T = TypeVar("T")
RUN = uuid.uuid4().hex[:8]
ONE, OTHER = f"one-{RUN}", f"other-{RUN}"
ANN, BOB, CARL = f"{ONE}/ann", f"{OTHER}/bob", f"carl-{RUN}"
V2 = {"Content-Type": "application/vnd.kafka.v2+json"}
JSON = {"Content-Type": "application/vnd.kafka.json.v2+json"}
CONFIG = """
[kafka]
create_topics = true
[mapping]
dotted_topics = []
[amqp]
dead_letter_topic = "{{topic}}-dlq"
[security]
allow_anonymous = false
password_file = "{path}"
failed_attempt_delay_s = 0
[security.tenants]
sources = ["user"]
"""


@pytest.fixture(scope="module")
async def gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    """A gateway with users of two tenants and of none, without ACLs: each may do everything that its tenant may.

    Clients create no names with dots, so an address with another tenant's name must find nothing. Where they may,
    `test_dotted_names` has what they find: their own tenant's topic.
    """
    directory = tmp_path_factory.mktemp("tenants")
    hasher = Argon2Hasher(time_cost=1, memory_cost=1024)
    path = directory / "passwords"
    path.write_text("".join(f"{name}:{hasher.hash('secret')}\n" for name in (ANN, BOB, CARL)))
    process = GatewayProcess(directory, bootstrap, config=CONFIG.format(path=path))
    yield await process.start()
    assert await process.stop() == 0


@pytest.fixture
async def ann(gateway: GatewayProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with http(gateway, ANN) as session:
        yield session


@pytest.fixture
async def bob(gateway: GatewayProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with http(gateway, BOB) as session:
        yield session


def http(gateway: GatewayProcess, user: str) -> aiohttp.ClientSession:
    host, port = gateway.address("http")
    fields = {"Authorization": aiohttp.encode_basic_auth(user, "secret")}
    return aiohttp.ClientSession(f"http://{host}:{port}", headers=fields)


async def ask(
    session: aiohttp.ClientSession, method: str, path: str, body: Any = None, media: dict[str, str] = V2
) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    async with session.request(method, path, data=data, headers=media if body is not None else {}) as answer:
        raw = await answer.read()
        return answer.status, json.loads(raw) if raw else None


async def send(session: aiohttp.ClientSession, topic: str, *values: Any) -> None:
    body = {"records": [{"value": value} for value in values]}
    status, answer = await ask(session, "POST", f"/topics/{topic}", body, JSON)
    assert status == 200, answer
    assert all("offset" in one for one in answer["offsets"]), answer


def mqtt(gateway: GatewayProcess, user: str, client_id: str | None = None, **options: Any) -> Any:
    return RawClient.connect(gateway.address("mqtt"), client_id, username=user, password=b"secret", **options)


async def amqp(gateway: GatewayProcess, user: str, work: Callable[[BlockingConnection], T]) -> T:
    """Run `work` with a connection of this user, in a thread."""

    def run() -> T:
        host, port = gateway.address("amqp")
        connection = BlockingConnection(
            f"amqp://{host}:{port}", timeout=TIMEOUT, user=user, password="secret", allowed_mechs="PLAIN",
            allow_insecure_mechs=True,
        )  # fmt: skip
        try:
            return work(connection)
        finally:
            connection.close()

    return await asyncio.to_thread(run)


def name(what: str) -> str:
    return f"{what}-{uuid.uuid4().hex[:8]}"


async def queue(gateway: GatewayProcess, user: str, address: str, count: int = 1) -> list[Message]:
    """Receive and accept messages of a queue."""

    def work(connection: BlockingConnection) -> list[Message]:
        receiver = connection.create_receiver(address, credit=count)
        found = []
        for _ in range(count):
            found.append(receiver.receive(TIMEOUT))
            receiver.accept()
        receiver.close()
        return found

    return await amqp(gateway, user, work)


# Within one tenant


async def test_a_message_goes_through_three_protocols(
    gateway: GatewayProcess, ann: aiohttp.ClientSession, admin: AIOKafkaAdminClient
) -> None:
    topic = name("sensors")
    paho = await PahoClient(gateway.address("mqtt"), user=ANN, password="secret").connect()
    assert await paho.subscribe("+/kitchen/#") in (0, 1)
    assert await paho.publish(f"{topic}/kitchen/temp", b'"21.5"') in (0, ReasonCode.NO_MATCHING_SUBSCRIBERS)
    await wait_until(lambda: len(paho.messages) == 1)
    assert paho.messages[0].topic == f"{topic}/kitchen/temp", "as it was published"
    await paho.close()

    (message,) = await queue(gateway, ANN, f"queue://{topic}")
    assert body_of(message) == b'"21.5"'
    assert message.annotations["x-opt-bridge.topic"] == topic

    group = name("group")
    created = await ask(
        ann, "POST", f"/consumers/{group}", {"name": "c", "format": "json", "auto.offset.reset": "earliest"}
    )
    assert created[0] == 200
    assert created[1]["base_uri"].endswith(f"/consumers/{group}/instances/c")
    assert (await ask(ann, "POST", f"/consumers/{group}/instances/c/subscription", {"topics": [topic]}))[0] == 204
    records: list[Any] = []

    async def poll() -> bool:
        async with ann.get(
            f"/consumers/{group}/instances/c/records?timeout=500",
            headers={"Accept": "application/vnd.kafka.json.v2+json"},
        ) as answer:
            assert answer.status == 200
            records.extend(await answer.json(content_type=None))
        return bool(records)

    await wait_until(poll, 60)
    assert (records[0]["topic"], records[0]["key"], records[0]["value"]) == (topic, "kitchen/temp", "21.5")
    subscription = await ask(ann, "GET", f"/consumers/{group}/instances/c/subscription")
    assert subscription[1]["topics"] == [topic]
    assert topic in (await ask(ann, "GET", "/topics"))[1]
    assert (await ask(ann, "GET", f"/topics/{topic}"))[1]["name"] == topic
    assert group in (await ask(ann, "GET", "/groups"))[1]
    assert (await ask(ann, "GET", f"/groups/{group}"))[1]["group"] == group
    assert (await ask(ann, "DELETE", f"/consumers/{group}/instances/c"))[0] == 204

    there = await admin.list_topics()
    assert f"{ONE}.{topic}" in there
    assert topic not in there, "Kafka has the whole name"
    assert any(found[0] == f"{ONE}.{group}" for found in await admin.list_consumer_groups())


async def test_requests_are_answered_across_protocols(gateway: GatewayProcess, ann: aiohttp.ClientSession) -> None:
    """A reply address in a header belongs to the tenant: an answer by any protocol reaches the requester."""
    topic = name("device")
    device = await mqtt(gateway, ANN)
    await device.subscribe(f"{topic}/#")

    async def answer_one() -> None:
        request = await device.message()
        properties = request.properties
        await device.publish(properties.response_topic, b"fine", correlation_data=properties.correlation_data)

    answering = asyncio.create_task(answer_one())
    async with ann.post(f"/requests/{topic}%2Fstatus?timeout=30000", data=b"?") as answer:
        assert (answer.status, await answer.read()) == (200, b"fine")
    await answering

    def by_amqp(connection: BlockingConnection) -> bytes:
        replies = connection.create_receiver(None, dynamic=True, credit=1)
        address = replies.link.remote_source.address
        assert ONE not in address
        request = Message(body=b"?", inferred=True, reply_to=address, correlation_id="c")
        connection.create_sender(topic).send(request)
        return body_of(replies.receive(TIMEOUT))

    answering = asyncio.create_task(answer_one())
    assert await amqp(gateway, ANN, by_amqp) == b"fine"
    await answering
    await device.disconnect()


async def test_a_dead_letter_stays_in_its_tenant(gateway: GatewayProcess, admin: AIOKafkaAdminClient) -> None:
    topic = name("work")

    def reject(connection: BlockingConnection) -> None:
        connection.create_sender(topic).send(Message(body=b"bad", inferred=True))
        receiver = connection.create_receiver(f"queue://{topic}", credit=1)
        receiver.receive(TIMEOUT)
        receiver.reject()

    await amqp(gateway, ANN, reject)
    (letter,) = await queue(gateway, ANN, f"queue://{topic}-dlq")
    assert letter.annotations["x-opt-dead-letter-topic"] == topic
    assert letter.annotations["x-opt-dead-letter-group"] == topic
    assert f"{ONE}.{topic}-dlq" in await admin.list_topics()


# Two tenants with the same names


async def test_tenants_can_use_the_same_names_in_mqtt(gateway: GatewayProcess) -> None:
    """Topics, wildcards at the first level, retained messages, wills, shared subscriptions and client ids."""
    topic, client_id = name("mqtt"), name("client")
    one = await mqtt(gateway, ANN, client_id, will=Will(f"{topic}/will", b"ann's", 1))
    other = await mqtt(gateway, BOB, client_id)
    for client in (one, other):
        await client.subscribe("#", f"$share/{topic}/{topic}/shared")
    await one.ping()  # the other client has not taken it over
    assert await one.publish(f"{topic}/a", b"ann's", retain=True) == 0
    assert await one.publish(f"{topic}/shared", b"ann's shared") == 0
    assert await other.publish(f"{topic}/a", b"bob's") == 0
    assert await other.publish(f"{topic}/shared", b"bob's shared") == 0
    seen = {message.payload for message in await one.messages(3)}
    assert seen == {b"ann's", b"ann's shared"}, "the shared one comes twice: by # and by the group"
    late = await mqtt(gateway, ANN)
    await late.subscribe("+/a", f"{topic}/will")
    retained = await late.message()
    assert (retained.topic, retained.payload, retained.retain) == (f"{topic}/a", b"ann's", True)
    one.drop()
    will = await late.message()
    assert (will.topic, will.payload) == (f"{topic}/will", b"ann's")
    assert await other.publish(f"{topic}/end", b"end") == 0
    assert {message.payload for message in await other.messages(4)} == {b"bob's", b"bob's shared", b"end"}
    await other.disconnect()
    await late.disconnect()


async def test_a_persistent_session_belongs_to_its_tenant(gateway: GatewayProcess) -> None:
    """It is found by its client id, with its filters; unsubscribing uses the client's name of the topic."""
    topic, client_id = name("kept"), name("client")
    kept = {"clean_start": False, "session_expiry_interval": 600}
    one = await mqtt(gateway, ANN, client_id, **kept)
    await one.subscribe(f"{topic}/#", f"{topic}-off")
    assert (await one.unsubscribe(f"{topic}-off", f"{topic}-none")).reason_codes == (0, 0x11)
    await one.disconnect()
    other = await mqtt(gateway, BOB, client_id, **kept)
    assert not other.connack.session_present
    assert await other.publish(f"{topic}/a", b"bob's", qos=2) in (0, 0x10)
    writer = await mqtt(gateway, ANN)
    assert await writer.publish(f"{topic}/a", b"ann's") == 0
    again = await mqtt(gateway, ANN, client_id, **kept)
    assert again.connack.session_present
    message = await again.message()
    assert (message.topic, message.payload) == (f"{topic}/a", b"ann's")
    for client in (again, other, writer):
        await client.disconnect()


async def test_tenants_can_use_the_same_names_in_amqp_and_http(
    gateway: GatewayProcess, ann: aiohttp.ClientSession, bob: aiohttp.ClientSession
) -> None:
    topic, group = name("both"), name("group")
    await send(ann, topic, "ann's")
    await send(bob, topic, "bob's")
    for user, session, value in ((ANN, ann, "ann's"), (BOB, bob, "bob's")):
        (message,) = await queue(gateway, user, f"{topic}/group.id/{group}")
        assert body_of(message) == json.dumps(value).encode()
        status, page = await ask(session, "GET", f"/topics/{topic}/records?from=beginning")
        assert status == 200
        assert [(one["topic"], one["value"]) for one in page] == [(topic, value)]
        assert (await ask(session, "POST", f"/consumers/{group}", {"name": "same"}))[0] == 200
        path = f"/consumers/{group}/instances/same"
        assert (await ask(session, "POST", f"{path}/subscription", {"topic_pattern": ".*"}))[0] == 204
        assert topic in (await ask(session, "GET", f"{path}/subscription"))[1]["topics"]
        assert (await ask(session, "DELETE", path))[0] == 204


# What a tenant tries


@pytest.fixture(scope="module")
async def secrets(gateway: GatewayProcess) -> str:
    """Store a secret in one of ann's topics, live, retained and as a dead letter, and create a group of hers."""
    topic = name("secret")
    async with http(gateway, ANN) as ann:
        await send(ann, topic, "ann's secret")
    client = await mqtt(gateway, ANN)
    assert await client.publish(f"{topic}/r", b"ann's secret", retain=True) in (0, 0x10)
    await client.disconnect()
    await queue(gateway, ANN, f"{topic}/group.id/{topic}-group")
    return topic


async def test_no_filter_reaches_another_tenant(gateway: GatewayProcess, secrets: str) -> None:
    client = await mqtt(gateway, BOB)
    filters = (
        "#", "+/#", "+/+", f"{ONE}.{secrets}/#", f"$tenants/{ONE}/#", "$tenants/#", f"../{ONE}.{secrets}/#",
        f"$share/{ONE}.{secrets}-group/{secrets}/#", f"$share/x/$tenants/{ONE}/#", "$SYS/#", "$tenants/+/+/#",
        f"$share/x/{ONE}.{secrets}/#", f"%2e/{secrets}",
    )  # fmt: skip
    client.send(Subscribe(7, tuple(Subscription(one, 1) for one in filters)))
    await client.answer(Suback, 7, timeout=90)
    writer = await mqtt(gateway, ANN)
    assert await writer.publish(f"{secrets}/live", b"ann's secret") in (0, 0x10)
    await writer.disconnect()
    mark = name("mark")
    assert await client.publish(mark, b"bob's own") == 0
    payloads = []
    while not payloads or payloads[-1] != b"bob's own":
        payloads.append((await client.message()).payload)
    assert b"ann's secret" not in payloads
    await client.disconnect()


@pytest.mark.parametrize(
    "topic", ["{one}.{topic}/x", "$tenants/{one}/{topic}/x", "$share/g/{topic}", "../{one}.{topic}"]
)
async def test_a_tenants_messages_stay_in_the_tenant(gateway: GatewayProcess, secrets: str, topic: str) -> None:
    listener = await mqtt(gateway, ANN)
    await listener.subscribe(f"{secrets}/#", "#")
    intruder = await mqtt(gateway, BOB)
    where = topic.format(one=ONE, topic=secrets)
    assert await intruder.publish(where, b"bob's", response_topic=f"{ONE}.{secrets}/x") in (0, 0x10, 0x87)
    await intruder.disconnect()
    writer = await mqtt(gateway, ANN)
    assert await writer.publish(f"{secrets}/mark", b"mark") == 0
    await writer.disconnect()
    payloads = []
    while not payloads or payloads[-1] != b"mark":
        payloads.append((await listener.message()).payload)
    assert b"bob's" not in payloads
    await listener.disconnect()


@pytest.mark.parametrize(
    "address",
    [
        "{one}.{topic}", "queue://{one}.{topic}", "/topics/{one}.{topic}", "../{one}.{topic}", "{topic}",
        "{topic}/group.id/{one}.{topic}-group", "{one}.{topic}/group.id/{topic}-group",
        "{one}.{topic}::{topic}-group", "{one}.{topic}/partitions/0", "{topic}/ConsumerGroups/{one}.g/Partitions/0",
    ],
)  # fmt: skip
async def test_no_amqp_address_reaches_another_tenant(gateway: GatewayProcess, secrets: str, address: str) -> None:
    where = address.format(one=ONE, topic=secrets)

    def work(connection: BlockingConnection) -> None:
        try:
            receiver = connection.create_receiver(where, credit=10)
        except (LinkDetached, LinkException):
            return
        receiver.link.drain(0)
        connection.wait(lambda: receiver.link.credit == 0, timeout=TIMEOUT)
        assert not receiver.fetcher.has_message
        receiver.close()

    await amqp(gateway, BOB, work)


async def test_no_path_of_http_reaches_another_tenant(
    gateway: GatewayProcess, bob: aiohttp.ClientSession, ann: aiohttp.ClientSession
) -> None:
    """No answer to bob contains ann's secret, or her topic's name unless his request contained it."""
    secrets = name("hidden")
    await send(ann, secrets, "ann's secret")
    await queue(gateway, ANN, f"{secrets}/group.id/{secrets}-group")
    whole = f"{ONE}.{secrets}"
    topics = [
        whole,
        f"..%2F{whole}",
        f"%2e%2e%2f{whole}",
        f"{OTHER}.{whole}",
        f"{ONE}%2E{secrets}",
        "__trivium_retained",
    ]
    for topic in topics:
        for path in ("", "/records?from=beginning", "/partitions", "/partitions/0/offsets"):
            status, found = await ask(bob, "GET", f"/topics/{topic}{path}")
            assert status in (403, 404, 400, 405), (topic, path, found)
        status, found = await ask(
            bob, "GET", f"/topics/{topic}/stream?group={ONE}.{secrets}-group&from=beginning&duration=200"
        )
        assert status in (403, 404, 400), (topic, found)
    assert not [topic for topic in (await ask(bob, "GET", "/topics"))[1] if secrets in topic]
    assert not [group for group in (await ask(bob, "GET", "/groups"))[1] if secrets in group]
    for group in (f"{ONE}.{secrets}-group", f"{secrets}-group", f"..%2f{ONE}.{secrets}-group"):
        for path in ("", "/lag"):
            status, found = await ask(bob, "GET", f"/groups/{group}{path}")
            assert status in (403, 404), (group, found)
    (cluster,) = (await ask(bob, "GET", "/v3/clusters"))[1]["data"]
    listed = (await ask(bob, "GET", f"/v3/clusters/{cluster['cluster_id']}/topics"))[1]["data"]
    assert not [one for one in listed if secrets in json.dumps(one)]
    assert (await ask(bob, "GET", f"/v3/clusters/{cluster['cluster_id']}/topics/{whole}"))[0] in (403, 404)
    group = name("try")
    assert (await ask(bob, "POST", f"/consumers/{group}", {"name": "c", "auto.offset.reset": "earliest"}))[0] == 200
    path = f"/consumers/{group}/instances/c"
    assert (await ask(bob, "POST", f"{path}/subscription", {"topic_pattern": f".*{secrets}.*"}))[0] == 204
    assert (await ask(bob, "GET", f"{path}/subscription"))[1]["topics"] == []
    assert (await ask(ann, "GET", f"{path}/subscription"))[0] == 404, "a consumer of another tenant is not there"
    assert (await ask(bob, "DELETE", path))[0] == 204
    async with bob.ws_connect("/stream", protocols=("trivium.v1",)) as socket:
        for topic in (whole, f"../{whole}", f"$tenants/{ONE}/{secrets}"):
            await socket.send_json({"type": "subscribe", "id": topic, "topic": topic, "from": "beginning"})
            answer = await socket.receive_json(timeout=TIMEOUT)
            assert answer["type"] == "error", answer
    status, _ = await ask(bob, "POST", f"/requests/{whole}%2Fx?timeout=100", {"a": 1})
    assert status in (404, 504)


async def test_errors_use_the_clients_names(gateway: GatewayProcess, bob: aiohttp.ClientSession) -> None:
    topic = f"{name('none')}.dotted"  # clients cannot create such a topic
    status, answer = await ask(bob, "GET", f"/topics/{topic}")
    assert (status, answer["message"]) == (404, f"Topic {topic} not found")

    def attach(connection: BlockingConnection) -> None:
        connection.create_sender(topic)

    with pytest.raises(LinkDetached) as refused:
        await amqp(gateway, BOB, attach)
    assert topic in str(refused.value)
    assert OTHER not in str(refused.value)
    paho = await PahoClient(gateway.address("mqtt"), user=BOB, password="secret", protocol=4).connect()
    await paho.close()
    assert paho.connack == "Success"
    paho = await PahoClient(gateway.address("mqtt"), user=CARL, password="secret", protocol=4).connect()
    await asyncio.to_thread(paho.paho.loop_stop)
    assert paho.connack == "Not authorized"


async def make_by_amqp(gateway: GatewayProcess, topic: str) -> None:
    """Send over the anonymous relay, to names that look like another tenant's."""

    def work(connection: BlockingConnection) -> None:
        relay = connection.create_sender(None)
        for where in (f"{ONE}.{topic}", f"topic://{topic}-sent", f"/queues/{ONE}.{topic}/key", f"{topic}-sent/x.y"):
            delivery = relay.link.send(Message(address=where, body=b"bob's", inferred=True))
            connection.wait(lambda delivery=delivery: delivery.settled, timeout=TIMEOUT)

    await amqp(gateway, BOB, work)


async def test_everything_that_a_tenant_creates_is_below_its_prefix(
    gateway: GatewayProcess, bob: aiohttp.ClientSession, admin: AIOKafkaAdminClient
) -> None:
    topic = name("made")
    for whole in (f"{ONE}.{topic}", topic, f"..{topic}"):
        await ask(bob, "POST", f"/topics/{whole}", {"records": [{"value": 1}]}, JSON)
        await ask(bob, "POST", "/admin/topics", {"topic_name": f"{whole}-a", "partitions_count": 1})
        record = {"value": {"type": "JSON", "data": 1}}
        (cluster,) = (await ask(bob, "GET", "/v3/clusters"))[1]["data"]
        where = f"/v3/clusters/{cluster['cluster_id']}/topics/{whole}/records"
        status, report = await ask(bob, "POST", where, record, {"Content-Type": "application/json"})
        assert status == 404 or (status, report["topic_name"]) == (200, whole), report
    await make_by_amqp(gateway, topic)
    for will in (f"{ONE}.{topic}/will", f"{topic}-will/x", f"$tenants/{ONE}/{topic}/will"):
        client = await mqtt(gateway, BOB, will=Will(will, b"bob's", 1))
        assert client.connack.reason_code in (0, ReasonCode.NOT_AUTHORIZED), will
        client.drop()
    group = f"{ONE}.{topic}-group"
    assert (await ask(bob, "POST", f"/consumers/{group}", {"name": "c"}))[0] == 200
    path, place = f"/consumers/{group}/instances/c", {"topic": f"{ONE}.{topic}", "partition": 0}
    assert (await ask(bob, "POST", f"{path}/assignments", {"partitions": [place]}))[0] == 404
    for what in ("positions", "offsets"):
        status, _ = await ask(bob, "POST", f"{path}/{what}", {"offsets": [{**place, "offset": 1}]})
        assert status in (404, 409), what
    assert (await ask(bob, "DELETE", path))[0] == 204
    for address in (
        f"queue%3A%2F%2F{ONE}.{topic}",
        f"topic%3A%2F%2F{topic}-asked%2Fx",
        f"%24tenants%2F{ONE}%2F{topic}",
    ):
        status, _ = await ask(bob, "POST", f"/requests/{address}?timeout=100", {"a": 1}, {"Content-Type": "text/plain"})
        assert status in (403, 404, 422, 504), address
    made = [found for found in await admin.list_topics() if topic in found]
    assert made
    assert all(found.startswith(f"{OTHER}.") for found in made), made


# No tenant, no entry


async def test_a_client_without_a_tenant_is_refused(gateway: GatewayProcess) -> None:
    client = await RawClient.connect(gateway.address("mqtt"), username=CARL, password=b"secret")
    assert client.connack.reason_code == ReasonCode.NOT_AUTHORIZED
    client.drop()
    with pytest.raises(ConnectionException, match=r"unauthorized-access.*no tenant"):
        await amqp(gateway, CARL, lambda connection: connection.create_sender("t"))
    async with http(gateway, CARL) as carl:
        status, answer = await ask(carl, "GET", "/topics")
    assert (status, answer["message"]) == (403, "Not allowed: the login names no tenant")
