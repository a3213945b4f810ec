"""Rate limits at run time: counts what a client sends and receives, and makes clients in debt wait in turn.

Messages that were sent or read cannot be undone: they are charged, and a client in debt waits (ADR 0095). Waiters at
the same limit continue in the order of their arrival, as many as the limit covers; a waiter that is in debt again
queues behind the others. No waiter has its own timer (ADR 0095).
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from flowcontrol.bucket import RateLimit
from gateway.runtime.failures import failures
from gateway.views.pauses import pauses

AHEAD_S: Final = 0.05
"""A waiter continues when this many seconds' worth of the rate is available, not after each message."""
OUT_AHEAD_S: Final = 0.2
"""The same for sending: a receiver that continues reads the log from its position, which costs more than a message."""


class Waiter(Protocol):
    """A connection or task that waits at a brake."""

    mean: float  # average bytes of a message

    def resume(self, brake: Brake) -> tuple[int, int]:
        """Continue: it is the waiter's turn. Returns the messages and bytes that it will probably spend now."""


class Brake:
    """One direction of one limit, and the waiters in it."""

    __slots__ = ("_ahead_s", "_clock", "_timer", "_waiting", "disconnects", "limit", "reason")

    def __init__(
        self, limit: RateLimit, reason: str, ahead_s: float, clock: Callable[[], float], *, disconnects: bool = False
    ) -> None:
        """`reason` is one of `gateway.views.pauses`; `clock` returns monotonic seconds."""
        self.limit = limit
        self.reason = reason
        self.disconnects = disconnects  # an MQTT client in debt is disconnected
        self._ahead_s = ahead_s
        self._clock = clock
        self._waiting: collections.OrderedDict[Waiter, None] = collections.OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_waiters(self) -> bool:
        """Whether there are waiters, so that a new one queues behind them."""
        return bool(self._waiting)

    def wait(self, waiter: Waiter) -> None:
        """Call the waiter's `resume` when it is its turn. No effect while it is already waiting."""
        if waiter not in self._waiting:
            self._waiting[waiter] = None
            if self._timer is None:
                self._arm()

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter."""
        self._waiting.pop(waiter, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        mean = next(iter(self._waiting)).mean
        wait_s = self.limit.wait_s(self._clock(), self._ahead_s, mean)
        self._timer = asyncio.get_running_loop().call_later(wait_s or self._ahead_s, self._turn)

    def _turn(self) -> None:
        """Let the first waiters continue, as many as the limit covers given the expected spending of each."""
        self._timer = None
        now = self._clock()
        messages = size = 0
        for _ in range(len(self._waiting)):  # a waiter that waits again gets another turn later
            if not self._waiting or not self.limit.covers(messages, size, now):
                break
            waiter, _ = self._waiting.popitem(last=False)
            try:
                more, bytes_more = waiter.resume(self)
            except Exception as error:  # a bug in one connection must not stop the others
                failures.report("connection", error, self.reason)
                continue
            messages += more
            size += bytes_more
        if self._waiting and self._timer is None:
            self._arm()


class Pace:
    """One direction of one connection: all limits that apply to it."""

    __slots__ = ("_clock", "brakes")

    def __init__(self, brakes: tuple[Brake, ...], clock: Callable[[], float]) -> None:
        """`brakes` has at least one element."""
        self.brakes = brakes
        self._clock = clock

    def spend(self, messages: int, size: int) -> None:
        """Charge messages of `size` bytes in total."""
        now = self._clock()
        for brake in self.brakes:
            brake.limit.spend(messages, size, now)

    def give_back(self, messages: int) -> None:
        """Credit messages that were charged but will not come."""
        now = self._clock()
        for brake in self.brakes:
            brake.limit.give_back(messages, now)

    def burst(self, mean: float) -> int:
        """Return how many messages of about `mean` bytes make a burst, at least one."""
        bursts = (
            min(most, largest / max(mean, 1.0)) for most, largest in (brake.limit.bursts for brake in self.brakes)
        )
        return max(1, int(min(bursts)))

    def page(self, messages: int, size: int) -> tuple[int, int]:
        """Limit the messages and bytes of one response to half of a burst.

        The wait after it is then shorter than a burst lasts, so no part of the rate is lost when a client waits in
        whole seconds.
        """
        for brake in self.brakes:
            most, largest = brake.limit.bursts
            messages, size = int(min(messages, most / 2)), int(min(size, largest / 2))
        return max(1, messages), size

    def owed(self) -> tuple[float, Brake]:
        """Return the longest remaining debt in seconds and its brake; 0 means no debt."""
        now = self._clock()
        waits = [brake.limit.wait_s(now) for brake in self.brakes]
        longest = max(waits)
        return longest, self.brakes[waits.index(longest)]

    def owing(self) -> Iterator[Brake]:
        """Return the brakes with a debt."""
        now = self._clock()
        return (brake for brake in self.brakes if brake.limit.wait_s(now) > 0)

    def grant(self, most: int, mean: float, turns: tuple[Brake, ...]) -> int | Brake:
        """Grant up to `most` messages of about `mean` bytes and charge them in advance.

        Their bytes are not charged: `spend` these. At the brakes in `turns` it is the caller's turn, so other waiters
        there do not count. Returns a number above 0, or else the brake that is in debt or has other waiters.
        """
        now = self._clock()
        for brake in self.brakes:
            if brake.has_waiters and brake not in turns:
                return brake
            most = brake.limit.affordable(most, mean, now)
            if not most:
                return brake
        self.spend(most, 0)
        return most


class ReadingPause:
    """Pauses reading from one connection while the client is in debt for messages that were read."""

    __slots__ = ("_disconnect", "_messages", "_over", "_pace", "_pause", "_resume", "_size", "_turns", "_waits", "mean")

    def __init__(
        self,
        pace: Pace,
        pause: Callable[[str], None],
        resume: Callable[[str], None],
        disconnect: Callable[[], None] | None = None,
    ) -> None:
        """`pause` and `resume` are called with a reason, `disconnect` instead if the limit's rule says so."""
        self.mean = 0.0  # the size of what is read next is unknown
        self._pace = pace
        self._pause = pause
        self._resume = resume
        self._disconnect = disconnect
        self._waits: Brake | None = None
        self._turns: tuple[Brake, ...] = ()  # brakes at which it is this connection's turn
        self._over: asyncio.Future[None] | None = None  # of messages that were read and wait
        self._messages = self._size = 0  # since the last resume

    def must_wait(self) -> bool:
        """Whether messages that were read must wait until `over`: there is a debt, or others wait before them.

        Ask before the messages are handled. A connection that is new, or that did nothing until now, has no pause, but
        its principal may have a debt: without this question, each new connection could send one read.
        """
        if self._waits is None:
            self._check()
        if self._waits is None:
            for brake in self._pace.brakes:
                if brake.has_waiters and brake not in self._turns:
                    self._wait(brake)
                    break
        return self._waits is not None

    async def over(self) -> None:
        """Wait until the pause or the connection ends."""
        while self._waits is not None:
            self._over = asyncio.get_running_loop().create_future()
            await self._over

    def spend(self, messages: int, size: int) -> None:
        """Charge messages of `size` bytes in total that were read."""
        self._turns = ()
        self._pace.spend(messages, size)
        self._messages += messages
        self._size += size
        if self._waits is None:
            self._check()

    def _check(self) -> None:
        wait_s, brake = self._pace.owed()
        if wait_s <= 0:
            return
        if self._disconnect is not None and any(one.disconnects for one in self._pace.owing()):
            disconnect, self._disconnect = self._disconnect, None
            disconnect()
            return
        self._wait(brake)

    def _wait(self, brake: Brake) -> None:
        self._waits = brake
        brake.wait(self)
        self._pause(brake.reason)

    def resume(self, brake: Brake) -> tuple[int, int]:
        """See `Waiter`."""
        before, self._waits = brake.reason, None
        spent = self._messages, self._size
        self._messages = self._size = 0
        self._check()
        now: Brake | None = self._waits
        if now is not None:  # for another limit
            if now.reason != before:
                self._resume(before)
            return 0, 0
        self._turns = (*self._turns, brake)
        self._resume(before)
        self._go_on()
        return spent

    def _go_on(self) -> None:
        over, self._over = self._over, None
        if over is not None and not over.done():
            over.set_result(None)

    def end(self) -> None:
        """Stop waiting: the connection is closed."""
        if self._waits is not None:
            self._waits.remove(self)
            self._waits = None
        self._go_on()


