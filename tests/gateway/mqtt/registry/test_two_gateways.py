"""Two gateways on one Kafka: a client has one connection, one session and one will, wherever it connects."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.mqtt.registry.opening import RELEASE_S
from protocols.mqtt import packets
from protocols.mqtt.packets import Publish, Subscription, Version, Will
from protocols.mqtt.properties import Properties
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

NewTopic = Callable[..., Awaitable[str]]
Connect = Callable[..., Awaitable[RawClient]]
KEPT: dict[str, Any] = {"clean_start": False, "session_expiry_interval": 60}


@pytest.fixture(scope="module")
async def other(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    """A second gateway beside the one that all tests share."""
    process = GatewayProcess(tmp_path_factory.mktemp("other"), bootstrap, config="[kafka]\ncreate_topics = true\n")
    await process.start()
    yield process
    assert await process.stop() == 0


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connect clients, and drop them at the end."""
    clients: list[RawClient] = []

    async def one(to: GatewayProcess, client_id: str | None = None, **options: Any) -> RawClient:
        clients.append(await RawClient.connect(to.address("mqtt"), client_id, **options))
        return clients[-1]

    yield one
    for client in clients:
        client.drop()


@pytest.fixture
def name() -> str:
    return f"two-{uuid.uuid4().hex[:10]}"


async def expect_taken_over(client: RawClient) -> None:
    said = await client.expect_end()
    assert [one.reason_code for one in said if isinstance(one, packets.Disconnect)] == [0x8E]


@pytest.mark.clause("MQTT-3.1.4-3", "MQTT-3.1.2-5")
async def test_a_session_moves_with_what_is_on_the_way(
    connect: Connect, gateway: GatewayProcess, other: GatewayProcess, new_topic: NewTopic, name: str
) -> None:
    """QoS 2 is exactly once in both directions over the move, and the order is kept."""
    topic = await new_topic(partitions=1)
    first = await connect(gateway, name, **KEPT)
    watcher = await connect(other)
    await watcher.subscribe(f"{topic}/in")
    await first.subscribe(f"{topic}/out")
    for number in range(3):
        await watcher.publish(f"{topic}/out", b"%d" % number, 2)
    begun = [await first.expect(Publish) for _ in range(3)]
    first.send(packets.Pubrec(begun[0].packet_id))
    await first.expect(packets.Pubrel)
    first.send(Publish(f"{topic}/in", b"mine", 2, packet_id=9))
    assert await first.expect(packets.Pubrec) == packets.Pubrec(9)
    first.send(Publish(f"{topic}/in", b"also mine", 2, packet_id=10))  # nobody waits for its PUBREC
    second = await connect(other, name, **KEPT)
    assert second.connack.session_present
    await expect_taken_over(first)
    assert await second.expect(packets.Pubrel) == packets.Pubrel(begun[0].packet_id)
    again = [await second.expect(Publish) for _ in range(2)]
    assert [(m.payload, m.packet_id, m.dup) for m in again] == [(m.payload, m.packet_id, True) for m in begun[1:]]
    for packet_id, payload in ((9, b"mine"), (10, b"also mine")):
        second.send(Publish(f"{topic}/in", payload, 2, dup=True, packet_id=packet_id))
        await second.answer(packets.Pubrec, packet_id)
        second.send(packets.Pubrel(packet_id))
        await second.answer(packets.Pubcomp, packet_id)
    await watcher.publish(f"{topic}/in", b"end", 2)
    assert [m.payload for m in await watcher.messages(3)] == [b"mine", b"also mine", b"end"]


@pytest.mark.clause("MQTT-3.1.4-3", "MQTT-3.1.2-4", "MQTT-3.1.2-8", "MQTT-3.1.3-9")
@pytest.mark.parametrize(("clean_start", "delay", "comes"), [(True, 60, True), (False, 0, True), (False, 60, False)])
async def test_the_will_of_the_connection_that_is_taken_over(  # noqa: PLR0917 - fixtures
    connect: Connect,
    gateway: GatewayProcess,
    other: GatewayProcess,
    name: str,
    clean_start: bool,
    delay: int,
    comes: bool,
) -> None:
    """Clean Start ends the session and so the will's delay; otherwise a delayed will is cancelled, any other is due."""
    will = Will(f"{name}/will", b"w", 1, properties=Properties(will_delay_interval=delay))
    watcher = await connect(other)
    await watcher.subscribe(f"{name}/will")
    first = await connect(gateway, name, will=will, **KEPT)
    again = {**KEPT, "clean_start": clean_start}
    second = await connect(other, name, **again)
    await expect_taken_over(first)
    assert second.connack.session_present is not clean_start
    if not comes:
        await watcher.publish(f"{name}/will", b"end")
    assert (await watcher.message()).payload == (b"w" if comes else b"end")
    await second.disconnect()


