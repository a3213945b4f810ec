import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcontrol.budget import Budget, BudgetError


@given(
    limit=st.integers(1, 1000),
    records_limit=st.integers(1, 20),
    steps=st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 300))),
)
def test_random_walks(limit, records_limit, steps):
    """Never negative, exact, the parent is the sum of its children, and everything recovers."""
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
