"""An HTTP client on plain sockets, cheap enough for a load generator: repeated requests, line uploads, polls."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Final, cast

from loadtest.gateway import process_cpu

END_OF_HEAD: Final = b"\r\n\r\n"
LENGTH: Final = b"content-length: "
CHUNK: Final = 64 * 1024
CONTROL: Final = "application/vnd.kafka.v2+json"


def request_head(method: str, path: str, media: str, framing: str) -> bytes:
    """Encode the request line and headers."""
    return f"{method} {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: {media}\r\n{framing}\r\n\r\n".encode()


def is_whole(answer: bytes) -> bool:
    """True if a response with Content-Length has been received completely."""
    head = answer.find(END_OF_HEAD)
    if head < 0:
        return False
    start = answer[:head].lower().index(LENGTH) + len(LENGTH)
    return len(answer) >= head + len(END_OF_HEAD) + int(answer[start : answer.find(b"\r\n", start)])


class Repeated(asyncio.Protocol):
    """A connection that repeats the same request as soon as the response is complete."""

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
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport does not inherit from it
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Record the response when it is complete, and send the next request."""
        self._buffer = buffer = self._buffer + data if self._buffer else data
        if not is_whole(buffer):
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
        """Mark this client as finished."""
        if not self.done.done():
            self.done.set_result(None)


async def repeat(
    address: tuple[str, int], pid: int, path: str, *, body: bytes, media: str, connections: int, seconds: float
) -> dict[str, Any]:
    """Repeat a request on several connections and measure.

    Args:
        address: the server's address.
        pid: the server's process, whose CPU time is measured.
        path: the request's path.
        body: the request's body.
        media: the request's content type.
        connections: number of connections.
        seconds: duration.
    """
    host, port = address
    request = request_head("POST", path, media, f"Content-Length: {len(body)}") + body
    loop = asyncio.get_running_loop()
    used, began = process_cpu(pid), time.perf_counter()
    clients = [
        (await loop.create_connection(lambda: Repeated(request, began + seconds), host, port))[1]
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
        "CPU us/request": round((process_cpu(pid) - used) / count * 1e6, 1),
        "failures": sum(client.failures for client in clients),
    }


class Connection:
    """A connection for any requests, one at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `open` to create an instance."""
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: tuple[str, int]) -> Connection:
        """Connect."""
        return cls(*await asyncio.open_connection(*address, limit=1 << 20))

    async def ask(self, method: str, path: str, value: Any = None, media: str = CONTROL) -> bytes:
        """Send a request and return the response's body; raise RuntimeError if the status is not 20x."""
        body = b"" if value is None else json.dumps(value).encode()
        self._writer.write(request_head(method, path, media, f"Content-Length: {len(body)}") + body)
        answer = (await self._reader.readuntil(END_OF_HEAD)).lower()
        length = answer.partition(LENGTH)[2].partition(b"\r")[0]
        found = await self._reader.readexactly(int(length)) if length else b""
        if not answer.startswith(b"http/1.1 20"):
            raise RuntimeError(f"{method} {path}: {answer!r} {found!r}")
        return found

    async def upload(self, path: str, line: bytes, media: str, *, seconds: float) -> int:
        """Stream the same line repeatedly in one request, read the reports meanwhile, and return their number."""
        self._writer.write(request_head("POST", path, media, "Transfer-Encoding: chunked"))
        async with asyncio.TaskGroup() as group:
            reports = group.create_task(self._reports())
            piece = line * (CHUNK // len(line))
            chunk = b"%x\r\n%b\r\n" % (len(piece), piece)
            until = time.perf_counter() + seconds
            while time.perf_counter() < until and not reports.done():
                self._writer.write(chunk)
                await self._writer.drain()
            self._writer.write(b"0\r\n\r\n")
        return reports.result()

    async def _reports(self) -> int:
        """Count the lines of a chunked response; raise RuntimeError on a status other than 200 or a reported error."""
        head = await self._reader.readuntil(END_OF_HEAD)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head!r} {await self._reader.read(1000)!r}")
        count = 0
        while True:
            size = int(await self._reader.readline(), 16)
            data = await self._reader.readexactly(size + 2)
            if not size:
                return count
            count += data[:-2].count(b"\n")
            if b"error" in data:
                raise RuntimeError(data[:1000].decode())

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()
