"""Clients that disconnect during a poll, a stream or an upload."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import uuid
from typing import Final

from loadtest.clients.http_wire import CONTROL, END_OF_HEAD, answered, request, request_head

WAYS: Final = ("poll", "stream", "upload")
LONG_MS: Final = 20_000  # far longer than the client stays
STAY_S: Final = 0.05  # the longest stay after the start
ACCEPT: Final = "Accept: */*"
LINE: Final = json.dumps({"key": "a2V5", "value": "dmFs"}).encode() + b"\n"


async def depart(rng: random.Random, address: tuple[str, int], topic: str, silent: str) -> str:
    """Start an operation, wait for its start where the protocol reports it, and disconnect.

    Args:
        rng: chooses the operation, the time, and whether the connection is closed or reset.
        address: of the gateway.
        topic: the topic of uploads.
        silent: a topic without records.

    Returns:
        the operation, one of `WAYS`.
    """
    way = rng.choice(WAYS)
    reader, writer = await asyncio.open_connection(*address)
    try:
        if way == "poll":
            await _poll(reader, writer, silent)
        elif way == "stream":
            writer.write(request_head("GET", f"/topics/{silent}/stream", CONTROL, ACCEPT))
            await reader.readuntil(END_OF_HEAD)  # the stream has started
        else:
            media = "application/x-ndjson"
            writer.write(request_head("POST", f"/topics/{topic}/records", media, "Transfer-Encoding: chunked"))
            part = LINE * 5 + LINE[: rng.randrange(len(LINE))]
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        await asyncio.sleep(rng.random() * STAY_S)
        if rng.random() < 0.5:
            own = writer.get_extra_info("socket")
            if own is not None:  # the gateway may have closed already
                with contextlib.suppress(OSError):
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset
    finally:
        writer.close()
    return way


async def _poll(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, topic: str) -> None:
    """Create a consumer, and poll where there are no records."""
    group = f"gone-{uuid.uuid4().hex}"
    path = f"/consumers/{group}/instances/one"
    partition = {"partitions": [{"topic": topic, "partition": 0}]}
    for at, value in (
        (f"/consumers/{group}", {"name": "one", "auto.offset.reset": "latest"}),
        (f"{path}/assignments", partition),
        (f"{path}/positions/end", partition),
    ):
        writer.write(request("POST", at, CONTROL, json.dumps(value).encode()))
        await answered(reader, at)
    writer.write(request_head("GET", f"{path}/records?timeout={LONG_MS}", CONTROL, ACCEPT))
