"""Receivers of every protocol on bare sockets; they read and acknowledge only when a test calls them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import uuid
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Final, Self

from loadtest.clients import amqp_wire, mqtt_wire
from tests.support.gateway import GatewayProcess
from tests.support.websocket import TEXT, frame, handshake, parse

NUMBER: Final = re.compile(rb"#(\d{6})#")
LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: (\d+)")
POSITION: Final = re.compile(rb"\r\nNext-Position: (\S+)")
WAIT_S: Final = 120
LITTLE: Final = 4096  # bytes of a receiver's buffers


def numbered(number: int, size: int) -> bytes:
    """Make a message that every protocol carries unchanged."""
    return b'"#%06d#%b"' % (number, b"x" * size)


async def connect_little(address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect with small buffers, which are full soon if nothing is read."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LITTLE)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, address)
    return await asyncio.open_connection(sock=own, limit=LITTLE)


class Receiver:
    """A receiver of a whole topic, or a member of a group.

    Attributes:
        numbers: the numbers of the messages received, in order.
        window: the maximum of messages in flight, in protocols that have one. None means as many as the socket takes.
    """

    protocol: ClassVar[str]
    lossless: ClassVar[bool] = True
    window: int | None

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.numbers: list[int] = []
        self._reader, self._writer = reader, writer
        self._rest = b""

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(
        cls, gateway: GatewayProcess, topic: str, group: str | None = None, window: int | None = None
    ) -> AsyncIterator[Self]:
        receiver = cls(*await connect_little(gateway.address(cls.protocol)))
        receiver.window = window
        try:
            async with asyncio.timeout(WAIT_S):
                await receiver._subscribe(topic, group)
            yield receiver
        finally:
            receiver.leave()

    @property
    def address(self) -> str:
        """The receiver's address, as the gateway sees it."""
        host, port = self._writer.get_extra_info("sockname")
        return f"{host}:{port}"

    def leave(self) -> None:
        """Abort the connection, without a close."""
        self._writer.transport.abort()

    async def read(self, count: int) -> list[int]:
        """Read and acknowledge until `count` messages have come; return all numbers."""
        async with asyncio.timeout(WAIT_S):
            while len(self.numbers) < count:
                self._received(await self._read_some())
        return self.numbers

    async def read_byte(self) -> None:
        """Read one byte and ignore it."""
        assert await self._reader.read(1)

    async def read_on(self) -> None:
        """Read and acknowledge forever."""
        while True:
            self._received(await self._read_some())

    async def _subscribe(self, topic: str, group: str | None) -> None:
        raise NotImplementedError

    async def _read_some(self) -> bytes:
        data = await self._reader.read(65536)
        assert data, f"{type(self).__name__}: the connection was closed"
        return data

    def _received(self, data: bytes) -> None:
        """Record the numbers in the received bytes, which may end anywhere."""
        data = self._rest + data
        found = list(NUMBER.finditer(data))
        self.numbers += [int(number[1]) for number in found]
        self._rest = data[max(found[-1].end() if found else 0, len(data) - 8) :]


class Mqtt(Receiver):
    """A subscriber at QoS 1; a group is a shared subscription."""

    protocol = "mqtt"
    qos = 1

    async def _subscribe(self, topic: str, group: str | None) -> None:
        self._packets = mqtt_wire.Splitter()
        self._answers: list[int] = []
        self._writer.write(
            mqtt_wire.connect_packet(f"c-{uuid.uuid4().hex[:8]}", keep_alive_s=0, receive_maximum=self.window)
        )
        share = "" if group is None else f"$share/{group}/"
        self._writer.write(mqtt_wire.subscribe_packet(1, [(f"{share}{topic}/#", self.qos)]))
        while 0x90 not in self._answers:  # messages may come before SUBACK (section 3.8.4)
            self._received(await self._read_some())

    def _received(self, data: bytes) -> None:
        super()._received(data)
        for first, body in self._packets.feed(data):
            if first >> 4 != 3:
                self._answers.append(first)
            elif first & 0x06:
                behind = 2 + int.from_bytes(body[:2], "big")
                self._writer.write(mqtt_wire.packet(0x40, body[behind : behind + 2]))


class MqttAtMostOnce(Mqtt):
    """A subscriber at QoS 0, which loses messages when its buffers are full."""

    qos = 0
    lossless = False


class Amqp(Receiver):
    """A link with credit for everything, which accepts each delivery."""

    protocol = "amqp"
    settled = False

    async def _subscribe(self, topic: str, group: str | None) -> None:
        self._accepted = 0
        frames = amqp_wire.Splitter()

        async def until(code: int) -> None:
            while not any(amqp_wire.read_value(body, 0)[0][0] == code for body in frames.feed(await self._read_some())):
                pass

        self._writer.write(amqp_wire.GREETING)
        await until(amqp_wire.SASL_OUTCOME)
        name = f"r-{uuid.uuid4().hex[:8]}"
        address = topic if group is None else f"{topic}/group.id/{group}"
        self._writer.write(amqp_wire.opening(name))
        self._writer.write(amqp_wire.attach_receiver(name, name, address, settled=self.settled))
        await until(amqp_wire.ATTACH)
        self._writer.write(amqp_wire.credit(0, 0, self.window or 100_000))

    def _received(self, data: bytes) -> None:
        super()._received(data)
        if len(self.numbers) > self._accepted and not self.settled:
            self._writer.write(amqp_wire.accept(self._accepted, len(self.numbers) - 1))
            self._accepted = len(self.numbers)


class AmqpSettled(Amqp):
    """A link whose deliveries are sent settled."""

    settled = True


