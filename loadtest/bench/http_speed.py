"""HTTP throughput, compared with bare aiohttp and bare aiokafka in the same run.

    python -m loadtest.bench.http_speed --bootstrap 127.0.0.1:9092 [--seconds 5] [--only post,upload,poll]

The gateway runs in its own process, started as a user would. It is compared with an aiohttp application that reads the
same body and returns the same bytes, and with aiokafka in this process, which writes batches or reads with `getmany`.
CPU is that of the gateway's process. The load generator uses plain sockets; everything runs on one machine with the
broker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

import uvloop
from aiohttp import web
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from loadtest.bench.http_client import Connection, repeat
from loadtest.bench.publisher import store_record
from loadtest.gateway import GatewayProcess, process_cpu
from mapping.record import Record

HOST: Final = "127.0.0.1"
POSTS: Final = ((1, 1), (64, 1), (16, 100))  # connections, records per request
UPLOADS: Final = (1, 4)  # connections
FORMATS: Final = ("json", "binary")
JSON_RECORDS: Final = "application/vnd.kafka.json.v2+json"
CONTROL: Final = "application/vnd.kafka.v2+json"
LINES: Final = "application/x-ndjson"
PAYLOAD: Final = "x" * 70
INFO: Final = b'{"bridge_version":"1.0.0"}'
SEED_S: Final = 2.0
POLLED_BYTES: Final = 1 << 20
PARTITIONS: Final = 3
Row = dict[str, Any]


def one_record(number: int) -> Row:
    """Create a record; it is 26 bytes longer than its text."""
    return {"key": f"sensor-{number % 50}", "value": {"n": number, "text": PAYLOAD}}


def compact(value: Any) -> bytes:
    """Encode as JSON without spaces, as most clients do."""
    return json.dumps(value, separators=(",", ":")).encode()


def answer(count: int) -> bytes:
    """Encode the response to a request of `count` records."""
    return compact({"offsets": [{"partition": 0, "offset": 123456}] * count})


def serve_bare(answers: dict[str, bytes], ready: Pipe) -> None:
    """Run a bare aiohttp application until the process is killed."""
    uvloop.run(_bare(answers, ready))


async def _bare(answers: dict[str, bytes], ready: Pipe) -> None:
    async def post(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answers[request.match_info["count"]], headers={"Content-Type": CONTROL})

    async def get(_: web.Request) -> web.Response:
        return web.Response(body=INFO, headers={"Content-Type": CONTROL})

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/bare/{count}", post)
    app.router.add_get("/", get)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    ready.send(runner.addresses[0][1])
    await asyncio.Event().wait()


@contextmanager
def bare_server() -> Iterator[tuple[tuple[str, int], int]]:
    """Run a bare server; yields its address and process id."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    answers = {str(count): answer(count) for _, count in POSTS}
    process = context.Process(target=serve_bare, args=(answers, theirs), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield (HOST, ours.recv()), process.pid
    finally:
        process.kill()
        process.join()


class Bench:
    """One run against a gateway."""

    def __init__(self, gateway: GatewayProcess, bootstrap: str, topic: str, seconds: float) -> None:
        """Create it for a topic with `PARTITIONS` partitions."""
        self._gateway = gateway
        self._address = gateway.address("http")
        self._bootstrap = bootstrap
        self._topic = topic
        self._seconds = seconds
        self._records = [Record(self._topic, b"sensor-%d" % n, compact(one_record(n)["value"])) for n in range(100)]

    async def post(self) -> None:
        """Measure requests of one record and of 100 records."""
        with bare_server() as (bare, bare_pid):
            for connections, count in POSTS:
                body = compact({"records": [one_record(number) for number in range(count)]})

                async def drive(
                    address: tuple[str, int],
                    pid: int,
                    path: str,
                    seconds: float,
                    *,
                    body: bytes = body,
                    connections: int = connections,
                ) -> Row:
                    return await repeat(
                        address, pid, path, body=body, media=JSON_RECORDS, connections=connections, seconds=seconds
                    )

                path = f"/topics/{self._topic}"
                await drive(self._address, self._gateway.pid, path, 1.0)  # warm-up
                floor = await drive(bare, bare_pid, f"/bare/{count}", self._seconds)
                row = await drive(self._address, self._gateway.pid, path, self._seconds)
                row["records/s"] = row["requests/s"] * count
                row["bare aiohttp requests/s"] = floor["requests/s"]
                row["bare CPU us/request"] = floor["CPU us/request"]
                row["ratio"] = round(row["requests/s"] / floor["requests/s"], 2)
                show("post", {"connections": connections, "records": count, **row})
        await self._raw_produce()

    async def _raw_produce(self) -> None:
        stored = await store_record(self._bootstrap, self._topic, self._records[0], self._seconds)
        show("raw aiokafka, batches", {"records/s": round(stored.rate), "CPU us/record": round(stored.cpu_us, 2)})

    async def upload(self) -> None:
        """Measure uploads of lines in one long request per connection."""
        line = compact(one_record(1)) + b"\n"
        for count in UPLOADS:
            connections = [await Connection.open(self._address) for _ in range(count)]
            path = f"/topics/{self._topic}/records"
            used, began = process_cpu(self._gateway.pid), time.perf_counter()
            reports = await asyncio.gather(
                *(one.upload(path, line, LINES, seconds=self._seconds) for one in connections)
            )
            total, took = sum(reports), time.perf_counter() - began
            cpu = (process_cpu(self._gateway.pid) - used) / total * 1e6
            show("upload", {"connections": count, "records/s": round(total / took), "CPU us/record": round(cpu, 2)})
            for one in connections:
                one.close()

    async def poll(self) -> None:
        """Measure a consumer that reads stored records."""
        await store_record(self._bootstrap, self._topic, self._records[0], SEED_S)
        for embedded in FORMATS:
            show(f"poll, {embedded}", await self._polled(embedded))
            show("raw aiokafka, getmany", await self._raw_poll())

    async def _polled(self, embedded: str) -> Row:
        connection = await Connection.open(self._address)
        group = f"/consumers/{self._topic}-{embedded}"
        await connection.ask("POST", group, {"name": "c", "format": embedded, "auto.offset.reset": "earliest"})
        await connection.ask("POST", f"{group}/instances/c/subscription", {"topics": [self._topic]})
        path = f"{group}/instances/c/records?timeout=1000&max_bytes={POLLED_BYTES}"
        while not (first := await connection.ask("GET", path)).count(b'"offset":'):
            pass
        polls, records, size = 0, 0, 0
        used, began = process_cpu(self._gateway.pid), time.perf_counter()
        while first and time.perf_counter() - began < self._seconds:
            page = await connection.ask("GET", path)
            found = page.count(b'"offset":')
            if not found:
                break  # everything has been read
            polls, records, size = polls + 1, records + found, size + len(page)
        took, cpu = time.perf_counter() - began, process_cpu(self._gateway.pid) - used
        await connection.ask("DELETE", f"{group}/instances/c")
        connection.close()
        return {
            "records/s": round(records / took),
            "CPU us/record": round(cpu / records * 1e6, 2),
            "records/poll": round(records / polls),
            "MB/s": round(size / took / 1e6),
        }

    async def _raw_poll(self) -> Row:
        consumer = AIOKafkaConsumer(self._topic, bootstrap_servers=self._bootstrap, auto_offset_reset="earliest")
        await consumer.start()
        try:
            while not await consumer.getmany(timeout_ms=1000):
                pass
            count = 0
            used, began = time.process_time(), time.perf_counter()
            while time.perf_counter() - began < self._seconds:
                found = await consumer.getmany(timeout_ms=200)
                if not found:
                    break
                count += sum(map(len, found.values()))
            took, cpu = time.perf_counter() - began, time.process_time() - used
        finally:
            await consumer.stop()
        return {"records/s": round(count / took), "CPU us/record": round(cpu / count * 1e6, 2)}


def show(title: str, row: Row) -> None:
    """Print one line of results."""
    print(f"{title + ':':24}" + ", ".join(f"{name} {value:,}" for name, value in row.items()), flush=True)


async def run(bootstrap: str, seconds: float, parts: list[str]) -> None:
    """Start a gateway and run the measurements."""
    topic = f"bench-{uuid.uuid4().hex[:8]}"
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(topic, PARTITIONS, 1, topic_configs={"retention.bytes": "268435456"})])
    with tempfile.TemporaryDirectory() as directory:
        gateway = GatewayProcess(Path(directory), bootstrap)
        await gateway.start()
        try:
            bench = Bench(gateway, bootstrap, topic, seconds)
            measured: dict[str, Callable[[], Awaitable[None]]] = {
                "post": bench.post,
                "upload": bench.upload,
                "poll": bench.poll,
            }
            for part in parts:
                await measured[part]()
        finally:
            await gateway.stop()
            await admin.delete_topics([topic])
            await admin.close()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", required=True, help="Kafka's address")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each measurement")
    parser.add_argument("--only", default="post,upload,poll", help="measurements to run")
    arguments = parser.parse_args()
    uvloop.run(run(arguments.bootstrap, arguments.seconds, arguments.only.split(",")))


if __name__ == "__main__":
    main()
