"""The same logins and ACLs apply to all three protocols, with and without TLS; tested with foreign clients."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import signal
import ssl
import struct
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import paho.mqtt.client as paho
import pytest
import trustme
from proton import ConnectionException, Message, SSLDomain
from proton.utils import BlockingConnection, LinkDetached, SendException
from pwdlib.hashers.argon2 import Argon2Hasher

from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient
from tests.support.waiting import wait_until

HOST = "127.0.0.1"
WAIT_S = 60
RUN = uuid.uuid4().hex[:8]
OPEN = f"open-{RUN}"  # alice may do everything here
DEVICES = f"devices-{RUN}"  # device-7 may publish under its own name
CLOSED = f"closed-{RUN}"  # no client may do anything
ALICE = "correct-horse-Tr1vium"
OPERATOR = "staple-Tr1vium"
WRONG = "wrong-battery-Tr1vium"
JSON_RECORDS = {"Content-Type": "application/vnd.kafka.json.v2+json"}
AUTHORITY = trustme.CA()
CLIENTS = trustme.CA()

CONFIG = f"""
[kafka]
create_topics = true
[log]
level = "debug"
[security]
allow_anonymous = false
password_file = "{{password_file}}"
failed_attempt_delay_s = 0.001
{{tls}}
[[security.access]]
principal = "alice"
topic = "{OPEN}"
[[security.access]]
principal = "operator"
action = "admin"
[[security.access]]
principal = "device-7"
action = "publish"
topic = "{DEVICES}/device-7/#"
"""

MATRIX = f"matrix-{RUN}"
MATRIX_RULES = f"""
[[security.access]]
topic = "{MATRIX}/closed/#"
allow = false
[[security.access]]
principal = "alice"
topic = "{MATRIX}/exact"
[[security.access]]
topic = "{MATRIX}/prefix/#"
[[security.access]]
topic = "{MATRIX}/+/state"
[[security.access]]
topic = "{MATRIX}/own/{{name}}/#"
[[security.access]]
topic = "{MATRIX}/cn/{{cn}}"
[[security.access]]
kafka = "{MATRIX}-{{name}}"
"""
MAY = {  # a name below MATRIX: whether alice and device-7 may use it
    "exact": (True, False),
    "closed/state": (False, False),
    "prefix/a/b": (True, True),
    "prefixed": (False, False),
    "hall/state": (True, True),
    "hall/states": (False, False),
    "own/alice/a": (True, False),
    "own/device-7/a": (False, True),
    "own/{name}": (False, False),
    "cn/device-7": (False, True),
}


class Files:
    """Certificates, keys and the password file."""

    def __init__(self, directory: Path) -> None:
        self.passwords = directory / "passwords"
        hasher = Argon2Hasher(time_cost=1, memory_cost=1024)
        lines = [f"{name}:{hasher.hash(password)}\n" for name, password in (("alice", ALICE), ("operator", OPERATOR))]
        self.passwords.write_text("".join(lines))
        self.cert, self.key = directory / "server.pem", directory / "server.key"
        self.clients, self.authority = directory / "clients.pem", directory / "authority.pem"
        CLIENTS.cert_pem.write_to_path(str(self.clients))
        AUTHORITY.cert_pem.write_to_path(str(self.authority))
        self.renew()
        self.device_cert, self.device_key = directory / "device.pem", directory / "device.key"
        device = CLIENTS.issue_cert(common_name="device-7")
        self.device_cert.write_bytes(b"".join(blob.bytes() for blob in device.cert_chain_pems))
        self.device_key.write_bytes(device.private_key_pem.bytes())

    def renew(self) -> None:
        leaf = AUTHORITY.issue_cert(HOST)
        self.cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        self.key.write_bytes(leaf.private_key_pem.bytes())

    @property
    def tls(self) -> str:
        return f'tls_cert = "{self.cert}"\ntls_key = "{self.key}"\ntls_client_ca = "{self.clients}"'

    def context(self, *, device: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.authority)
        if device:
            context.load_cert_chain(self.device_cert, self.device_key)
        return context

    def domain(self, *, device: bool = False) -> SSLDomain:
        domain = SSLDomain(SSLDomain.MODE_CLIENT)
        domain.set_trusted_ca_db(str(self.authority))
        if device:
            domain.set_credentials(str(self.device_cert), str(self.device_key), None)
        domain.set_peer_authentication(SSLDomain.VERIFY_PEER)
        return domain


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("certificates"))


@contextlib.asynccontextmanager
async def running(directory: Path, bootstrap: str, config: str, *options: str) -> AsyncIterator[GatewayProcess]:
    process = await GatewayProcess(directory, bootstrap, *options, config=config).start()
    yield process
    assert await process.stop() == 0


@pytest.fixture(scope="module")
async def secured(
    bootstrap: str, files: Files, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GatewayProcess]:
    """TLS on every listener; passwords and client certificates."""
    config = CONFIG.format(password_file=files.passwords, tls=files.tls) + MATRIX_RULES
    async with running(tmp_path_factory.mktemp("secured"), bootstrap, config) as process:
        yield process


@pytest.fixture(scope="module")
async def plain(
    bootstrap: str, files: Files, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GatewayProcess]:
    """Passwords without TLS, on loopback except the management listener."""
    config = CONFIG.format(password_file=files.passwords, tls="")
    async with running(tmp_path_factory.mktemp("plain"), bootstrap, config, "--management", "0.0.0.0:0") as process:
        yield process


@pytest.fixture
async def bystander(secured: GatewayProcess, files: Files) -> AsyncIterator[PahoClient]:
    """A client that is connected during the whole test and must still work afterwards."""
    client = PahoClient(secured.address("mqtt"), user="alice", password=ALICE)
    client.paho.tls_set_context(files.context())
    await client.connect()
    yield client
    assert client.disconnected is None
    assert await client.publish(f"{OPEN}/bystander", b"still here") == 0
    await client.close()


def mqtt(gateway: GatewayProcess, files: Files | None = None, *, device: bool = False, **options: Any) -> PahoClient:
    client = PahoClient(gateway.address("mqtt"), **options)
    if files is not None:
        client.paho.tls_set_context(files.context(device=device))
    return client


def amqp(
    gateway: GatewayProcess, mechanism: str, files: Files | None = None, *, device: bool = False, **options: Any
) -> BlockingConnection:
    """Connect; proton's client supports PLAIN, EXTERNAL and ANONYMOUS without Cyrus."""
    if files is not None:
        options["ssl_domain"] = files.domain(device=device)
    return BlockingConnection(
        f"{'amqp' if files is None else 'amqps'}://{gateway.addresses['amqp']}",
        timeout=WAIT_S,
        allowed_mechs=mechanism,
        allow_insecure_mechs=True,
        **options,
    )


