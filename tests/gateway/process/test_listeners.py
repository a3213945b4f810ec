"""Several listeners of one protocol, each with its own TLS, logins and limit, share the same sessions."""

from __future__ import annotations

import asyncio
import base64
import shutil
import signal
import socket
import ssl
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from pwdlib.hashers.argon2 import Argon2Hasher

from protocols.mqtt import packets
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import Properties
from tests.support.amqp_frames import Frames, WireClient
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.mqtt_packets import encode_packet
from tests.support.waiting import wait_until

SERVERS, DEVICES = trustme.CA(), trustme.CA()
TOPIC = f"listeners-{uuid.uuid4().hex[:8]}"
SASL = b"AMQP\x03\x01\x00\x00"
ANN = {"username": "ann", "password": b"secret"}
BASIC = {"Authorization": "Basic " + base64.b64encode(b"ann:secret").decode()}
CONFIG = """
[kafka]
create_topics = true
[security]
password_file = "{directory}/passwords"
failed_attempt_delay_s = 0.01
trusted_proxies = ["127.0.0.1/32"]
[[listeners]]
name = "local"
protocol = "mqtt"
address = "127.0.0.1:0"
logins = ["anonymous"]
[[listeners]]
name = "devices"
protocol = "mqtt"
address = "127.0.0.1:0"
logins = ["certificate"]
tls = {{ cert = "{directory}/one.pem", key = "{directory}/one.pem", client_ca = "{directory}/ca.pem", require_client_cert = true }}
[[listeners]]
name = "users"
protocol = "mqtt"
address = "127.0.0.1:0"
logins = ["password"]
tls = {{ cert = "{directory}/two.pem", key = "{directory}/two.pem" }}
[[listeners]]
name = "amqps"
protocol = "amqp"
address = "127.0.0.1:0"
logins = ["certificate"]
tls = {{ cert = "{directory}/one.pem", key = "{directory}/one.pem", client_ca = "{directory}/ca.pem" }}
[[listeners]]
name = "public"
protocol = "http"
address = "127.0.0.1:0"
logins = ["password"]
max_connections = 3
[[listeners]]
name = "inner"
protocol = "http"
address = "127.0.0.1:0"
proxy_protocol = true
"""  # noqa: E501 - an inline table has one line

IPV6 = """
[[listeners]]
name = "mqtt6"
protocol = "mqtt"
address = "[::1]:0"
[[listeners]]
name = "amqp6"
protocol = "amqp"
address = "[::1]:0"
[[listeners]]
name = "http6"
protocol = "http"
address = "[::1]:0"
"""
HAS_IPV6 = socket.has_dualstack_ipv6()


def write_server(path: Path) -> None:
    SERVERS.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(path))


def client_context(device: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    SERVERS.configure_trust(context)
    if device is not None:
        DEVICES.issue_cert("device@x", common_name=device).configure_cert(context)
    return context


@pytest.fixture(scope="module")
async def gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    directory: Path = tmp_path_factory.mktemp("listeners")
    (directory / "passwords").write_text(f"ann:{Argon2Hasher(time_cost=1, memory_cost=1024).hash('secret')}\n")
    for name in ("one", "two"):
        write_server(directory / f"{name}.pem")
    DEVICES.cert_pem.write_to_path(str(directory / "ca.pem"))
    config = CONFIG.format(directory=directory) + (IPV6 if HAS_IPV6 else "")
    process = await GatewayProcess(directory, bootstrap, config=config).start()
    yield process
    assert await process.stop() == 0


async def mqtt(gateway: GatewayProcess, listener: str, device: str | None = None, **connect: Any) -> RawClient:
    tls = client_context(device) if listener in ("devices", "users") else None
    client = RawClient(*await asyncio.open_connection(*gateway.address(listener), ssl=tls), Version.V5)
    client.send(packets.Connect(Version.V5, connect.pop("client_id", ""), **connect))
    client.connack = await client.expect(packets.Connack)
    return client


async def is_closed(gateway: GatewayProcess, listener: str, sent: bytes = b"") -> bool:
    """Return whether a connection is closed without an answer."""
    reader, writer = await asyncio.open_connection(*gateway.address(listener))
    try:
        writer.write(sent)
        return await reader.read(1) == b""
    except ConnectionError:
        return True
    finally:
        writer.close()


async def metrics(gateway: GatewayProcess) -> list[str]:
    url = f"http://{gateway.addresses['management']}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return (await response.text()).splitlines()


async def test_each_mqtt_listener_accepts_its_configured_logins(gateway: GatewayProcess) -> None:
    answers = []
    for listener, device, login in (
        ("local", None, {}),
        ("devices", "pump-7", {}),
        ("devices", "pump-7", ANN),  # this listener accepts no passwords
        ("users", None, ANN),
        ("users", None, {}),
        ("users", "pump-7", {}),  # this listener requests no certificate
    ):
        client = await mqtt(gateway, listener, device, **login)
        answers.append((listener, client.connack.reason_code))
        client.drop()
    assert answers == [
        ("local", 0), ("devices", 0), ("devices", 0x86), ("users", 0), ("users", 0x87), ("users", 0x87)
    ]  # fmt: skip
    with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):  # not without a certificate
        await mqtt(gateway, "devices")
    log = gateway.log.read_text()
    assert all(f"listener={name}" in log or f'"listener": "{name}"' in log for name in ("local", "devices", "users"))