class Events(Receiver):
    """Server-sent events."""

    protocol = "http"

    async def _subscribe(self, topic: str, group: str | None) -> None:
        query = "" if group is None else f"?group={group}"
        self._writer.write(f"GET /topics/{topic}/stream{query} HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n".encode())
        assert (await self._reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


class Live(Receiver):
    """A WebSocket."""

    protocol = "http"

    async def _subscribe(self, topic: str, group: str | None) -> None:
        self._frames = b""
        self._subscribed = False
        self._writer.write(handshake("/stream", Sec_WebSocket_Protocol="trivium.v1"))
        assert (await self._reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        wanted = {"topic": topic, "group": group, "credit": self.window}
        self._say(type="subscribe", **{name: value for name, value in wanted.items() if value is not None})
        while not self._subscribed:
            self._received(await self._read_some())

    def _say(self, **fields: object) -> None:
        self._writer.write(frame(json.dumps({"id": "s", **fields}).encode(), TEXT))

    def _received(self, data: bytes) -> None:
        super()._received(data)
        frames, self._frames = parse(self._frames + data)
        said = [json.loads(payload) for opcode, payload in frames if opcode == TEXT]
        self._subscribed = self._subscribed or any(one["type"] == "subscribed" for one in said)
        deliveries = [one["delivery"] for one in said if "delivery" in one]
        if deliveries:
            self._say(type="ack", deliveries=deliveries)


class Polling(Receiver):
    """A receiver that polls: it sends the next request when an answer is complete.

    It starts at the first record; message 0, which created the topic, is not recorded.
    """

    protocol = "http"
    ahead: ClassVar[int] = 1  # unanswered requests

    async def _request(self, method: str, path: str, content: dict[str, object]) -> Any:
        """Send a request and wait for its answer."""
        body = json.dumps(content).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/vnd.kafka.v2+json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        found = await self._reader.readuntil(b"\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 20"), found
        length = LENGTH.search(found)
        return json.loads(await self._reader.readexactly(int(length[1])) or b"null") if length else None

    def _begin(self) -> None:
        self._answer = bytearray()
        for _ in range(self.ahead):
            self._poll(b"")

    def _poll(self, head: bytes) -> None:
        """Send the next request; `head` is the header of the previous answer."""
        raise NotImplementedError

    def _received(self, data: bytes) -> None:
        super()._received(data)
        self.numbers = [number for number in self.numbers if number]
        self._answer += data
        while (end := self._answer.find(b"\r\n\r\n") + 4) > 3:
            head = bytes(self._answer[:end])
            assert head.startswith(b"HTTP/1.1 200 "), head
            length = LENGTH.search(head)
            assert length
            if len(self._answer) < end + int(length[1]):
                break
            del self._answer[: end + int(length[1])]
            self._poll(head)


class Poll(Polling):
    """A consumer instance that commits nothing, in a new group unless one is given.

    Attributes:
        path: the instance's path.
    """

    max_bytes: ClassVar[int] = 64 * 1024 * 1024

    async def _subscribe(self, topic: str, group: str | None) -> None:
        group = group or f"g-{uuid.uuid4().hex[:8]}"
        settings: dict[str, object] = {"format": "json", "auto.offset.reset": "earliest", "enable.auto.commit": False}
        made = await self._request("POST", f"/consumers/{group}", settings)
        self.path = f"/consumers/{group}/instances/{made['instance_id']}"
        await self._request("POST", f"{self.path}/subscription", {"topics": [topic]})
        self._begin()

    def _poll(self, head: bytes) -> None:
        accept = "Accept: application/vnd.kafka.json.v2+json"
        query = f"timeout=60000&max_bytes={self.max_bytes}"
        self._writer.write(f"GET {self.path}/records?{query} HTTP/1.1\r\nHost: x\r\n{accept}\r\n\r\n".encode())


class PollAhead(Poll):
    """A consumer that sends a hundred requests before it reads an answer."""

    ahead = 100


class Pages(Polling):
    """Reads pages of the log, one after the other."""

    async def _subscribe(self, topic: str, group: str | None) -> None:
        assert group is None
        self._path = f"/topics/{topic}/records?wait=60000&format=json"
        self._begin()

    def _poll(self, head: bytes) -> None:
        place = POSITION.search(head)
        start = place[1].decode() if place and self.ahead == 1 else "beginning"
        self._writer.write(f"GET {self._path}&from={start} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


class FirstPage(Pages):
    """Requests the same page again and again, a hundred requests ahead."""

    lossless = False
    ahead = 100


class Sender:
    """An MQTT client that publishes numbered messages at QoS 1."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, topic: str, size: int) -> None:
        self._reader, self._writer = reader, writer
        self._topic, self._size = topic, size
        self._packets = mqtt_wire.Splitter()
        self._sent, self._answers = 0, -1  # -1 for CONNACK, which is counted too

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, gateway: GatewayProcess, topic: str, size: int) -> AsyncIterator[Self]:
        """Publish messages of `size` bytes to `topic`."""
        sender = cls(*await asyncio.open_connection(*gateway.address("mqtt")), topic, size)
        sender._writer.write(mqtt_wire.connect_packet(f"p-{uuid.uuid4().hex[:8]}", keep_alive_s=0))
        try:
            yield sender
        finally:
            sender._writer.transport.abort()

    async def publish(self, count: int) -> None:
        """Publish `count` more, at most a hundred unacknowledged, and wait until all are acknowledged."""
        for _ in range(count):
            self._writer.write(
                mqtt_wire.publish_packet(f"{self._topic}/x", numbered(self._sent, self._size), 1, self._sent + 1)
            )
            self._sent += 1
            await self._acknowledged(self._sent - 100)
        await self._acknowledged(self._sent)

    async def _acknowledged(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self._answers < count:
                self._answers += len(self._packets.feed(await self._reader.read(65536)))
