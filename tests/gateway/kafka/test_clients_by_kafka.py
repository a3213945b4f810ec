"""Clients of three protocols under Kafka's own users and ACLs: logins, rights, and their withdrawal."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import aiohttp
import paho.mqtt.client as paho
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from proton import ConnectionException, Message
from proton.utils import BlockingConnection, LinkDetached, SendException

from gateway.kafka.cluster.rights import AclOperation
from gateway.kafka.driver.acl_requests import ALL, GROUP, TOPIC, Acl
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient
from tests.support.secured import secured_of
from tests.support.topics import until_led
from tests.support.waiting import wait_until
from tools.acls import Acls
from tools.cluster import Cluster
from tools.secured import USER

RUN: Final = uuid.uuid4().hex[:8]
EXACT, PREFIXED, CLOSED, FAR, OTHER = (f"{name}-{RUN}" for name in ("exact", "prefix-a", "closed", "far", "other"))
LENT: Final = f"lent-{RUN}"
GROUPS: Final = f"team-{RUN}-"
READ, WRITE = AclOperation.READ, AclOperation.WRITE
MAY: Final = {  # a topic: whether ann may publish and subscribe, and bob
    EXACT: ((True, True), (False, True)),  # an ACL for ann; bob may read every topic
    PREFIXED: ((True, True), (True, True)),  # everyone, by a prefixed ACL
    CLOSED: ((False, False), (False, False)),  # allowed to ann and denied to everyone
    FAR: ((False, False), (False, True)),  # allowed to ann from another host
    OTHER: ((False, False), (False, True)),
}
ACLS: Final = [
    *(Acl(TOPIC, topic, False, "User:ann", "*", op, True) for topic in (EXACT, CLOSED, LENT) for op in (READ, WRITE)),
    *(Acl(TOPIC, f"prefix-a-{RUN}"[:-4], True, "User:*", "*", op, True) for op in (READ, WRITE)),
    Acl(TOPIC, CLOSED, False, "User:*", "*", ALL, False),
    *(Acl(TOPIC, FAR, False, "User:ann", "10.1.2.3", op, True) for op in (READ, WRITE)),
    Acl(TOPIC, "*", False, "User:bob", "127.0.0.1", READ, True),
    Acl(GROUP, GROUPS, True, "User:ann", "*", READ, True),
]
LOAN: Final = [acl for acl in ACLS if acl.name == LENT]
REFRESH_S: Final = 1.0
IN_TIME_S: Final = 6.0
WAIT_S: Final = 60
CONTROL: Final = {"Content-Type": "application/vnd.kafka.v2+json"}
RECORDS: Final = {"Content-Type": "application/vnd.kafka.json.v2+json"}


class Gateway:
    """A gateway whose logins and rights come from Kafka, and its clients."""

    def __init__(self, process: GatewayProcess, password: str) -> None:
        self.process = process
        self.password = password
        self.http = f"http://{process.addresses['http']}"

    async def mqtt(self, user: str, password: str | None = None, **options: Any) -> PahoClient:
        right = self.password if password is None else password
        return await PahoClient(self.process.address("mqtt"), user=user, password=right, **options).connect()

    def amqp(self, user: str, password: str | None = None, **options: Any) -> BlockingConnection:
        return BlockingConnection(
            f"amqp://{self.process.addresses['amqp']}", timeout=WAIT_S, allowed_mechs="PLAIN",
            allow_insecure_mechs=True, user=user, password=self.password if password is None else password, **options,
        )  # fmt: skip

    def session(self, user: str, password: str | None = None) -> aiohttp.ClientSession:
        right = self.password if password is None else password
        login = base64.b64encode(f"{user}:{right}".encode()).decode()
        return aiohttp.ClientSession(self.http, headers={"Authorization": f"Basic {login}"})


@pytest.fixture(scope="module")
async def acls(secured_broker: Cluster) -> AsyncIterator[Acls]:
    async with Acls(secured_broker.bootstrap_servers) as acls:
        await acls.create(*ACLS)
        yield acls
        await acls.delete(*ACLS)


@pytest.fixture(scope="module")
async def gateway(
    secured_broker: Cluster, acls: Acls, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    admin = AIOKafkaAdminClient(bootstrap_servers=secured_broker.bootstrap_servers)
    await admin.start()
    await admin.create_topics([NewTopic(name, 1, 1) for name in (*MAY, LENT)])
    for name in (*MAY, LENT):
        await until_led(admin, name)
    await admin.close()
    secured = secured_of(secured_broker)
    config = f"""
