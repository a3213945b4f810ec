"""The budgets of what was submitted and is not answered: of the process, of each topic, of each connection."""

from __future__ import annotations

from flowcontrol.budget import Budget
from gateway.config import BudgetConfig


class Budgets:
    """One for the process, which each topic's has for its parent, and a connection's of its own.

    Attributes:
        process: bytes and records of the whole process.
    """

    def __init__(self, limits: BudgetConfig) -> None:
        self.process = Budget(limits.process_bytes, limits.process_records)
        self._limits = limits
        self._topics: dict[str, Budget] = {}
        self._kept: set[str] = set()

    def topic(self, name: str) -> Budget:
        """The budget of a topic; it goes with `forget` unless it is kept."""
        budget = self._topics.get(name)
        if budget is None:
            budget = Budget(self._limits.topic_bytes, self._limits.process_records, parent=self.process)
            self._topics[name] = budget
        return budget

    def keep(self, name: str) -> Budget:
        """The budget of a topic that is known: kept also while it is empty, until `drop`."""
        self._kept.add(name)
        return self.topic(name)

    def drop(self, name: str) -> None:
        """The topic is gone; what still has its budget gives back to it."""
        self._kept.discard(name)
        self._topics.pop(name, None)

    def forget(self, name: str) -> None:
        """Drop the budget of a topic that is not kept, if nothing is counted in it."""
        budget = self._topics.get(name)
        if budget is not None and not budget.records and name not in self._kept:
            del self._topics[name]

    def connection(self) -> Budget:
        """A budget for one connection, without a parent."""
        return Budget(self._limits.connection_bytes, self._limits.process_records)
