"""An HTTP client on plain sockets, cheap enough for a load generator: requests one at a time, uploads of lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

END_OF_HEAD: Final = b"\r\n\r\n"
LENGTH: Final = b"content-length: "
LINES: Final = 500  # of an upload, per chunk
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

    async def upload(self, path: str, lines: Sequence[bytes]) -> int:
        """Stream lines in one request, read the reports meanwhile, and return their number."""
        self._writer.write(request_head("POST", path, "application/x-ndjson", "Transfer-Encoding: chunked"))
        async with asyncio.TaskGroup() as group:
            reports = group.create_task(self._reports())
            for at in range(0, len(lines), LINES):
                piece = b"".join(lines[at : at + LINES])
                self._writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
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
