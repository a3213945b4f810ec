"""The journal: its callbacks run in order, after the record is stored, whatever Kafka answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.kafka.contracts import Owner, Result
from gateway.mqtt.session import journal as module
from gateway.mqtt.session.journal import Journal
from mapping.outcomes import Outcome
from tests.support.waiting import wait_until

STORED = Result(Outcome.STORED, 0)


class Writer:
    """Records the state at each write, and the callbacks."""

    def __init__(self) -> None:
        self.state = 0
        self.written: list[int] = []
        self.said: list[Any] = []
        self.too_large = 0
        self.journal = Journal(self.write, self.refuse)

    def write(self, owner: Owner) -> None:
        self.written.append(self.state)

    def refuse(self) -> None:
        self.too_large += 1

    def change(self, then: str = "") -> None:
        self.state += 1
        self.journal.save((self.said.append, then) if then else None)

    def answer(self, result: Result = STORED) -> None:
        self.journal.settle([None], [0], result)


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_one_write_covers_a_turn_and_what_waits_is_said_in_order() -> None:
    writer = Writer()
    writer.change("a")
    writer.change("b")
    assert writer.written == []
    await turn()
    assert (writer.written, writer.said) == ([2], [])
    writer.change("c")
    writer.change()
    await turn()
    assert writer.written == [2], "one is on its way"
    writer.answer()
    assert (writer.written, writer.said) == ([2, 4], ["a", "b"])
    assert not writer.journal.idle
    writer.answer()
    assert writer.said == ["a", "b", "c"]
    assert writer.journal.idle


async def test_what_kafka_does_not_take_is_written_again_with_what_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    writer = Writer()
    writer.change("a")
    await turn()
    writer.answer(Result(Outcome.BUSY, reason="silent"))
    writer.change("b")
    assert not writer.journal.idle
    await wait_until(lambda: len(writer.written) == 2)
    assert (writer.written, writer.said) == ([1, 2], [])
    writer.answer()
    assert writer.said == ["a", "b"]


@pytest.mark.parametrize("result", [STORED, Result(Outcome.BUSY)])
async def test_nothing_is_said_after_the_stop(result: Result) -> None:
    writer = Writer()
    writer.change("a")
    await turn()
    writer.change("b")
    writer.journal.stop()
    writer.answer(result)
    writer.change("c")
    await turn()
    assert (writer.written, writer.said) == ([1], [])
    assert writer.journal.idle


async def test_an_action_may_save_again() -> None:
    writer = Writer()
    writer.journal.save((lambda _: writer.change("b"), None))
    await turn()
    writer.answer()
    await turn()
    writer.answer()
    assert writer.said == ["b"]


async def test_what_kafka_will_never_take_is_not_tried_again() -> None:
    writer = Writer()
    writer.change("lost with its connection")
    await turn()
    writer.answer(Result(Outcome.TOO_LARGE))
    assert (writer.too_large, writer.said) == (1, [])
    assert writer.journal.idle
    writer.change("smaller")
    await turn()
    writer.change("behind it")
    writer.answer(Result(Outcome.TOO_LARGE))
    assert writer.written == [1, 2, 3], "what changed meanwhile is tried"
    writer.answer()
    assert (writer.too_large, writer.said) == (2, ["behind it"])
