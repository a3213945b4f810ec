"""Listeners to server-sent events, among them one that compares its bytes with those of the other listeners.

All listeners at the end of a log with one partition receive the same bytes. The listener that is ahead stores them and
finds the events in them; the others are verified with one memory compare per read.
"""

from __future__ import annotations

import abc
import bisect
import time
from collections.abc import Callable
from typing import Final

from loadtest.clients.connection import Connection

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


class EventStream(Connection, abc.ABC):
    """One connection.

    Attributes:
        subscribed: done when the response's head and the first event, `retry`, have arrived.
    """

    def __init__(self, path: str, fields: str = "") -> None:
        """`fields` are further header fields, each with its line end."""
        super().__init__()
        self.greeting = f"GET {path} HTTP/1.1\r\nHost: gateway\r\nAccept: text/event-stream\r\n{fields}\r\n".encode()
        self.subscribed = self.promise()
        self._head = b""

    def data_received(self, data: bytes) -> None:
        """Handle the head, then chunks."""
        now = time.perf_counter()
        if not self.subscribed.done():
            self._head += data
            head, _, rest = self._head.partition(b"\r\n\r\n")
            first, end, data = rest.partition(b"\n\n\r\n")
            if rest and b" 200 " not in head.split(b"\r\n", 1)[0]:
                self.fail(ConnectionRefusedError(self._head[:200].decode(errors="replace")))
            if not end or _BEGUN not in first:
                return
            self.subscribed.set_result(None)
        if data:
            self._events(data, now)

    @abc.abstractmethod
    def _events(self, data: bytes, now: float) -> None:
        """Handle bytes behind the first event."""


class EventListener(EventStream):
    """Compares.

    Attributes:
        finished: done when all events have arrived.
        wrong: whether it received other bytes than the other listeners.
    """

    def __init__(self, path: str, shared: Shared, total: int, on_message: Callable[[int, float], None]) -> None:
        """`on_message` is called with the number of the last event of each read, and its time."""
        super().__init__(path)
        self._shared = shared
        self._total = total
        self._on_message = on_message
        self._at = 0
        self.finished = self.promise()
        self.wrong = False

    @property
    def got(self) -> int:
        """The number of events so far."""
        return bisect.bisect_right(self._shared.ends, self._at)

    def _events(self, data: bytes, now: float) -> None:
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

    def close(self) -> None:
        """Abort the connection, whatever is missing."""
        self.finished.cancel()
        self.drop()
