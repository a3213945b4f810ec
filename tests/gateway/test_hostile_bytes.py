"""Garbage at every listener while honest clients work: these notice nothing, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import struct
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import aiohttp
from proton import Message
from proton.utils import BlockingConnection

from tests.support.amqp import ThreadedSender
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient
from tests.support.waiting import wait_until

SEED = 20261121
DURATION_S = 8.0
ENOUGH = 50  # attacks on each listener, and answers to each honest client
ATTACKERS = 3  # per listener, at the same time
SLACK = 8  # descriptors, for new connections to Kafka, which stay; a leak would be one for each of thousands of attacks
GROWTH_KIB = 48 * 1024  # resident memory for arenas and caches; a leak per connection would be more
HEADERS = {"Content-Type": "application/vnd.kafka.json.v2+json"}
TELLING = (0x00, 0x01, 0x7F, 0x80, 0xFE, 0xFF)  # lengths, flags and type codes at their limits


class Health(NamedTuple):
    """The numbers in which a leak would show."""

    descriptors: int
    resident_kib: int


def health(pid: int) -> Health:
    resident = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert resident is not None
    return Health(len(list(Path(f"/proc/{pid}/fd").iterdir())), int(resident[1]))


# real clients' bytes, to be damaged


class Relay:
    """A relay between a client and the gateway that records the client's bytes."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.said = bytearray()
        self._target = target
        self._server: asyncio.Server

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._server.sockets[0].getsockname()
        return host, port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._copy(reader, far_writer, self.said))
            group.create_task(self._copy(far_reader, writer, bytearray()))

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                kept += data
                writer.write(data)
        writer.close()


async def record_mqtt(relay: Relay, topic: str, transport: str = "tcp") -> None:
    client = await PahoClient(relay.address, transport=transport).connect()
    await client.subscribe(f"{topic}/#")
    for number in range(3):
        await client.publish(f"{topic}/{number}", b"recorded")
    await wait_until(lambda: len(client.messages) == 3)
    await client.close()


async def record_mqtt_websocket(relay: Relay, topic: str) -> None:
    await record_mqtt(relay, topic, "websockets")


async def record_amqp(relay: Relay, topic: str) -> None:
    def work() -> None:
        connection = BlockingConnection("amqp://{}:{}".format(*relay.address), timeout=60)
        receiver = connection.create_receiver(topic, credit=10)
        sender = connection.create_sender(topic)
        for number in range(3):
            sender.send(Message(body=b"recorded", properties={"number": number}))
        receiver.receive(timeout=60)
        receiver.accept()
        connection.close()

    await asyncio.to_thread(work)


async def record_http(relay: Relay, topic: str) -> None:
    url = "http://{}:{}".format(*relay.address)
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        for _ in range(2):
            body = {"records": [{"key": "k", "value": {"a": 1}}, {"value": "text", "partition": 0}]}
            async with session.post(f"{url}/topics/{topic}", json=body) as response:
                assert response.status == 200
        async with session.get(f"{url}/topics/{topic}") as response:
            assert response.status == 200


RECORDERS: dict[str, Callable[[Relay, str], Awaitable[None]]] = {
    "mqtt": record_mqtt,
    "mqtt_websocket": record_mqtt_websocket,
    "amqp": record_amqp,
    "http": record_http,
}


# damage


