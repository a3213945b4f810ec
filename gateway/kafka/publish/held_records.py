"""Records whose topic is not known yet: kept in order until Kafka has told of it, or it has been created."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import Any, Final

from gateway.failures import failures
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.contracts import Owner, Refused
from gateway.kafka.publish.batch import WITHDRAWN, stands_for
from gateway.kafka.publish.budgets import Budgets
from gateway.kafka.publish.sender_partitions import Sender
from gateway.spawn import Spawn
from mapping.outcomes import Outcome
from mapping.record import Record

HELD_RECORDS: Final = 500_000
"""How many records may wait for one unknown topic's look-up; further ones are BUSY. The budgets' gates come before:
with what a held record is counted for, the process budget shuts its gate earlier."""
HELD_OVERHEAD: Final = 512
"""What a held record is counted for beside its key, value and headers: its objects."""
_Held = tuple[Record, Owner | None, Any, Sender | None, int]
"""A record that waits for its topic, its ticket, its sender, and its size."""
Submit = Callable[[Record, Owner | None, Any, Sender | None], None]
Refuse = Callable[[Owner | None, Any, Outcome, str], None]
LookUp = Callable[[str, str | None], Awaitable[TopicInfo]]
"""Learns of a topic by its name, creating it for a principal where need be; raises Refused."""


def _principal(held: _Held) -> str | None:
    return getattr(held[1], "principal", None)


class HeldRecords:
    """The records that wait, by topic."""

    def __init__(
        self, budgets: Budgets, *, submit: Submit, refuse: Refuse, look_up: LookUp, spawn: Spawn, timeout_s: float
    ) -> None:
        """Records wait for `timeout_s` at the most, and are counted in `budgets` meanwhile.

        `look_up` is called for each topic that records wait for, `submit` takes one whose topic has become known,
        `refuse` settles one whose topic cannot be used.
        """
        self._budgets = budgets
        self._submit = submit
        self._refuse = refuse
        self._look_up = look_up
        self._spawn = spawn
        self._timeout_s = timeout_s
        self._held: dict[str, list[_Held]] = {}

    def hold(self, record: Record, owner: Owner | None, token: Any, sender: Sender | None) -> None:
        """Keep `record` until its topic is known; ask for the topic, once."""
        name = record.topic
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = []
            self._spawn(self._resolve(name))
        if len(held) >= HELD_RECORDS:
            self._refuse(owner, token, Outcome.BUSY, f"topic {name} is still being looked up")
            return
        size = HELD_OVERHEAD + len(record.key or b"") + len(record.value or b"")
        size += sum(len(header) + len(value or b"") for header, value in record.headers)
        held.append((record, owner, token, sender, size))
        source = self._budgets.topic(name)
        source.take(size)
        budget = getattr(owner, "budget", None)
        if budget is not None:
            budget.take(size, 1, source)

    def release(self, name: str) -> None:
        """The topic is known: submit what waits for it."""
        self._end(name, None, self._held.pop(name, ()))

    def refuse_all(self, refused: Refused) -> None:
        """Settle everything that waits."""
        for name in tuple(self._held):
            self._end(name, refused, self._held.pop(name))

    def withdraw(self, owners: Set[int]) -> None:
        """Refuse what waits of these owners (by their ids)."""
        refused = Refused(Outcome.BUSY, WITHDRAWN)
        for name, held in list(self._held.items()):
            theirs = [one for one in held if stands_for(one[1]) in owners]
            if theirs:
                self._held[name] = [one for one in held if stands_for(one[1]) not in owners]
                self._end(name, refused, theirs)

    async def _resolve(self, name: str) -> None:
        """Learn of a topic that records wait for. One client's limit is not the others': each is asked for in turn."""
        refused: Refused | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                while held := self._held.get(name):
                    principal = _principal(held[0])
                    try:
                        await self._look_up(name, principal)
                    except Refused as error:
                        if error.outcome is not Outcome.FULL:
                            raise
                        self._refuse_of(name, principal, error)
        except TimeoutError:
            refused = Refused(Outcome.BUSY, "Kafka did not answer in time")
        except Refused as error:
            refused = error
        except Exception as error:  # contained: what waits for the topic has a clear outcome
            failures.tell("topic", error, name)
            refused = Refused(Outcome.BUSY, f"topic {name} could not be looked up")
        self._end(name, refused, self._held.pop(name, ()))

    def _refuse_of(self, name: str, principal: str | None, refused: Refused) -> None:
        """Refuse what one client's records wait for; those of others wait on."""
        held = self._held.pop(name)
        others = [one for one in held if _principal(one) != principal]
        if others:
            self._held[name] = others
        self._end(name, refused, [one for one in held if _principal(one) == principal])

    def _end(self, name: str, refused: Refused | None, held: Sequence[_Held]) -> None:
        for record, owner, token, sender, size in held:
            if refused is None:
                self._submit(record, owner, token, sender)
            else:
                self._refuse(owner, token, refused.outcome, refused.reason)
            # After taking again, so that the gate does not flap.
            self._budgets.topic(name).give(size)
            budget = getattr(owner, "budget", None)
            if budget is not None:
                budget.give(size)
        self._budgets.forget(name)
