"""A flood of wrong passwords delays no other client's login, in any protocol; excess logins get a "busy" answer."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from proton.utils import BlockingConnection
from pwdlib.hashers.argon2 import Argon2Hasher

from protocols.mqtt.decoding import decode_packet
from protocols.mqtt.packets import Connack, Connect, Version
from protocols.mqtt.reasons import ReasonCode
from tests.support.amqp import TIMEOUT
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.mqtt_packets import encode_packet
from tests.support.waiting import wait_until

STRANGER = "127.0.0.2"
FLOOD = 320  # the gateway admits 260 at a time
NAMES = ("ann", "bob", "eve")
CONFIG = """
[security]
allow_anonymous = false
password_file = "{path}"
"""


@pytest.fixture(scope="module")
async def gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    """A gateway whose password checks take about 200 ms, so that a flood arrives faster than it is checked."""
    directory = tmp_path_factory.mktemp("flood")
    path = directory / "passwords"
    hasher = Argon2Hasher(time_cost=24, memory_cost=16384, parallelism=1)
    path.write_text("".join(f"{name}:{hasher.hash(name)}\n" for name in NAMES))
    process = await GatewayProcess(directory, bootstrap, config=CONFIG.format(path=path)).start()
    yield process
    assert await process.stop() == 0


class Flood:
    """Simultaneous logins with different wrong passwords from another address; `answers` has their CONNACKs."""

    def __init__(self, *, ceaseless: bool) -> None:
        self.answers: list[int] = []
        self.ceaseless = ceaseless
        self.over = False
        self.writers: list[asyncio.StreamWriter] = []

    async def attack(self, address: tuple[str, int], number: int) -> None:
        """Try one password, or one after the other."""
        await self._attempt(address, f"{number}")
        while self.ceaseless:
            await self._attempt(address, f"{number}-{len(self.answers)}")

    async def _attempt(self, address: tuple[str, int], guess: str) -> None:
        reader, writer = await asyncio.open_connection(*address, local_addr=(STRANGER, 0))
        self.writers.append(writer)
        connect = Connect(Version.V5, f"flood-{guess}", username="ann", password=guess.encode())
        try:
            if self.over:
                return
            writer.write(encode_packet(connect, Version.V5))
            head = await reader.readexactly(2)
            packet = decode_packet(head[0], await reader.readexactly(head[1]), Version.V5)
            if isinstance(packet, Connack):
                self.answers.append(packet.reason_code)
        except (asyncio.IncompleteReadError, ConnectionError):
            if not self.over:
                raise
        finally:
            writer.close()

    def end(self) -> None:
        """Stop without cancelling: a task that is cancelled while it connects leaves its socket open."""
        self.ceaseless, self.over = False, True
        for writer in self.writers:
            writer.close()


@asynccontextmanager
async def flood(address: tuple[str, int], *, ceaseless: bool = False) -> AsyncIterator[Flood]:
    made = Flood(ceaseless=ceaseless)
    async with asyncio.TaskGroup() as group:
        for number in range(FLOOD):
            group.create_task(made.attack(address, number))
        await wait_until(lambda: len(made.writers) >= FLOOD and ReasonCode.SERVER_BUSY in made.answers)
        yield made
        made.end()


async def by_mqtt(gateway: GatewayProcess) -> None:
    client = await RawClient.connect(gateway.address("mqtt"), username="ann", password=b"ann")
    assert client.connack.reason_code == 0
    client.drop()


async def by_amqp(gateway: GatewayProcess) -> None:
    host, port = gateway.address("amqp")
    options = {"user": "bob", "password": "bob", "allowed_mechs": "PLAIN", "allow_insecure_mechs": True}
    await asyncio.to_thread(
        lambda: BlockingConnection(f"amqp://{host}:{port}", timeout=TIMEOUT, **options).close()  # type: ignore[arg-type]
    )


async def by_http(gateway: GatewayProcess) -> None:
    host, port = gateway.address("http")
    fields = {"Authorization": f"Basic {base64.b64encode(b'eve:eve').decode()}"}
    async with aiohttp.ClientSession() as http, http.get(f"http://{host}:{port}/topics", headers=fields) as answer:
        assert answer.status == 200


async def waiting(gateway: GatewayProcess) -> float:
    """Return the number of logins that wait for their turn."""
    host, port = gateway.address("management")
    async with aiohttp.ClientSession() as http, http.get(f"http://{host}:{port}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("trivium_authentication_waiting"))


@pytest.mark.parametrize("log_in", [by_mqtt, by_amqp, by_http])
async def test_others_log_in_during_a_flood(
    gateway: GatewayProcess, log_in: Callable[[GatewayProcess], Awaitable[None]]
) -> None:
    async with flood(gateway.address("mqtt")) as stranger:
        await log_in(gateway)
        assert await waiting(gateway) > FLOOD / 2, "the flood was over before"
        assert set(stranger.answers) <= {ReasonCode.SERVER_BUSY, ReasonCode.BAD_USER_NAME_OR_PASSWORD}


async def http_says(gateway: GatewayProcess) -> bool:
    host, port = gateway.address("http")
    fields = {"Authorization": f"Basic {base64.b64encode(b'eve:wrong').decode()}"}
    url, connector = f"http://{host}:{port}/topics", aiohttp.TCPConnector(local_addr=(STRANGER, 0))
    async with aiohttp.ClientSession(connector=connector) as http, http.get(url, headers=fields) as answer:
        return answer.status == 503 and "Retry-After" in answer.headers


async def amqp_says(gateway: GatewayProcess) -> bool:
    reader, writer = await asyncio.open_connection(*gateway.address("amqp"), local_addr=(STRANGER, 0))
    response = b"\0bob\0wrong"
    arguments = b"\xa3\x05PLAIN\xa0" + bytes([len(response)]) + response
    init = b"\x00\x53\x41\xc0" + bytes([len(arguments) + 1, 2]) + arguments
    writer.write(b"AMQP\x03\x01\x00\x00" + (len(init) + 8).to_bytes(4, "big") + b"\x02\x01\x00\x00" + init)
    try:
        await reader.readuntil(b"\x00\x53\x44")
        return (await reader.readexactly(5)).endswith(b"\x50\x04")  # sasl-code sys-temp (part 5.3.3.6)
    finally:
        writer.close()


async def mqtt_3_says(gateway: GatewayProcess) -> bool:
    reader, writer = await asyncio.open_connection(*gateway.address("mqtt"), local_addr=(STRANGER, 0))
    writer.write(encode_packet(Connect(Version.V311, "o", username="ann", password=b"wrong"), Version.V311))
    try:
        return await reader.readexactly(4) == b"\x20\x02\x00\x03"
    finally:
        writer.close()


async def is_busy(gateway: GatewayProcess, says: Callable[[GatewayProcess], Awaitable[bool]]) -> bool:
    """Return whether a login gets a "busy" answer; one that is admitted may hit the protocol's time limit."""
    try:
        return await says(gateway)
    except (asyncio.IncompleteReadError, OSError, aiohttp.ClientError):
        return False


@pytest.mark.parametrize("says_busy", [http_says, amqp_says, mqtt_3_says])
async def test_each_protocol_answers_busy_in_its_own_way(
    gateway: GatewayProcess, says_busy: Callable[[GatewayProcess], Awaitable[bool]]
) -> None:
    """The flooding address gets "busy", not "wrong password". A few logins may be admitted, but not all."""
    async with flood(gateway.address("mqtt"), ceaseless=True):
        attempts = {asyncio.ensure_future(is_busy(gateway, says_busy)) for _ in range(8)}
        async with asyncio.timeout(3 * TIMEOUT):
            said = False
            while not said:
                done, attempts = await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)
                said = any(attempt.result() for attempt in done)
                attempts |= {asyncio.ensure_future(is_busy(gateway, says_busy)) for _ in done}
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)
