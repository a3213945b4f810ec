from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcontrol.budget import Budget, BudgetError, ConnectionBudget, GroupBudget


@given(
    limit=st.integers(1, 1000),
    records_limit=st.integers(1, 20),
    steps=st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 300))),
)
def test_random_walks(limit, records_limit, steps):
    """Budgets are exact and never negative, a parent is the sum of its children, and the gates open again."""
    parent = Budget(limit, records_limit)
    children = [Budget(limit, records_limit, parent) for _ in range(3)]
    taken = [[], [], []]
    told = []
    parent.gate.subscribe(told.append)
    for child, take, size in steps:
        if take or not taken[child]:
            children[child].take(size)
            taken[child].append(size)
        else:
            children[child].give(taken[child].pop())
        for budget, sizes in zip(children, taken, strict=True):
            assert (budget.bytes, budget.records) == (sum(sizes), len(sizes))
        for budget in (parent, *children):
            if budget.bytes >= limit or budget.records >= records_limit:
                assert not budget.gate.is_open
            if budget.bytes * 8 <= limit * 7 - 7 and budget.records * 8 <= records_limit * 7 - 7:
                assert budget.gate.is_open
        assert parent.bytes == sum(budget.bytes for budget in children)
        assert parent.records == sum(budget.records for budget in children)
    assert told == [state == 1 for state in (index % 2 for index in range(len(told)))]
    for budget, sizes in zip(children, taken, strict=True):
        budget.give(sum(sizes), len(sizes))
    assert (parent.bytes, parent.records, parent.gate.is_open) == (0, 0, True)


@given(st.integers(0, 100), st.integers(0, 10), st.integers(0, 200), st.integers(0, 20))
def test_giving_more_than_was_taken_raises_and_counts_nothing(size, records, back, records_back):
    parent = Budget(10**6, 10**6)
    budget = Budget(10**6, 10**6, parent)
    budget.take(size, records)
    if back <= size and records_back <= records:
        budget.give(back, records_back)
        assert (budget.bytes, budget.records) == (size - back, records - records_back)
    else:
        with pytest.raises(BudgetError):
            budget.give(back, records_back)
        assert (budget.bytes, budget.records) == (size, records)
    assert (parent.bytes, parent.records) == (budget.bytes, budget.records)


def test_negative_amounts_raise():
    budget = Budget(10, 10)
    budget.take(5)
    with pytest.raises(BudgetError):
        budget.take(-1)
    with pytest.raises(BudgetError):
        budget.give(-1)
    assert budget.bytes == 5


def test_nothing_is_refused_over_the_limit():
    budget = Budget(10, 10)
    budget.take(100)
    assert budget.bytes == 100
    assert not budget.gate.is_open


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        Budget(0, 1)


class Sender:
    """A greedy sender: it takes one byte after the other while its gate is open."""

    def __init__(self, topic: Budget) -> None:
        self.topic = topic
        self.budget = ConnectionBudget(10_000, 10_000)

    def send(self) -> bool:
        if not self.budget.gate.is_open:
            return False
        self.topic.take(1)
        self.budget.take(1, 1, self.topic)
        return True

    def answered(self) -> None:
        self.topic.give(1)
        self.budget.give(1)


def shares(*senders: list[Sender]) -> list[int]:
    """Return the bytes in flight of each group when all have sent for long and Kafka answers in order, slowly."""
    sent: deque[Sender] = deque()
    for _ in range(200):
        for sender in (sender for group in senders for sender in group):
            for _ in range(400):
                if sender.send():
                    sent.append(sender)
        for _ in range(min(len(sent), 100)):
            sent.popleft().answered()
    return [sum(sender.budget.bytes for sender in group) for group in senders]


@pytest.mark.parametrize("grouped", [True, False])
def test_groups_have_equal_shares_whatever_number_of_senders_each_has(grouped: bool) -> None:
    """A tenant with 49 greedy connections and one with a single one: a greedy group gets at most twice the other's."""
    process = Budget(10_000, 10_000)
    tenants = [GroupBudget(process) if grouped else process for _ in range(2)]
    many = [Sender(Budget(10_000, 10_000, tenants[0])) for _ in range(49)]
    one = [Sender(Budget(10_000, 10_000, tenants[1]))]
    of_many, of_one = shares(many, one)
    assert process.bytes == of_many + of_one
    assert (of_one * 2.5 > of_many) is grouped, (of_many, of_one)
    # A modest sender of either group is not kept from sending.
    for tenant in tenants:
        modest = Sender(Budget(10_000, 10_000, tenant))
        assert modest.send()
    assert process.gate.is_open


def test_a_groups_budget_is_exact_and_wakes_those_who_wait() -> None:
    process = Budget(800, 800)
    tenant, other = GroupBudget(process), GroupBudget(process)
    greedy, second = Sender(Budget(800, 800, tenant)), Sender(Budget(800, 800, other))
    while greedy.send():
        pass
    held = greedy.budget.bytes
    assert tenant.bytes == process.bytes == held
    assert greedy.budget.waits_for is tenant
    assert tenant.free == max(0, 700 - 2 * held)
    while second.send():
        pass
    for _ in range(second.budget.bytes):
        second.answered()
    assert second.budget.gate.is_open
    for _ in range(held // 2):
        greedy.answered()
    assert greedy.budget.gate.is_open, "half of it was answered"
    for _ in range(held - held // 2):
        greedy.answered()
    assert process.bytes == tenant.bytes == 0
