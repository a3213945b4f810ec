"""What is spent of a limit in one direction, and who waits for more: in turn, however many share it.

What was sent or read is there and cannot be unsent: it is spent, and who owes something waits (ADR 0051). Those who
wait for the same limit are let go on in the order in which they came, as many as it has something for; who owes again
is behind the others. Nobody has a timer of its own (ADR 0078).
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from flowcontrol.bucket import RateLimit
from gateway.failures import failures
from gateway.pauses import pauses

AHEAD_S: Final = 0.05
"""Who waits is let go on when so many seconds' worth is there, and not message by message."""
OUT_AHEAD_S: Final = 0.2
"""The same of what clients are sent: who goes on reads the log from where it was, which costs more than a message."""


class Waiter(Protocol):
    """Somebody who owes something."""

    mean: float  # bytes of a message, about

    def go_on(self, brake: Brake) -> tuple[int, int]:
        """It is its turn: how many messages, of how many bytes, it will probably spend before others had theirs."""


class Brake:
    """One direction of one limit."""

    __slots__ = ("_ahead_s", "_clock", "_timer", "_waiting", "disconnects", "limit", "reason")

    def __init__(
        self, limit: RateLimit, reason: str, ahead_s: float, clock: Callable[[], float], *, disconnects: bool = False
    ) -> None:
        """Nobody waits. `reason` is one of `gateway.pauses`; `clock`: seconds, monotonic."""
        self.limit = limit
        self.reason = reason
        self.disconnects = disconnects  # an MQTT client that owes is sent away
        self._ahead_s = ahead_s
        self._clock = clock
        self._waiting: collections.OrderedDict[Waiter, None] = collections.OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def awaited(self) -> bool:
        """Whether somebody waits: who comes now is behind them."""
        return bool(self._waiting)

    def wait(self, waiter: Waiter) -> None:
        """Call `go_on` when it is this one's turn; without effect while it waits already."""
        if waiter not in self._waiting:
            self._waiting[waiter] = None
            if self._timer is None:
                self._arm()

    def forget(self, waiter: Waiter) -> None:
        """It waits no more."""
        self._waiting.pop(waiter, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        mean = next(iter(self._waiting)).mean
        wait_s = self.limit.wait_s(self._clock(), self._ahead_s, mean)
        self._timer = asyncio.get_running_loop().call_later(wait_s or self._ahead_s, self._turn)

    def _turn(self) -> None:
        """Let go on who is first, and others as long as something is left behind what those before will spend."""
        self._timer = None
        now = self._clock()
        messages = size = 0
        for _ in range(len(self._waiting)):  # who waits again meanwhile has another turn
            if not self._waiting or not self.limit.covers(messages, size, now):
                break
            waiter, _ = self._waiting.popitem(last=False)
            try:
                more, bytes_more = waiter.go_on(self)
            except Exception as error:  # our bug, in one connection: the others behind it must go on
                failures.tell("connection", error, self.reason)
                continue
            messages += more
            size += bytes_more
        if self._waiting and self._timer is None:
            self._arm()


class Pace:
    """One direction of one client's connection: all limits that hold for it."""

    __slots__ = ("_clock", "brakes")

    def __init__(self, brakes: tuple[Brake, ...], clock: Callable[[], float]) -> None:
        """One at least."""
        self.brakes = brakes
        self._clock = clock

    def spend(self, messages: int, size: int) -> None:
        """Messages went, of `size` bytes together."""
        now = self._clock()
        for brake in self.brakes:
            brake.limit.spend(messages, size, now)

    def give_back(self, messages: int) -> None:
        """So many were counted that will not come."""
        now = self._clock()
        for brake in self.brakes:
            brake.limit.give_back(messages, now)

    def burst(self, mean: float) -> int:
        """How many messages of some `mean` bytes are a burst; one at least."""
        bursts = (
            min(most, largest / max(mean, 1.0)) for most, largest in (brake.limit.bursts for brake in self.brakes)
        )
        return max(1, int(min(bursts)))

    def page(self, messages: int, size: int) -> tuple[int, int]:
        """Of so many messages and bytes, how many may be one answer: half of a burst.

        So the wait behind it is less than a burst lasts, and nothing of the rate is lost by waiting whole seconds.
        """
        for brake in self.brakes:
            most, largest = brake.limit.bursts
            messages, size = int(min(messages, most / 2)), int(min(size, largest / 2))
        return max(1, messages), size

    def owed(self) -> tuple[float, Brake]:
        """The brake that is the longest in debt, and for how many seconds; 0: nothing is owed."""
        now = self._clock()
        waits = [brake.limit.wait_s(now) for brake in self.brakes]
        longest = max(waits)
        return longest, self.brakes[waits.index(longest)]

    def owing(self) -> Iterator[Brake]:
        """Those that something is owed to."""
        now = self._clock()
        return (brake for brake in self.brakes if brake.limit.wait_s(now) > 0)

    def grant(self, most: int, mean: float, turns: tuple[Brake, ...]) -> int | Brake:
        """How many messages of some `mean` bytes may come now, at most `most`; they count as if they had come.

        Their bytes do not: `spend` these. `turns`: brakes at which it is this one's turn, whoever waits there.

        Returns:
            A number above 0; else the brake that has nothing, or for which others wait.
        """
        now = self._clock()
        for brake in self.brakes:
            if brake.awaited and brake not in turns:
                return brake
            most = brake.limit.affordable(most, mean, now)
            if not most:
                return brake
        self.spend(most, 0)
        return most


class ReadingPause:
    """Pauses the reading of one connection while its client owes something for what was read."""

    __slots__ = ("_disconnect", "_messages", "_pace", "_pause", "_resume", "_size", "_waits", "mean")

    def __init__(
        self,
        pace: Pace,
        pause: Callable[[str], None],
        resume: Callable[[str], None],
        disconnect: Callable[[], None] | None = None,
    ) -> None:
        """`pause` and `resume` are called with a reason; `disconnect` where the limit wants that instead."""
        self.mean = 0.0  # what is read next is not chosen by its size
        self._pace = pace
        self._pause = pause
        self._resume = resume
        self._disconnect = disconnect
        self._waits: Brake | None = None
        self._messages = self._size = 0  # since it went on

    def spend(self, messages: int, size: int) -> None:
        """Messages were read, of `size` bytes together."""
        self._pace.spend(messages, size)
        self._messages += messages
        self._size += size
        if self._waits is None:
            self._look()

    def _look(self) -> None:
        wait_s, brake = self._pace.owed()
        if wait_s <= 0:
            return
        if self._disconnect is not None and any(one.disconnects for one in self._pace.owing()):
            disconnect, self._disconnect = self._disconnect, None
            disconnect()
            return
        self._waits = brake
        brake.wait(self)
        self._pause(brake.reason)

    def go_on(self, brake: Brake) -> tuple[int, int]:
        """See `Waiter`."""
        before, self._waits = brake.reason, None
        spent = self._messages, self._size
        self._messages = self._size = 0
        self._look()
        now: Brake | None = self._waits
        if now is not None:  # for another limit
            if now.reason != before:
                self._resume(before)
            return 0, 0
        self._resume(before)
        return spent

    def end(self) -> None:
        """The connection is gone."""
        if self._waits is not None:
            self._waits.forget(self)
            self._waits = None


class CreditPause:
    """The links of one connection that get no credit while its client owes something."""

    __slots__ = ("_pace", "_subject", "_turns", "_waiting", "_waits", "mean")

    def __init__(self, pace: Pace, subject: str) -> None:
        """Nobody waits; `subject`: what the connection's pauses are told of."""
        self.mean = 0.0
        self._pace = pace
        self._subject = subject
        self._waiting: dict[Callable[[], None], None] = {}
        self._waits: Brake | None = None
        self._turns: tuple[Brake, ...] = ()  # brakes at which its turn has come

    def spend(self, size: int) -> None:
        """Messages came for which credit was granted, of `size` bytes together."""
        self._pace.spend(0, size)

    def grant(self, most: int, mean: float, again: Callable[[], None], held: int) -> int:
        """How much credit may be granted now, at most `most`; `again` is called when there may be more.

        A link that has a burst's worth (`held`) gets no more: else who sends little could save up a whole window.
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

    def go_on(self, brake: Brake) -> tuple[int, int]:
        """See `Waiter`."""
        self._waits = None
        self._turns = (*self._turns, brake)
        pauses.end(brake.reason, self)
        waiting, self._waiting = self._waiting, {}
        for again in waiting:
            again()
        if self._waits is None:
            self._turns = ()
        # The messages are spent by now; of the bytes it is known how many come with one for each link.
        return 0, int((len(waiting) - len(self._waiting)) * self.mean)

    def forget(self, again: Callable[[], None], credit: int) -> None:
        """A link is gone, with credit that it has not used."""
        self._waiting.pop(again, None)
        self._pace.give_back(credit)

    def end(self) -> None:
        """The connection is gone."""
        self._waiting.clear()
        if self._waits is not None:
            self._waits.forget(self)
            pauses.end(self._waits.reason, self)
            self._waits = None


class SendingPause:
    """One connection that is sent nothing more while its client owes something for what it was sent."""

    __slots__ = ("_again", "_messages", "_pace", "_size", "_subject", "_turns", "_waits", "mean")

    def __init__(self, pace: Pace, subject: str, again: Callable[[], None]) -> None:
        """`again` is called when something may be sent again, if anybody has asked meanwhile."""
        self.mean = 1.0
        self._pace = pace
        self._subject = subject
        self._again: Callable[[], None] | None = again
        self._waits: Brake | None = None
        self._turns: tuple[Brake, ...] = ()  # of brakes for which others wait behind this one
        self._messages = self._size = 0  # since it went on

    @property
    def is_open(self) -> bool:
        """Whether something may be sent; when not, `again` will be called."""
        if self._waits is not None:
            return False
        for brake in self._pace.owing():
            return self._wait(brake)
        for brake in self._pace.brakes:
            if brake.awaited and brake not in self._turns:
                return self._wait(brake)
        return True

    @property
    def reason(self) -> str | None:
        """Why nothing may be sent, as `gateway.pauses` has it."""
        return None if self._waits is None else self._waits.reason

    def _wait(self, brake: Brake) -> bool:
        if self._again is not None:
            self._waits = brake
            self._turns = tuple(turn for turn in self._turns if turn is not brake)
            brake.wait(self)
            pauses.begin(brake.reason, self, self._subject)
        return False

    def spend(self, messages: int, size: int) -> None:
        """Messages were sent, of `size` bytes together."""
        self._pace.spend(messages, size)
        self._messages += messages
        self._size += size
        self.mean = size / messages if messages else self.mean

    def go_on(self, brake: Brake) -> tuple[int, int]:
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
        # What was sent from within the call is spent already; what the log's readers bring comes later.
        return max(0, spent[0] - self._messages), max(0, spent[1] - self._size)

    def end(self) -> None:
        """The connection is gone."""
        self._again = None
        if self._waits is not None:
            self._waits.forget(self)
            pauses.end(self._waits.reason, self)
            self._waits = None


class Turn:
    """One wait of a task: an upload's, between two parts of its body."""

    __slots__ = ("_over", "mean")

    def __init__(self) -> None:
        self.mean = 0.0
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def go_on(self, brake: Brake) -> tuple[int, int]:
        """See `Waiter`; what a part of a body brings is not known."""
        if not self._over.done():
            self._over.set_result(None)
        return 0, 0

    @classmethod
    async def come(cls, pace: Pace, what: object, subject: str) -> None:
        """Wait until nothing is owed; `what` is paused meanwhile, which is called `subject`."""
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
                brake.forget(turn)
                pauses.end(brake.reason, what)
