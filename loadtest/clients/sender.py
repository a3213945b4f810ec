"""What the senders of the three protocols have in common: a pace, answers counted and timed, an end, a failure."""

from __future__ import annotations

import abc
import array
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, cast

from loadtest.clients.pace import Pace
from loadtest.report import Latencies

CHUNK: Final = 2000  # messages written at once at the most

OnAck = Callable[[int, int], None]
"""Told positive answers: the first message and the one behind the last."""


class Sender(asyncio.Protocol, abc.ABC):
    """One connection with a number of messages to send.

    `on_ack` is told the positive answers; the others are counted in `refused` by the protocol's code.
    `connected` and `finished` carry the error when the connection fails before. With a rate `latencies` count from the
    moment at which a message was due, whatever kept it back, so that a server that stalls is not asked less often; and
    `late` has how far behind that the sender was by itself, when neither window nor peer kept it back.
    """

    greeting = b""
    closing = b""

    def __init__(self, total: int, pace: Pace, on_ack: OnAck) -> None:
        self.total = total
        self.pace = pace
        self.answered = 0
        self.latencies = Latencies()
        self.late = Latencies()
        self.refused: dict[int, int] = {}
        self._on_ack = on_ack
        self._held = False  # something that was due had to wait, for an answer or for the peer's leave
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self.connected: asyncio.Future[None] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()

    @property
    @abc.abstractmethod
    def sent(self) -> int:
        """Messages written."""

    @abc.abstractmethod
    def push(self) -> None:
        """Write what the pace allows."""

    def more(self, count: int) -> None:
        """So many messages more; `finished` is a new one."""
        self.total += count
        self.finished = asyncio.get_running_loop().create_future()

    def halt(self) -> None:
        """Send no more: what is not answered yet is all there is to come."""
        self.total = self.sent
        self._count(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one without saying so
        self._transport.write(self.greeting)

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway closed the socket."""
        if self.answered < self.total:
            self._fail(exc or ConnectionResetError("connection closed"))

    def close(self) -> None:
        """Disconnect and close."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self.closing)
            self._transport.close()

    def _wrote(self, first: int) -> None:
        """Messages were written, from this one on. All that are due by now are late by ourselves, if that one is."""
        if self.pace.rate is None:
            return
        if not self._held:
            behind = first + self.pace.capacity(first, first)
            self.late.extend([self.pace.now() - self.pace.due(index) for index in range(first, behind)])
        self._held = self.total > self.sent and self.pace.capacity(self.sent, self.sent) > 0

    def _is_connected(self) -> None:
        if not self.connected.done():
            self.connected.set_result(None)

    def _answer(self, index: int, code: int | None) -> None:
        """Message `index` is answered: well (None), or with a code of refusal."""
        if code is None:
            self._answer_run(index, index + 1)
            return
        self.refused[code] = self.refused.get(code, 0) + 1
        self._count(1)

    def _answer_run(self, first: int, behind: int) -> None:
        """The messages from `first` to before `behind` are answered well."""
        self._on_ack(first, behind)
        self._count(behind - first)

    def _count(self, answers: int) -> None:
        self.answered += answers
        if self.answered == self.total and not self.finished.done():
            self.finished.set_result(None)

    def _fail(self, error: Exception) -> None:
        for future in (self.connected, self.finished):
            if not future.done():
                future.set_exception(error)


class WindowedSender(Sender):
    """A sender of packets, each a message, with at most the pace's window unanswered.

    `due_at` says when each was due; without a rate, when it was written.
    """

    def __init__(self, packets: Sequence[bytes], pace: Pace, on_ack: OnAck) -> None:
        super().__init__(len(packets), pace, on_ack)
        self._packets = packets
        self.due_at = array.array("d")
        self._limit = sys.maxsize  # messages that the peer lets us send in total

    @property
    def sent(self) -> int:
        """Messages written."""
        return len(self.due_at)

    def push(self) -> None:
        """Write what the pace and the peer allow."""
        assert self._transport is not None
        sent = len(self.due_at)
        room = min(self.pace.capacity(sent, self.answered), self._limit - sent, self.total - sent, CHUNK)
        if room <= 0 or self._transport.is_closing():
            self._held = self._held or (self.pace.rate is not None and self.pace.capacity(sent, sent) > 0)
            return
        self._transport.write(b"".join(self._packets[sent : sent + room]))
        if self.pace.rate is None:
            self.due_at.extend([time.perf_counter()] * room)
        else:
            self.due_at.extend([self.pace.due(index) for index in range(sent, sent + room)])
        self._wrote(sent)

    def _timed_run(self, first: int, behind: int, now: float) -> None:
        """The messages from `first` to before `behind` were answered."""
        self.latencies.extend([now - due for due in self.due_at[first:behind]])
