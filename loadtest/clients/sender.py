"""Common parts of the senders of all protocols: pacing, counting and timing of acknowledgements, end, failure."""

from __future__ import annotations

import abc
import array
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from loadtest.clients.connection import Connection, join
from loadtest.clients.pace import Pace
from loadtest.report import Latencies

CHUNK: Final = 2000  # the most messages per write

OnAck = Callable[[int, int], None]
"""Called with a range of acknowledged messages: the first, and the one after the last."""


def ignore(_first: int, _behind: int) -> None:
    """The `OnAck` of a sender whose acknowledgements are only counted."""


class Sender(Connection, abc.ABC):
    """One connection with a number of messages to send.

    `on_ack` is called for acknowledged messages; others are counted in `refused` by the protocol's code.
    `connected` and `finished` have the error if the connection fails before. With a rate, `latencies` count from the
    time a message was due, whatever delayed it, so that a stalled server does not get fewer samples. `late` has the
    delays caused by the sender itself, when neither window nor peer held it back.
    """

    def __init__(self, total: int, pace: Pace, on_ack: OnAck = ignore) -> None:
        super().__init__()
        self.total = total
        self.pace = pace
        self.answered = 0
        self.latencies = Latencies()
        self.late = Latencies()
        self.refused: dict[int, int] = {}
        self._on_ack = on_ack
        self._held = False  # a due message had to wait for the window or for the peer
        self.connected = self.promise()
        self.finished = self.promise()

    @property
    @abc.abstractmethod
    def sent(self) -> int:
        """The number of messages written."""

    @abc.abstractmethod
    def push(self) -> None:
        """Write as many messages as the pace allows."""

    async def join(self, address: tuple[str, int]) -> None:
        """Connect, and wait for the end of the handshake."""
        await join(self, address)
        await self.connected

    def start(self) -> None:
        """Start the pace, and write the first messages."""
        self.pace.start()
        self.push()

    def more(self, count: int) -> None:
        """Add `count` messages, and reset `finished`."""
        self.total += count
        self.finished = self.promise()

    def halt(self) -> None:
        """Send no more messages, and finish when the sent ones are answered."""
        self.total = self.sent
        self._count(0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail, if messages are unanswered."""
        if self.answered < self.total:
            super().connection_lost(exc)

    def abandon(self) -> None:
        """Close although messages are unanswered."""
        self.finished.cancel()
        self.close()

    def _wrote(self, first: int) -> None:
        """Record the delay of the messages written from `first` on, unless they had to wait for window or peer."""
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
        """Count the answer to message `index`: success (None) or a refusal code."""
        if code is None:
            self._answer_run(index, index + 1)
            return
        self.refused[code] = self.refused.get(code, 0) + 1
        self._count(1)

    def _answer_run(self, first: int, behind: int) -> None:
        """Count the messages from `first` to before `behind` as acknowledged."""
        self._on_ack(first, behind)
        self._count(behind - first)

    def _count(self, answers: int) -> None:
        self.answered += answers
        if self.answered == self.total and not self.finished.done():
            self.finished.set_result(None)


class WindowedSender(Sender):
    """A sender with one packet per message, and at most the pace's window unacknowledged.

    `due_at` has the time each message was due or, without a rate, about to be written.
    """

    def __init__(self, packets: Sequence[bytes], pace: Pace, on_ack: OnAck = ignore) -> None:
        super().__init__(len(packets), pace, on_ack)
        self._packets = packets
        self.due_at = array.array("d")
        self._limit = sys.maxsize  # messages that the peer allows in total

    @property
    def sent(self) -> int:
        """The number of messages written."""
        return len(self.due_at)

    def push(self) -> None:
        """Write as many messages as the pace and the peer allow."""
        sent = len(self.due_at)
        room = min(self.pace.capacity(sent, self.answered), self._limit - sent, self.total - sent, CHUNK)
        if room <= 0 or not self.is_open:
            self._held = self._held or (self.pace.rate is not None and self.pace.capacity(sent, sent) > 0)
            return
        now = time.perf_counter()  # before the write: others may have received it before this process runs on
        self.write(b"".join(self._packets[sent : sent + room]))
        if self.pace.rate is None:
            self.due_at.extend([now] * room)
        else:
            self.due_at.extend([self.pace.due(index) for index in range(sent, sent + room)])
        self._wrote(sent)

    def _timed_run(self, first: int, behind: int, now: float) -> None:
        """Record the latencies of the messages from `first` to before `behind`."""
        self.latencies.extend([now - due for due in self.due_at[first:behind]])
