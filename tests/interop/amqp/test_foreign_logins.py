"""Connections of foreign AMQP clients: login, TLS, WebSocket, and heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, load_pem_private_key, pkcs12
from cryptography.x509 import load_pem_x509_certificate
from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.security.login.scram import derive
from gateway.security.login.user_files import scram_line
from tests.interop.amqp.clients import BLOCKING, EVERY, FE2O3, GO, REACTIVE, RHEA, RHEA_WS, Kind, each
from tests.interop.amqp.conftest import NewClient, NewJms
from tests.interop.amqp.drivers import ACCEPTED, Client, bodies, text
from tests.interop.amqp.jms import JmsClient
from tests.interop.amqp.jms import bodies as jms_bodies
from tests.interop.driver import RefusedError
from tests.support.gateway import GatewayProcess

PASSWORD = "correct-horse-Tr1vium"
STORE = "changeit-Tr1vium"
TOPIC = f"open-{uuid.uuid4().hex[:8]}"
DEVICES = f"devices-{uuid.uuid4().hex[:8]}"
CONFIG = f"""
[kafka]
create_topics = true
[security]
allow_anonymous = false
password_file = "{{passwords}}"
scram_file = "{{scram}}"
failed_attempt_delay_s = 0.001
{{tls}}
[[security.access]]
principal = "ann"
topic = "{TOPIC}"
[[security.access]]
principal = "device-7"
topic = "{DEVICES}"
"""
QUIET = "[kafka]\ncreate_topics = true\n[amqp]\nidle_timeout_s = 4.0\n"
QUIET_S = 7  # longer than both idle time-outs, which are long enough for a busy machine
WITH_TLS = [BLOCKING, REACTIVE, RHEA, GO]  # fe2o3-amqp is built without TLS


class Files:
    """Certificates, key stores and passwords."""

    def __init__(self, directory: Path) -> None:
        authority, clients = trustme.CA(), trustme.CA()
        leaf, device = authority.issue_cert("127.0.0.1"), clients.issue_cert("device-7.test", common_name="device-7")
        self.passwords, self.scram = directory / "passwords", directory / "scram"
        self.passwords.write_text(f"ann:{Argon2Hasher(time_cost=1, memory_cost=1024).hash(PASSWORD)}\n")
        credential = derive("SCRAM-SHA-256", PASSWORD, b"0123456789abcdef", 4096)
        self.scram.write_text(scram_line("ann", "SCRAM-SHA-256", credential) + "\n")
        self.ca, self.clients = directory / "authority.pem", directory / "clients.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        clients.cert_pem.write_to_path(str(self.clients))
        for name, made in (("server", leaf), ("device", device)):
            (directory / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
            (directory / f"{name}.key").write_bytes(made.private_key_pem.bytes())
        self.cert, self.key = directory / "device.pem", directory / "device.key"
        server = f'tls_cert = "{directory}/server.pem"\ntls_key = "{directory}/server.key"\n'
        self.tls = f'{server}tls_client_ca = "{self.clients}"'
        self.trusted, self.own = directory / "trusted.p12", directory / "own.p12"
        encryption = BestAvailableEncryption(STORE.encode())
        root = pkcs12.PKCS12Certificate(load_pem_x509_certificate(self.ca.read_bytes()), b"authority")
        self.trusted.write_bytes(pkcs12.serialize_java_truststore([root], encryption))
        key: Any = load_pem_private_key(self.key.read_bytes(), None)
        certificate = load_pem_x509_certificate(self.cert.read_bytes())
        self.own.write_bytes(pkcs12.serialize_key_and_certificates(b"device-7", key, certificate, None, encryption))

    def config(self, *, tls: bool) -> str:
        return CONFIG.format(passwords=self.passwords, scram=self.scram, tls=self.tls if tls else "")

    def of(self, *, device: bool) -> dict[str, str]:
        own = {"cert": str(self.cert), "key": str(self.key)} if device else {}
        return {"ca": str(self.ca), **own}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("login"))


@contextlib.asynccontextmanager
async def running(directory: Path, bootstrap: str, config: str) -> AsyncIterator[GatewayProcess]:
    process = await GatewayProcess(directory, bootstrap, config=config).start()
    try:
        yield process
    finally:
        code = await process.stop()
    assert code == 0


@pytest.fixture(scope="module")
async def strict(
    bootstrap: str, files: Files, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GatewayProcess]:
    async with running(tmp_path_factory.mktemp("strict"), bootstrap, files.config(tls=False)) as process:
        yield process


@pytest.fixture(scope="module")
async def secured(
    bootstrap: str, files: Files, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GatewayProcess]:
    async with running(tmp_path_factory.mktemp("secured"), bootstrap, files.config(tls=True)) as process:
        yield process


async def works(client: Client, topic: str) -> None:
    receiver, sender = await client.receiver(topic), await client.sender(topic)
    word = uuid.uuid4().hex
    assert await sender.send(text(word)) == [ACCEPTED]
    assert word in bodies(await receiver.receive(1))


async def jms_works(client: JmsClient, topic: str) -> None:
    session = await client.session()
    consumer = await session.consumer(f"topic:{topic}")
    word = uuid.uuid4().hex
    await (await session.producer(f"topic:{topic}")).texts(word)
    assert word in jms_bodies(await consumer.receive(1))


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_plain_password_and_rights(new_client: NewClient, strict: GatewayProcess, kind: Kind) -> None:
    client = await new_client(kind, at=strict, user="ann", password=PASSWORD, mechanism="PLAIN")
    await works(client, TOPIC)
    with pytest.raises(RefusedError) as refused:
        await client.sender(DEVICES)
    assert "amqp:unauthorized-access" in str(refused.value)
    stranger = await new_client(kind, at=strict, connected=False)
    with pytest.raises(RefusedError):
        await stranger.connect(user="ann", password="wrong", mechanism="PLAIN")
    with pytest.raises(RefusedError):
        await stranger.connect(mechanism="ANONYMOUS")


async def test_scram(new_client: NewClient, new_jms: NewJms, strict: GatewayProcess) -> None:
    """With the two libraries that support it."""
    client = await new_client(FE2O3, at=strict, user="ann", password=PASSWORD, mechanism="SCRAM-SHA-256")
    await works(client, TOPIC)
    stranger = await new_client(FE2O3, at=strict, connected=False)
    with pytest.raises(RefusedError):
        await stranger.connect(user="ann", password="wrong", mechanism="SCRAM-SHA-256")
    mechanism = "amqp.saslMechanisms=SCRAM-SHA-256"
    await jms_works(await new_jms(mechanism, at=strict, user="ann", password=PASSWORD), TOPIC)
    with pytest.raises(RefusedError) as refused:
        await new_jms(mechanism, at=strict, user="ann", password="wrong")
    assert "JMSSecuritySaslException" in str(refused.value)


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_anonymous(new_client: NewClient, own: str, kind: Kind) -> None:
    await works(await new_client(kind, mechanism="ANONYMOUS"), own)


@pytest.mark.parametrize("kind", **each([REACTIVE, RHEA, GO, FE2O3]))
async def test_without_sasl(new_client: NewClient, own: str, kind: Kind) -> None:
    await works(await new_client(kind, mechanism="NONE"), own)


@pytest.mark.parametrize("kind", **each(WITH_TLS))
async def test_tls_with_a_certificate_and_with_a_password(
    new_client: NewClient, secured: GatewayProcess, files: Files, kind: Kind
) -> None:
    device = await new_client(kind, at=secured, tls=files.of(device=True), mechanism="EXTERNAL")
    await works(device, DEVICES)
    ann = {"user": "ann", "password": PASSWORD, "mechanism": "PLAIN"}
    await works(await new_client(kind, at=secured, tls=files.of(device=False), **ann), TOPIC)


async def test_tls_of_jms(new_jms: NewJms, secured: GatewayProcess, files: Files) -> None:
    host, port = secured.address("amqp")
    trust = f"amqps://{host}:{port}?transport.trustStoreLocation={files.trusted}&transport.trustStorePassword={STORE}"
    client = await new_jms(connected=False)
    own = f"&transport.keyStoreLocation={files.own}&transport.keyStorePassword={STORE}&amqp.saslMechanisms=EXTERNAL"
    await client.connect(uri=trust + own)
    await jms_works(client, DEVICES)
    await client.close()
    await client.connect(uri=trust, user="ann", password=PASSWORD)
    await jms_works(client, TOPIC)


async def test_over_websocket(new_client: NewClient, new_jms: NewJms, amqp_gateway: GatewayProcess, own: str) -> None:
    client = await new_client(RHEA_WS)
    receiver, sender = await client.receiver(own), await client.sender(own)
    large = "0123456789abcdef" * 20_000
    assert await sender.send(text("small"), text(large)) == [ACCEPTED] * 2
    assert sorted(bodies(await receiver.receive(2))) == sorted(["small", large])
    host, port = amqp_gateway.address("http")
    jms = await new_jms(connected=False)
    await jms.connect(uri=f"amqpws://{host}:{port}/amqp")
    await jms_works(jms, own)


async def test_both_sides_send_heartbeats(
    new_client: NewClient, new_jms: NewJms, bootstrap: str, tmp_path: Path, own: str
) -> None:
    """Each client needs a heartbeat every three seconds, and the gateway every four."""
    async with running(tmp_path, bootstrap, QUIET) as gateway:
        jms = await new_jms("amqp.idleTimeout=3000", at=gateway)
        consumer = await (await jms.session()).consumer(f"topic:{own}")
        # proton's blocking client comes last: it sends heartbeats only while it waits.
        clients = [await new_client(kind, at=gateway, idle_ms=3000) for kind in reversed(EVERY)]
        receivers = [await client.receiver(own) for client in clients]
        silences = await asyncio.gather(
            consumer.some(1, QUIET_S * 1000), *(receiver.received(1, QUIET_S) for receiver in receivers)
        )
        assert silences == [[]] * 6
        assert [one.closed for one in (jms, *clients)] == [[]] * 6
        sender = await clients[0].sender(own)
        assert await sender.send(text("still there")) == [ACCEPTED]
        for receiver in receivers:
            assert bodies(await receiver.receive(1)) == ["still there"]
        assert len(await consumer.receive(1)) == 1
        for one in (jms, *clients):
            await one.release()