async def in_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(work), WAIT_S)


async def post(
    gateway: GatewayProcess,
    topic: str,
    *,
    key: str | None = None,
    auth: tuple[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> tuple[int, dict[str, Any], dict[str, str]]:
    scheme = "http" if tls is None else "https"
    url = f"{scheme}://{gateway.addresses['http']}/topics/{topic}"
    body = {"records": [{"key": key, "value": 1}]}
    headers = dict(JSON_RECORDS)
    if auth is not None:
        headers["Authorization"] = basic(*auth)
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers=headers, ssl=tls if tls is not None else True) as response,
    ):
        return response.status, await response.json(content_type=None), dict(response.headers)


def basic(user: str, password: str) -> str:
    """Encode credentials as in RFC 7617."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


# logins


@pytest.mark.parametrize("version", [paho.MQTTv5, paho.MQTTv311])
async def test_mqtt_password_with_and_without_tls(
    secured: GatewayProcess, plain: GatewayProcess, files: Files, version: int
) -> None:
    for gateway, tls in ((secured, files), (plain, None)):
        client = await mqtt(gateway, tls, user="alice", password=ALICE, protocol=version).connect()
        assert client.connack.value == 0
        assert await client.publish(f"{OPEN}/a") == 0
        await client.close()


@pytest.mark.clause("MQTT-3.1.4-2", "MQTT-4.13.2-1")
async def test_mqtt_refuses_a_wrong_password_and_a_client_without_one(
    secured: GatewayProcess, plain: GatewayProcess, files: Files, bystander: PahoClient
) -> None:
    for gateway, tls in ((secured, files), (plain, None)):
        wrong = await mqtt(gateway, tls, user="alice", password=WRONG).connect()
        assert wrong.connack.value == 0x86
        nobody = await mqtt(gateway, tls).connect()
        assert nobody.connack.value in (0x86, 0x87)
        stranger = await mqtt(gateway, tls, user="mallory", password=ALICE).connect()
        assert stranger.connack.value == 0x86
        for client in (wrong, nobody, stranger):
            await wait_until(lambda client=client: client.disconnected is not None)
            await client.close()


async def test_mqtt_logs_in_with_only_a_certificate(secured: GatewayProcess, files: Files) -> None:
    client = await mqtt(secured, files, device=True).connect()
    assert client.connack.value == 0
    assert await client.publish(f"{DEVICES}/device-7/temp", b"20") == 0
    assert await client.publish(f"{DEVICES}/device-8/temp", b"20") == 0x87
    assert await client.subscribe(f"{DEVICES}/device-7/#") == 0x87
    await client.close()


async def test_amqp_plain_and_external(secured: GatewayProcess, plain: GatewayProcess, files: Files) -> None:
    def work() -> None:
        connection = amqp(plain, "PLAIN", user="alice", password=ALICE)
        connection.create_sender(OPEN).send(Message(body=b"plain"))
        connection.close()
        connection = amqp(secured, "PLAIN", files, user="alice", password=ALICE)
        connection.create_sender(OPEN).send(Message(body=b"tls"))
        connection.close()
        connection = amqp(secured, "EXTERNAL", files, device=True)
        sender = connection.create_sender(DEVICES)
        sender.send(Message(body=b"21", annotations={"x-opt-bridge.key": "device-7/temp"}))
        connection.close()

    await in_thread(work)


async def test_amqp_refuses_wrong_passwords_anonymous_and_external_without_a_certificate(
    secured: GatewayProcess, plain: GatewayProcess, files: Files, bystander: PahoClient
) -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        with pytest.raises(ConnectionException):
            amqp(*arguments, **options)

    await in_thread(lambda: refused(secured, "PLAIN", files, user="alice", password=WRONG))
    await in_thread(lambda: refused(secured, "ANONYMOUS", files))
    await in_thread(lambda: refused(secured, "EXTERNAL", files))
    await in_thread(lambda: refused(plain, "ANONYMOUS"))
    # On the wire, the code is 1, auth (part 5.3.3.6).
    assert await sasl(plain, "PLAIN", b"\0alice\0" + WRONG.encode()) == (["PLAIN"], 1)
    assert await sasl(plain, "PLAIN", b"\0alice\0" + ALICE.encode()) == (["PLAIN"], 0)
    assert await sasl(plain, "PLAIN", b"bob\0alice\0" + ALICE.encode()) == (["PLAIN"], 1)
    assert await sasl(plain, "ANONYMOUS", b"guest") == (["PLAIN"], 1)
    assert await sasl(plain, "EXTERNAL", b"") == (["PLAIN"], 1)


async def sasl(gateway: GatewayProcess, mechanism: str, response: bytes) -> tuple[list[str], int]:
    """Log in; return the offered mechanisms and the outcome's code."""
    reader, writer = await asyncio.open_connection(*gateway.address("amqp"))
    writer.write(b"AMQP\x03\x01\x00\x00")
    assert await reader.readexactly(8) == b"AMQP\x03\x01\x00\x00"
    offered = await sasl_frame(reader)
    name = mechanism.encode()
    fields = b"\xa3" + bytes([len(name)]) + name + b"\xa0" + bytes([len(response)]) + response
    init = b"\x00\x53\x41\xc0" + bytes([len(fields) + 1, 2]) + fields
    writer.write(struct.pack(">IBBH", len(init) + 8, 2, 1, 0) + init)
    outcome = await sasl_frame(reader)
    writer.close()
    assert offered[:3] == b"\x00\x53\x40"
    assert outcome[:3] == b"\x00\x53\x44"
    mechanisms = [one for one in ("EXTERNAL", "PLAIN", "ANONYMOUS") if one.encode() in offered]
    return mechanisms, outcome[outcome.index(b"\x50") + 1]