async def test_a_session_is_resumed_at_another_listener(gateway: GatewayProcess) -> None:
    name, kept = f"c-{uuid.uuid4().hex[:8]}", Properties(session_expiry_interval=600)
    first = await mqtt(gateway, "local", client_id=name, properties=kept)
    assert await first.subscribe(f"{TOPIC}/#")
    first.drop()
    sender = await mqtt(gateway, "local")
    assert await sender.publish(f"{TOPIC}/a", b"1") == 0
    again = await mqtt(gateway, "local", client_id=name, properties=kept, clean_start=False)
    assert again.connack.session_present
    message = await again.expect(packets.Publish)
    assert message.payload == b"1"
    for one in (again, sender):
        one.drop()


async def test_amqp_logs_in_with_only_a_certificate(gateway: GatewayProcess) -> None:
    for device, offered in (("pump-7", [b"EXTERNAL"]), (None, [])):
        streams = await asyncio.open_connection(*gateway.address("amqps"), ssl=client_context(device))
        client = WireClient(*streams)
        client.say(SASL)
        assert await client.header() == SASL
        mechanisms = await client.until(0x40)
        assert [name for name in (b"EXTERNAL", b"PLAIN", b"ANONYMOUS", b"SCRAM") if name in mechanisms] == offered
        client.say(Frames.frame(Frames.performative(0x41, Frames.symbol("EXTERNAL"), Frames.binary(b"")), kind=1))
        assert (await client.until(0x44))[-1] == (0 if device else 1)
        await client.close()


async def test_websockets_use_the_logins_of_their_http_listener(gateway: GatewayProcess) -> None:
    """MQTT over WebSocket uses the HTTP listener's logins, not those of MQTT's listeners."""
    url = f"http://{gateway.addresses['public']}"
    async with aiohttp.ClientSession(url) as session:
        for login, reason in (({}, 0x87), (ANN, 0)):
            async with session.ws_connect("/mqtt", protocols=["mqtt"]) as socket:
                await socket.send_bytes(encode_packet(packets.Connect(Version.V5, "", **login), Version.V5))
                assert (await socket.receive_bytes())[3] == reason
        async with session.get("/topics") as response:
            assert response.status == 401
        async with session.get("/topics", headers=BASIC) as response:
            assert response.status == 200


