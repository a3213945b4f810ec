"""Limits on the topics that clients create, per client and in total, in every protocol, and after a restart."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from proton import Message
from proton.utils import BlockingConnection, LinkDetached, SendException
from pwdlib.hashers.argon2 import Argon2Hasher

from protocols.mqtt import packets
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

QUOTA_EXCEEDED = 0x97
LIMITED = "amqp:resource-limit-exceeded"
JSON = {"Content-Type": "application/vnd.kafka.json.v2+json"}


async def http(gateway: GatewayProcess, user: str, path: str, body: Any) -> int:
    """POST; return the status, or the error of the only record."""
    url = f"http://{gateway.addresses['http']}{path}"
    headers = dict(JSON if path.startswith("/topics") else {"Content-Type": "application/json"})
    if user:
        headers["Authorization"] = aiohttp.encode_basic_auth(user, "secret")
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers=headers) as response,
    ):
        return response.status


async def produce(gateway: GatewayProcess, user: str, topic: str) -> int:
    return await http(gateway, user, f"/topics/{topic}", {"records": [{"value": 1}]})


async def attach(gateway: GatewayProcess, user: str, topic: str) -> str:
    """Attach as a sender; return the condition of the refusal, or "" for none."""

    def run() -> str:
        connection = BlockingConnection(f"amqp://{user}:secret@{gateway.addresses['amqp']}", timeout=60)
        try:
            connection.create_sender(topic)
        except LinkDetached as detached:
            return str(detached.condition)
        finally:
            connection.close()
        return ""

    return await asyncio.to_thread(run)


async def relay(gateway: GatewayProcess, user: str, topic: str) -> bool:
    """Send over the anonymous relay; return whether the message was accepted."""

    def run() -> bool:
        connection = BlockingConnection(f"amqp://{user}:secret@{gateway.addresses['amqp']}", timeout=60)
        try:
            connection.create_sender(None).send(Message(address=topic, body=b"x"))
        except SendException:
            return False
        finally:
            connection.close()
        return True

    return await asyncio.to_thread(run)


async def login(gateway: GatewayProcess, user: str, **options: Any) -> RawClient:
    return await RawClient.connect(gateway.address("mqtt"), username=user, password=b"secret", **options)


@pytest.fixture
def config(tmp_path: Path) -> str:
    passwords = tmp_path / "passwords"
    line = Argon2Hasher(time_cost=1, memory_cost=1024).hash("secret")
    passwords.write_text("".join(f"{user}:{line}\n" for user in ("ann", "bob", "eve")))
    return (
        f'data_dir = "{tmp_path}/data"\n'
        "[kafka]\ntopic_partitions = 1\nmax_topics = 5\nmax_topics_per_principal = 3\n"
        f'[embedded]\nport = 0\nheap = "512m"\n[security]\npassword_file = "{passwords}"\nallow_anonymous = false\n'
    )


async def test_topics_that_clients_create_are_limited(config: str, new_gateway: Callable[..., GatewayProcess]) -> None:
    """Each client has its own limit; existing topics keep working; after a restart, Kafka's topics are counted."""
    gateway = await new_gateway(None, config=config).start()
    ann = await login(gateway, "ann")
    assert [await ann.publish(f"a{number}/x") for number in range(3)] == [0, 0, 0]
    assert await ann.publish("a3/x") == QUOTA_EXCEEDED
    assert await ann.publish("a4/x", qos=2) == QUOTA_EXCEEDED
    assert await ann.publish("a5/x", retain=True) == QUOTA_EXCEEDED
    assert await ann.publish("a1/y", qos=2) == 0, "what is there is not concerned"
    assert await ann.publish("a2/y", retain=True) == 0
    ann.send(packets.Publish("a6/x", b"x", 0))  # QoS 0: no answer, and no harm
    kept = await login(gateway, "ann", session_expiry_interval=60)
    assert await kept.publish("a7/x", qos=2) == QUOTA_EXCEEDED
    old = await login(gateway, "ann", version=4)
    old.send(packets.Publish("a8/x", b"x", 1, packet_id=1))
    assert await old.expect_end() == []  # MQTT 3.1.1 has no reason code for it

    assert await attach(gateway, "ann", "a9") == LIMITED
    assert not await relay(gateway, "ann", "a9")
    assert await produce(gateway, "ann", "a9") == 429
    assert await http(gateway, "ann", "/admin/topics", {"topic_name": "a9"}) == 429

    assert await attach(gateway, "bob", "b0") == ""
    assert await produce(gateway, "bob", "b1") == 200
    # There are five topics now.
    bob = await login(gateway, "bob")
    assert await bob.publish("b2/x") == QUOTA_EXCEEDED
    assert await attach(gateway, "eve", "e0") == LIMITED
    assert await produce(gateway, "eve", "e0") == 429
    assert await http(gateway, "eve", "/admin/topics", {"topic_name": "e0", "partitions_count": 1}) == 429
    for client in (ann, bob, kept, old):
        client.drop()
    assert await gateway.stop() == 0

    await gateway.start()
    eve = await login(gateway, "eve")
    assert await eve.publish("e0/x") == QUOTA_EXCEEDED
    assert await eve.publish("b1/x") == 0
    admin = AIOKafkaAdminClient(bootstrap_servers=gateway.addresses["kafka"])
    await admin.start()
    await admin.delete_topics(["a1"])
    await admin.close()
    async with asyncio.timeout(60):
        while await eve.publish("e1/x") != 0:
            pass
    eve.drop()
    assert await gateway.stop() == 0


