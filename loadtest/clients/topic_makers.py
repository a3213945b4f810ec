"""Clients that use one new topic after the other, and report each result: "" if it could be used, else the error."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import struct
import threading
from collections.abc import Callable
from typing import Any, Final

import aiohttp
from proton.utils import BlockingConnection, LinkDetached

from loadtest.clients.mqtt_wire import Splitter, connect_packet, publish_packet, read_varint, subscribe_packet
from loadtest.gateway import GatewayProcess

PASSWORD: Final = "secret"
PATIENCE_S: Final = 120.0
CONNACK, PUBACK, SUBACK = 0x20, 0x40, 0x90
_JSON: Final = {"Content-Type": "application/vnd.kafka.json.v2+json"}

Answered = Callable[[str], bool]
"""Called with each result; returns False to stop."""
Names = Callable[[], str]


class MqttConnection:
    """One connection whose packets are awaited one by one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._splitter = Splitter()
        self._packets: list[tuple[int, bytes]] = []

    @classmethod
    async def connect(cls, gateway: GatewayProcess, client_id: str, user: str | None = None) -> MqttConnection:
        """Connect; ConnectionError if CONNECT is refused."""
        client = cls(*await asyncio.open_connection(*gateway.address("mqtt")))
        client.writer.write(connect_packet(client_id, user, PASSWORD if user else None))
        body = await client.expect(CONNACK)
        if body[1]:
            raise ConnectionRefusedError(f"CONNACK 0x{body[1]:02x}")
        return client

    async def expect(self, first: int) -> bytes:
        """Return the body of the next packet, which must have this first byte."""
        kind, body = await self.receive()
        if kind != first:
            raise ConnectionError(f"packet 0x{kind:02x} {body.hex()} and not 0x{first:02x}")
        return body

    async def receive(self) -> tuple[int, bytes]:
        """Return the next packet."""
        async with asyncio.timeout(PATIENCE_S):
            while not self._packets:
                data = await self._reader.read(65536)
                if not data:
                    raise ConnectionError("the gateway closed the connection")
                self._packets += self._splitter.feed(data)
        return self._packets.pop(0)


def reason(body: bytes) -> int:
    """Return the reason code in a PUBACK's body."""
    return body[2] if len(body) > 2 else 0


async def by_mqtt(gateway: GatewayProcess, user: str, names: Names, answered: Answered) -> None:
    """Publish at QoS 1 to new first levels."""
    client = await MqttConnection.connect(gateway, names(), user)
    while True:
        client.writer.write(publish_packet(f"{names()}/x", b"x", 1, 1))
        code = reason(await client.expect(PUBACK))
        if not answered(f"0x{code:02x}" if code else ""):
            break
    client.writer.close()


async def by_http(gateway: GatewayProcess, user: str, names: Names, answered: Answered) -> None:
    """Produce one record to each topic."""
    headers = {**_JSON, "Authorization": aiohttp.encode_basic_auth(user, PASSWORD)}
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(
        f"http://{gateway.addresses['http']}", headers=headers, timeout=timeout
    ) as session:
        more = True
        while more:
            async with session.post(f"/topics/{names()}", json={"records": [{"value": 1}]}) as response:
                more = answered("" if response.status == 200 else str(response.status))


async def by_amqp(gateway: GatewayProcess, user: str, names: Names, answered: Answered, *, receiver: bool) -> None:
    """Attach one link after the other with proton's blocking client in its own thread."""
    loop = asyncio.get_running_loop()
    ended = threading.Event()
    done: asyncio.Future[None] = loop.create_future()

    def report(condition: str) -> None:
        if not answered(condition):
            ended.set()

    def attach() -> None:
        connection = BlockingConnection(f"amqp://{user}:{PASSWORD}@{gateway.addresses['amqp']}", timeout=PATIENCE_S)
        make: Any = connection.create_receiver if receiver else connection.create_sender
        while not ended.is_set():
            condition = ""
            try:
                make(names()).close()
            except LinkDetached as detached:
                condition = str(detached.condition)
            loop.call_soon_threadsafe(report, condition)
        connection.close()

    def run() -> None:
        error: Exception | None = None
        try:
            attach()
        except Exception as problem:  # raised where it is awaited
            error = problem
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(functools.partial(_settle, done, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        await done
    finally:
        ended.set()


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


async def by_subscribing(gateway: GatewayProcess, user: str, names: Names, count: int) -> int:
    """Subscribe to `count` filters of missing topics in one SUBSCRIBE; return how many were granted."""
    client = await MqttConnection.connect(gateway, names(), user)
    client.writer.write(subscribe_packet(1, [(f"{names()}/#", 1) for _ in range(count)]))
    body = await client.expect(SUBACK)
    client.writer.close()
    return sum(1 for code in body[3 + body[2] :] if code < 0x80)


def payload_of(body: bytes) -> bytes:
    """Return the payload of a QoS 0 PUBLISH."""
    length, behind = read_varint(body, 2 + struct.unpack_from(">H", body)[0])
    return body[behind + length :]
