"""Hostile HTTP requests against a running gateway: nothing is lost, nothing is left behind.

    python -m loadtest.scenarios.http_hostile --bootstrap 127.0.0.1:9092 [--requests 10000] [--at-once 20] [--seed 0]

An honest client publishes all the time; each of its acknowledged records is looked up in Kafka at the end. The gateway
must answer or close every connection, never with 500, log no traceback, and release descriptors, tasks, connections,
consumers and memory. One client in ten sends nothing bad, but disconnects during a poll, a stream or an upload.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import struct
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop

from loadtest.bench.http_client import Connection, is_whole
from loadtest.beside import beside, in_turn
from loadtest.clients.http_damage import attack
from loadtest.clients.http_departures import depart
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess, process_descriptors, process_resident, read_metrics
from loadtest.verify import stored

SETTINGS: Final = {
    "TRIVIUM_KAFKA__CREATE_TOPICS": "false",
    "TRIVIUM_HTTP__CONSUMER_IDLE_S": "3",  # consumers that were not deleted expire soon
    "TRIVIUM_HTTP__HEADER_TIMEOUT_S": "3",  # incomplete requests time out soon
}
ANSWER_S: Final = 60.0
SETTLED_S: Final = 60.0
STEP_S: Final = 0.002
HONEST_PAUSE_S: Final = 0.005
WARM_UP: Final = 0.2  # share of the requests before the first measurement
GROWTH: Final = 48 * 1024 * 1024  # bytes that large bodies may leave in the allocator
JSON_RECORDS: Final = "application/vnd.kafka.json.v2+json"
BACK: Final = ("trivium_http_connections", "trivium_http_consumers_instances", "trivium_http_produce_active")
"""The metrics that must return to 0."""
TASKS: Final = "trivium_event_loop_tasks"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
POOLED: Final = 8  # descriptors that stay: connections to Kafka, with one or two tasks each
DEPARTS: Final = 10  # one client in this number


class Figures(NamedTuple):
    """The gateway's descriptors, tasks and bytes of memory."""

    descriptors: int
    tasks: int
    resident: int


class Outcome(NamedTuple):
    """The result; descriptors, tasks and memory (bytes) after the warm-up and at the end."""

    requests: int
    seconds: float
    statuses: dict[str, int]
    honest: int
    lost: int
    descriptors: tuple[int, int]
    tasks: tuple[int, int]
    resident: tuple[int, int]
    problems: list[str]


