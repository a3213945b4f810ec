"""Acknowledgements are sent in order of arrival, for any order of Kafka's answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.kafka.contracts import Result
from gateway.mqtt.session.acks import AckQueue, Slot
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


@given(st.lists(st.sampled_from(["plain", "refused", "exactly once", "no_subscribers"]), max_size=12), st.data())
def test_what_is_stored_and_plain_is_taken_at_once_as_far_as_nobody_waits(
    kinds: list[str], data: st.DataObject
) -> None:
    queue, taken_at_once = AckQueue(), AckQueue()
    slots = [queue.arrive(number, 2 if kind == "exactly once" else 1) for number, kind in enumerate(kinds)]
    if set(kinds) == {"plain"}:
        others = taken_at_once.arrive_run(range(len(kinds)))
    else:
        others = [taken_at_once.arrive(slot.packet_id, slot.qos) for slot in slots]
    for slot, other, kind in zip(slots, others, kinds, strict=True):
        slot.no_subscribers = other.no_subscribers = kind == "no_subscribers"
    left: list[int] = []
    left_at_once: list[int] = []
    numbers = list(range(len(kinds)))
    while numbers:
        batch = [number for number in numbers if data.draw(st.booleans())] or numbers[:1]
        numbers = [number for number in numbers if number not in batch]
        for number in batch:
            result = Result(Outcome.BUSY if kinds[number] == "refused" else Outcome.STORED)
            slots[number].result = others[number].result = result
        left += [slot.packet_id for slot in queue.ready()]
        good = taken_at_once.stored()
        assert all(kinds[number] == "plain" for number in good)
        left_at_once += good + [slot.packet_id for slot in taken_at_once.ready()]
        assert left_at_once == left
    assert left == list(range(len(kinds)))
