"""CPU time of the gateway's event loop per HTTP request, compared with bare aiohttp and with another checkout.

    python -m loadtest.bench.http_cpu [--bootstrap HOST:PORT] [--beside CHECKOUT] [--limit 1.03]

Several connections send a request at the same time, wait until all have a response, and repeat, so that every run gives
the server the same work in the same portions. The servers take turns in rounds of a few hundred requests, and the
result is the median of the rounds' ratios, so that other load on the machine affects all servers alike. With `--limit`
the exit code is 1 if a kind of request costs more than that many times its cost in the checkout of `--beside` (a git
worktree of the version to compare with).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop
from aiohttp import web

from loadtest.clients.connection import Connection, join
from loadtest.clients.http_wire import CONTROL, Splitter, request
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess, loop_cpu
from loadtest.report import Report

BATCH: Final = 100  # records per request in the larger case
WARM_UP: Final = 300  # requests of each kind before measuring
FLOOR: Final = "aiohttp"
NOW: Final = "now"
BEFORE: Final = "beside"


JSON_RECORDS: Final = "application/vnd.kafka.json.v2+json"
PAYLOAD: Final = "x" * 70
INFO: Final = b'{"bridge_version":"1.0.0"}'


def one_record(number: int) -> dict[str, Any]:
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
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ready.send(runner.addresses[0][1])
    await asyncio.Event().wait()


@contextmanager
def bare_server() -> Iterator[tuple[tuple[str, int], int]]:
    """Run a bare server; yields its address and process id."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    answers = {str(count): answer(count) for count in (1, BATCH)}
    process = context.Process(target=serve_bare, args=(answers, theirs), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield ("127.0.0.1", ours.recv()), process.pid
    finally:
        process.kill()
        process.join()


class Kind(NamedTuple):
    """A kind of request: name, number of records (0 for a GET), and number of connections."""

    name: str
    records: int
    connections: int


KINDS: Final = tuple(
    Kind(name, records, connections)
    for name, records in (("GET", 0), ("POST of one record", 1), (f"POST of {BATCH} records", BATCH))
    for connections in (1, 16, 64)
)


class Side(NamedTuple):
    """A server: address, process, and path to send records to."""

    address: tuple[str, int]
    pid: int
    path: str


class Client(Connection):
    """A connection that reports complete responses to a callback."""

    def __init__(self, answered: Callable[[], None]) -> None:
        super().__init__()
        self.good = 0
        self._answered = answered
        self._splitter = Splitter()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        for answer in self._splitter.feed(data):
            self.good += answer.status == 200
            self._answered()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`. The missing response shows when the successful ones are counted."""
        self._answered()


class Wave:
    """Connections that all send at the same time."""

    def __init__(self) -> None:
        """Start without connections."""
        self._clients: list[Client] = []
        self._missing = 0
        self._whole = asyncio.get_running_loop().create_future()

    async def open(self, address: tuple[str, int], connections: int) -> None:
        """Open connections."""
        for _ in range(connections):
            self._clients.append(await join(Client(self._answered), address))

    def _answered(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._whole.set_result(None)

    async def ask(self, request: bytes, times: int) -> None:
        """Send `request` on each connection, `times` times; raise RuntimeError if a response is not 200."""
        loop = asyncio.get_running_loop()
        for _ in range(times):
            self._missing, self._whole = len(self._clients), loop.create_future()
            for client in self._clients:
                if not client.is_open:
                    raise RuntimeError("a connection was closed")
                client.write(request)
            await self._whole
        good, expected = sum(client.good for client in self._clients), times * len(self._clients)
        if good != expected:
            raise RuntimeError(f"{expected - good} of {expected} requests were not answered with 200")

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            client.close()


async def cost(side: Side, kind: Kind, requests: int) -> float:
    """Measure the server's CPU time per request, in microseconds."""
    wave = Wave()
    await wave.open(side.address, kind.connections)
    try:
        used = loop_cpu(side.pid)
        times = requests // kind.connections
        await wave.ask(request_of(side, kind), times)
        return (loop_cpu(side.pid) - used) / (times * kind.connections) * 1e6
    finally:
        wave.close()


def request_of(side: Side, kind: Kind) -> bytes:
    """Encode a request of a kind."""
    if not kind.records:
        return b"GET / HTTP/1.1\r\nHost: bench\r\n\r\n"
    body = compact({"records": [one_record(number) for number in range(kind.records)]})
    path = side.path.format(records=kind.records)
    return request("POST", path, JSON_RECORDS, body)


async def compare(sides: dict[str, Side], options: argparse.Namespace, report: Report) -> dict[str, float]:
    """Measure all kinds on all servers in turn; return the ratio of `NOW` to `BEFORE`, if present, by kind."""
    rounds, requests = options.rounds, options.requests
    ratios: dict[str, float] = {}
    for kind in KINDS:
        title = f"{kind.name}, {kind.connections} at once"
        if options.only not in title:
            continue
        found: dict[str, list[float]] = {name: [] for name in sides}
        for side in sides.values():
            await cost(side, kind, WARM_UP)
        for number in range(rounds):
            order = list(sides) if number % 2 else list(reversed(sides))
            for name in order:
                found[name].append(await cost(sides[name], kind, requests))
        row: dict[str, float | str] = {name: round(statistics.median(costs), 1) for name, costs in found.items()}
        for other in (FLOOR, BEFORE):
            if other in found:
                ratio = statistics.median(mine / theirs for mine, theirs in zip(found[NOW], found[other], strict=True))
                row[f"to {other}"] = f"{ratio:.3f}"
                if other == BEFORE:
                    ratios[title] = ratio
        report.add(**{"": title}, **row)
    return ratios


async def run(options: argparse.Namespace) -> int:
    """Start the servers and measure; return the exit code."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        async def start(name: str, bootstrap: str | None, checkout: Path | None = None) -> GatewayProcess:
            gateway = GatewayProcess(directory / name, bootstrap, checkout=checkout)
            stack.push_async_callback(gateway.stop)
            await gateway.start()
            return gateway

        kafka = options.bootstrap or (await start("kafka", None)).kafka
        topic = f"bench-{uuid.uuid4().hex[:8]}"
        await create_topic(kafka, topic, configs={"retention.bytes": "268435456"})
        bare, bare_pid = stack.enter_context(bare_server())
        sides = {FLOOR: Side(bare, bare_pid, "/bare/{records}")}
        checkouts = {BEFORE: options.beside} if options.beside else {}
        for name, checkout in (*checkouts.items(), (NOW, None)):
            gateway = await start(name, kafka, checkout)
            sides[name] = Side(gateway.address("http"), gateway.pid, f"/topics/{topic}")
        report = Report("HTTP: CPU per request, us", lines=True)
        ratios = await compare(sides, options, report)
    report.print()
    dear = {name: ratio for name, ratio in ratios.items() if options.limit and ratio > options.limit}
    for name, ratio in dear.items():
        print(f"{name}: {ratio:.3f} times the cost before, limit {options.limit:g}", file=sys.stderr)
    return 1 if dear else 0


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", help="Kafka's address (default: start a broker)")
    parser.add_argument("--beside", type=Path, help="another checkout of this project to compare with")
    parser.add_argument("--limit", type=float, help="highest allowed ratio to the other checkout")
    parser.add_argument("--only", default="", help="measure only kinds whose name contains this text")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=480, help="requests per kind, server and round")
    sys.exit(uvloop.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
