"""Names with dots are topics in every protocol, and what the catch-all topic has of before is still found."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from proton import Message
from proton.utils import BlockingConnection, LinkDetached
from pwdlib.hashers.argon2 import Argon2Hasher

from protocols.mqtt.packets import Puback, Publish, Subscription
from tests.support.amqp import TIMEOUT, as_client_of
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

T = TypeVar("T")
NewGateway = Callable[..., GatewayProcess]
CREATING = "[kafka]\ncreate_topics = true\ntopic_partitions = 1\n"
BEFORE = f"{CREATING}[mapping]\ndotted_topics = []\n"
"""What was the default before names with dots were topics."""
JSON = {"Content-Type": "application/vnd.kafka.json.v2+json"}
SESSION = {"clean_start": False, "session_expiry_interval": 3600}


def unique(prefix: str) -> str:
    return f"{prefix}.new-{uuid.uuid4().hex[:8]}"


async def by_amqp(gateway: GatewayProcess, work: Callable[[BlockingConnection], T], user: str | None = None) -> T:
    """Run `work` with a connection, in a thread."""
    login: dict[str, Any] = {}
    if user is not None:
        login = {"user": user, "password": "secret", "allowed_mechs": "PLAIN", "allow_insecure_mechs": True}
    return await as_client_of(gateway.addresses["amqp"], work, **login)


async def send_by_amqp(gateway: GatewayProcess, address: str, body: str, user: str | None = None) -> str:
    """Send a message; return the text of the refusal, "" if it was accepted."""

    def work(connection: BlockingConnection) -> str:
        try:
            connection.create_sender(address).send(Message(body=body, annotations={"x-opt-bridge.key": "amqp"}))
        except LinkDetached as refused:
            return str(refused)
        return ""

    return await by_amqp(gateway, work, user)


async def send_by_http(gateway: GatewayProcess, topic: str, value: str, user: str | None = None) -> tuple[int, str]:
    """Produce a record; return the status and the body."""
    fields = JSON if user is None else {**JSON, "Authorization": aiohttp.encode_basic_auth(user, "secret")}
    body = json.dumps({"records": [{"key": "http", "value": value}]})
    url = f"http://{gateway.addresses['http']}/topics/{topic}"
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=fields) as answer:
        return answer.status, await answer.text()


async def until_heard(client: RawClient, topics: set[str]) -> list[Publish]:
    """Receive and acknowledge messages until each of these topics has had one; return them all."""
    heard: list[Publish] = []
    while not topics <= {message.topic for message in heard}:
        message = await client.message()
        heard.append(message)
    return heard


@pytest.mark.parametrize("config", [CREATING, f'{CREATING}[mapping]\ndotted_topics = ["orders.*"]\n'])
async def test_a_dotted_name_is_one_topic_in_every_protocol(
    bootstrap: str, new_gateway: NewGateway, admin: AIOKafkaAdminClient, config: str
) -> None:
    """Its messages cross all three, whoever names it first; as a queue and as a topic of AMQP."""
    gateway = await new_gateway(bootstrap, config=config).start()
    topic = unique("orders")
    listener = await RawClient.connect(gateway.address("mqtt"))
    await listener.subscribe(f"{topic}/#")
    assert not await send_by_amqp(gateway, topic, "by amqp")
    assert (await send_by_http(gateway, topic, "by http"))[0] == 200
    assert await listener.publish(f"{topic}/mqtt", b"by mqtt") == 0
    heard = await until_heard(listener, {f"{topic}/{name}" for name in ("amqp", "http", "mqtt")})
    assert len(heard) == 3
    assert topic in await admin.list_topics()

    def read(connection: BlockingConnection) -> set[str]:
        receiver = connection.create_receiver(f"queue://{topic}", credit=10)
        keys = set()
        for _ in range(3):
            message = receiver.receive(timeout=TIMEOUT)
            keys.add(message.annotations["x-opt-bridge.key"])
            receiver.accept()
        return keys

    assert await by_amqp(gateway, read) == {"amqp", "http", "mqtt"}
    url = f"http://{gateway.addresses['http']}/topics/{topic}/records?from=beginning"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200
        assert [record["key"] for record in await answer.json()] == ["amqp", "http", "mqtt"]
    listener.drop()
    assert await gateway.stop() == 0


@pytest.mark.parametrize("first", [".", "_"])
async def test_of_two_names_that_collide_in_kafka_the_second_is_refused_with_the_reason(
    gateway: GatewayProcess, first: str
) -> None:
    """In every protocol, and the first stays usable; nothing is stored under another name."""
    run = uuid.uuid4().hex[:8]
    there, refused = f"a{first}b{run}", f"a{'_' if first == '.' else '.'}b{run}"
    client = await RawClient.connect(gateway.address("mqtt"))
    assert await client.publish(f"{there}/x", b"1") == 0
    client.send(Publish(f"{refused}/x", b"2", 1, packet_id=77))
    answer = await client.answer(Puback, 77)
    assert answer.reason_code == 0x90
    text = await send_by_amqp(gateway, refused, "2")
    status, body = await send_by_http(gateway, refused, "2")
    assert status == 404
    assert "amqp:not-found" in text
    for told in (str(answer.properties), text, body):
        assert there in told
        assert refused in told
    assert not await send_by_amqp(gateway, there, "3")
    assert (await send_by_http(gateway, there, "4"))[0] == 200
    assert await client.publish(f"{there}/x", b"5") == 0
    client.drop()


async def test_what_was_stored_before_names_with_dots_were_topics_is_found_afterwards(
    bootstrap: str, new_gateway: NewGateway, admin: AIOKafkaAdminClient
) -> None:
    """A kept session, a share and a retained message read both places, over the change and back."""
    name = unique("plant")
    kept, worker, share = f"kept-{name}", f"worker-{name}", f"$share/{name}-group/{name}/#"
    old = await new_gateway(bootstrap, config=BEFORE, name="old").start()
    for client_id, topic_filter in ((kept, f"{name}/#"), (worker, share)):
        client = await RawClient.connect(old.address("mqtt"), client_id, **SESSION)
        await client.subscribe(Subscription(topic_filter, 1))
        await client.disconnect()
    sender = await RawClient.connect(old.address("mqtt"))
    assert await sender.publish(f"{name}/old", b"old") == 0
    assert await sender.publish(f"{name}/state", b"retained by the old", retain=True) == 0
    assert name not in await admin.list_topics()
    await sender.disconnect()
    assert await old.stop() == 0

    new = await new_gateway(bootstrap, config=CREATING, name="new").start()
    sender = await RawClient.connect(new.address("mqtt"))
    assert await sender.publish(f"{name}/new", b"new") == 0
    assert name in await admin.list_topics()
    for client_id in (kept, worker):
        client = await RawClient.connect(new.address("mqtt"), client_id, **SESSION)
        assert client.connack.session_present
        heard = await until_heard(client, {f"{name}/{what}" for what in ("old", "state", "new")})
        assert len(heard) == 3, "each once"
        await client.disconnect()
    for topic_filter in (f"{name}/state", f"{name}/+", "+/state"):
        reader = await RawClient.connect(new.address("mqtt"))
        await reader.subscribe(topic_filter)
        (message,) = [one for one in await until_heard(reader, {f"{name}/state"}) if one.topic == f"{name}/state"]
        assert (message.payload, message.retain) == (b"retained by the old", True)
        reader.drop()
    assert await sender.publish(f"{name}/state", b"", retain=True) == 0
    assert await sender.publish(f"{name}/late", b"late") == 0
    sender.drop()
    assert await new.stop() == 0

    back = await new_gateway(bootstrap, config=BEFORE, name="back").start()
    client = await RawClient.connect(back.address("mqtt"), kept, **SESSION)
    assert client.connack.session_present
    await until_heard(client, {f"{name}/late"})
    reader = await RawClient.connect(back.address("mqtt"))
    await reader.subscribe(f"{name}/#")
    assert await reader.publish(f"{name}/mark", b"mark") == 0
    assert (await reader.message()).topic == f"{name}/mark", "the retained message is gone in both places"
    client.drop()
    reader.drop()
    assert await back.stop() == 0


TENANTS = f"""{CREATING}
[security]
allow_anonymous = false
password_file = "{{path}}"
failed_attempt_delay_s = 0
[security.tenants]
sources = ["user"]
"""


@pytest.mark.part("tenants")
async def test_of_a_tenants_names_the_first_dot_stays_the_tenants(
    bootstrap: str, new_gateway: NewGateway, admin: AIOKafkaAdminClient, tmp_path: Any
) -> None:
    """A tenant may use dots in its own names; with another tenant's prefix it names a topic of its own."""
    run = uuid.uuid4().hex[:8]
    acme, other, topic = f"acme-{run}", f"other-{run}", unique("orders")
    hasher = Argon2Hasher(time_cost=1, memory_cost=64)
    path = tmp_path / "passwords"
    path.write_text("".join(f"{tenant}/ann:{hasher.hash('secret')}\n" for tenant in (acme, other)))
    gateway = await new_gateway(bootstrap, config=TENANTS.format(path=path)).start()
    ann = await RawClient.connect(gateway.address("mqtt"), username=f"{acme}/ann", password=b"secret")
    bob = await RawClient.connect(gateway.address("mqtt"), username=f"{other}/ann", password=b"secret")
    await ann.subscribe(f"{topic}/#")
    await bob.subscribe(f"{topic}/#", f"{acme}.{topic}/#")
    assert not await send_by_amqp(gateway, topic, "by amqp", f"{acme}/ann")
    assert (await send_by_http(gateway, topic, "by http", f"{acme}/ann"))[0] == 200
    assert await ann.publish(f"{topic}/mqtt", b"by mqtt") == 0
    heard = await until_heard(ann, {f"{topic}/{name}" for name in ("amqp", "http", "mqtt")})
    assert len(heard) == 3
    assert not await send_by_amqp(gateway, f"{acme}.{topic}", "bob's", f"{other}/ann")
    assert (await send_by_http(gateway, f"{acme}.{topic}", "bob's", f"{other}/ann"))[0] == 200
    assert await bob.publish(f"{acme}.{topic}/mqtt", b"bob's") == 0
    heard = await until_heard(bob, {f"{acme}.{topic}/{name}" for name in ("amqp", "http", "mqtt")})
    assert len(heard) == 3, "nothing of the other tenant"
    assert await ann.publish(f"{topic}/mark", b"mark") == 0
    assert (await ann.message()).topic == f"{topic}/mark", "nothing of the other tenant"
    made = {name for name in await admin.list_topics() if topic in name}
    assert made == {f"{acme}.{topic}", f"{other}.{acme}.{topic}"}
    ann.drop()
    bob.drop()
    assert await gateway.stop() == 0
