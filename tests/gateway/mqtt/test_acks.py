"""Acknowledgements leave in order of arrival, whatever the order of Kafka's answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.kafka.contracts import Result
from gateway.mqtt.acks import AckQueue, Slot
from mapping.outcomes import Outcome


@given(st.lists(st.integers(0, 200), max_size=60))
def test_acknowledgements_leave_in_order_and_exactly_once(steps: list[int]) -> None:
    queue = AckQueue()
    waiting: list[Slot] = []
    left: list[int] = []
    arrived = 0
    for step in steps:
        if step % 2 or not waiting:
            arrived += 1
            waiting.append(queue.arrive(arrived))
        else:
            slot = waiting.pop(step % len(waiting))
            slot.result = Result(Outcome.STORED)
            left += [one.packet_id for one in queue.ready()]
        assert len(queue) == arrived - len(left)
    for slot in waiting:
        slot.result = Result(Outcome.BUSY)
    left += [one.packet_id for one in queue.ready()]
    assert left == list(range(1, arrived + 1))
    assert len(queue) == 0


def test_nobody_is_acknowledged_ahead_of_one_that_waits() -> None:
    queue = AckQueue()
    first, second = queue.arrive(1), queue.arrive(2)
    second.result = Result(Outcome.STORED)
    assert queue.ready() == []
    first.result = Result(Outcome.BUSY)
    assert queue.ready() == [first, second]