class CreditPause:
    """Withholds credit from the links of one connection while its client is in debt."""

    __slots__ = ("_pace", "_subject", "_turns", "_waiting", "_waits", "mean")

    def __init__(self, pace: Pace, subject: str) -> None:
        """`subject` identifies the connection in `gateway.views.pauses`."""
        self.mean = 0.0
        self._pace = pace
        self._subject = subject
        self._waiting: dict[Callable[[], None], None] = {}
        self._waits: Brake | None = None
        self._turns: tuple[Brake, ...] = ()  # brakes at which it is this connection's turn

    def spend(self, size: int) -> None:
        """Charge the bytes of messages that came; the messages were charged with their credit."""
        self._pace.spend(0, size)

    def grant(self, most: int, mean: float, again: Callable[[], None], held: int) -> int:
        """Return how much credit may be granted now, at most `most`. If none, `again` is called when there may be more.

        A link that already holds a burst of credit (`held`) gets none: otherwise a slow sender could save up a whole
        window.
        """
        most = min(most, self._pace.burst(mean) - held)
        if most <= 0:
            return 0
        found = self._pace.grant(most, mean, self._turns)
        if isinstance(found, int):
            return found
        self._waiting[again] = None
        self.mean = mean
        if self._waits is None:
            self._waits = found
            self._turns = tuple(turn for turn in self._turns if turn is not found)
            found.wait(self)
            pauses.begin(found.reason, self, self._subject)
        return 0

    def resume(self, brake: Brake) -> tuple[int, int]:
        """See `Waiter`."""
        self._waits = None
        self._turns = (*self._turns, brake)
        pauses.end(brake.reason, self)
        waiting, self._waiting = self._waiting, {}
        for again in waiting:
            again()
        if self._waits is None:
            self._turns = ()
        # The messages are charged already. The bytes are estimated as one message for each link that got credit.
        return 0, int((len(waiting) - len(self._waiting)) * self.mean)

    def forget(self, again: Callable[[], None], credit: int) -> None:
        """Remove a detached link and return its unused credit."""
        self._waiting.pop(again, None)
        self._pace.give_back(credit)

    def end(self) -> None:
        """Stop waiting: the connection is closed."""
        self._waiting.clear()
        if self._waits is not None:
            self._waits.remove(self)
            pauses.end(self._waits.reason, self)
            self._waits = None


