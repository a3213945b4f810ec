"""What waits at the brakes for one client: to be read, to get credit, to be sent to, or a task.

The four differ in what waits and in how the wait is reported. `TABLE` has their states.
"""

from __future__ import annotations

import abc
import asyncio
import enum
from collections.abc import Callable
from typing import Final

from gateway.limits.brakes import Brake, Pace
from gateway.views.pauses import pauses


class PauseState(enum.Enum):
    """Whether a client waits."""

    FREE = enum.auto()
    WAITING = enum.auto()  # at one brake
    ENDED = enum.auto()  # the connection is closed


class PauseEvent(enum.Enum):
    """What happens to a pause."""

    BLOCKED = enum.auto()  # there is a debt, or others wait at a brake before this client
    TURN = enum.auto()  # at the brake where it waits
    END = enum.auto()


_S, _E = PauseState, PauseEvent
TABLE: Final[dict[PauseState, dict[PauseEvent, PauseState]]] = {
    _S.FREE: {_E.BLOCKED: _S.WAITING, _E.END: _S.ENDED},
    _S.WAITING: {_E.BLOCKED: _S.WAITING, _E.TURN: _S.FREE, _E.END: _S.ENDED},
    _S.ENDED: {_E.BLOCKED: _S.ENDED, _E.END: _S.ENDED},
}
"""The next state. A turn of a client that does not wait is a bug."""


class RatePause(abc.ABC):
    """The states of one direction of a client at its limits; a `gateway.limits.brakes.Waiter`.

    Once it is the client's turn at a brake, others that wait there are not before it until it waits there again.
    """

    __slots__ = ("_brake", "_messages", "_pace", "_size", "_subject", "_turns", "mean", "state")

    def __init__(self, pace: Pace, subject: str, mean: float = 0.0) -> None:
        """`subject` is the connection's name in `gateway.views.pauses`; `mean` the bytes of a message, 0 if unknown."""
        self.mean = mean
        self.state = PauseState.FREE
        self._pace = pace
        self._subject = subject
        self._brake: Brake | None = None  # at which it waits
        self._turns: tuple[Brake, ...] = ()  # brakes at which it is this client's turn
        self._messages = self._size = 0  # spent since the last turn

    @property
    def reason(self) -> str | None:
        """The reason of the current pause, one of `gateway.views.pauses`, or None."""
        return None if self._brake is None else self._brake.reason

    def must_wait(self) -> bool:
        """Whether the client waits: it has a debt, or others wait before it.

        Ask before the messages are handled. A connection that is new, or that did nothing until now, has no pause, but
        its principal may have a debt: without this question, each new connection could send one read.
        """
        if self.state is PauseState.FREE:
            self._check_debt()
        if self.state is PauseState.FREE:
            for brake in self._pace.brakes:
                if brake.has_waiters and brake not in self._turns:
                    self._wait(brake)
                    break
        return self.state is PauseState.WAITING

    def spend(self, messages: int, size: int) -> None:
        """Charge messages of `size` bytes in total."""
        self._pace.spend(messages, size)
        self._messages += messages
        self._size += size

    def resume(self, brake: Brake) -> tuple[int, int]:
        """Continue: it is the client's turn. Returns the messages and bytes that it will probably spend now."""
        messages, size = self._messages, self._size
        self._messages = self._size = 0
        self.state, self._brake = TABLE[self.state][PauseEvent.TURN], None
        self._turns = (*self._turns, brake)
        self._check_debt()  # at another brake
        if self.reason != brake.reason:
            self._report_end(brake.reason)
        if self.state is PauseState.FREE:
            self._go_on()
        if self.state is PauseState.WAITING:
            return 0, 0
        return self._still_to_come(messages, size)

    def _still_to_come(self, messages: int, size: int) -> tuple[int, int]:
        """Return what the client will spend in its turn, by what it has spent since the last one."""
        # What was spent during the call is charged already.
        return max(0, messages - self._messages), max(0, size - self._size)

    def end(self) -> None:
        """Stop waiting: the connection is closed."""
        self.state = TABLE[self.state][PauseEvent.END]
        brake, self._brake = self._brake, None
        if brake is not None:
            brake.remove(self)
            self._report_end(brake.reason)

    def _check_debt(self) -> None:
        wait_s, brake = self._pace.owed()
        if wait_s > 0:
            self._pay(brake)

    def _pay(self, brake: Brake) -> None:
        """React to a debt at a brake."""
        self._wait(brake)

    def _wait(self, brake: Brake) -> None:
        before, self.state = self.state, TABLE[self.state][PauseEvent.BLOCKED]
        if before is PauseState.FREE:
            self._brake = brake
            self._turns = tuple(turn for turn in self._turns if turn is not brake)
            brake.wait(self)
            self._report_begin(brake.reason)

    def _report_begin(self, reason: str) -> None:
        pauses.begin(reason, self, self._subject)

    def _report_end(self, reason: str) -> None:
        pauses.end(reason, self)

    @abc.abstractmethod
    def _go_on(self) -> None:
        """Let what waits continue; it may have to wait again."""


