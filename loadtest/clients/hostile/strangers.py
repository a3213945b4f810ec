"""Hostile input of every kind, each at its own pace."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gzip
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import aiohttp
from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy

from loadtest.clients.mqtt_wire import connect_packet, publish_packet, subscribe_packet, text
from loadtest.clients.talk import PUBACK, SUBACK, MqttTalk
from loadtest.gateway import GatewayProcess

TOPIC: Final = "house"
BAD_LINES: Final = gzip.compress(b"1\n" * 100_000)
TIMEOUT_S: Final = 60.0
WILL_BYTES: Final = 8_000
PROPERTIES: Final = 5_000


class _Name(str):
    """A header's name of bytes that are not UTF-8, for aiokafka's builder."""

    def encode(self, *_: object) -> bytes:
        return b"caf\xe9"


def bad_batch(number: int) -> bytes:
    """Return a batch with a record that no strict reader takes: a header's name is not UTF-8, or there are too many."""
    builder = _DefaultRecordBatchBuilderPy(2, 0, 0, -1, -1, -1, 1 << 24)
    headers = [(_Name("x"), b"1")] if number % 2 else [(f"h{index}", b"1") for index in range(PROPERTIES)]
    builder.append(0, int(time.time() * 1000), b"k", b"bad", headers)
    return bytes(builder.build())


class Strangers:
    """Everything hostile, each kind at its own pace."""

    def __init__(self, gateway: GatewayProcess, kafka: AIOKafkaClient, http: aiohttp.ClientSession) -> None:
        self._mqtt = gateway.address("mqtt")
        self._kafka, self._http = kafka, http
        self._numbers = itertools.count()
        self.done: collections.Counter[str] = collections.Counter()
        self.kinds: dict[str, tuple[float, Callable[[], Awaitable[None]]]] = {
            "bad lines": (2.0, self._bad_lines),
            "bad records": (0.2, self._bad_record),
            "reconnecting floods": (0.1, self._flood),
            "sessions with wills": (0.05, self._will),
            "share names": (0.5, self._share),
            "many properties": (0.2, self._properties),
            "many headers": (0.5, self._headers),
        }
        """By name: the pause between two of a kind in seconds, and what it does."""

    async def run(self, kind: str) -> None:
        """Go on with one kind until cancelled; that one is refused or cut off is what it expects."""
        pause_s, act = self.kinds[kind]
        while True:
            with contextlib.suppress(OSError, aiohttp.ClientError, TimeoutError):
                async with asyncio.timeout(TIMEOUT_S):
                    await act()
            self.done[kind] += 1
            await asyncio.sleep(pause_s)

    async def _bad_lines(self) -> None:
        headers = {"Content-Type": "application/x-ndjson", "Content-Encoding": "gzip"}
        async with self._http.post(f"/topics/{TOPIC}/records", data=BAD_LINES, headers=headers) as answer:
            await answer.read()

    async def _bad_record(self) -> None:
        node = self._kafka.cluster.leader_for_partition(TopicPartition(TOPIC, 0))
        raw = bad_batch(next(self._numbers))
        await self._kafka.send(node, ProduceRequest(None, -1, 10_000, [(TOPIC, [(0, raw)])]))

    @contextlib.asynccontextmanager
    async def _client(self, hello: bytes) -> AsyncIterator[MqttTalk]:
        talk = await MqttTalk.open(self._mqtt, hello)
        try:
            yield talk
        finally:
            talk.drop()

    async def _flood(self) -> None:
        async with self._client(connect_packet(f"flood-{next(self._numbers) % 50}")) as talk:
            talk.writer.write(publish_packet(f"{TOPIC}/flood", b"x" * 100, 0) * 200)
            await talk.writer.drain()

    async def _will(self) -> None:
        will = (f"{TOPIC}/will", secrets.token_bytes(WILL_BYTES))
        hello = connect_packet(f"w-{secrets.token_hex(6)}", session_expiry_s=60, will=will)
        async with self._client(hello):
            pass

    async def _share(self) -> None:
        async with self._client(connect_packet(f"s-{secrets.token_hex(6)}")) as talk:
            await talk.ask([subscribe_packet(1, [(f"$share/{secrets.token_hex(4)}/{TOPIC}/#", 1)])], SUBACK)

    async def _properties(self) -> None:
        properties = (b"\x26" + text("name") + text("value")) * PROPERTIES
        async with self._client(connect_packet(f"p-{next(self._numbers) % 50}")) as talk:
            await talk.ask([publish_packet(f"{TOPIC}/x", b"x", 1, 1, properties=properties)], PUBACK)

    async def _headers(self) -> None:
        record: dict[str, Any] = {"value": 1}
        record["headers"] = [{"key": f"h{number}", "value": "MQ=="} for number in range(PROPERTIES)]
        headers = {"Content-Type": "application/vnd.kafka.json.v2+json"}
        async with self._http.post(f"/topics/{TOPIC}", json={"records": [record]}, headers=headers) as answer:
            await answer.read()