[kafka]
security_protocol = "SASL_SSL"
sasl_mechanism = "SCRAM-SHA-512"
sasl_username = "{USER}"
sasl_password_file = "{secured.ca.parent / "password"}"
ssl_cafile = "{secured.ca}"
[security]
allow_anonymous = false
failed_attempt_delay_s = 0.001
password_source = "kafka"
access_source = "kafka"
access_refresh_s = {REFRESH_S}
"""
    directory = tmp_path_factory.mktemp("by-kafka")
    process = await GatewayProcess(directory, secured_broker.servers("SASL"), config=config).start()
    yield Gateway(process, secured.password)
    assert await process.stop() == 0
    log = process.log.read_text()
    assert secured.password not in log
    assert "Traceback" not in log


async def in_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(work), WAIT_S)


def attached(make: Callable[[str], Any], address: str) -> bool:
    try:
        make(address)
    except LinkDetached as detached:
        return detached.condition != "amqp:unauthorized-access"
    return True


async def test_a_password_of_kafka_is_valid_in_each_protocol_and_no_other_is(gateway: Gateway) -> None:
    for password, connack, status in ((None, 0, 200), ("wrong", 0x86, 401), ("", 0x86, 401)):
        client = await gateway.mqtt("ann", password)
        assert client.connack.value == connack
        await client.close()
        async with gateway.session("ann", password) as http, http.get("/topics") as answer:
            assert answer.status == status
    await in_thread(lambda: gateway.amqp("ann").close())
    with pytest.raises(ConnectionException, match="amqp:unauthorized-access"):
        await in_thread(lambda: gateway.amqp("ann", "wrong"))
    management = f"http://{gateway.process.addresses['management']}"
    async with aiohttp.ClientSession(management) as http, http.get("/metrics") as answer:
        metrics = {
            name: value for name, _, value in (line.partition(" ") for line in (await answer.text()).split("\n"))
        }
    assert float(metrics["trivium_authentication_remembered_total"]) >= 2, "Kafka is not asked again for each login"
    assert float(metrics["trivium_kafka_acls_acls"]) >= len(ACLS)
    assert float(metrics["trivium_kafka_acls_age_seconds"]) < WAIT_S


@pytest.mark.parametrize("user", ["ann", "bob"])
async def test_each_kind_of_acl_is_the_same_in_each_protocol(gateway: Gateway, user: str) -> None:
    """Allow, deny, prefix, wildcard, host."""
    expected = {topic: may[user == "bob"] for topic, may in MAY.items()}

    client = await gateway.mqtt(user)
    by_mqtt = {t: (await client.publish(f"{t}/x") == 0, await client.subscribe(f"{t}/#") == 1) for t in MAY}
    await client.close()

    def links() -> dict[str, tuple[bool, bool]]:
        connection = gateway.amqp(user)
        found = {t: (attached(connection.create_sender, t), attached(connection.create_receiver, t)) for t in MAY}
        connection.close()
        return found

    by_http: dict[str, tuple[bool, bool]] = {}
    async with gateway.session(user) as http:
        for topic in MAY:
            body = {"records": [{"key": "x", "value": 1}]}
            async with http.post(f"/topics/{topic}", json=body, headers=RECORDS) as produced:
                assert produced.status in {200, 403}
            async with http.get(f"/topics/{topic}/records?limit=1") as read:
                assert read.status in {200, 403}
            by_http[topic] = produced.status == 200, read.status == 200
        async with http.get("/topics") as answer:
            seen = set(await answer.json(content_type=None)) & set(MAY)
    assert by_mqtt == expected
    assert await in_thread(links) == expected
    assert by_http == expected
    assert seen == {topic for topic, may in expected.items() if any(may)}


async def test_a_group_needs_read_on_the_group(gateway: Gateway) -> None:
    for user, group, allowed in (("ann", f"{GROUPS}1", True), ("ann", f"x-{RUN}", False), ("bob", f"{GROUPS}1", False)):
        client = await gateway.mqtt(user)
        assert await client.subscribe(f"$share/{group}/{EXACT}/#") == (1 if allowed else 0x87)
        await client.close()

        def link(user: str = user, group: str = group) -> bool:
            connection = gateway.amqp(user)
            try:
                return attached(connection.create_receiver, f"{EXACT}/group.id/{group}")
            finally:
                connection.close()

        assert await in_thread(link) is allowed
        async with gateway.session(user) as http:
            async with http.post(f"/consumers/{group}", json={"name": f"c-{user}", "format": "json"}) as created:
                assert created.status == (200 if allowed else 403)
            if allowed:
                await http.delete(f"/consumers/{group}/instances/c-{user}")


async def until(refused: Callable[[], Awaitable[bool]]) -> float:
    """Wait for a refusal; return the loop's time of it."""
    await wait_until(refused)
    return asyncio.get_running_loop().time()


