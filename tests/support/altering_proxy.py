"""A proxy between Kafka's clients and a broker that alters batches in the answers to fetches, as a bad disk would."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

FETCH: Final = 1
CRC_AT: Final = 17  # what is before it is set by the broker


@dataclass
class Alteration:
    """What is done to a batch, and how often."""

    change: Callable[[bytes], bytes]
    times: int | None = None  # None: always
    done: int = 0


@dataclass
class AlteringProxy:
    """Clients that use `bootstrap` reach the broker through the proxy only: it rewrites the broker's port."""

    broker: tuple[str, int]
    alterations: dict[bytes, Alteration] = field(default_factory=dict)  # by a batch from its checksum on
    bootstrap: str = ""
    _port: int = 0

    def alter(self, raw: bytes, change: Callable[[bytes], bytes], times: int | None = None) -> Alteration:
        """Alter the batch wherever it is answered; the change keeps its size."""
        found = self.alterations[raw[CRC_AT:]] = Alteration(change, times)
        return found

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[AlteringProxy]:
        """Serve until the block ends."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self.bootstrap = f"127.0.0.1:{self._port}"
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream, broker = await asyncio.open_connection(*self.broker)
        except OSError:
            writer.close()
            return
        asked: dict[int, int] = {}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(reader, broker, asked))
                group.create_task(self._answers(upstream, writer, asked))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            broker.close()

    async def _requests(
        self, reader: asyncio.StreamReader, broker: asyncio.StreamWriter, asked: dict[int, int]
    ) -> None:
        while True:
            frame = await _frame(reader)
            api, _, number = struct.unpack_from(">hhi", frame)
            asked[number] = api
            broker.write(struct.pack(">i", len(frame)) + frame)
            await broker.drain()

    async def _answers(
        self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: dict[int, int]
    ) -> None:
        host, port = self.broker[0].encode(), self.broker[1]
        there, here = host + struct.pack(">i", port), host + struct.pack(">i", self._port)
        while True:
            frame = await _frame(upstream)
            if asked.pop(struct.unpack_from(">i", frame)[0], None) == FETCH:
                frame = self._altered(frame)
            else:
                frame = frame.replace(there, here)
            writer.write(struct.pack(">i", len(frame)) + frame)
            await writer.drain()

    def _altered(self, frame: bytes) -> bytes:
        for needle, alteration in self.alterations.items():
            at = frame.find(needle)
            while at >= 0 and (alteration.times is None or alteration.done < alteration.times):
                begin, end = at - CRC_AT, at + len(needle)
                changed = alteration.change(frame[begin:end])
                assert len(changed) == end - begin
                frame = frame[:begin] + changed + frame[end:]
                alteration.done += 1
                at = frame.find(needle, end)
        return frame


async def _frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(size)
