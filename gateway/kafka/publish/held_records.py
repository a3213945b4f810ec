"""Records whose topic or partition is not known yet: kept in order until it was looked up or created."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Set
from functools import partial
from typing import Any, Final

import msgspec

from flowcontrol.budget import Budget
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.contracts import Owner, Refused
from gateway.kafka.publish.batch import WITHDRAWN, owner_id
from gateway.kafka.publish.budgets import Budgets
from gateway.kafka.publish.sender_partitions import RememberedSender
from gateway.runtime.failures import failures
from gateway.runtime.spawn import Spawn
from mapping.outcomes import Outcome
from mapping.record import Record

HELD_RECORDS: Final = 500_000
"""How many records may wait for one topic's lookup; further ones are BUSY. Usually the process budget shuts its gate
earlier, since every held record counts for at least `HELD_OVERHEAD`."""
HELD_OVERHEAD: Final = 512
"""Bytes that a held record counts for in addition to its key, value and headers: its Python objects."""
_Held = tuple[Record, Owner | None, Any, RememberedSender | None, int, Budget]
"""A waiting record, its owner and token, its sender, its size, and the budget that it is counted in."""
Submit = Callable[[Record, Owner | None, Any, RememberedSender | None], None]
Refuse = Callable[[Owner | None, Any, Outcome, str], None]
LookUp = Callable[[str, str | None], Awaitable[TopicInfo]]
"""Looks up a topic by its name, creating it for a principal if needed; raises Refused."""


def _principal(held: _Held) -> str | None:
    owner = held[1]
    return None if owner is None else owner.principal


def _is_of(principal: str | None, held: _Held) -> bool:
    return _principal(held) == principal


class HeldRecords(msgspec.Struct, eq=False):
    """The waiting records, by topic."""

    budgets: Budgets  # count the records while they wait
    submit: Submit  # called for each record whose topic is known now
    refuse: Refuse  # called for each record whose topic cannot be used
    look_up: LookUp  # called for each topic that records wait for
    spawn: Spawn
    timeout_s: float  # how long records wait at most
    _held: dict[str, list[_Held]] = {}

    def hold(self, record: Record, owner: Owner | None, token: Any, sender: RememberedSender | None) -> None:
        """Keep `record` until its topic is known; the first record of a topic starts the lookup."""
        name = record.topic
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = []
            self.spawn(self._resolve(name))
        if len(held) >= HELD_RECORDS:
            self.refuse(owner, token, Outcome.BUSY, f"topic {name} is still being looked up")
            return
        size = HELD_OVERHEAD + len(record.key or b"") + len(record.value or b"")
        size += sum(len(header) + len(value or b"") for header, value in record.headers)
        source = self.budgets.topic(name)  # kept with the record: a topic that is deleted gets another one
        held.append((record, owner, token, sender, size, source))
        source.take(size)
        budget = None if owner is None else owner.budget
        if budget is not None:
            budget.take(size, 1, source)

    def waits_for(self, name: str) -> bool:
        """Whether records wait for a topic."""
        return name in self._held

    def release(self, name: str) -> None:
        """Submit the records that wait for a topic, which is known now."""
        self._end(name, None, self._held.pop(name, ()))

    def refuse_all(self, refused: Refused) -> None:
        """Refuse all waiting records."""
        for name in tuple(self._held):
            self._refuse_some(name, refused, lambda _: True)

    def withdraw(self, owners: Set[int]) -> None:
        """Refuse the waiting records of these owners (by id)."""
        for name in tuple(self._held):
            self._refuse_some(name, Refused(Outcome.BUSY, WITHDRAWN), lambda waiting: owner_id(waiting[1]) in owners)

    async def _resolve(self, name: str) -> None:
        """Look up a topic that records wait for, for one principal after the other: each has its own limit."""
        refused: Refused | None = None
        try:
            async with asyncio.timeout(self.timeout_s):
                while held := self._held.get(name):
                    principal = _principal(held[0])
                    try:
                        await self.look_up(name, principal)
                    except Refused as error:
                        if error.outcome is not Outcome.FULL:
                            raise
                        self._refuse_some(name, error, partial(_is_of, principal))
        except TimeoutError:
            refused = Refused(Outcome.BUSY, "Kafka did not answer in time")
        except Refused as error:
            refused = error.bare()
        except Exception as error:  # contained: the waiting records still get a definite outcome
            failures.report("topic", error, name)
            refused = Refused(Outcome.BUSY, f"topic {name} could not be looked up")
        self._end(name, refused, self._held.pop(name, ()))

    def _refuse_some(self, name: str, refused: Refused, chosen: Callable[[_Held], bool]) -> None:
        """Refuse the chosen records of a topic that is being looked up; the others go on waiting."""
        held = self._held.get(name, ())  # they may have been released during the lookup
        self._held[name] = [waiting for waiting in held if not chosen(waiting)]
        self._end(name, refused, [waiting for waiting in held if chosen(waiting)])

    def _end(self, name: str, refused: Refused | None, held: Sequence[_Held]) -> None:
        for record, owner, token, sender, size, source in held:
            if refused is None:
                self.submit(record, owner, token, sender)
            else:
                self.refuse(owner, token, refused.outcome, refused.reason)
            # After submitting, so that the gate does not flap.
            source.give(size)
            budget = None if owner is None else owner.budget
            if budget is not None:
                budget.give(size)
        self.budgets.forget(name)
