"""Wakes pumps whose time may have come: one timer of the loop for all that wait for the same few seconds.

A timer of its own costs an idle connection 0.9 KB, an alarm here a tenth of it. The price is that a pump is woken up to
`WIDTH_S` too early: it looks, and sets its alarm anew. Nearly always it would have to anyway, because bytes that were
received or sent meanwhile have moved its deadline.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple, Protocol

from gateway.failures import failures

WIDTH_S: Final = 4.0  # of a slot; deadlines nearer than two of them are for a timer of one's own
WAKES_PER_TURN: Final = 128  # about a millisecond


class Sleeper(Protocol):
    """A pump; a Protocol, because `gateway.net.pump` needs this module."""

    def wake(self) -> None:
        """Called at the time that was set, or a little before."""


class _Slot(NamedTuple):
    sleepers: set[Sleeper]
    timer: asyncio.TimerHandle


class Alarms:
    """The pumps to wake, by time, in slots of `WIDTH_S`. Times are the running loop's, in seconds."""

    __slots__ = ("_slots",)

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def __len__(self) -> int:
        """How many timers of the loop there are."""
        return len(self._slots)

    def set(self, at: float, sleeper: Sleeper) -> None:
        """Wake `sleeper` once, at `at` or up to `WIDTH_S` before."""
        number = int(at / WIDTH_S)
        slot = self._slots.get(number)
        if slot is None:
            timer = asyncio.get_running_loop().call_at(number * WIDTH_S, self._ring, number)
            slot = self._slots[number] = _Slot(set(), timer)
        slot.sleepers.add(sleeper)

    def cancel(self, at: float, sleeper: Sleeper) -> None:
        """Do not wake `sleeper` for `at`, if that is still to come; nothing of it is kept."""
        number = int(at / WIDTH_S)
        slot = self._slots.get(number)
        if slot is not None:
            slot.sleepers.discard(sleeper)
            if not slot.sleepers:
                slot.timer.cancel()
                del self._slots[number]

    def _ring(self, number: int) -> None:
        """Wake a slot's sleepers, a bounded number in each iteration of the event loop."""
        slot = self._slots.get(number)
        if slot is None:  # all of them have cancelled between two iterations
            return
        sleepers = slot.sleepers
        try:
            for _ in range(min(len(sleepers), WAKES_PER_TURN)):
                if sleepers:  # one that was woken may cancel another's alarm
                    sleeper = sleepers.pop()
                    try:
                        sleeper.wake()
                    except Exception as error:  # the others are woken all the same
                        failures.tell("timer", error)
        finally:
            if sleepers:
                asyncio.get_running_loop().call_soon(self._ring, number)
            else:
                self._slots.pop(number, None)
