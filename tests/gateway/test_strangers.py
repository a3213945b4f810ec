"""The memory that peers can use before they have logged in is limited, for each and for all together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.net.strangers import Stranger, Strangers
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until
from tests.support.websocket import frame, handshake

STRANGER = "127.0.0.2"
LIMIT = 1 << 20
CONFIG = f"""
[budget]
login_bytes = {LIMIT}
"""
HEAD = b"GET /topics HTTP/1.1\r\nHost: 127.0.0.1\r\n"
FIELD = b"X-A: %b\r\n" % (b"x" * 8000)


@pytest.fixture(scope="module")
async def gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    process = await GatewayProcess(tmp_path_factory.mktemp("strangers"), bootstrap, config=CONFIG).start()
    yield process
    assert await process.stop() == 0


class Crowd:
    """Connections from one address that never finish what they start; `gone` counts those that were closed."""

    def __init__(self) -> None:
        self.gone = 0
        self.answers: list[bytes] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def add(self, address: tuple[str, int], data: bytes) -> None:
        reader, writer = await asyncio.open_connection(*address, local_addr=(STRANGER, 0))
        self._writers.append(writer)
        self._tasks.append(asyncio.create_task(self._listen(reader)))
        writer.write(data)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
        self.gone += 1
        self.answers.append(answer)

    async def leave(self) -> None:
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._tasks)


@pytest.fixture
async def crowd() -> AsyncIterator[Crowd]:
    made = Crowd()
    yield made
    await made.leave()


async def held(gateway: GatewayProcess) -> dict[str, float]:
    host, port = gateway.address("management")
    async with aiohttp.ClientSession() as http, http.get(f"http://{host}:{port}/metrics") as answer:
        lines = [line.split() for line in (await answer.text()).splitlines() if line.startswith("trivium_strangers")]
    return {name.removeprefix("trivium_strangers_"): float(value) for name, value in lines}


async def works(gateway: GatewayProcess) -> None:
    """Check that others can log in, by each protocol that was flooded."""
    client = await RawClient.connect(gateway.address("mqtt"))
    assert client.connack.reason_code == 0
    client.drop()
    host, port = gateway.address("http")
    async with aiohttp.ClientSession() as http, http.get(f"http://{host}:{port}/topics") as answer:
        assert answer.status == 200


CONNECT = b"\x10\xff\xff\x03" + b"\0\x04MQTT\5\2\0\0" + b"x" * 40_000  # claims 65,535 bytes


@pytest.mark.parametrize(
    ("protocol", "data"),
    [
        ("mqtt", CONNECT),
        ("http", HEAD + FIELD * 5),
        ("http", b"POST /topics/t HTTP/1.1\r\nHost: 127.0.0.1\r\n" + FIELD * 5),
        ("http", handshake("/mqtt").removesuffix(b"\r\n") + FIELD * 5),
        ("http", handshake("/mqtt") + frame(CONNECT + b"x" * 20_000)[:-20_000]),
    ],
)
async def test_the_memory_of_all_strangers_is_limited(
    gateway: GatewayProcess, crowd: Crowd, protocol: str, data: bytes
) -> None:
    """Of 40 connections with 40 kB each, about 26 fit; the oldest are closed, and others log in all the time."""
    before = (await held(gateway))["dropped_total"]
    for _ in range(40):
        await crowd.add(gateway.address(protocol), data)
    await wait_until(lambda: crowd.gone >= 10)
    await works(gateway)
    now = await held(gateway)
    assert now["bytes"] <= LIMIT
    assert now["dropped_total"] - before >= 10
    await crowd.leave()
    bounds: list[float] = []
    while not bounds or bounds[-1] > 0:
        bounds.append((await held(gateway))["bytes"])


async def test_the_size_of_a_whole_header_is_limited(gateway: GatewayProcess, crowd: Crowd) -> None:
    """Complete or not, in one piece or in many; no single field is too long."""
    address = gateway.address("http")
    await crowd.add(address, HEAD + FIELD * 9)
    await crowd.add(address, HEAD + FIELD * 9 + b"\r\n")
    reader, writer = await asyncio.open_connection(*address)
    writer.write(HEAD)
    for _ in range(9):
        writer.write(FIELD)
        await writer.drain()
    said = await asyncio.wait_for(reader.readline(), 60)
    writer.close()
    assert b" 431 " in said
    await wait_until(lambda: crowd.gone == 2)
    assert all(b" 431 " in answer.partition(b"\r")[0] for answer in crowd.answers)


async def test_bodies_and_later_requests_do_not_count_as_header(gateway: GatewayProcess) -> None:
    """Consecutive requests whose bodies contain what looks like the end of a header."""
    reader, writer = await asyncio.open_connection(*gateway.address("http"))
    body = b"x" * 30_000 + b"\r\n\r\n" + b"y" * 60_000
    post = b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    get = HEAD + FIELD * 7 + b"\r\n"

    async def status() -> int:
        line = await asyncio.wait_for(reader.readline(), 60)
        size = 0
        while (field := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = field.partition(b":")
            size = int(value) if name.lower() == b"content-length" else size
        await reader.readexactly(size)
        return int(line.split()[1])

    for _ in range(3):
        writer.write(get)
        assert await status() == 200
        writer.write(post)
        assert await status() in {404, 405}
    writer.close()


class Members:
    """Strangers that record which of them were dropped."""

    def __init__(self, limit: int) -> None:
        self.strangers = Strangers(limit)
        self.dropped: list[int] = []
        self.all: list[Stranger] = []

    def enter(self, address: str) -> None:
        number = len(self.all)
        note: Callable[[], None] = lambda: self.dropped.append(number)  # noqa: E731
        self.all.append(self.strangers.enter(address, note))


def test_the_address_with_the_most_bytes_loses_its_oldest_connection() -> None:
    members = Members(100)
    for address in ("flood", "other", "flood", "flood"):
        members.enter(address)
    assert members.all[0].received(40)
    assert members.all[1].received(30)
    assert members.all[2].received(30)
    assert members.all[3].received(30)
    assert members.dropped == [0]
    assert not members.all[1].received(90), "it holds the most now"
    assert members.dropped == [0, 1]
    assert members.strangers.statistics().bytes == 60


steps = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.booleans()),
    max_size=60,
)


@given(steps)
def test_the_sum_is_always_exact(taken: list[tuple[str, int, bool]]) -> None:
    members = Members(100)
    for number, (address, size, leaves) in enumerate(taken):
        if number % 3 == 0:
            members.enter(address)
        one = members.all[size % len(members.all)]
        stays = one.received(size)
        assert stays or members.all.index(one) in members.dropped
        if leaves:
            one.leave()
        assert members.strangers.statistics().bytes == sum(each.bytes for each in members.all) <= 100
    for one in members.all:
        one.leave()
    assert members.strangers.statistics().bytes == 0
    assert members.strangers.statistics().connections == 0
