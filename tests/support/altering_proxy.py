"""A proxy between Kafka's clients and a broker that alters answers, as a bad disk, network or broker would."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

PRODUCE: Final = 0
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
    answers: dict[int, Alteration] = field(default_factory=dict)  # by API key: what is done to a whole answer
    held: dict[int, asyncio.Event] = field(default_factory=dict)  # by API key: set when an answer has been kept back
    bootstrap: str = ""
    _port: int = 0

    def alter(self, raw: bytes, change: Callable[[bytes], bytes], times: int | None = None) -> Alteration:
        """Alter the batch wherever it is answered; the change keeps its size."""
        found = self.alterations[raw[CRC_AT:]] = Alteration(change, times)
        return found

    def alter_answers(self, api: int, change: Callable[[bytes], bytes], times: int | None = None) -> Alteration:
        """Alter the answers to requests with an API key. An answer that the change leaves as it is does not count."""
        found = self.answers[api] = Alteration(change, times)
        return found

    def hold(self, api: int) -> asyncio.Event:
        """Keep back every answer to requests with an API key from now on."""
        return self.held.setdefault(api, asyncio.Event())

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
            api = asked.pop(struct.unpack_from(">i", frame)[0], None)
            frame = self._altered(frame) if api == FETCH else frame.replace(there, here)
            if api in self.held:
                self.held[api].set()
                continue
            whole = self.answers.get(api) if api is not None else None
            if whole is not None and (whole.times is None or whole.done < whole.times):
                changed = whole.change(frame)
                whole.done += changed != frame
                frame = changed
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


def of_another_partition(topic: str) -> Callable[[bytes], bytes]:
    """Return a change of answers that name one partition of the topic: they name another one."""
    name = topic.encode() + struct.pack(">i", 1)

    def change(frame: bytes) -> bytes:
        at = frame.find(name)
        if at < 0:
            return frame
        at += len(name)
        return frame[:at] + struct.pack(">i", 7) + frame[at + 4 :]

    return change