class SendingPause:
    """Stops sending to one connection while its client is in debt for messages that were sent."""

    __slots__ = ("_again", "_messages", "_pace", "_size", "_subject", "_turns", "_waits", "mean")

    def __init__(self, pace: Pace, subject: str, again: Callable[[], None]) -> None:
        """`again` is called when sending may continue, if `is_open` was False in between."""
        self.mean = 1.0
        self._pace = pace
        self._subject = subject
        self._again: Callable[[], None] | None = again
        self._waits: Brake | None = None
        self._turns: tuple[Brake, ...] = ()  # brakes at which it is this connection's turn
        self._messages = self._size = 0  # since the last resume

    @property
    def is_open(self) -> bool:
        """Whether sending is allowed. If not, `again` will be called."""
        if self._waits is not None:
            return False
        for brake in self._pace.owing():
            return self._wait(brake)
        for brake in self._pace.brakes:
            if brake.has_waiters and brake not in self._turns:
                return self._wait(brake)
        return True

    @property
    def reason(self) -> str | None:
        """The reason of the current pause, one of `gateway.views.pauses`, or None."""
        return None if self._waits is None else self._waits.reason

    def _wait(self, brake: Brake) -> bool:
        if self._again is not None:
            self._waits = brake
            self._turns = tuple(turn for turn in self._turns if turn is not brake)
            brake.wait(self)
            pauses.begin(brake.reason, self, self._subject)
        return False

    def spend(self, messages: int, size: int) -> None:
        """Charge messages of `size` bytes in total that were sent."""
        self._pace.spend(messages, size)
        self._messages += messages
        self._size += size
        self.mean = size / messages if messages else self.mean

    def resume(self, brake: Brake) -> tuple[int, int]:
        """See `Waiter`."""
        self._waits = None
        self._turns = (*self._turns, brake)
        pauses.end(brake.reason, self)
        spent = self._messages, self._size
        self._messages = self._size = 0
        if self._again is not None:
            self._again()
        waits: Brake | None = self._waits
        if waits is not None:
            return 0, 0
        # Messages sent during the call are charged already; those of the log readers come later.
        return max(0, spent[0] - self._messages), max(0, spent[1] - self._size)

    def end(self) -> None:
        """Stop waiting: the connection is closed."""
        self._again = None
        if self._waits is not None:
            self._waits.remove(self)
            pauses.end(self._waits.reason, self)
            self._waits = None


class TaskTurn:
    """One wait of a task: an upload between two parts of its body."""

    __slots__ = ("_over", "mean")

    def __init__(self) -> None:
        self.mean = 0.0
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def resume(self, brake: Brake) -> tuple[int, int]:
        """See `Waiter`. The size of the next part of a body is unknown."""
        if not self._over.done():
            self._over.set_result(None)
        return 0, 0

    @classmethod
    async def wait(cls, pace: Pace, what: object, subject: str) -> None:
        """Wait until there is no debt. Meanwhile `what` is noted as paused under the name `subject`."""
        while True:
            wait_s, brake = pace.owed()
            if wait_s <= 0:
                return
            turn = cls()
            brake.wait(turn)
            pauses.begin(brake.reason, what, subject)
            try:
                await turn._over
            finally:
                brake.remove(turn)
                pauses.end(brake.reason, what)
