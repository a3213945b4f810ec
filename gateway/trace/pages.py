"""`POST /trace` of the management listener: streams a trace's lines."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import msgspec
from aiohttp import web

from gateway.observe.clients import ClientList
from gateway.observe.management import bad, record_act
from gateway.runtime.taps import taps
from gateway.trace.traces import AT_ONCE, Trace, TraceRequest

LINES: Final = "application/x-ndjson"
CHECK_S: Final = 1.0  # between two checks whether the reader is still connected
LAST_S: Final = 1.0  # for the last line


class TracePages:
    """The route for traces."""

    def __init__(self, clients: ClientList) -> None:
        self._clients = clients
        self._running = 0  # also traces that have all their lines, until their readers have them

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.post("/trace", self._trace)]

    @staticmethod
    def stop() -> None:
        """End all traces: the gateway is stopping."""
        for trace in taps.watchers:
            trace.end("the gateway stops")

    async def _trace(self, request: web.Request) -> web.StreamResponse:
        try:
            wanted = msgspec.json.decode(await request.read(), type=TraceRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return bad(str(error))
        if self._running >= AT_ONCE:
            return bad(f"{AT_ONCE} traces are running, which is the maximum: wait until one ends", 429)
        trace = Trace(wanted)
        trace.begin()
        self._running += 1
        why = "the reader left"
        try:
            record_act(request, "trace", wanted.client or wanted.topic or wanted.address)
            answer = web.StreamResponse(headers={"Content-Type": LINES, "Cache-Control": "no-store"})
            await answer.prepare(request)
            with suppress(TimeoutError):
                why = "time"
                async with asyncio.timeout(wanted.seconds):
                    async for client in self._clients.all():
                        trace.attach(client)
                    why = await _copy(trace, request, answer)
        finally:
            trace.end(why)
            self._running -= 1
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(LAST_S):
                while rest := await trace.read(0):
                    await answer.write(rest)
                await answer.write(trace.summary())
                await answer.write_eof()
                return answer
        if request.transport is not None:
            request.transport.abort()  # do not wait for a reader that has not read by now
        return answer


async def _copy(trace: Trace, request: web.Request, answer: web.StreamResponse) -> str:
    """Send lines until the trace ends or the reader disconnects; returns the reason."""
    while (lines := await trace.read(CHECK_S)) is not None:
        if request.transport is None or request.transport.is_closing():
            return "the reader left"
        if lines:
            await answer.write(lines)
    return "lines"
