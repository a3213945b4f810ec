"""Records that wait for their topic, without Kafka."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.kafka.contracts import Refused
from gateway.kafka.publish.budgets import Budgets
from gateway.kafka.publish.held_records import HeldRecords
from gateway.runtime.failures import failures
from gateway.settings.config import BudgetConfig
from mapping.outcomes import Outcome
from mapping.record import Record

FULL = Refused(Outcome.FULL, "no further topic")


def waiting_in(budgets: Budgets, group: asyncio.TaskGroup, look_up: Any, outcomes: list[Outcome]) -> HeldRecords:
    """Records whose refusals are put into `outcomes`."""
    return HeldRecords(
        budgets,
        submit=lambda *_: None,
        refuse=lambda _owner, _token, outcome, _reason: outcomes.append(outcome),
        look_up=look_up,
        spawn=group.create_task,
        timeout_s=60,
    )


async def test_a_limit_that_is_reached_after_the_records_were_refused() -> None:
    """As at a shutdown, while a topic is being created."""
    outcomes: list[Outcome] = []
    may_answer = asyncio.Event()

    async def look_up(name: str, principal: str | None) -> Any:
        await may_answer.wait()
        raise FULL

    budgets = Budgets(BudgetConfig())
    async with asyncio.TaskGroup() as group:
        held = waiting_in(budgets, group, look_up, outcomes)
        before = failures.statistics().contained_total
        held.hold(Record("t", None, b"v"), None, None, None)
        await asyncio.sleep(0)
        held.refuse_all(Refused(Outcome.BUSY, "shutting down"))
        may_answer.set()
    assert outcomes == [Outcome.BUSY]
    assert (budgets.process.bytes, budgets.process.records) == (0, 0)
    assert failures.statistics().contained_total == before


async def test_a_topic_that_is_deleted_while_records_wait_for_its_partition() -> None:
    """They were counted in its budget, which is dropped; its successor gives nothing back that it has not taken."""
    outcomes: list[Outcome] = []
    may_answer = asyncio.Event()

    async def look_up(name: str, principal: str | None) -> Any:
        await may_answer.wait()
        raise Refused(Outcome.UNKNOWN_TOPIC, "gone")

    budgets = Budgets(BudgetConfig())
    budgets.keep("t")
    async with asyncio.TaskGroup() as group:
        held = waiting_in(budgets, group, look_up, outcomes)
        held.hold(Record("t", None, b"v", partition=7), None, None, None)
        await asyncio.sleep(0)
        budgets.drop("t")
        may_answer.set()
    assert outcomes == [Outcome.UNKNOWN_TOPIC]
    assert (budgets.process.bytes, budgets.process.records) == (0, 0)