def damaged(said: bytes, rng: random.Random) -> bytes:
    """Return the conversation with a few faults, or only noise, or noise after a valid start."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 2000))
    if kind == 1:
        return said[: rng.randrange(len(said))] + rng.randbytes(rng.randrange(1, 500))
    data = bytearray(said)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        at = rng.randrange(len(data))
        what = rng.randrange(5)
        if what == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            data[at] = rng.choice(TELLING)
        elif what == 2:
            del data[at : at + rng.randrange(1, 9)]
        elif what == 3:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
        else:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        if not data:
            break
    return bytes(data)


async def attack(address: tuple[str, int], data: bytes, rng: random.Random) -> None:
    """Open one hostile connection and end it in a random way."""
    with contextlib.suppress(OSError, TimeoutError):
        reader, writer = await asyncio.open_connection(*address)
        try:
            cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(4)))
            for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                writer.write(data[start:end])
                await writer.drain()
            ending = rng.randrange(4)
            if ending == 0 and writer.can_write_eof():
                writer.write_eof()
            if ending <= 1:
                await asyncio.wait_for(reader.read(), 0.1)
            elif ending == 2:  # a reset instead of a close
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            writer.transport.abort()


# honest clients


class Honest:
    """One client of each protocol that publishes and waits, again and again, on a connection that must not break."""

    def __init__(self, gateway: GatewayProcess, topic: str) -> None:
        self.done = dict.fromkeys(RECORDERS, 0)
        self.slowest_s = dict.fromkeys(RECORDERS, 0.0)
        self.stopping = False
        self._gateway = gateway
        self._topic = topic
        self._mqtt = PahoClient(gateway.address("mqtt"), client_id=f"honest-{uuid.uuid4().hex}")
        self._websocket = PahoClient(gateway.address("mqtt_websocket"), transport="websockets")
        self._amqp = ThreadedSender(gateway.addresses["amqp"], topic)

    async def run(self) -> None:
        await self._mqtt.connect()
        await self._websocket.connect()
        await self._amqp.connect()
        async with (
            aiohttp.ClientSession(headers=HEADERS, connector=aiohttp.TCPConnector(limit=1)) as session,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self._repeat("mqtt", lambda: self._mqtt.publish(f"{self._topic}/honest"), 0))
            group.create_task(self._repeat("mqtt_websocket", lambda: self._websocket.publish(f"{self._topic}/w"), 0))
            group.create_task(self._repeat("amqp", lambda: self._amqp.send(b"honest"), "ACCEPTED"))
            group.create_task(self._repeat("http", lambda: self._post(session), 200))
        for client in (self._mqtt, self._websocket):
            assert client.disconnected is None
            await client.close()
        await self._amqp.close()

    async def _post(self, session: aiohttp.ClientSession) -> int:
        url = f"http://{self._gateway.addresses['http']}/topics/{self._topic}"
        async with session.post(url, json={"records": [{"value": 1}]}) as response:
            answer = await response.json(content_type=None)
            return response.status if "error_code" not in answer["offsets"][0] else -1

    async def _repeat(self, name: str, publish: Callable[[], Awaitable[object]], expected: object) -> None:
        loop = asyncio.get_running_loop()
        while not self.stopping:
            began = loop.time()
            assert await publish() == expected, name
            self.slowest_s[name] = max(self.slowest_s[name], loop.time() - began)
            self.done[name] += 1


async def test_hostile_bytes_disturb_no_other_client_and_leave_nothing_behind(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess], new_topic: Callable[..., Awaitable[str]]
) -> None:
    gateway = await new_gateway(
        bootstrap, "--mqtt-websocket", "127.0.0.1:0", config="[kafka]\ncreate_topics = false\n"
    ).start()
    topic = await new_topic()
    said: dict[str, bytes] = {}
    for name, record in RECORDERS.items():
        async with Relay(gateway.address(name)) as relay:
            await record(relay, topic)
            said[name] = bytes(relay.said)
    honest = Honest(gateway, topic)
    rng = random.Random(SEED)
    attacks = dict.fromkeys(RECORDERS, 0)
    loop = asyncio.get_running_loop()

    async def attacker(name: str, own: random.Random, until: float) -> None:
        while loop.time() < until:
            await attack(gateway.address(name), damaged(said[name], own), own)
            attacks[name] += 1

    async def storm(duration_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            for name in RECORDERS:
                for _ in range(ATTACKERS):
                    own = random.Random(rng.random())
                    group.create_task(attacker(name, own, loop.time() + duration_s))

    async with asyncio.TaskGroup() as group:
        working = group.create_task(honest.run())
        await wait_until(lambda: min(honest.done.values()) >= 1)
        await storm(1.0)  # fills caches and opens the connections to Kafka
        await wait_until(lambda: settled(gateway, len(RECORDERS)))
        before = health(gateway.pid)
        await storm(DURATION_S)
        while min(*attacks.values(), *honest.done.values()) < ENOUGH:  # on a busy machine
            await storm(1.0)
        await wait_until(lambda: health(gateway.pid).descriptors <= before.descriptors + SLACK)
        after = health(gateway.pid)
        honest.stopping = True
        await working
    print(f"attacks {attacks}, honest {honest.done}, slowest {honest.slowest_s}, {before} -> {after}")
    assert min(attacks.values()) >= ENOUGH
    assert min(honest.done.values()) >= ENOUGH
    assert max(honest.slowest_s.values()) < 15
    assert after.resident_kib - before.resident_kib < GROWTH_KIB
    said_itself = gateway.log.read_text()
    assert not re.search(r'Traceback|"exception"|"level": "(error|critical)"', said_itself), said_itself[-3000:]
    assert await gateway.stop() == 0


def settled(gateway: GatewayProcess, connections: int) -> bool:
    """Return whether only this number of clients is connected to the listeners."""
    ports = {gateway.address(name)[1] for name in RECORDERS}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established = [row for row in rows if row[3] == "01" and int(row[1].rpartition(":")[2], 16) in ports]
    return len(established) == connections
