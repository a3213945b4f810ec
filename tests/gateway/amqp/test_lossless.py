"""AMQP -> Kafka -> AMQP through a running gateway: messages of every shape come back byte for byte."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator

from aiokafka import AIOKafkaConsumer
from hypothesis import HealthCheck, Phase, given, settings

from loadtest.clients.amqp_wire import (
    ACCEPTED,
    ATTACH,
    DISPOSITION,
    FLOW,
    GREETING,
    SASL_OUTCOME,
    TRANSFER,
    Splitter,
    accept,
    attach_receiver,
    attach_sender,
    credit,
    opening,
    read_value,
    transfer,
)
from mapping.amqp.outgoing import COORDINATE_NAMES
from protocols.amqp.primitives import compound, decode, skip
from protocols.amqp.sections import HEADER, MESSAGE_ANNOTATIONS, scan
from tests.support.amqp_messages import messages_of
from tests.support.gateway import GatewayProcess

MESSAGES = 300
WAIT_S = 60
MORE = 5  # the place of the field in a transfer


def corpus(now_ms: int) -> list[tuple[bytes, ...]]:
    """The sections of `MESSAGES` messages, the same in every run except for their times."""
    found: list[tuple[bytes, ...]] = []

    @settings(
        max_examples=MESSAGES, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(messages_of(now_ms, "anonymous"))
    def collect(parts: tuple[bytes, ...]) -> None:
        found.append(parts)

    collect()
    return found


class Peer:
    """One link on one connection; the test writes and reads its frames, so that it controls every byte.

    `limit` is how many deliveries may be sent, by the gateway's credit.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._splitter = Splitter()
        self._frames: Iterator[bytes] = iter(())
        self.limit = 0

    @classmethod
    async def attached(cls, address: tuple[str, int], attach: bytes, until: int) -> Peer:
        peer = cls(*await asyncio.open_connection(*address))
        peer.writer.write(GREETING)
        await peer.frame(SASL_OUTCOME)
        peer.writer.write(opening("lossless") + attach)
        await peer.frame(until)
        return peer

    async def frame(self, *wanted: int) -> tuple[list, bytes]:
        """The next frame of these; its fields and what follows them."""
        while True:
            for body in self._frames:
                (code, fields), at = read_value(body, 0)
                assert code < 0x16 or code >= 0x40, (hex(code), fields)
                if code == FLOW and len(fields) > 6 and fields[4] is not None:
                    self.limit = (fields[5] or 0) + (fields[6] or 0)
                if code in wanted:
                    return fields, body[at:]
            data = await asyncio.wait_for(self._reader.read(1 << 16), WAIT_S)
            assert data, "the gateway has closed the connection"
            self._frames = self._splitter.feed(data)


async def send(address: tuple[str, int], topic: str, messages: list[bytes]) -> None:
    """Send all, as credit allows; every one must be accepted."""
    peer = await Peer.attached(address, attach_sender("out", "lossless", topic), FLOW)
    sent = accepted = 0
    while accepted < len(messages):
        while sent < min(peer.limit, len(messages)):
            peer.writer.write(transfer(sent, b"tag-%d\x00\xff" % sent, messages[sent]))
            sent += 1
        fields, _ = await peer.frame(DISPOSITION, FLOW)
        if len(fields) > 4 and isinstance(fields[4], tuple):
            _, first, last, _, state, *_ = fields
            assert state[0] == ACCEPTED, (first, last, state)
            accepted += 1 if last is None else last - first + 1
    peer.writer.close()


async def receive(address: tuple[str, int], source: str, count: int) -> list[bytes]:
    peer = await Peer.attached(address, attach_receiver("in", "lossless", source), ATTACH)
    peer.writer.write(credit(0, 0, count))
    found: list[bytes] = []
    parts: list[bytes] = []
    while len(found) < count:
        fields, payload = await peer.frame(TRANSFER)
        parts.append(payload)
        if len(fields) <= MORE or not fields[MORE]:
            found.append(b"".join(parts))
            parts.clear()
    peer.writer.write(accept(0, count - 1))
    peer.writer.close()
    return found


def split(message: bytes) -> tuple[bytes, list[bytes], bytes]:
    """(header, encoded items of the message annotations, everything else) of a message."""
    header, rest, items = b"", b"", []
    for code, start, at, end in scan(message):
        if code == HEADER:
            header = message[start:end]
        elif code == MESSAGE_ANNOTATIONS:
            count, place, after = compound(message, at, end)
            for _ in range(count):
                behind = skip(message, place, after)
                items.append(message[place:behind])
                place = behind
        else:
            rest += message[start:end]
    return header, items, rest


async def test_messages_of_every_shape_come_back_byte_for_byte(
    gateway: GatewayProcess, bootstrap: str, new_topic: Callable[..., Awaitable[str]]
) -> None:
    topic = await new_topic(partitions=1)  # so they come in order
    sent = corpus(int(time.time() * 1000))
    assert len(sent) == MESSAGES
    address = gateway.address("amqp")
    await send(address, topic, [b"".join(parts) for parts in sent])
    came = await receive(address, f"{topic}/group.id/{topic}", MESSAGES)
    for parts, message in zip(sent, came, strict=True):
        head, notes, *rest = parts
        header, items, bare = split(message)
        assert bare == b"".join(rest)  # properties, application properties, body, footer
        own = split(notes)[1]
        assert items[: len(own)] == own
        names = [decode(item, 0, len(item))[0] for item in items[len(own) :: 2]]
        assert set(names) <= COORDINATE_NAMES
        if head and not any(code == 0x73 for code, *_ in scan(b"".join(rest))):
            assert header == head
    await check_values(bootstrap, topic, sent)


async def check_values(bootstrap: str, topic: str, sent: list[tuple[bytes, ...]]) -> None:
    """A Kafka client that does not know AMQP sees text as UTF-8, binaries unchanged, and the rest as JSON."""
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    kinds = dict.fromkeys(("one data", "text", "json", "null"), 0)
    try:
        for parts in sent:
            record = await asyncio.wait_for(consumer.getone(), WAIT_S)
            body = parts[4]
            sections = scan(body)
            headers = dict(record.headers)
            form = headers.get("amqp.body", b"")
            value = decode(body, sections[0][2], sections[0][3])[0] if len(sections) == 1 else None
            if len(sections) == 1 and sections[0][0] == 0x75:
                assert record.value == value
                kinds["one data"] += 1
            elif type(value) is str:
                assert record.value.decode() == value
                kinds["text"] += 1
            elif form.startswith(b"json:"):
                json.loads(record.value)
                kinds["json"] += 1
            elif form == b"v:null":
                assert record.value is None
                kinds["null"] += 1
    finally:
        await consumer.stop()
    assert min(kinds.values()) > 0, kinds
