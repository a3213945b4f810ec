"""CPU time of the gateway's event loop per HTTP request, compared with another checkout.

    python -m loadtest.bench.http_cpu [--bootstrap HOST:PORT] [--beside CHECKOUT] [--limit 1.03]

Several connections send a request at the same time, wait until all have a response, and repeat, so that every run gives
the server the same work in the same portions. The servers take turns in rounds of a few hundred requests, and the
result is the median of the rounds' ratios, so that other load on the machine affects all servers alike. With `--limit`
the exit code is 1 if a kind of request costs more than that many times its cost in the checkout of `--beside` (a git
worktree of the version to compare with).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop

from loadtest.clients.connection import Connection, join
from loadtest.clients.http_wire import Splitter, request
from loadtest.clients.topics import create_topic
from loadtest.engine.command import Scenario, parser_of, until_signal
from loadtest.engine.stand import Stand
from loadtest.gateway import loop_cpu

BATCH: Final = 100  # records per request in the larger case
WARM_UP: Final = 300  # requests of each kind before measuring
NOW: Final = "now"
BEFORE: Final = "beside"
JSON_RECORDS: Final = "application/vnd.kafka.json.v2+json"
PAYLOAD: Final = "x" * 70


def one_record(number: int) -> dict[str, Any]:
    """Create a record; it is 26 bytes longer than its text."""
    return {"key": f"sensor-{number % 50}", "value": {"n": number, "text": PAYLOAD}}


def compact(value: Any) -> bytes:
    """Encode as JSON without spaces, as most clients do."""
    return json.dumps(value, separators=(",", ":")).encode()


class Kind(NamedTuple):
    """A kind of request: name, number of records (0 for a GET), and number of connections."""

    name: str
    records: int
    connections: int

    @property
    def title(self) -> str:
        """Its name in the report."""
        return f"{self.name}, {self.connections} at once"


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
    return request("POST", side.path, JSON_RECORDS, body)


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        beside: another checkout of this project to compare with.
        limit: highest allowed ratio to the other checkout.
        rounds: of each kind.
        requests: per kind, server and round.
    """

    beside: Path | None = None
    limit: float | None = None
    rounds: int = 20
    requests: int = 480


async def run(stand: Stand, plan: Plan) -> None:
    """Start the servers, and measure all kinds on all of them in turn."""
    topic, sides = f"bench-{uuid.uuid4().hex[:8]}", dict[str, Side]()
    await create_topic(await stand.kafka(), topic, configs={"retention.bytes": "268435456"})
    checkouts = {BEFORE: plan.beside} if plan.beside else {}
    async with AsyncExitStack() as stack:
        for name, checkout in (*checkouts.items(), (NOW, None)):
            gateway = await stack.enter_async_context(stand.gateway(name=name, checkout=checkout))
            sides[name] = Side(gateway.address("http"), gateway.pid, f"/topics/{topic}")
        for kind in KINDS:
            if stand.wants(kind.title):
                await compare(stand, plan, sides, kind)


async def compare(stand: Stand, plan: Plan, sides: dict[str, Side], kind: Kind) -> None:
    """Measure a kind of request; add a row with the medians, and with the ratio to the other checkout."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        await cost(side, kind, WARM_UP)
    for number in range(plan.rounds):
        for name in list(sides) if number % 2 else list(reversed(sides)):
            found[name].append(await cost(sides[name], kind, plan.requests))
    row: dict[str, Any] = {name: round(statistics.median(costs), 1) for name, costs in found.items()}
    if BEFORE in found:
        ratio = statistics.median(now / before for now, before in zip(found[NOW], found[BEFORE], strict=True))
        row[f"to {BEFORE}"] = f"{ratio:.3f}"
        kept = plan.limit is None or ratio <= plan.limit
        stand.check(kept, f"{kind.title}: {ratio:.3f} times the cost before, limit {plan.limit}")
    stand.row(**{"": kind.title}, **row)


SCENARIO: Final = Scenario("http_cpu", "CPU per HTTP request, us", Plan(), run, "kinds whose name contains this")


def main() -> None:
    """Run the command line."""
    parser, _ = parser_of("python -m loadtest.bench", __doc__, [SCENARIO])
    options = parser.parse_args([SCENARIO.name, *sys.argv[1:]])
    sys.exit(uvloop.run(until_signal(options.work(options))))


if __name__ == "__main__":
    main()
