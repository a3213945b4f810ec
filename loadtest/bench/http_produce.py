"""How fast records come in by HTTP, beside a bare aiohttp handler that reads the same body and answers the same bytes.

    python -m loadtest.bench.http_produce --bootstrap 127.0.0.1:9092 [--seconds 5]

Three processes share the machine: the gateway's HTTP side, the bare handler, and this generator, which speaks HTTP over
plain sockets. Each case is measured on both servers in turn; `ratio` is the gateway's rate over the bare handler's.
CPU is the server process's own, per request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import time
import uuid
from multiprocessing.connection import Connection
from typing import Any, Final, cast

import uvloop
from aiohttp import web

from gateway.config import Address, BudgetConfig, HttpConfig, KafkaConfig, SecurityConfig
from gateway.kafka.client import client_settings
from gateway.kafka.consumers import Lookup
from gateway.kafka.group import Groups
from gateway.kafka.publisher import Publisher
from gateway.kafka.replay import Replay
from gateway.kafka.tail import Tail
from gateway.kafka.topics import Topics
from gateway.rest.listener import RestListener
from gateway.rest.services import RestServices
from gateway.security.authentication import Authenticator
from gateway.security.authorization import AccessList
from gateway.security.origins import Origins

LOCAL: Final = Address("127.0.0.1:0")
CASES: Final = ((1, 1), (64, 1), (16, 100))  # connections, records a request
PAYLOAD: Final = "x" * 70
END_OF_HEAD: Final = b"\r\n\r\n"
LENGTH: Final = b"content-length: "


def serve_gateway(bootstrap: str, ready: Connection) -> None:
    """Run the gateway's HTTP side until the process is killed."""
    uvloop.run(_gateway(bootstrap, ready))


def wall_clock() -> int:
    """Epoch milliseconds."""
    return time.time_ns() // 1_000_000


async def _gateway(bootstrap: str, ready: Connection) -> None:
    loop = asyncio.get_running_loop()
    kafka = KafkaConfig(bootstrap_servers=bootstrap)
    async with asyncio.TaskGroup() as group:
        topics = Topics(kafka, create=True, spawn=group.create_task, clock=loop.time)
        publisher = Publisher(
            kafka,
            BudgetConfig(),
            topics,
            spawn=group.create_task,
            clock=loop.time,
            wall_clock=wall_clock,
            chance=random.Random(1),
        )
        await publisher.start()
        lookup = Lookup(client_settings(kafka, "lookup"), ensure=topics.get)
        replay = Replay(client_settings(kafka, "replay"), group.create_task, lookup)
        services = RestServices(
            config=HttpConfig(address=LOCAL),
            publisher=publisher,
            topics=topics,
            lookup=lookup,
            tail=Tail(client_settings(kafka, "tail"), group.create_task, lookup, replay),
            replay=replay,
            groups=Groups(client_settings(kafka, "group"), group.create_task, lookup, random=random.random),
            authenticator=Authenticator(SecurityConfig()),
            access=AccessList(),
            origins=Origins(SecurityConfig()),
            kafka=client_settings(kafka, "http"),
            spawn=group.create_task,
            clock=loop.time,
            wall_clock=wall_clock,
        )
        listener = RestListener(services)
        await listener.start()
        ready.send(listener.port)
        await topics.run()


def serve_bare(answers: dict[str, bytes], ready: Connection) -> None:
    """Run a bare aiohttp application until the process is killed."""
    uvloop.run(_bare(answers, ready))


