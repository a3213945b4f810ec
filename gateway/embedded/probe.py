"""Whether a Kafka broker serves clients, asked over the wire in one request and without a client library."""

from __future__ import annotations

import asyncio
import struct

METADATA = 3
VERSION = 1  # the oldest in which an empty list asks for no topic
CORRELATION = 1
LARGEST_ANSWER = 1024 * 1024

_REQUEST_BODY = struct.pack(">hhih7si", METADATA, VERSION, CORRELATION, 7, b"trivium", 0)
REQUEST = struct.pack(">i", len(_REQUEST_BODY)) + _REQUEST_BODY
_SIZE = struct.Struct(">i")
_HEAD = struct.Struct(">ii")  # correlation id, number of brokers


async def broker_answers(host: str, port: int, timeout_s: float = 2.0) -> bool:
    """Whether the broker answers a metadata request and counts at least one broker as serving.

    A KRaft broker listens before the controller has unfenced it; until then it names no broker.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(REQUEST)
                (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
                if not _HEAD.size <= size <= LARGEST_ANSWER:
                    return False
                answer = await reader.readexactly(size)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    correlation, brokers = _HEAD.unpack_from(answer)
    return bool(correlation == CORRELATION and brokers > 0)