class TaskPause(RatePause):
    """Lets a task wait, such as that of an upload between two parts of its body."""

    __slots__ = ("_over",)

    def __init__(self, pace: Pace, subject: str) -> None:
        super().__init__(pace, subject)
        self._over: asyncio.Future[None] | None = None

    async def over(self) -> None:
        """Wait until the pause or the connection ends."""
        while self.state is PauseState.WAITING:
            self._over = asyncio.get_running_loop().create_future()
            await self._over

    def end(self) -> None:
        """Stop waiting: the connection is closed."""
        super().end()
        self._go_on()

    def _go_on(self) -> None:
        over, self._over = self._over, None
        if over is not None and not over.done():
            over.set_result(None)


class ReadingPause(TaskPause):
    """Pauses reading from one connection while the client is in debt for messages that were read."""

    __slots__ = ("_disconnect", "_pause", "_resume")

    def __init__(
        self,
        pace: Pace,
        pause: Callable[[str], None],
        resume: Callable[[str], None],
        disconnect: Callable[[], None] | None = None,
    ) -> None:
        """`pause` and `resume` are called with a reason, `disconnect` instead if the limit's rule says so."""
        super().__init__(pace, "")
        self._pause = pause
        self._resume = resume
        self._disconnect = disconnect

    def spend(self, messages: int, size: int) -> None:
        """Charge messages of `size` bytes in total that were read."""
        self._turns = ()
        super().spend(messages, size)
        if self.state is PauseState.FREE:
            self._check_debt()

    def _pay(self, brake: Brake) -> None:
        if self._disconnect is not None and any(each.disconnects for each in self._pace.owing()):
            disconnect, self._disconnect = self._disconnect, None
            disconnect()
        else:
            self._wait(brake)

    def _report_begin(self, reason: str) -> None:
        self._pause(reason)

    def _report_end(self, reason: str) -> None:
        self._resume(reason)


class CreditPause(RatePause):
    """Withholds credit from the links of one connection while its client is in debt."""

    __slots__ = ("_served", "_waiting")

    def __init__(self, pace: Pace, subject: str) -> None:
        super().__init__(pace, subject)
        self._served = 0  # links that got credit in the last turn
        self._waiting: dict[Callable[[], None], None] = {}

    def grant(self, most: int, mean: float, again: Callable[[], None], held: int) -> int:
        """Return how much credit may be granted now, at most `most`. If none, `again` is called when there may be more.

        The messages are charged with their credit; `spend` only their bytes. A link that already holds a burst of
        credit (`held`) gets none: otherwise a slow sender could save up a whole window.
        """
        most = min(most, self._pace.burst(mean) - held)
        if most <= 0:
            return 0
        granted = self._pace.grant(most, mean, self._turns)
        if isinstance(granted, int):
            return granted
        self._waiting[again] = None
        self.mean = mean
        self._wait(granted)
        return 0

    def forget(self, again: Callable[[], None], credit: int) -> None:
        """Remove a detached link and return its unused credit."""
        self._waiting.pop(again, None)
        self._pace.give_back(credit)

    def end(self) -> None:
        """Stop waiting: the connection is closed."""
        super().end()
        self._waiting.clear()

    def _go_on(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for again in waiting:
            again()
        self._served = len(waiting) - len(self._waiting)
        if self.state is PauseState.FREE:
            self._turns = ()

    def _still_to_come(self, messages: int, size: int) -> tuple[int, int]:
        # The messages are charged with their credit. The bytes are those of one message of each link that got some.
        return 0, int(self._served * self.mean)


class SendingPause(RatePause):
    """Stops sending to one connection while its client is in debt for messages that were sent."""

    __slots__ = ("_again",)

    def __init__(self, pace: Pace, subject: str, again: Callable[[], None]) -> None:
        """`again` is called when sending may continue, if `must_wait` was True in between."""
        super().__init__(pace, subject, mean=1.0)
        self._again = again

    def spend(self, messages: int, size: int) -> None:
        """Charge messages of `size` bytes in total that were sent."""
        super().spend(messages, size)
        self.mean = size / messages if messages else self.mean

    def _go_on(self) -> None:
        self._again()
