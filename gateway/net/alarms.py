"""Coarse timers for pumps: one event loop timer for all deadlines within the same few seconds.

A timer of its own costs an idle connection 0.9 KB, an alarm here a tenth of that. The price is that a pump is woken up
to `WIDTH_S` too early, checks its deadline and sets its alarm again. It would nearly always have to do that anyway,
because bytes that were received or sent meanwhile have moved the deadline.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple, Protocol

from gateway.runtime.failures import failures

WIDTH_S: Final = 4.0  # of a slot; a deadline nearer than two slots needs a timer of its own
WAKES_PER_TURN: Final = 128  # about a millisecond


class Sleeper(Protocol):
    """A pump. It is a Protocol because `gateway.net.pump` imports this module."""

    def wake(self) -> None:
        """Called at the time that was set, or up to `WIDTH_S` before."""


class _Slot(NamedTuple):
    sleepers: set[Sleeper]
    timer: asyncio.TimerHandle


class Alarms:
    """The pumps to wake, in slots of `WIDTH_S`. Times are those of the running loop, in seconds."""

    __slots__ = ("_slots",)

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def __len__(self) -> int:
        """Return the number of event loop timers in use."""
        return len(self._slots)

    def set(self, at: float, sleeper: Sleeper) -> None:
        """Wake `sleeper` once, at `at` or up to `WIDTH_S` earlier."""
        number = int(at / WIDTH_S)
        slot = self._slots.get(number)
        if slot is None:
            timer = asyncio.get_running_loop().call_at(number * WIDTH_S, self._fire, number)
            slot = self._slots[number] = _Slot(set(), timer)
        slot.sleepers.add(sleeper)

    def cancel(self, at: float, sleeper: Sleeper) -> None:
        """Cancel the alarm of `sleeper` for `at`, if it has not been woken yet."""
        number = int(at / WIDTH_S)
        slot = self._slots.get(number)
        if slot is not None:
            slot.sleepers.discard(sleeper)
            if not slot.sleepers:
                slot.timer.cancel()
                del self._slots[number]

    def _fire(self, number: int) -> None:
        """Wake a slot's sleepers, at most `WAKES_PER_TURN` in each event loop iteration."""
        slot = self._slots.get(number)
        if slot is None:  # all were cancelled between two iterations
            return
        sleepers = slot.sleepers
        try:
            for _ in range(min(len(sleepers), WAKES_PER_TURN)):
                if sleepers:  # a sleeper that was woken may have cancelled others
                    sleeper = sleepers.pop()
                    try:
                        sleeper.wake()
                    except Exception as error:  # the others must still be woken
                        failures.report("timer", error)
        finally:
            if sleepers:
                asyncio.get_running_loop().call_soon(self._fire, number)
            else:
                self._slots.pop(number, None)
