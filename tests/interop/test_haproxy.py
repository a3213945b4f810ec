"""HAProxy in front of all protocols: the client's address in both versions of its header, and its health checks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import shutil
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
from tests.support.amqp_frames import Frames, WireClient
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.mqtt_packets import encode_packet
from tests.support.waiting import wait_until

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed (Debian: apt-get install haproxy)")
SERVERS, DEVICES = trustme.CA(), trustme.CA()
TOPIC = f"haproxy-{uuid.uuid4().hex[:8]}"
SASL = b"AMQP\x03\x01\x00\x00"
JSON_RECORDS = {"Content-Type": "application/vnd.kafka.json.v2+json"}
GATEWAY = """
[kafka]
create_topics = true
[security]
allow_anonymous = false
password_file = "{directory}/passwords"
failed_attempt_delay_s = 0.01
trusted_proxies = ["127.0.0.1/32"]
proxy_common_names = true
[[security.access]]
topic = "{topic}/{{cn}}/#"
"""
LISTENER = """
[[listeners]]
name = "{name}"
protocol = "{name}"
address = "127.0.0.1:0"
proxy_protocol = true
"""
PASSED_THROUGH = """
[[listeners]]
name = "mqtts"
protocol = "mqtt"
address = "127.0.0.1:0"
proxy_protocol = true
tls = {{ cert = "{directory}/server.pem", key = "{directory}/server.pem" }}
"""
BALANCER = """
global
    stats socket {directory}/stats
defaults
    mode tcp
    timeout connect 5s
    timeout client 1m
    timeout server 1m
"""
ENDS_TLS = """
listen {name}
    bind fd@{fd} ssl crt {directory}/server.pem ca-file {directory}/ca.pem verify optional
    server gateway {address} send-proxy-v2-ssl-cn check {check} inter 200ms fall 50
"""
PASSES_ON = """
listen {name}
    bind fd@{fd}
    server gateway {address} {header} check check-send-proxy inter 200ms fall 50
"""


def client_context(device: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    SERVERS.configure_trust(context)
    if device is not None:
        DEVICES.issue_cert("device@x", common_name=device).configure_cert(context)
    return context


class Balanced:
    """A gateway behind HAProxy."""

    def __init__(self, gateway: GatewayProcess, directory: Path) -> None:
        self.gateway = gateway
        self.directory = directory
        self.addresses: dict[str, tuple[str, int]] = {}

    async def open(
        self, name: str, source: str, device: str | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect a client from an address to one of HAProxy's frontends."""
        tls = None if name == "mqtt6" else client_context(device)
        host, port = self.addresses[name]
        return await asyncio.open_connection(
            host, port, ssl=tls, local_addr=(source, 0), server_hostname="127.0.0.1" if tls else None
        )

    async def mqtt(self, name: str, source: str, device: str | None = None, **connect: Any) -> RawClient:
        client = RawClient(*await self.open(name, source, device), Version.V5)
        client.send(packets.Connect(Version.V5, "", **connect))
        client.connack = await client.expect(packets.Connack)
        return client

    def peers(self) -> set[str]:
        """Return the peer addresses in the gateway's log."""
        return set(re.findall(r'"peer": "([^"]+):\d+"', self.gateway.log.read_text()))

    async def metric(self, name: str) -> float:
        url = f"http://{self.gateway.addresses['management']}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            lines = (await response.text()).splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).rpartition(" ")[2])

    async def checked(self) -> dict[str, str]:
        """Return the results of HAProxy's health checks, by backend."""
        reader, writer = await asyncio.open_unix_connection(self.directory / "stats")
        writer.write(b"show stat\n")
        rows = [line.split(",") for line in (await reader.read()).decode().splitlines()]
        writer.close()
        return {row[0]: row[36] for row in rows if len(row) > 36 and row[1] == "gateway"}


@pytest.fixture(scope="module")
async def balanced(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Balanced]:
    directory: Path = tmp_path_factory.mktemp("haproxy")
    (directory / "passwords").write_text(f"ann:{Argon2Hasher(time_cost=1, memory_cost=1024).hash('secret')}\n")
    SERVERS.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(directory / "server.pem"))
    DEVICES.cert_pem.write_to_path(str(directory / "ca.pem"))
    listeners = "".join(LISTENER.format(name=name) for name in ("mqtt", "amqp", "http"))
    config = GATEWAY.format(directory=directory, topic=TOPIC) + listeners + PASSED_THROUGH.format(directory=directory)
    gateway = await GatewayProcess(directory, bootstrap, config=config).start()
    found = Balanced(gateway, directory)
    with contextlib.ExitStack() as stack:
        fds: dict[str, int] = {}
        for name in ("mqtt", "amqp", "http", "mqtts", *(["mqtt6"] if socket.has_dualstack_ipv6() else [])):
            family, host = (socket.AF_INET6, "::1") if name == "mqtt6" else (socket.AF_INET, "127.0.0.1")
            opened = stack.enter_context(socket.create_server((host, 0), family=family))
            found.addresses[name] = opened.getsockname()[:2]
            fds[name] = opened.fileno()
        text = BALANCER.format(directory=directory)
        for name, check in (
            ("mqtt", "check-send-proxy"),
            ("amqp", "check-send-proxy"),
            ("http", "no-check-send-proxy"),
        ):
            text += ENDS_TLS.format(
                name=name, fd=fds[name], directory=directory, address=gateway.addresses[name], check=check
            )
        text += PASSES_ON.format(name="mqtts", fd=fds["mqtts"], address=gateway.addresses["mqtts"], header="send-proxy")
        if "mqtt6" in fds:
            header = "send-proxy-v2"
            text += PASSES_ON.format(name="mqtt6", fd=fds["mqtt6"], address=gateway.addresses["mqtt"], header=header)
        (directory / "haproxy.cfg").write_text(text)
        with (directory / "haproxy.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                HAPROXY, "-db", "-f", str(directory / "haproxy.cfg"),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=tuple(fds.values()),
            )  # fmt: skip
    try:
        await wait_until(lambda: (directory / "stats").exists() or process.returncode is not None)
        assert process.returncode is None, (directory / "haproxy.log").read_text()
        yield found
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert await gateway.stop() == 0