@pytest.mark.part("live websockets")
async def test_a_right_that_is_withdrawn_ends_what_its_client_does(gateway: Gateway, acls: Acls) -> None:
    async with contextlib.AsyncExitStack() as stack:
        publisher, subscriber, worker = [await gateway.mqtt("ann") for _ in range(3)]
        older = await gateway.mqtt("ann", protocol=paho.MQTTv311)
        for client in (publisher, subscriber, worker, older):
            stack.push_async_callback(client.close)
        assert await publisher.publish(f"{LENT}/x") == 0
        assert await subscriber.subscribe(f"{LENT}/#") == 1
        assert await worker.subscribe(f"$share/{GROUPS}2/{LENT}/#") == 1
        connection = await in_thread(lambda: gateway.amqp("ann"))
        stack.push_async_callback(in_thread, connection.close)
        sender = await in_thread(lambda: connection.create_sender(LENT))
        other = await in_thread(lambda: connection.create_sender(EXACT))
        relay = await in_thread(lambda: connection.create_sender(None))
        receiving = await in_thread(lambda: gateway.amqp("ann"))
        stack.push_async_callback(in_thread, receiving.close)
        receiver = await in_thread(lambda: receiving.create_receiver(LENT))
        http = await stack.enter_async_context(gateway.session("ann"))
        events = await stack.enter_async_context(http.get(f"/topics/{LENT}/stream"))
        assert events.status == 200
        socket = await stack.enter_async_context(http.ws_connect("/stream", protocols=["trivium.v1"]))
        await socket.send_json({"type": "subscribe", "id": "s", "topic": LENT, "format": "json"})
        assert (await socket.receive_json(timeout=WAIT_S))["type"] == "subscribed"
        consumer = f"/consumers/{GROUPS}3/instances/c"
        assert (await http.post(f"/consumers/{GROUPS}3", json={"name": "c", "format": "json"})).status == 200
        assert (await http.post(f"{consumer}/subscription", json={"topics": [LENT]})).status in {200, 204}

        async def mqtt_refuses() -> bool:
            code = await publisher.publish(f"{LENT}/x")
            assert code in {0, 0x87}
            return code == 0x87

        async def older_is_closed() -> bool:
            if older.disconnected is None:
                older.send(f"{LENT}/x")
            return older.disconnected is not None

        def send(link: Any, address: str | None = None) -> bool:
            try:
                link.send(Message(address=address, body=b"1"), timeout=WAIT_S)
            except LinkDetached as detached:
                return str(detached.condition) == "amqp:unauthorized-access"
            except SendException:
                return address is not None  # a relay's link stays open: later messages may go to other topics
            return False

        async def amqp_refuses() -> bool:
            return await in_thread(lambda: send(sender))

        async def relay_refuses() -> bool:
            return await in_thread(lambda: send(relay, LENT))

        async def http_refuses() -> bool:
            body = {"records": [{"key": "x", "value": 1}]}
            async with http.post(f"/topics/{LENT}", json=body, headers=RECORDS) as produced:
                return produced.status == 403

        async def events_end() -> bool:
            async for _ in events.content:
                pass
            return True

        async def socket_errs() -> bool:
            while (message := await socket.receive_json(timeout=WAIT_S))["type"] != "error":
                pass
            return message["error_code"] == 403

        async def poll_refuses() -> bool:
            async with http.get(
                f"{consumer}/records?timeout=100", headers={"Accept": RECORDS["Content-Type"]}
            ) as polled:
                return polled.status == 403

        def receive() -> bool:
            try:
                while True:
                    receiver.receive(timeout=WAIT_S)
            except LinkDetached as detached:
                return str(detached.condition) == "amqp:unauthorized-access"

        async def is_gone(client: PahoClient) -> bool:
            return client.disconnected is not None

        began = asyncio.get_running_loop().time()
        await acls.delete(*LOAN)
        ends = dict(
            zip(
                ("mqtt", "mqtt 3.1.1", "amqp", "http", "events", "websocket", "consumer", "subscriber", "shared"),
                await asyncio.gather(
                    until(mqtt_refuses), until(older_is_closed), until(amqp_refuses), until(http_refuses),
                    until(events_end), until(socket_errs), until(poll_refuses), until(lambda: is_gone(subscriber)),
                    until(lambda: is_gone(worker)),
                ),
                strict=True,
            )
        )  # fmt: skip
        assert await relay_refuses()
        assert await in_thread(receive)
        for dialect in ("", "/v2"):
            async with http.post(f"{dialect}{consumer}/offsets", headers=CONTROL) as committed:
                assert committed.status == 403
        assert (subscriber.disconnected.value, worker.disconnected.value) == (0x87, 0x87)
        assert publisher.disconnected is None
        assert await publisher.publish(f"{EXACT}/x") == 0
        await in_thread(lambda: other.send(Message(body=b"1")))
        taken = {name: end - began for name, end in ends.items()}
        assert max(taken.values()) < IN_TIME_S, taken

        await acls.create(*LOAN)
        await wait_until(lambda: allowed(publisher))
        assert await http_refuses() is False


async def allowed(publisher: PahoClient) -> bool:
    return await publisher.publish(f"{LENT}/x") == 0
