"""Peers that start a TLS handshake or AMQP's SASL and never finish it: their number is limited, and others log in."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import trustme
from pwdlib.hashers.argon2 import Argon2Hasher

from protocols.mqtt.decoding import decode_packet
from protocols.mqtt.packets import Connack, Connect, Version
from tests.support.gateway import GatewayProcess
from tests.support.mqtt_packets import encode_packet
from tests.support.waiting import wait_until

STRANGER = "127.0.0.2"
CROWD = 300
LIMIT = 1 << 20
ROOM = LIMIT // (48 * 1024)
"""The number of unfinished handshakes that the limit allows."""
AUTHORITY = trustme.CA()
CONFIG = """
[budget]
login_bytes = {limit}
[security]
allow_anonymous = false
password_file = "{directory}/passwords"
tls_cert = "{directory}/server.pem"
tls_key = "{directory}/server.pem"
"""
HALF_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"r" * 400
SASL = b"AMQP\x03\x01\x00\x00"
HALF_INIT = (400).to_bytes(4, "big") + b"\x02\x01\x00\x00\x00\x53\x41" + b"x" * 300


@pytest.fixture(scope="module")
async def gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("half-open")
    AUTHORITY.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(directory / "server.pem")
    hasher = Argon2Hasher(time_cost=1, memory_cost=1024, parallelism=1)
    (directory / "passwords").write_text(f"ann:{hasher.hash('ann')}\n")
    config = CONFIG.format(limit=LIMIT, directory=directory)
    process = await GatewayProcess(directory, bootstrap, config=config).start()
    yield process
    assert await process.stop() == 0


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    return context


async def held(gateway: GatewayProcess) -> dict[str, float]:
    host, port = gateway.address("management")
    async with aiohttp.ClientSession() as http, http.get(f"http://{host}:{port}/metrics") as answer:
        lines = [line.split() for line in (await answer.text()).splitlines() if line.startswith("trivium_strangers")]
    return {name.removeprefix("trivium_strangers_"): float(value) for name, value in lines}


def descriptors(gateway: GatewayProcess) -> int:
    return len(os.listdir(Path("/proc") / str(gateway.pid) / "fd"))  # noqa: PTH208 - only their number counts


async def by_mqtt(gateway: GatewayProcess) -> None:
    reader, writer = await asyncio.open_connection(*gateway.address("mqtt"), ssl=trusting())
    writer.write(encode_packet(Connect(Version.V5, "half-open", username="ann", password=b"ann"), Version.V5))
    head = await reader.readexactly(2)
    packet = decode_packet(head[0], await reader.readexactly(head[1]), Version.V5)
    writer.close()
    assert isinstance(packet, Connack)
    assert packet.reason_code == 0


async def by_amqp(gateway: GatewayProcess) -> None:
    reader, writer = await asyncio.open_connection(*gateway.address("amqp"), ssl=trusting())
    response = b"\0ann\0ann"
    arguments = b"\xa3\x05PLAIN\xa0" + bytes([len(response)]) + response
    init = b"\x00\x53\x41\xc0" + bytes([len(arguments) + 1, 2]) + arguments
    writer.write(SASL + (len(init) + 8).to_bytes(4, "big") + b"\x02\x01\x00\x00" + init)
    await reader.readuntil(b"\x00\x53\x44")
    outcome = await reader.readexactly(5)
    writer.close()
    assert outcome.endswith(b"\x50\x00")  # sasl-code ok (part 5.3.3.6)


async def by_http(gateway: GatewayProcess) -> None:
    host, port = gateway.address("http")
    fields = {"Authorization": f"Basic {base64.b64encode(b'ann:ann').decode()}"}
    url = f"https://{host}:{port}/topics"
    async with aiohttp.ClientSession() as http, http.get(url, headers=fields, ssl=trusting()) as answer:
        assert answer.status == 200


class Crowd:
    """Connections from one address; `gone` counts those that the gateway closed."""

    def __init__(self) -> None:
        self.gone = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def add(self, address: tuple[str, int], data: bytes, context: ssl.SSLContext | None = None) -> None:
        reader, writer = await asyncio.open_connection(*address, local_addr=(STRANGER, 0), ssl=context)
        self._writers.append(writer)
        self._tasks.append(asyncio.create_task(self._listen(reader)))
        writer.write(data)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            await reader.read()
        self.gone += 1

    async def leave(self) -> None:
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._tasks)


@pytest.fixture
async def crowd() -> AsyncIterator[Crowd]:
    made = Crowd()
    yield made
    await made.leave()


@pytest.mark.parametrize(
    ("protocol", "begun", "log_in"),
    [("mqtt", b"", by_mqtt), ("amqp", HALF_HELLO, by_amqp), ("http", HALF_HELLO, by_http)],
)
async def test_unfinished_handshakes_are_limited_and_others_log_in(
    gateway: GatewayProcess,
    crowd: Crowd,
    protocol: str,
    begun: bytes,
    log_in: Callable[[GatewayProcess], Awaitable[None]],
) -> None:
    before, files = await held(gateway), descriptors(gateway)
    for _ in range(CROWD):
        await crowd.add(gateway.address(protocol), begun)
    await wait_until(lambda: crowd.gone >= CROWD - ROOM)
    async with asyncio.timeout(60):
        await log_in(gateway)
    now = await held(gateway)
    assert now["bytes"] <= LIMIT
    assert now["dropped_total"] - before["dropped_total"] >= CROWD - ROOM
    assert descriptors(gateway) - files <= ROOM + 10
    await crowd.leave()
    last = now
    while last["bytes"]:
        last = await held(gateway)


async def test_unfinished_sasl_is_counted_and_others_log_in(gateway: GatewayProcess, crowd: Crowd) -> None:
    """A SASL frame is small, so the whole crowd fits within the limit; they hold no more than they have sent."""
    context = trusting()
    for _ in range(CROWD // 6):
        await crowd.add(gateway.address("amqp"), SASL + HALF_INIT, context)
    sent = len(SASL + HALF_INIT) * (CROWD // 6)
    now = await held(gateway)
    while now["bytes"] < sent:
        now = await held(gateway)
    assert now["bytes"] == sent
    async with asyncio.timeout(60):
        await by_amqp(gateway)
    await crowd.leave()
    while now["bytes"]:
        now = await held(gateway)
