"""Check whether a Kafka broker serves clients, by one request, without a client library."""

from __future__ import annotations

import asyncio
import struct

METADATA = 3
VERSION = 1  # the oldest in which an empty list requests no topic
CORRELATION = 1
LARGEST_ANSWER = 1024 * 1024

_REQUEST_BODY = struct.pack(">hhih7si", METADATA, VERSION, CORRELATION, 7, b"trivium", 0)
REQUEST = struct.pack(">i", len(_REQUEST_BODY)) + _REQUEST_BODY
_SIZE = struct.Struct(">i")
_HEAD = struct.Struct(">ii")  # correlation id, number of brokers
_NODE = struct.Struct(">ih")  # of a broker: node id, length of the host name
_PORT_AND_RACK = struct.Struct(">ih")  # of a broker: port, length of the rack's name (-1 for null)


async def broker_answers(host: str, port: int, timeout_s: float = 2.0, node: int | None = None) -> bool:
    """Whether the broker answers a metadata request that lists `node`, or any broker if `node` is None.

    A KRaft broker listens before the controller has unfenced it; until then its answer does not list itself.
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
    correlation, count = _HEAD.unpack_from(answer)
    if correlation != CORRELATION or count <= 0:
        return False
    return node is None or node in _nodes(answer, count)


def _nodes(answer: bytes, count: int) -> set[int]:
    """Return the node ids of the brokers in an answer; none when it is not a valid Kafka answer."""
    nodes, at = set(), _HEAD.size
    try:
        for _ in range(count):
            number, host = _NODE.unpack_from(answer, at)
            at += _NODE.size + host
            _, rack = _PORT_AND_RACK.unpack_from(answer, at)
            at += _PORT_AND_RACK.size + max(0, rack)
            nodes.add(number)
    except struct.error:
        return set()
    return nodes
