"""Clients for tests: paho, driven from an event loop, and a client that sends and receives single packets."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from typing import Any, TypeVar

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from protocols.mqtt import packets
from protocols.mqtt.decoding import decode_packet
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import NONE, Properties
from tests.support.mqtt_packets import encode_packet
from tests.support.waiting import wait_until

T = TypeVar("T")
A = TypeVar("A", bound="packets.Acknowledgement | packets.Suback | packets.Unsuback")


class PahoClient:
    """One connection, without reconnects."""

    def __init__(
        self, address: tuple[str, int], *, user: str | None = None, password: str = "", **options: Any
    ) -> None:
        self.connack: Any = None
        self.disconnected: Any = None
        self.messages: list[paho.MQTTMessage] = []
        self.subacks: dict[int, list[Any]] = {}
        self.pubacks: dict[int, Any] = {}
        self._address = address
        options.setdefault("protocol", paho.MQTTv5)
        options.setdefault("client_id", f"c-{uuid.uuid4().hex[:10]}")
        self.paho = paho.Client(CallbackAPIVersion.VERSION2, reconnect_on_failure=False, **options)
        if user is not None:
            self.paho.username_pw_set(user, password)
        self.paho.on_connect = lambda _c, _d, _f, reason, _p: setattr(self, "connack", reason)
        self.paho.on_disconnect = lambda _c, _d, _f, reason, _p: setattr(self, "disconnected", reason)
        self.paho.on_message = lambda _c, _d, message: self.messages.append(message)
        self.paho.on_subscribe = lambda _c, _d, mid, codes, _p: self.subacks.update({mid: codes})
        self.paho.on_publish = lambda _c, _d, mid, reason, _p: self.pubacks.update({mid: reason})

    async def connect(self, **options: Any) -> PahoClient:
        """Connect and wait for CONNACK or the end of the connection."""
        await asyncio.to_thread(self.paho.connect, *self._address, **options)
        self.paho.loop_start()
        await wait_until(lambda: self.connack is not None or self.disconnected is not None)
        return self

    def send(self, topic: str, payload: bytes = b"", qos: int = 1) -> int:
        """Publish without waiting; return the packet identifier."""
        return self.paho.publish(topic, payload, qos).mid

    async def publish(self, topic: str, payload: bytes = b"") -> int:
        """Publish with QoS 1 and wait; return PUBACK's reason code."""
        mid = self.send(topic, payload)
        await wait_until(lambda: mid in self.pubacks or self.disconnected is not None)
        return self.pubacks[mid].value

    async def subscribe(self, topic_filter: str, qos: int = 1) -> int:
        """Subscribe and wait; return SUBACK's reason code."""
        _, mid = self.paho.subscribe(topic_filter, qos)
        assert mid is not None
        # The subscription `#` has to find the end of every topic of the whole run.
        await wait_until(lambda: mid in self.subacks or self.disconnected is not None, 90)
        return self.subacks[mid][0].value

    async def close(self) -> None:
        """Disconnect and end the thread."""
        self.paho.disconnect()
        await asyncio.to_thread(self.paho.loop_stop)


