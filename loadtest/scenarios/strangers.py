"""`python -m loadtest.scenarios.strangers`: hostile input of every kind for a long time, beside modest clients.

Uploads of bad lines, records that clients cannot parse, floods that reconnect, sessions with wills that never come
back, share names, and messages with thousands of properties arrive all the time. Two modest clients publish beside
them. Prints each minute the gateway's resident memory and the latencies of the modest clients, and ends with 1 if the
memory grew, a modest client waited too long, or the log shows a bug.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import itertools
import secrets
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import aiohttp
from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy

from loadtest.clients.modest import Modest
from loadtest.clients.mqtt_wire import packet, publish_packet, subscribe_packet, text, varint
from loadtest.gateway import GatewayProcess, process_resident
from loadtest.report import Latencies

TOPIC: Final = "house"
MEBIBYTE: Final = 1 << 20
LIMIT_MS: Final = 250
"""The longest p99 of the modest clients."""
GROWTH: Final = 1.15
"""How much larger the resident memory may be in the last third than in the second one."""
BAD_LINES: Final = gzip.compress(b"1\n" * 100_000)
WILL_BYTES: Final = 8_000
PROPERTIES: Final = 5_000
TIMEOUT_S: Final = 60.0


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


def connect(client_id: str, *, expiry_s: int = 0, will: bytes = b"") -> bytes:
    """Return an MQTT 5 CONNECT with a will."""
    flags = 0x02 | (0x04 if will else 0)
    properties = struct.pack(">BI", 0x11, expiry_s) if expiry_s else b""
    body = text("MQTT") + bytes((5, flags)) + struct.pack(">H", 60) + varint(len(properties)) + properties
    body += text(client_id)
    if will:
        body += varint(0) + text(f"{TOPIC}/will") + struct.pack(">H", len(will)) + will
    return packet(0x10, body)


def many_properties(count: int) -> bytes:
    """Return a PUBLISH at QoS 1 with that many User Properties."""
    properties = (b"\x26" + text("name") + text("value")) * count
    return packet(0x32, text(f"{TOPIC}/x") + struct.pack(">H", 1) + varint(len(properties)) + properties + b"x")


@contextlib.asynccontextmanager
async def stranger(
    address: tuple[str, int], hello: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect, and wait for CONNACK."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(hello)
        await reader.readexactly(2)
        yield reader, writer
    finally:
        writer.transport.abort()


class Strangers:
    """Everything hostile, each kind at its own pace."""

    def __init__(self, gateway: GatewayProcess, kafka: AIOKafkaClient, http: aiohttp.ClientSession) -> None:
        self._mqtt = gateway.address("mqtt")
        self._url = "http://{}:{}/topics/{}".format(*gateway.address("http"), TOPIC)
        self._kafka, self._http = kafka, http
        self._numbers = itertools.count()
        self.done: Counter[str] = Counter()

    @property
    def kinds(self) -> dict[str, tuple[float, Callable[[], Awaitable[None]]]]:
        """By name: the pause between two of a kind in seconds, and what it does."""
        return {
            "bad lines": (2.0, self._bad_lines),
            "bad records": (0.2, self._bad_record),
            "reconnecting floods": (0.1, self._flood),
            "sessions with wills": (0.05, self._will),
            "share names": (0.5, self._share),
            "many properties": (0.2, self._properties),
            "many headers": (0.5, self._headers),
        }

    async def run(self, kind: str) -> None:
        """Go on with one kind until cancelled; that one is refused or cut off is what it expects."""
        pause_s, act = self.kinds[kind]
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, aiohttp.ClientError, TimeoutError):
                async with asyncio.timeout(TIMEOUT_S):
                    await act()
            self.done[kind] += 1
            await asyncio.sleep(pause_s)

    async def _bad_lines(self) -> None:
        headers = {"Content-Type": "application/x-ndjson", "Content-Encoding": "gzip"}
        async with self._http.post(f"{self._url}/records", data=BAD_LINES, headers=headers) as answer:
            await answer.read()

    async def _bad_record(self) -> None:
        place = TopicPartition(TOPIC, 0)
        node = self._kafka.cluster.leader_for_partition(place)
        raw = bad_batch(next(self._numbers))
        await self._kafka.send(node, ProduceRequest(None, -1, 10_000, [(TOPIC, [(0, raw)])]))

    async def _flood(self) -> None:
        async with stranger(self._mqtt, connect(f"flood-{next(self._numbers) % 50}")) as (_, writer):
            writer.write(publish_packet(f"{TOPIC}/flood", b"x" * 100, 0) * 200)
            await writer.drain()

    async def _will(self) -> None:
        hello = connect(f"w-{secrets.token_hex(6)}", expiry_s=60, will=secrets.token_bytes(WILL_BYTES))
        async with stranger(self._mqtt, hello):
            pass

    async def _share(self) -> None:
        async with stranger(self._mqtt, connect(f"s-{secrets.token_hex(6)}")) as (reader, writer):
            writer.write(subscribe_packet(1, [(f"$share/{secrets.token_hex(4)}/{TOPIC}/#", 1)]))
            await reader.read(4096)

    async def _properties(self) -> None:
        async with stranger(self._mqtt, connect(f"p-{next(self._numbers) % 50}")) as (reader, writer):
            writer.write(many_properties(PROPERTIES))
            await reader.read(4096)

    async def _headers(self) -> None:
        record = {"value": 1, "headers": [{"key": f"h{number}", "value": "MQ=="} for number in range(PROPERTIES)]}
        headers = {"Content-Type": "application/vnd.kafka.json.v2+json"}
        async with self._http.post(self._url, json={"records": [record]}, headers=headers) as answer:
            await answer.read()


async def prepare(gateway: GatewayProcess) -> AIOKafkaClient:
    """Create the topic, and return a client that knows its leader."""
    async with stranger(gateway.address("mqtt"), connect("first")) as (reader, writer):
        writer.write(publish_packet(f"{TOPIC}/first", b"x", 1, 1))
        await reader.read(4096)
    kafka = AIOKafkaClient(bootstrap_servers=gateway.kafka)
    await kafka.bootstrap()
    await kafka.add_topic(TOPIC)
    while kafka.cluster.leader_for_partition(TopicPartition(TOPIC, 0)) in {None, -1}:
        await kafka.force_metadata_update()
    return kafka


async def soak(gateway: GatewayProcess, seconds: float, every_s: float) -> tuple[list[int], Latencies]:
    """Run everything; return the resident bytes at the end of each period, and the latencies of the modest clients."""
    kafka = await prepare(gateway)
    modest = [await Modest.start(*gateway.address("mqtt"), TOPIC, pause_s) for pause_s in (0.05, 1.0)]
    sizes, waited = [], Latencies()
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        strangers = Strangers(gateway, kafka, http)
        tasks = [group.create_task(strangers.run(kind)) for kind in strangers.kinds]
        end = time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            await asyncio.sleep(min(every_s, end - began))
            now = time.monotonic()
            period = Latencies()
            for client in modest:
                await client.answered(now)
                period.merge(client.between(began, now))
            waited.merge(period)
            sizes.append(process_resident(gateway.pid))
            print(f"{sizes[-1] // MEBIBYTE} MiB, modest p50 {period.milliseconds(50):.1f} ms, p99 "
                  f"{period.milliseconds(99):.1f} ms; {dict(strangers.done)}", flush=True)  # fmt: skip
        for task in tasks:
            task.cancel()
    for client in modest:
        await client.stop()
    await kafka.close()
    return sizes, waited


async def main() -> int:
    """Run the soak on a new gateway; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", help="Kafka, HOST:PORT; default: the embedded one")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two lines")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        gateway = GatewayProcess(Path(directory), given.bootstrap)
        await gateway.start()
        try:
            sizes, waited = await soak(gateway, given.minutes * 60, given.every)
        finally:
            await gateway.stop()
        faults = gateway.bugs()
    third = max(1, len(sizes) // 3)
    second, last = max(sizes[third : 2 * third] or sizes), max(sizes[-third:])
    if last > GROWTH * second:
        faults.append(f"the memory grew from {second // MEBIBYTE} to {last // MEBIBYTE} MiB")
    if waited.milliseconds(99) > LIMIT_MS:
        faults.append(f"the modest clients waited {waited.milliseconds(99):.0f} ms (p99)")
    print(f"resident {second // MEBIBYTE} MiB, then {last // MEBIBYTE}; modest p99 {waited.milliseconds(99):.1f} ms")
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