async def test_a_session_that_ends_with_its_connection_is_not_there_at_another_gateway(
    connect: Connect, gateway: GatewayProcess, other: GatewayProcess, name: str
) -> None:
    """The other gateway knows it only because of its will, which it publishes without waiting for long."""
    watcher = await connect(other)
    await watcher.subscribe(f"{name}/will")
    loop = asyncio.get_running_loop()
    for _ in range(5):  # a busy machine may take as long as a gateway that waits in vain
        first = await connect(gateway, name, will=Will(f"{name}/will", b"w", 1))
        began = loop.time()
        second = await connect(other, name, clean_start=False)
        took = loop.time() - began
        assert not second.connack.session_present
        await expect_taken_over(first)
        assert (await watcher.message()).payload == b"w"
        await second.disconnect()
        if took < RELEASE_S - 0.5:
            break
    assert took < RELEASE_S - 0.5, "the other gateway lets go of it at once"


@pytest.mark.parametrize("version", [Version.V5, Version.V311])
async def test_to_and_fro(
    connect: Connect, gateway: GatewayProcess, other: GatewayProcess, name: str, version: Version
) -> None:
    """A session that moves at each CONNECT, sometimes with the old connection still open, loses nothing."""
    sender = await connect(gateway)
    kept = KEPT if version is Version.V5 else {"clean_start": False}
    got: list[bytes] = []
    for turn in range(6):
        process = (gateway, other)[turn % 2]
        client = await connect(process, name, version=version, **kept)
        assert client.connack.session_present is (turn > 0)
        if not turn:
            await client.subscribe(Subscription(f"{name}/#", 2))
        for number in range(3):
            await sender.publish(f"{name}/a", b"%d" % (3 * turn + number), 2)
        if turn % 3:
            client.drop()
            continue
        while len(got) < 3 * (turn + 1):
            got.append((await client.message()).payload)
    last = await connect(other, name, version=version, **kept)
    while len(got) < 18:
        got.append((await last.message()).payload)
    assert got == [b"%d" % number for number in range(18)]


async def test_killed_and_started_again(  # noqa: PLR0917 - fixtures
    connect: Connect,
    bootstrap: str,
    new_gateway: Callable[..., GatewayProcess],
    tmp_path: Path,
    new_topic: NewTopic,
    name: str,
) -> None:
    """On the same data directory it is the successor: sessions resume immediately, and wills are due."""
    topic = await new_topic(partitions=1)
    process = new_gateway(bootstrap, "--data-dir", str(tmp_path / "data"))
    await process.start()
    client = await connect(process, name, **KEPT)
    await client.subscribe(Subscription(f"{topic}/#", 2))
    await connect(process, will=Will(f"{topic}/will", b"w", 2))
    client.send(Publish(f"{topic}/a", b"one", 2, packet_id=7))
    assert await client.answer(packets.Pubrec, 7) == packets.Pubrec(7)
    begun = await client.expect(Publish)
    assert begun.payload == b"one"
    await process.kill()
    await process.start()
    back = await connect(process, name, **KEPT)
    assert back.connack.session_present
    back.send(Publish(f"{topic}/a", b"one", 2, dup=True, packet_id=7))
    await back.answer(packets.Pubrec, 7)
    back.send(packets.Pubrel(7))
    await back.answer(packets.Pubcomp, 7)
    again = await back.message()
    assert (again.payload, again.packet_id, again.dup) == (b"one", begun.packet_id, True)
    assert (await back.message()).payload == b"w"
    await back.disconnect()


@pytest.fixture
async def guarded(bootstrap: str, new_gateway: Callable[..., GatewayProcess], tmp_path: Path) -> GatewayProcess:
    """A third gateway, with a user `ann`."""
    passwords = tmp_path / "passwords"
    passwords.write_text(f"ann:{Argon2Hasher(time_cost=1, memory_cost=1024).hash('secret')}\n")
    config = f'[kafka]\ncreate_topics = true\n[security]\npassword_file = "{passwords}"\n'
    return await new_gateway(bootstrap, config=config).start()


async def test_a_session_is_its_principal_s_at_every_gateway(
    connect: Connect, gateway: GatewayProcess, guarded: GatewayProcess, name: str
) -> None:
    """Another user neither gets nor ends it, nor its connection; when the session ends, the client id is free."""
    ann = {"username": "ann", "password": b"secret"}
    owner = await connect(guarded, name, **ann, **KEPT)
    await owner.subscribe(f"{name}/#")
    for to in (gateway, guarded):
        for clean_start in (True, False):
            thief = await connect(to, name, clean_start=clean_start, session_expiry_interval=60)
            assert thief.connack.reason_code == 0x87
    await owner.publish(f"{name}/a", b"still there")
    assert (await owner.message()).payload == b"still there"
    owner.drop()
    thief = await connect(gateway, name, **KEPT)
    assert thief.connack.reason_code == 0x87, "also while it has no connection"
    owner = await connect(guarded, name, **ann, **KEPT)
    assert owner.connack.session_present
    await owner.disconnect(session_expiry_interval=0)
    free = await connect(gateway, name, **KEPT)
    async with asyncio.timeout(60):
        while free.connack.reason_code == 0x87:  # nothing acknowledges DISCONNECT: the end may not be stored yet
            free = await connect(gateway, name, **KEPT)
    assert (free.connack.reason_code, free.connack.session_present) == (0, False)
    await free.disconnect(session_expiry_interval=0)
