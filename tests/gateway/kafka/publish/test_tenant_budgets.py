"""A tenant's topics share a budget below the process's; topics without a tenant do not."""

from __future__ import annotations

from gateway.kafka.publish.budgets import Budgets
from gateway.settings.config import BudgetConfig
from mapping.tenants import Tenancy


def test_a_tenants_topics_share_a_budget() -> None:
    budgets = Budgets(BudgetConfig(), Tenancy(True))
    one, two, other, nobodys = (budgets.topic(name) for name in ("a.x", "a.y", "b.x", "x"))
    assert one.parent is two.parent is not other.parent
    assert one.parent is not None
    assert one.parent.parent is other.parent.parent is nobodys.parent is budgets.process
    one.take(5)
    two.take(7)
    assert budgets.statistics().tenant_bytes == {"a": 12, "b": 0}
    assert budgets.process.bytes == 12


def test_without_tenants_a_dot_means_nothing() -> None:
    budgets = Budgets(BudgetConfig())
    assert budgets.topic("a.x").parent is budgets.process
    assert budgets.statistics().tenant_bytes == {}