async def test_the_certificate_name_that_haproxy_verified_is_the_login(balanced: Balanced) -> None:
    client = await balanced.mqtt("mqtt", "127.0.0.11", "pump-7")
    assert client.connack.reason_code == 0
    assert [await client.publish(f"{TOPIC}/{name}/x", b"1") for name in ("pump-7", "pump-8")] == [0, 0x87]
    client.drop()
    unknown = await balanced.mqtt("mqtt", "127.0.0.11")
    assert unknown.connack.reason_code == 0x87
    unknown.drop()

    amqp = WireClient(*await balanced.open("amqp", "127.0.0.12", "pump-7"))
    amqp.say(SASL)
    assert await amqp.header() == SASL
    assert b"EXTERNAL" in await amqp.until(0x40)
    amqp.say(Frames.frame(Frames.performative(0x41, Frames.symbol("EXTERNAL"), Frames.binary(b"")), kind=1))
    assert (await amqp.until(0x44))[-1] == 0
    await amqp.close()

    host, port = balanced.addresses["http"]
    url = f"https://{host}:{port}"
    connector = aiohttp.TCPConnector(ssl=client_context("pump-7"), local_addr=("127.0.0.13", 0))
    async with aiohttp.ClientSession(url, connector=connector) as session:
        records = {"records": [{"key": f"{name}/x", "value": 1} for name in ("pump-7", "pump-8")]}
        async with session.post(f"/topics/{TOPIC}", json=records, headers=JSON_RECORDS) as response:
            results = (await response.json(content_type=None))["offsets"]
        assert ["offset" in result for result in results] == [True, False]
        async with session.ws_connect("/mqtt", protocols=["mqtt"]) as websocket:
            await websocket.send_bytes(encode_packet(packets.Connect(Version.V5, ""), Version.V5))
            assert (await websocket.receive_bytes())[3] == 0
    await wait_until(lambda: {"127.0.0.11", "127.0.0.13"} <= balanced.peers())


async def test_wrong_passwords_slow_only_their_address_even_with_tls_passthrough(balanced: Balanced) -> None:
    slowed = "trivium_authentication_addresses_slowed"
    before = await balanced.metric(slowed)
    for source in ("127.0.0.21", "127.0.0.22", "127.0.0.21"):
        client = await balanced.mqtt("mqtts", source, username="ann", password=b"wrong")
        assert client.connack.reason_code == 0x86
        client.drop()
    assert await balanced.metric(slowed) == before + 2
    host, port = balanced.addresses["http"]
    connector = aiohttp.TCPConnector(ssl=client_context(), local_addr=("127.0.0.23", 0))
    wrong = {"Authorization": "Basic " + base64.b64encode(b"ann:wrong").decode()}
    async with (
        aiohttp.ClientSession(f"https://{host}:{port}", connector=connector) as session,
        session.get("/topics", headers=wrong) as response,
    ):
        assert response.status == 401
    assert await balanced.metric(slowed) == before + 3
    known = await balanced.mqtt("mqtts", "127.0.0.24", username="ann", password=b"secret")
    assert known.connack.reason_code == 0
    known.drop()
    await wait_until(lambda: "127.0.0.24" in balanced.peers())


async def test_a_clients_ipv6_address(balanced: Balanced) -> None:
    if "mqtt6" not in balanced.addresses:
        pytest.skip("this machine has no IPv6")
    client = await balanced.mqtt("mqtt6", "::1", username="ann", password=b"secret")
    assert client.connack.reason_code == 0
    client.drop()
    await wait_until(lambda: "[::1]" in balanced.peers())


async def test_haproxys_health_checks_are_harmless(balanced: Balanced) -> None:
    """The checks send LOCAL in version 2, UNKNOWN in version 1, or no header."""
    headers = await balanced.metric("trivium_proxy_protocol_headers_total")

    async def are_checked() -> bool:
        return await balanced.metric("trivium_proxy_protocol_headers_total") > headers + 10

    async def are_good() -> bool:
        return set((await balanced.checked()).values()) == {"L4OK"}

    await wait_until(are_checked)
    await wait_until(are_good)  # a check may be late on a busy machine
    for name in ("broken", "untrusted"):
        assert await balanced.metric(f"trivium_proxy_protocol_{name}_total") == 0
    assert not re.findall(
        r'^.*"level": "(?:warning|error)", "logger": "gateway\.net.*$', balanced.gateway.log.read_text(), re.MULTILINE
    )