async def sasl_frame(reader: asyncio.StreamReader) -> bytes:
    size, offset, kind, _ = struct.unpack(">IBBH", await asyncio.wait_for(reader.readexactly(8), WAIT_S))
    assert kind == 1
    return (await reader.readexactly(size - 8))[offset * 4 - 8 :]


async def test_http_basic_and_certificate(secured: GatewayProcess, plain: GatewayProcess, files: Files) -> None:
    alice = ("alice", ALICE)
    for gateway, tls in ((secured, files.context()), (plain, None)):
        assert (await post(gateway, OPEN, auth=alice, tls=tls))[0] == 200
        for auth in (("alice", WRONG), ("mallory", ALICE), None):
            status, body, headers = await post(gateway, OPEN, auth=auth, tls=tls)
            assert status == 401
            assert body["error_code"] == 401
            assert headers["WWW-Authenticate"].startswith("Basic realm=")
    device = files.context(device=True)
    status, body, _ = await post(secured, DEVICES, key="device-7/temp", tls=device)
    assert (status, "offset" in body["offsets"][0]) == (200, True)


async def test_a_certificate_of_another_authority_is_refused_by_the_handshake(
    secured: GatewayProcess, files: Files, bystander: PahoClient
) -> None:
    context = files.context()
    trustme.CA().issue_cert(common_name="device-7").configure_cert(context)
    for protocol in ("mqtt", "amqp", "http"):
        assert await is_refused(secured.address(protocol), context), protocol


