"""Behind a test's load balancer that sends PROXY headers: all protocols, with TLS and without."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
import struct
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
from protocols.proxy import SIGNATURE
from tests.support.amqp_frames import Frames, WireClient
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.mqtt_packets import encode_packet
from tests.support.waiting import wait_until

TOPIC = f"proxied-{uuid.uuid4().hex[:8]}"
AUTHORITY = trustme.CA()
JSON_RECORDS = {"Content-Type": "application/vnd.kafka.json.v2+json"}
SASL = b"AMQP\x03\x01\x00\x00"
CONFIG = """
[kafka]
create_topics = true
[mqtt]
proxy_protocol = true
[amqp]
proxy_protocol = true
[http]
proxy_protocol = true
[security]
allow_anonymous = false
password_file = "{passwords}"
failed_attempt_delay_s = 0.01
trusted_proxies = ["127.0.0.1/32"]
proxy_common_names = true
{tls}
[[security.access]]
topic = "{topic}/{{cn}}/#"
"""


def v1(host: str, port: int = 4711) -> bytes:
    return f"PROXY TCP4 {host} 127.0.0.1 {port} 1883\r\n".encode()


def v2(host: str, name: bytes | None = None) -> bytes:
    block = bytes(map(int, host.split("."))) + bytes([127, 0, 0, 1]) + struct.pack(">HH", 4712, 1883)
    if name is not None:
        said = struct.pack(">BI", 0x03, 0) + struct.pack(">BH", 0x22, len(name)) + name
        block += struct.pack(">BH", 0x20, len(said)) + said
    return SIGNATURE + struct.pack(">BBH", 0x21, 0x11, len(block)) + block


@contextlib.asynccontextmanager
async def balancer(
    gateway: GatewayProcess, protocol: str, header: bytes, *, source: str = "127.0.0.1"
) -> AsyncIterator[tuple[str, int]]:
    """Connections to this address are forwarded to the gateway with a header for the address `source`."""
    tasks: set[asyncio.Task[None]] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    writer.write(data)
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, ahead = await asyncio.open_connection(*gateway.address(protocol), local_addr=(source, 0))
        ahead.write(header)
        tasks.update({asyncio.create_task(pass_on(reader, ahead)), asyncio.create_task(pass_on(behind, writer))})

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Fleet:
    """A gateway behind balancers, and how its clients connect."""

    def __init__(self, gateway: GatewayProcess, tls: ssl.SSLContext | None) -> None:
        self.gateway = gateway
        self.tls = tls

    async def open(self, address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*address, ssl=self.tls)

    async def mqtt(self, address: tuple[str, int], **connect: Any) -> tuple[RawClient, int]:
        client = RawClient(*await self.open(address), Version.V5)
        client.send(packets.Connect(Version.V5, "", **connect))
        return client, (await client.expect(packets.Connack)).reason_code

    async def amqp(self, address: tuple[str, int], mechanism: str, response: bytes) -> int:
        """The outcome of SASL."""
        client = WireClient(*await self.open(address))
        client.say(SASL)
        assert await client.header() == SASL
        assert mechanism.encode() in await client.until(0x40)
        init = Frames.performative(0x41, Frames.symbol(mechanism), Frames.binary(response))
        client.say(Frames.frame(init, kind=1))
        outcome = (await client.until(0x44))[-1]
        await client.close()
        return outcome

    def http(self, address: tuple[str, int]) -> str:
        return f"http{'' if self.tls is None else 's'}://{address[0]}:{address[1]}"

    async def metric(self, name: str) -> float:
        url = f"http://{self.gateway.addresses['management']}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            lines = (await response.text()).splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).rpartition(" ")[2])


@pytest.fixture(scope="module", params=["plain", "tls"])
async def fleet(
    request: pytest.FixtureRequest, bootstrap: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    directory: Path = tmp_path_factory.mktemp("proxied")
    passwords = directory / "passwords"
    passwords.write_text(f"ann:{Argon2Hasher(time_cost=1, memory_cost=1024).hash('secret')}\n")
    tls, context = "", None
    if request.param == "tls":
        leaf = AUTHORITY.issue_cert("127.0.0.1")
        leaf.private_key_and_cert_chain_pem.write_to_path(str(directory / "server.pem"))
        tls = f'tls_cert = "{directory / "server.pem"}"\ntls_key = "{directory / "server.pem"}"'
        context = ssl.create_default_context()
        AUTHORITY.configure_trust(context)
    config = CONFIG.format(passwords=passwords, tls=tls, topic=TOPIC)
    process = await GatewayProcess(directory, bootstrap, config=config).start()
    yield Fleet(process, context)
    assert await process.stop() == 0


async def test_the_certificate_that_the_balancer_verified_is_the_clients(fleet: Fleet) -> None:
    header = v2("203.0.113.7", b"pump-7")
    async with balancer(fleet.gateway, "mqtt", header) as address:
        client, reason = await fleet.mqtt(address)
        assert reason == 0
        assert [await client.publish(f"{TOPIC}/{name}/x", b"1") for name in ("pump-7", "pump-8")] == [0, 0x87]
        client.drop()
    async with balancer(fleet.gateway, "amqp", header) as address:
        assert await fleet.amqp(address, "EXTERNAL", b"") == 0
    async with balancer(fleet.gateway, "http", header) as address, aiohttp.ClientSession() as session:
        records = {"records": [{"key": f"{name}/x", "value": 1} for name in ("pump-7", "pump-8")]}
        url = f"{fleet.http(address)}/topics/{TOPIC}"
        async with session.post(url, json=records, headers=JSON_RECORDS, ssl=fleet.tls or True) as response:
            results = (await response.json(content_type=None))["offsets"]
        assert ["offset" in result for result in results] == [True, False]
    assert "peer=203.0.113.7:4712" in fleet.gateway.log.read_text().replace('"', "").replace("peer: ", "peer=")


async def test_wrong_passwords_slow_their_own_address_and_not_the_balancers(fleet: Fleet) -> None:
    before = await fleet.metric("trivium_authentication_addresses_slowed")
    wrong = {"username": "ann", "password": b"wrong"}
    for header in (v1("198.51.100.1"), v2("198.51.100.2")):
        async with balancer(fleet.gateway, "mqtt", header) as address:
            client, reason = await fleet.mqtt(address, **wrong)
            assert reason == 0x86
            client.drop()
    async with balancer(fleet.gateway, "amqp", v1("198.51.100.3")) as address:
        assert await fleet.amqp(address, "PLAIN", b"\0ann\0wrong") == 1
    async with balancer(fleet.gateway, "http", v1("198.51.100.4")) as address, aiohttp.ClientSession() as session:
        wrong_login = {"Authorization": "Basic " + base64.b64encode(b"ann:wrong").decode()}
        url = f"{fleet.http(address)}/topics"
        async with session.get(url, headers=wrong_login, ssl=fleet.tls or True) as response:
            assert response.status == 401
    async with balancer(fleet.gateway, "http", v2("198.51.100.5")) as address, aiohttp.ClientSession() as session:
        url = f"{fleet.http(address)}/mqtt"
        async with session.ws_connect(url, protocols=["mqtt"], ssl=fleet.tls or True) as socket:
            await socket.send_bytes(encode_packet(packets.Connect(Version.V5, "", **wrong), Version.V5))
            assert (await socket.receive_bytes())[3] == 0x86
    assert await fleet.metric("trivium_authentication_addresses_slowed") == before + 5


async def test_other_peers_and_a_balancer_without_a_header_are_closed(fleet: Fleet) -> None:
    async def ends(header: bytes, protocol: str, source: str = "127.0.0.1") -> bool:
        reader, writer = await asyncio.open_connection(*fleet.gateway.address(protocol), local_addr=(source, 0))
        writer.write(header)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        return True

    before = {name: await fleet.metric(f"trivium_proxy_protocol_{name}_total") for name in ("untrusted", "broken")}
    for protocol in ("mqtt", "amqp", "http"):
        assert await ends(v1("198.51.100.9"), protocol, "127.0.0.2")
        assert await ends(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", protocol)
        assert await ends(SIGNATURE + b"\x21\x11\xff\xff", protocol)
    reader, writer = await asyncio.open_connection(*fleet.gateway.address("mqtt"))
    writer.write(b"PROXY TCP4 1.1.1.1")
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    _, silent = await asyncio.open_connection(*fleet.gateway.address("mqtt"))
    silent.close()  # a health check of the balancer
    after = {name: await fleet.metric(f"trivium_proxy_protocol_{name}_total") for name in before}
    assert {name: after[name] - before[name] for name in before} == {"untrusted": 3, "broken": 7}
    assert "not from security.trusted_proxies" in fleet.gateway.log.read_text()


async def test_the_balancers_own_connections_and_parts_of_a_header(fleet: Fleet) -> None:
    """LOCAL is the balancer's own address; a header may come byte by byte, and with the client's first bytes."""
    async with balancer(fleet.gateway, "mqtt", SIGNATURE + b"\x20\x00\x00\x00") as address:
        client, reason = await fleet.mqtt(address, username="ann", password=b"secret")
        assert reason == 0
        await client.ping()
        client.drop()
    if fleet.tls is not None:
        return
    reader, writer = await asyncio.open_connection(*fleet.gateway.address("mqtt"))
    connect = packets.Connect(Version.V5, "", username="ann", password=b"secret")
    for byte in v2("203.0.113.9") + encode_packet(connect, Version.V5):
        writer.write(bytes([byte]))
        await writer.drain()
    assert (await reader.readexactly(4))[3] == 0
    writer.close()
    await wait_until(lambda: "203.0.113.9" in fleet.gateway.log.read_text())