class RawClient:
    """One connection, packet by packet; it sends any packet, legal or not, and answers nothing by itself.

    It decodes packets with the gateway's decoder, which has its own tests against bytes typed by hand.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, version: Version) -> None:
        self.version = version
        self.connack: packets.Connack = packets.Connack()
        self._reader = reader
        self._writer = writer
        self._next_id = 0
        self._aside: deque[packets.Packet] = deque()

    @classmethod
    async def open(cls, address: tuple[str, int], version: int = 5, local_address: str | None = None) -> RawClient:
        """Connect the socket, without sending CONNECT."""
        local = None if local_address is None else (local_address, 0)
        reader, writer = await asyncio.open_connection(*address, local_addr=local)
        return cls(reader, writer, Version(version))

    @classmethod
    async def connect(cls, address: tuple[str, int], client_id: str | None = None, **options: Any) -> RawClient:
        """Connect and store CONNACK in `connack`; `options` are fields of `packets.Connect` and its properties."""
        client = await cls.open(address, options.pop("version", 5), options.pop("local_address", None))
        names = packets.Connect.__struct_fields__
        fields = {name: options.pop(name) for name in list(options) if name in names}
        if options:
            fields["properties"] = Properties(**options)
        if client_id is None:
            client_id = f"r-{uuid.uuid4().hex[:12]}"
        client.send(packets.Connect(client.version, client_id, **fields))
        try:
            client.connack = await client.expect(packets.Connack)
        except BaseException:
            client.drop()
            raise
        return client

    @property
    def granted(self) -> Properties:
        """CONNACK's properties."""
        return self.connack.properties or NONE

    @property
    def local(self) -> tuple[str, int]:
        """Our end's address and port."""
        name: tuple[str, int] = self._writer.get_extra_info("sockname")
        return name

    def send(self, packet: packets.Packet) -> None:
        """Send a packet."""
        self.send_bytes(encode_packet(packet, self.version))

    def send_bytes(self, data: bytes) -> None:
        """Send any bytes."""
        self._writer.write(data)

    def new_id(self) -> int:
        """Return an unused packet identifier."""
        self._next_id += 1
        return self._next_id

    async def receive(self, timeout: float = 60) -> packets.Packet:
        """Wait for the next packet; raise EOFError if the server has closed."""
        if self._aside:
            return self._aside.popleft()
        return await self._read(timeout)

    async def _read(self, timeout: float) -> packets.Packet:
        try:
            async with asyncio.timeout(timeout):
                head = await self._reader.readexactly(2)
                length, shift = head[1] & 0x7F, 7
                while head[-1] & 0x80:
                    head += await self._reader.readexactly(1)
                    length |= (head[-1] & 0x7F) << shift
                    shift += 7
                body = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            raise EOFError(f"the server has closed the connection; unread: {self._aside}") from None
        return decode_packet(head[0], body, self.version)

    async def expect(self, kind: type[T], timeout: float = 60) -> T:
        """Wait for the next packet, which must be of this kind."""
        packet = await self.receive(timeout)
        assert isinstance(packet, kind), packet
        return packet

    async def answer(self, kind: type[A], packet_id: int, timeout: float = 60) -> A:
        """Wait for the answer to a packet; earlier packets are kept for `receive`."""
        while True:
            packet = await self._read(timeout)
            if isinstance(packet, kind) and packet.packet_id == packet_id:
                return packet
            self._aside.append(packet)

    async def expect_end(self) -> list[packets.Packet]:
        """Wait until the server closes; return the packets before that."""
        said = []
        try:
            while True:
                said.append(await self.receive())
        except EOFError:
            return said

    async def subscribe(self, *filters: str | packets.Subscription, **properties: Any) -> packets.Suback:
        """Subscribe, at QoS 2 unless the filter says otherwise, and wait for SUBACK."""
        subscriptions = tuple(
            one if isinstance(one, packets.Subscription) else packets.Subscription(one, 2) for one in filters
        )
        self.send(packets.Subscribe(self.new_id(), subscriptions, Properties(**properties) if properties else None))
        return await self.answer(packets.Suback, self._next_id)

    async def unsubscribe(self, *filters: str) -> packets.Unsuback:
        """Unsubscribe and wait for UNSUBACK."""
        self.send(packets.Unsubscribe(self.new_id(), filters))
        return await self.answer(packets.Unsuback, self._next_id)

    async def publish(self, topic: str, payload: bytes = b"", qos: int = 1, retain: bool = False, **more: Any) -> int:
        """Publish, complete the exchange, and return the first answer's reason code."""
        packet_id = self.new_id() if qos else 0
        properties = Properties(**more) if more else None
        self.send(packets.Publish(topic, payload, qos, retain, False, packet_id, properties))
        if not qos:
            return 0
        if qos == 1:
            return (await self.answer(packets.Puback, packet_id)).reason_code
        pubrec = await self.answer(packets.Pubrec, packet_id)
        if pubrec.reason_code < 0x80:
            self.send(packets.Pubrel(packet_id))
            assert await self.answer(packets.Pubcomp, packet_id) == packets.Pubcomp(packet_id)
        return pubrec.reason_code

    async def message(self, timeout: float = 60) -> packets.Publish:
        """Wait for the next packet, which must be a message, and complete its acknowledgement."""
        message = await self.expect(packets.Publish, timeout)
        if message.qos == 1:
            self.send(packets.Puback(message.packet_id))
        elif message.qos == 2:
            self.send(packets.Pubrec(message.packet_id))
            assert await self.answer(packets.Pubrel, message.packet_id) == packets.Pubrel(message.packet_id)
            self.send(packets.Pubcomp(message.packet_id))
        return message

    async def messages(self, count: int) -> list[packets.Publish]:
        """Wait for `count` messages, and acknowledge each."""
        return [await self.message() for _ in range(count)]

    async def ping(self) -> None:
        """Check with PINGREQ that no other packet is in flight."""
        self.send(packets.Pingreq())
        await self.expect(packets.Pingresp)

    async def disconnect(self, reason_code: int = 0, **properties: Any) -> None:
        """Disconnect and wait until the server has closed."""
        self.send(packets.Disconnect(reason_code, Properties(**properties) if properties else None))
        assert await self.expect_end() == []
        self._writer.close()

    def close_writing(self) -> None:
        """Half-close the connection: nothing more is sent, but packets are still read."""
        self._writer.write_eof()

    def drop(self) -> None:
        """Drop the connection without DISCONNECT, as a broken network does."""
        self._writer.transport.abort()