async def test_one_of_two_http_listeners_is_behind_a_balancer(gateway: GatewayProcess) -> None:
    reader, writer = await asyncio.open_connection(*gateway.address("inner"))
    writer.write(b"PROXY TCP4 192.0.2.1 127.0.0.1 5 6\r\nGET /topics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert await is_closed(gateway, "inner", b"GET /topics HTTP/1.1\r\nHost: x\r\n\r\n")


@pytest.mark.part("live websockets")
async def test_connections_above_the_maximum_are_closed_immediately_and_counted(gateway: GatewayProcess) -> None:
    """HTTP connections, WebSockets of MQTT and event streams all count; a closed one frees its place."""
    here = 'listener="public",protocol="http"'
    url = f"http://{gateway.addresses['public']}"

    async def counted(name: str) -> float:
        line = next(one for one in await metrics(gateway) if one.startswith(f"trivium_listener_{name}{{{here}}}"))
        return float(line.rpartition(" ")[2])

    async def are_open(count: int) -> bool:
        return await counted("connections") == count

    await wait_until(lambda: are_open(0))
    refused = await counted("refused_total")
    async with aiohttp.ClientSession(url, headers=BASIC) as session:
        async with (
            session.ws_connect("/mqtt", protocols=["mqtt"]),
            session.get(f"/topics/{TOPIC}/stream") as stream,
            session.ws_connect("/stream", protocols=["trivium.v1"]),
        ):
            assert stream.status == 200
            assert await are_open(3)
            assert await is_closed(gateway, "public")
            assert await counted("refused_total") == refused + 1
        await wait_until(lambda: are_open(0))
        async with session.get("/topics") as response:
            assert response.status == 200
    assert "listener=public" in gateway.log.read_text() or '"listener": "public"' in gateway.log.read_text()


async def test_logs_and_metrics_name_the_listener(gateway: GatewayProcess) -> None:
    names = {"local", "devices", "users", "amqps", "public", "inner"}
    names |= {"mqtt6", "amqp6", "http6"} if HAS_IPV6 else set()
    assert gateway.addresses.keys() == names | {"management", "kafka", "pid", "kafka_pid"}
    url = f"http://{gateway.addresses['management']}/ready"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert (await response.json())["listeners"] == dict.fromkeys(names, True)
    told = [line for line in await metrics(gateway) if line.startswith("trivium_listener_connections_total{")]
    assert {name for name in names for line in told if f'listener="{name}"' in line} == names


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
async def test_each_protocol_over_ipv6(gateway: GatewayProcess) -> None:
    assert all(gateway.addresses[name].startswith("[::1]:") for name in ("mqtt6", "amqp6", "http6"))
    client = await mqtt(gateway, "mqtt6")
    assert client.connack.reason_code == 0
    client.drop()
    amqp = WireClient(*await asyncio.open_connection(*gateway.address("amqp6")))
    amqp.say(SASL)
    assert await amqp.header() == SASL
    assert b"ANONYMOUS" in await amqp.until(0x40)
    await amqp.close()
    url = f"http://{gateway.addresses['http6']}"  # also the header Host
    async with aiohttp.ClientSession(url) as session:
        control = {"Content-Type": "application/vnd.kafka.v2+json"}
        async with session.post(f"/consumers/{TOPIC}", json={"name": "one"}, headers=control) as response:
            assert response.status == 200
            uri = (await response.json(content_type=None))["base_uri"]
        assert uri.startswith(f"{url}/")
        async with session.delete(uri) as response:
            assert response.status == 204
        own_page = {"Origin": url}
        async with session.ws_connect("/mqtt", protocols=["mqtt"], headers=own_page) as websocket:
            await websocket.send_bytes(encode_packet(packets.Connect(Version.V5, ""), Version.V5))
            assert (await websocket.receive_bytes())[3] == 0
    assert '"peer": "[::1]:' in gateway.log.read_text()


async def shown(gateway: GatewayProcess) -> list[bytes]:
    """Return the certificates of two listeners."""
    found = []
    for listener in ("devices", "users"):
        tls = client_context("pump-7")
        _, writer = await asyncio.open_connection(*gateway.address(listener), ssl=tls)
        found.append(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        writer.close()
    return found


async def are_others(gateway: GatewayProcess, before: list[bytes]) -> bool:
    return not set(before) & set(await shown(gateway))


async def test_sighup_reloads_the_certificates_of_every_listener(gateway: GatewayProcess) -> None:
    before = await shown(gateway)
    for name in ("one", "two"):
        write_server(gateway.directory / f"{name}.pem")
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGHUP)
    await wait_until(lambda: are_others(gateway, before))


async def test_changed_files_are_loaded_without_a_signal(
    gateway: GatewayProcess, bootstrap: str, tmp_path: Path
) -> None:
    config = (gateway.directory / "trivium.toml").read_text().replace("[security]", "[security]\nreload_s = 0.1")
    config = config.replace(str(gateway.directory), str(tmp_path))
    for name in ("passwords", "one.pem", "two.pem", "ca.pem"):
        shutil.copy(gateway.directory / name, tmp_path / name)
    process = await GatewayProcess(tmp_path, bootstrap, config=config).start()
    try:
        before = await shown(process)
        for name in ("one", "two"):
            write_server(tmp_path / f"{name}.pem")
        await wait_until(lambda: are_others(process, before))
    finally:
        assert await process.stop() == 0
