"""A listener to server-sent events that compares its bytes with those of the other listeners.

All listeners at the end of a log with one partition receive the same bytes. The listener that is ahead stores them and
finds the events in them; the others are verified with one memory compare per read.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Callable
from typing import Final, cast

_BEGUN: Final = b"retry: "


class Shared:
    """The bytes that the listeners of one run have received, as far as the first of them.

    Attributes:
        text: all bytes after the response's head.
        ends: the end of each event in `text`.
    """

    def __init__(self) -> None:
        self.text = bytearray()
        self.ends: list[int] = []

    def extend(self, data: bytes) -> None:
        """Append the bytes of the listener that is ahead."""
        seen = max(0, len(self.text) - 3)
        self.text += data
        while (at := self.text.find(b"\n\n\r\n", seen)) >= 0:
            seen = at + 4
            if not self.ends or seen > self.ends[-1]:
                self.ends.append(seen)


class EventListener(asyncio.Protocol):
    """One connection.

    Attributes:
        subscribed: done when the response's head has arrived.
        finished: done when all events have arrived.
        wrong: whether it received other bytes than the other listeners.
    """

    def __init__(self, path: str, shared: Shared, total: int, on_message: Callable[[int, float], None]) -> None:
        """`on_message` is called with the number of the last event of each read, and its time."""
        self._request = f"GET {path} HTTP/1.1\r\nHost: gateway\r\nAccept: text/event-stream\r\n\r\n".encode()
        self._shared = shared
        self._total = total
        self._on_message = on_message
        self._head = b""
        self._at = 0
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self.subscribed: asyncio.Future[None] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()
        self.wrong = False

    @property
    def got(self) -> int:
        """The number of events so far."""
        return bisect.bisect_right(self._shared.ends, self._at)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Handle the head, then chunks."""
        now = time.perf_counter()
        if not self.subscribed.done():
            self._head += data
            head, separator, rest = self._head.partition(b"\r\n\r\n")
            first, _, behind = rest.partition(b"\n\n\r\n")
            if not separator or _BEGUN not in first:
                return
            if b" 200 " not in head.split(b"\r\n", 1)[0]:
                raise AssertionError(head)
            self.subscribed.set_result(None)
            data = behind
        if not data:
            return
        shared = self._shared
        known = len(shared.text) - self._at
        if not shared.text.startswith(data[:known], self._at):
            self.wrong = True
        if len(data) > known:
            shared.extend(data[known:])
        self._at += len(data)
        got = self.got
        if got:
            self._on_message(got - 1, now)
        if got >= self._total and not self.finished.done():
            self.finished.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the pending futures."""
        for future in (self.subscribed, self.finished):
            if not future.done():
                future.set_exception(exc or ConnectionResetError("connection closed"))

    def close(self) -> None:
        """Abort the connection."""
        if self._transport is not None:
            self.finished.cancel()
            self._transport.abort()
