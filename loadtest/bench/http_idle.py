"""Cost of idle long polls: produce rate and gateway CPU with and without them.

Run `python -m loadtest.bench.http_idle --ready-file FILE [--polls 1000] [--rounds 3]` against a running gateway on this
machine. Each poll has its own consumer and group. In each round the consumers are created, wait, are woken by one
record and are deleted. Since the machine's speed drifts, the rate with polls is compared with the mean of the rates
without them before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import uvloop

from loadtest.gateway import process_cpu, process_descriptors, process_resident

CONNECTIONS: Final = 64
PART_S: Final = 5.0
SETTLE_S: Final = 5.0
WAKE_S: Final = 60.0
CREATING: Final = 20  # consumers created concurrently
CONTROL: Final = {"Content-Type": "application/vnd.kafka.v2+json"}
BODY: Final = b'{"records":[{"value":"' + b"x" * 70 + b'"}]}'
REQUEST: Final = (
    b"POST /topics/idle-load HTTP/1.1\r\nHost: bench\r\nContent-Type: application/vnd.kafka.json.v2+json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
) + BODY


def _size(pid: int) -> str:
    """Format a process's memory and file descriptors."""
    return f"{process_resident(pid) >> 20} MB, {process_descriptors(pid)} file descriptors"


class Rate(NamedTuple):
    """Result of a produce measurement."""

    requests: float  # per second
    cpu_us: float  # of the gateway per request, including everything else it does meanwhile


class Bench:
    """One run of the benchmark."""

    def __init__(self, address: str, pid: int, polls: int, session: aiohttp.ClientSession) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._pid = pid
        self._polls = polls
        self._session = session
        self._run = f"idle-{time.time_ns()}"
        self._woken = 0

    async def run(self, rounds: int) -> None:
        """Run all rounds and print the results."""
        await self._produce("warm-up")
        alone, beside = [await self._produce("without polls")], []
        for _ in range(rounds):
            beside.append(await self._round())
            alone.append(await self._produce("without polls"))
        pairs = [
            (rate.requests / statistics.mean((before.requests, after.requests)),
             rate.cpu_us / statistics.mean((before.cpu_us, after.cpu_us)))
            for before, rate, after in zip(alone, beside, alone[1:], strict=False)
        ]  # fmt: skip
        for rate, cpu in pairs:
            print(f"with polls: {rate:.1%} of the rate without, {cpu:.1%} of the CPU per request")
        rate, cpu = (statistics.median(one) for one in zip(*pairs, strict=True))
        print(f"median: {rate:.1%} of the rate, {cpu:.1%} of the CPU")

    async def _round(self) -> Rate:
        """Create polls, measure the produce rate with them, and delete them."""
        began = time.perf_counter()
        creating = asyncio.Semaphore(CREATING)
        await asyncio.gather(*(self._create(number, creating) for number in range(self._polls)))
        print(f"{self._polls} consumers created in {time.perf_counter() - began:.1f} s; {_size(self._pid)}")
        self._woken = 0
        async with asyncio.TaskGroup() as group:
            for number in range(self._polls):
                group.create_task(self._poll(number))
            await asyncio.sleep(SETTLE_S)
            spent = process_cpu(self._pid)
            await asyncio.sleep(PART_S)
            print(f"idle: {(process_cpu(self._pid) - spent) / PART_S:.1%} of a core")
            rate = await self._produce("with polls")
            began = time.perf_counter()
            await self._request("POST", f"/topics/{self._run}", {"records": [{"value": 1}]}, "application/json")
        print(f"one record woke {self._woken} polls in {time.perf_counter() - began:.2f} s")
        await asyncio.gather(*(self._delete(number, creating) for number in range(self._polls)))
        print(f"all deleted; {_size(self._pid)}")
        return rate

    async def _produce(self, title: str) -> Rate:
        """Measure the rate of single-record requests on `CONNECTIONS` connections."""
        until = time.perf_counter() + PART_S
        spent = process_cpu(self._pid)
        counts = await asyncio.gather(*(self._send(until) for _ in range(CONNECTIONS)))
        spent = process_cpu(self._pid) - spent
        rate = Rate(sum(counts) / PART_S, spent / sum(counts) * 1e6)
        print(f"{title}: {rate.requests:,.0f} requests/s, CPU {rate.cpu_us:.1f} us/request", flush=True)
        return rate

    async def _send(self, until: float) -> int:
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        count = 0
        while time.perf_counter() < until:
            writer.write(REQUEST)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if not head.startswith(b"http/1.1 200 "):
                raise RuntimeError(head.decode())
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
            count += 1
        writer.close()
        return count

    async def _create(self, number: int, turn: asyncio.Semaphore) -> None:
        async with turn:
            group = f"/consumers/{self._run}-{number}"
            await self._request("POST", group, {"name": "c", "format": "json", "auto.offset.reset": "latest"})
            await self._request("POST", f"{group}/instances/c/subscription", {"topics": [self._run]})

    async def _poll(self, number: int) -> None:
        path = f"/consumers/{self._run}-{number}/instances/c/records?timeout=60000"
        until = time.perf_counter() + 4 * PART_S + WAKE_S
        while time.perf_counter() < until:
            if await self._request("GET", path):
                self._woken += 1
                return

    async def _delete(self, number: int, turn: asyncio.Semaphore) -> None:
        async with turn:
            await self._request("DELETE", f"/consumers/{self._run}-{number}/instances/c")

    async def _request(self, method: str, path: str, body: Any = None, media: str = CONTROL["Content-Type"]) -> Any:
        data = None if body is None else json.dumps(body)
        headers = {} if body is None else {"Content-Type": media}
        async with self._session.request(method, path, data=data, headers=headers) as response:
            raw = await response.read()
            if response.status >= 300:
                raise RuntimeError(f"{method} {path}: {response.status} {raw!r}")
            return json.loads(raw) if raw else None


async def bench(ready: dict[str, Any], polls: int, rounds: int) -> None:
    """Run the benchmark against the gateway of a ready file."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(f"http://{ready['http']}", connector=connector, timeout=timeout) as session:
        await Bench(ready["http"], ready["pid"], polls, session).run(rounds)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ready-file", type=Path, required=True, help="ready file of a gateway that creates topics")
    parser.add_argument("--polls", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    uvloop.run(bench(json.loads(options.ready_file.read_text()), options.polls, options.rounds))


if __name__ == "__main__":
    main()