class Limited(GatewayProcess):
    """A gateway process with a soft and a hard limit of open files."""

    def limit(self, soft: int, hard: int) -> GatewayProcess:
        program = self._argv[4:] if self._argv[0] == "sh" else self._argv
        self._argv = ["sh", "-c", f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"', "sh", *program]
        return self


async def test_the_embedded_broker_does_not_run_out_of_open_files(tmp_path: Path) -> None:
    """It raises its limit of open files to the hard limit, refuses topics beyond, and checks the limit at the start."""
    config = f'data_dir = "{tmp_path}/data"\n[embedded]\nport = 0\nheap = "512m"\n'
    gateway = Limited(tmp_path, None, config=config).limit(300, 1200)
    try:
        await gateway.start()
        assert resource.prlimit(gateway.addresses["kafka_pid"], resource.RLIMIT_NOFILE) == (1200, 1200)
        assert await make(gateway, "some", 400) == 201
        assert await make(gateway, "many", 500) == 429
        assert await make(gateway, "few", 2) == 201
        figures = await metrics(gateway)
        assert 400 < figures["trivium_embedded_kafka_open_files"] < 0.7 * 1200
        assert figures["trivium_embedded_kafka_open_files_limit"] == 1200
        assert figures["trivium_topics_topics"] == 2
        assert figures["trivium_topics_topics_refused_total"] == 1
        assert await gateway.stop() == 0

        with pytest.raises(RuntimeError, match=r"4\d\d log files in .* may open 450 files: allow at least"):
            await gateway.limit(300, 450).start()
        await gateway.limit(300, 900).start()  # the hard limit is enough, though a limit of 300 is not
        assert await make(gateway, "some", 1) == 409
        assert await gateway.stop() == 0
    finally:
        await gateway.kill()


async def make(gateway: GatewayProcess, topic: str, partitions: int) -> int:
    """Create a topic; return the status. Retry while busy: a broker that creates hundreds of files may be fenced."""
    statuses: list[int] = []

    async def is_answered() -> bool:
        asked = {"topic_name": topic, "partitions_count": partitions}
        statuses.append(await http(gateway, "", "/admin/topics", asked))
        return statuses[-1] != 503

    await wait_until(is_answered)
    return statuses[-1]


async def metrics(gateway: GatewayProcess) -> dict[str, float]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{gateway.addresses['management']}/metrics") as response,
    ):
        lines = (line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[:1] != "#")
        return {name: float(value) for name, value in lines}