async def is_refused(address: tuple[str, int], context: ssl.SSLContext) -> bool:
    """Return whether the handshake fails; with TLS 1.3 the client's first read fails."""
    try:
        reader, writer = await asyncio.open_connection(*address, ssl=context)
        writer.write(b"\x10")
        return not await asyncio.wait_for(reader.read(1), WAIT_S)
    except (ssl.SSLError, ConnectionError):
        return True


# rights


@pytest.mark.clause("MQTT311-3.3.5-2")
async def test_each_protocol_refuses_topics_that_are_not_allowed(
    secured: GatewayProcess, files: Files, bystander: PahoClient
) -> None:
    client = await mqtt(secured, files, user="alice", password=ALICE).connect()
    assert await client.publish(f"{CLOSED}/x") == 0x87
    assert await client.subscribe(f"{CLOSED}/#") == 0x87
    assert await client.subscribe(f"{CLOSED}/#") == 0x87
    assert await client.subscribe(f"{OPEN}/#") == 1
    assert await client.publish(f"{OPEN}/x", b"fine") == 0
    await wait_until(lambda: client.messages)
    await client.close()
    older = await mqtt(secured, files, user="alice", password=ALICE, protocol=paho.MQTTv311).connect()
    older.send(f"{CLOSED}/x")
    await wait_until(lambda: older.disconnected is not None)  # 3.1.1 has no reason code for it
    assert older.pubacks == {}
    await older.close()

    def links() -> None:
        connection = amqp(secured, "PLAIN", files, user="alice", password=ALICE)
        for make in (connection.create_sender, connection.create_receiver):
            with pytest.raises(LinkDetached) as caught:
                make(CLOSED)
            assert caught.value.condition == "amqp:unauthorized-access"
        connection.create_sender(OPEN).send(Message(body=b"fine"))
        connection.close()

    await in_thread(links)

    alice = ("alice", ALICE)
    status, body, _ = await post(secured, CLOSED, auth=alice, tls=files.context())
    assert (status, body["error_code"]) == (403, 403)
    status, _, _ = await post(secured, OPEN, auth=alice, tls=files.context())
    assert status == 200
    status, body, _ = await post(secured, DEVICES, key="device-8/temp", tls=files.context(device=True))
    assert status == 403 or body["offsets"][0]["error_code"] == 403


@pytest.mark.parametrize("device", [False, True])
async def test_each_kind_of_rule_means_the_same_in_each_protocol(
    secured: GatewayProcess, files: Files, device: bool
) -> None:
    """Rules with allow, deny, prefix, wildcard and variable, by MQTT, AMQP and HTTP, for alice and a device."""
    expected = {name: may[device] for name, may in MAY.items()}
    login: dict[str, Any] = {} if device else {"user": "alice", "password": ALICE}
    mine, others = (f"{MATRIX}-{name}" for name in (("device-7", "alice") if device else ("alice", "device-7")))

    client = await mqtt(secured, files, device=device, **login).connect()
    assert {name: await client.publish(f"{MATRIX}/{name}") == 0 for name in MAY} == expected
    assert {name: await client.subscribe(f"{MATRIX}/{name}") == 1 for name in MAY} == expected
    assert [await client.publish(f"{topic}/x") for topic in (mine, others)] == [0, 0x87]
    await client.close()

    def links() -> None:
        connection = amqp(secured, "EXTERNAL" if device else "PLAIN", files, device=device, **login)
        sender = connection.create_sender(MATRIX)
        accepted = dict.fromkeys(MAY, True)
        for name in MAY:
            try:
                sender.send(Message(body=b"1", annotations={"x-opt-bridge.key": name}))
            except SendException:
                accepted[name] = False
        assert accepted == expected
        connection.create_receiver(mine)
        with pytest.raises(LinkDetached) as caught:
            connection.create_receiver(others)
        assert caught.value.condition == "amqp:unauthorized-access"
        connection.close()

    await in_thread(links)

    base = f"https://{secured.addresses['http']}/topics"
    headers = {} if device else {"Authorization": basic("alice", ALICE)}
    async with aiohttp.ClientSession(headers=headers) as session:
        tls = files.context(device=device)
        records = {"records": [{"key": name, "value": 1} for name in MAY]}
        async with session.post(f"{base}/{MATRIX}", json=records, headers=JSON_RECORDS, ssl=tls) as response:
            results = (await response.json(content_type=None))["offsets"]
        assert {name: "offset" in result for name, result in zip(MAY, results, strict=True)} == expected
        for topic, status in ((mine, 200), (others, 403)):
            async with session.get(f"{base}/{topic}/records?limit=1", ssl=tls) as response:
                assert response.status == status