class Hostile:
    """One run."""

    def __init__(self, gateway: GatewayProcess, *, requests: int, at_once: int, seed: int = 0) -> None:
        """`gateway` runs with `SETTINGS`."""
        self._gateway = gateway
        self._requests = requests
        self._at_once = at_once
        self._seed = seed
        self._statuses: Counter[str] = Counter()
        self._problems: list[str] = []
        self._honest = f"honest-{uuid.uuid4().hex[:8]}"
        self._target = f"target-{uuid.uuid4().hex[:8]}"
        self._silent = f"silent-{uuid.uuid4().hex[:8]}"
        self._acknowledged: list[int] = []

    async def run(self) -> Outcome:
        """Attack, wait until the gateway has settled, verify."""
        began = time.perf_counter()
        for topic in (self._honest, self._target, self._silent):
            await create_topic(self._gateway.kafka, topic, 1)
        first = int(self._requests * WARM_UP)
        async with beside(self._publish()):
            await in_turn(range(first), self._one, self._at_once)
            before = await self._settled()
            await in_turn(range(first, self._requests), self._one, self._at_once)
        after = await self._settled(before)
        lost = await self._lost()
        self._check(before, after, lost)
        return Outcome(
            self._requests,
            round(time.perf_counter() - began, 1),
            dict(sorted(self._statuses.items())),
            len(self._acknowledged),
            lost,
            (before.descriptors, after.descriptors),
            (before.tasks, after.tasks),
            (before.resident, after.resident),
            self._problems,
        )

    def _check(self, before: Figures, after: Figures, lost: int) -> None:
        if lost:
            self._problems.append(f"{lost} of {len(self._acknowledged)} records are not at their offset")
        if after.descriptors > before.descriptors + POOLED:
            self._problems.append(f"descriptors: {before.descriptors}, then {after.descriptors}")
        if after.tasks > before.tasks + 2 * POOLED:
            self._problems.append(f"tasks: {before.tasks}, then {after.tasks}")
        if after.resident > before.resident + GROWTH:
            self._problems.append(f"memory: {before.resident}, then {after.resident} bytes")
        self._problems += self._gateway.bugs()

    async def _one(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        if number % DEPARTS == 0:
            way = await depart(rng, self._gateway.address("http"), self._target, self._silent)
            self._statuses[f"left in mid-{way}"] += 1
            return
        pieces, ending, refused, first = attack(rng, self._target)
        reader, writer = await asyncio.open_connection(*self._gateway.address("http"))
        answer = b""
        try:
            if first:
                await self._known(reader, writer, first)
            for piece in pieces:
                if writer.transport.is_closing():
                    break  # the gateway closed the connection
                writer.write(piece)
                await asyncio.sleep(STEP_S)
            if ending == "wait":
                with contextlib.suppress(NotImplementedError, OSError):
                    async with asyncio.timeout(ANSWER_S):
                        answer = await reader.read(-1)
            elif ending == "reset":
                own = writer.get_extra_info("socket")
                if own is not None:  # the gateway may have closed already
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except (ConnectionError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                self._problems.append(f"request {number}: neither answered nor closed within {ANSWER_S:g} s")
        finally:
            writer.close()
        answer = answer.removeprefix(CONTINUE)
        status = answer[9:12].decode(errors="replace") if answer.startswith(b"HTTP/1.") else "none"
        self._statuses[status if ending == "wait" else ending] += 1
        if status == "500" or (refused and status.startswith("2")):
            self._problems.append(f"request {number}: {answer[:300]!r}")

    @staticmethod
    async def _known(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        """Send a valid request and read its response, so that its head is known."""
        writer.write(request)
        answer = b""
        async with asyncio.timeout(ANSWER_S):
            while not is_whole(answer):
                part = await reader.read(1 << 16)
                if not part:
                    return  # refused, and closed
                answer += part

    async def _publish(self) -> None:
        """Run the honest client: one record after the other."""
        connection = await Connection.open(self._gateway.address("http"))
        try:
            for number in range(1 << 31):
                body = {"records": [{"value": number}]}
                said = json.loads(await connection.ask("POST", f"/topics/{self._honest}", body, media=JSON_RECORDS))
                if "offset" not in said["offsets"][0]:
                    raise RuntimeError(f"refused: {said}")
                self._acknowledged.append(said["offsets"][0]["offset"])
                await asyncio.sleep(HONEST_PAUSE_S)
        finally:
            connection.close()

    async def _lost(self) -> int:
        """Return how many acknowledged records are not at their offset; the numbers were sent in order."""
        there = {record.offset: record.value async for record in stored(self._gateway.kafka, self._honest)}
        return sum(there.get(offset) != b"%d" % number for number, offset in enumerate(self._acknowledged))

    async def _settled(self, before: Figures | None = None) -> Figures:
        """Wait until the requests' leftovers are released, except the honest client's connection.

        Args:
            before: the figures to return to, plus what is pooled.
        """
        until = time.perf_counter() + SETTLED_S
        connection = await Connection.open(self._gateway.address("management"))
        try:
            while True:
                found = read_metrics((await connection.ask("GET", "/metrics")).decode())
                left = {name: found[name] for name in BACK if found[name] > (not name.endswith("_instances"))}
                figures = Figures(
                    process_descriptors(self._gateway.pid), int(found[TASKS]), process_resident(self._gateway.pid)
                )
                if before is not None and figures.tasks > before.tasks + 2 * POOLED:
                    left[TASKS] = figures.tasks
                if not left:
                    return figures
                if time.perf_counter() > until:
                    self._problems.append(f"left behind: {left}")
                    return figures
                await asyncio.sleep(0.1)
        finally:
            connection.close()


async def run(bootstrap: str, options: argparse.Namespace) -> Outcome:
    """Run it with its own gateway."""
    with tempfile.TemporaryDirectory() as directory:
        gateway = GatewayProcess(Path(directory), bootstrap, environment=SETTINGS)
        await gateway.start()
        try:
            hostile = Hostile(gateway, requests=options.requests, at_once=options.at_once, seed=options.seed)
            return await hostile.run()
        finally:
            await gateway.stop()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcome: dict[str, Any] = uvloop.run(run(options.bootstrap, options))._asdict()
    for name, value in outcome.items():
        print(f"{name}: {value}")
    raise SystemExit(1 if outcome["problems"] else 0)


if __name__ == "__main__":
    main()