async def _bare(answers: dict[str, bytes], ready: Connection) -> None:
    async def post(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(
            body=answers[request.match_info["count"]], headers={"Content-Type": "application/vnd.kafka.v2+json"}
        )

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/bare/{count}", post)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, LOCAL.host, 0)
    await site.start()
    ready.send(runner.addresses[0][1])
    await asyncio.Event().wait()


class Client(asyncio.Protocol):
    """One connection that sends the same request again as soon as the answer is whole."""

    def __init__(self, request: bytes, stop_at: float) -> None:
        self.latencies: list[float] = []
        self.failures = 0
        self.done = asyncio.get_running_loop().create_future()
        self._request = request
        self._stop_at = stop_at
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by its methods only
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note the answer when it is whole, and send again."""
        self._buffer = buffer = self._buffer + data if self._buffer else data
        head = buffer.find(END_OF_HEAD)
        if head < 0:
            return
        start = buffer[:head].lower().index(LENGTH) + len(LENGTH)
        end = buffer.find(b"\r\n", start)
        if len(buffer) < head + len(END_OF_HEAD) + int(buffer[start:end]):
            return
        if not buffer.startswith(b"HTTP/1.1 200"):
            self.failures += 1
        self._buffer = b""
        now = time.perf_counter()
        self.latencies.append(now - self._sent)
        if now < self._stop_at:
            self._send()
        else:
            assert self._transport is not None
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell that this client is over."""
        if not self.done.done():
            self.done.set_result(None)


def cpu_seconds(pid: int) -> float:
    """What the process has used so far."""
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(port: int, pid: int, path: str, *, body: bytes, connections: int, seconds: float) -> dict[str, Any]:
    """Drive one server with one case."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/vnd.kafka.json.v2+json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    stop_at = time.perf_counter() + seconds
    used = cpu_seconds(pid)
    began = time.perf_counter()
    clients = [
        (await loop.create_connection(lambda: Client(head.encode() + body, stop_at), LOCAL.host, port))[1]
        for _ in range(connections)
    ]
    await asyncio.gather(*(client.done for client in clients))
    took = time.perf_counter() - began
    latencies = sorted(latency for client in clients for latency in client.latencies)
    count = len(latencies)
    return {
        "requests/s": round(count / took),
        "p50 ms": round(latencies[count // 2] * 1000, 2),
        "p99 ms": round(latencies[count * 99 // 100] * 1000, 2),
        "CPU us/request": round((cpu_seconds(pid) - used) / count * 1e6, 1),
        "failures": sum(client.failures for client in clients),
    }


def bodies(count: int) -> bytes:
    """A request of `count` records, written as most clients write JSON: without spaces."""
    records = [{"key": f"sensor-{number % 50}", "value": {"n": number, "text": PAYLOAD}} for number in range(count)]
    return json.dumps({"records": records}, separators=(",", ":")).encode()


def answer(count: int) -> bytes:
    """What such a request is answered."""
    return json.dumps({"offsets": [{"partition": 0, "offset": 123456}] * count}, separators=(",", ":")).encode()


async def run(bootstrap: str, seconds: float) -> list[dict[str, Any]]:
    """All cases on both servers."""
    context = multiprocessing.get_context("spawn")
    rows = []
    ours, theirs = context.Pipe(), context.Pipe()
    answers = {str(count): answer(count) for _, count in CASES}
    gateway = context.Process(target=serve_gateway, args=(bootstrap, ours[1]), daemon=True)
    bare = context.Process(target=serve_bare, args=(answers, theirs[1]), daemon=True)
    gateway.start()
    bare.start()
    try:
        port, bare_port = ours[0].recv(), theirs[0].recv()
        assert gateway.pid is not None
        assert bare.pid is not None
        topic = f"bench-{uuid.uuid4().hex[:8]}"
        for connections, count in CASES:
            body = bodies(count)
            await measure(
                port, gateway.pid, f"/topics/{topic}", body=body, connections=connections, seconds=1.0
            )  # warm
            floor = await measure(
                bare_port, bare.pid, f"/bare/{count}", body=body, connections=connections, seconds=seconds
            )
            result = await measure(
                port, gateway.pid, f"/topics/{topic}", body=body, connections=connections, seconds=seconds
            )
            rows.append(
                {
                    "connections": connections,
                    "records": count,
                    **result,
                    "records/s": result["requests/s"] * count,
                    "bare requests/s": floor["requests/s"],
                    "bare CPU us/request": floor["CPU us/request"],
                    "ratio": round(result["requests/s"] / floor["requests/s"], 2),
                }
            )
    finally:
        for process in (gateway, bare):
            process.kill()
            process.join()
    return rows


def main() -> None:
    """Parse the command line, print one JSON object a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    for row in uvloop.run(run(arguments.bootstrap, arguments.seconds)):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