async def test_metrics_beyond_loopback_need_a_password_and_the_right_admin(plain: GatewayProcess) -> None:
    host, port = plain.address("management")
    assert host == "0.0.0.0"
    seen = {}
    async with aiohttp.ClientSession() as session:
        for auth in (None, ("alice", ALICE), ("operator", WRONG), ("operator", OPERATOR)):
            headers = {} if auth is None else {"Authorization": basic(*auth)}
            async with session.get(f"http://{HOST}:{port}/metrics", headers=headers) as response:
                seen[auth] = response.status, b"trivium_mqtt_connections" in await response.read()
        async with session.get(f"http://{HOST}:{port}/ready") as response:
            assert await response.json() == {"ready": True}
    assert list(seen.values()) == [(401, False), (401, False), (401, False), (200, True)]


async def test_no_password_is_written_to_the_log(secured: GatewayProcess, plain: GatewayProcess, files: Files) -> None:
    for gateway, tls in ((secured, files), (plain, None)):
        for password in (ALICE, WRONG):
            client = await mqtt(gateway, tls, user="alice", password=password).connect()
            await client.close()
            auth = ("alice", password)
            await post(gateway, OPEN, auth=auth, tls=files.context() if tls is not None else None)
        await sasl(plain, "PLAIN", b"\0alice\0" + WRONG.encode())
        said = gateway.log.read_text()
        assert "listening" in said
        for password in (ALICE, WRONG):
            assert password not in said
            assert basic("alice", password)[6:] not in said
        assert "$argon2" not in said
        assert "Traceback" not in said


# a new certificate


async def test_sighup_loads_the_new_certificate_and_keeps_open_connections(
    secured: GatewayProcess, files: Files, bystander: PahoClient
) -> None:
    async def shown(protocol: str) -> bytes | None:
        _, writer = await asyncio.open_connection(*secured.address(protocol), ssl=files.context())
        certificate = writer.get_extra_info("ssl_object").getpeercert(True)
        writer.transport.abort()
        return certificate

    before = {protocol: await shown(protocol) for protocol in ("mqtt", "amqp", "http")}
    files.renew()
    renewed = ssl.PEM_cert_to_DER_cert(
        files.cert.read_text().partition("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----\n"
    )
    assert renewed not in before.values()
    assert secured.process is not None
    secured.process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(WAIT_S):
        while await shown("mqtt") != renewed:
            continue
    assert [await shown(protocol) for protocol in ("amqp", "http")] == [renewed, renewed]
    assert await bystander.publish(f"{OPEN}/after", b"reload") == 0
    fresh = await mqtt(secured, files, user="alice", password=ALICE).connect()
    assert fresh.connack.value == 0
    await fresh.close()


# beyond loopback


async def test_beyond_loopback_it_refuses_to_start_without_authentication(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess]
) -> None:
    refused = new_gateway(bootstrap, "--mqtt", "0.0.0.0:0", "--http", "0.0.0.0:0", name="refused")
    with pytest.raises(RuntimeError) as caught:
        await refused.start()
    assert refused.process is not None
    assert refused.process.returncode == 2
    assert "mqtt.address: 0.0.0.0:0" in str(caught.value)
    assert "http.address: 0.0.0.0:0" in str(caught.value)
    assert "Traceback" not in str(caught.value)


async def test_beyond_loopback_it_starts_with_the_insecure_setting(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = await new_gateway(bootstrap, "--mqtt", "0.0.0.0:0", "--insecure").start()
    host, port = gateway.address("mqtt")
    assert host == "0.0.0.0"
    client = await PahoClient((HOST, port)).connect()
    assert client.connack.value == 0
    await client.close()
    assert "can be reached from other machines without authentication" in gateway.log.read_text()
    assert await gateway.stop() == 0
