"""HTTP/1.1 requests and responses, implemented independently of the gateway, for the clients of this package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self

END_OF_HEAD: Final = b"\r\n\r\n"
LINES: Final = 500  # of an upload, per chunk
CONTROL: Final = "application/vnd.kafka.v2+json"


def request_head(method: str, path: str, media: str, framing: str, *, host: str = "load") -> bytes:
    """Encode the request line and headers; `framing` has further fields."""
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {media}\r\n{framing}\r\n\r\n".encode()


def request(method: str, path: str, media: str, body: bytes = b"") -> bytes:
    """Encode a request with its length."""
    return request_head(method, path, media, f"Content-Length: {len(body)}") + body


class Answer(NamedTuple):
    """A response; names of fields are in lower case."""

    status: int
    fields: dict[str, str]
    body: bytes


class Splitter:
    """Splits a byte stream into responses with a Content-Length, or without a body."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[Answer]:
        """Return the responses that are now complete."""
        self._buffer += data
        answers: list[Answer] = []
        while True:
            head, separator, rest = self._buffer.partition(END_OF_HEAD)
            if not separator:
                return answers
            line, *lines = head.decode("latin-1").split("\r\n")
            fields = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
            length = int(fields.get("content-length", "0"))
            if len(rest) < length:
                return answers
            self._buffer = rest[length:]
            answers.append(Answer(int(line.split(" ")[1]), fields, rest[:length]))


class Connection:
    """A connection for any requests, one at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: tuple[str, int]) -> Self:
        """Connect."""
        return cls(*await asyncio.open_connection(*address, limit=1 << 20))

    async def ask(self, method: str, path: str, value: Any = None, media: str = CONTROL) -> bytes:
        """Send a request and return the response's body; raise RuntimeError if the status is not 20x."""
        self._writer.write(request(method, path, media, b"" if value is None else json.dumps(value).encode()))
        splitter = Splitter()
        while data := await self._reader.read(1 << 20):
            for status, _, body in splitter.feed(data):
                if status // 10 != 20:
                    raise RuntimeError(f"{method} {path}: {status} {body!r}")
                return body
        raise ConnectionResetError(f"{method} {path}")

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
