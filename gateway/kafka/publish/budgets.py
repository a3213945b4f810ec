"""The budgets of submitted and unsettled records: of the process, of tenants, topics and connections.

Also the budget of messages in flight to clients: one for the process, shared by all receivers.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Final

import msgspec

from flowcontrol.budget import Budget, ConnectionBudget, GroupBudget
from gateway.settings.config import BudgetConfig
from gateway.views.flow import BudgetFlow, budget_flow
from gateway.views.pauses import PROCESS, PROCESS_BUDGET, TOPIC_BUDGET, pauses
from mapping.tenants import NO_TENANTS, Tenancy
from telemetry.statistics import gauge

TENANTS: Final = 200  # number of tenants in the metrics: those with the most bytes in flight
OUTGOING: Final = "outgoing"  # name of the receivers' budget


class BudgetStatistics(msgspec.Struct, frozen=True):
    """Levels and limits of the budgets. Their shut gates are reported as pauses (`gateway.views.pauses`)."""

    limit_bytes: Annotated[
        int, gauge("limit of bytes in flight to Kafka, at which the gateway stops reading from clients")
    ]
    topic_bytes: Annotated[dict[str, int], gauge("bytes in flight to Kafka", "topic")]
    tenant_bytes: Annotated[
        dict[str, int], gauge("bytes in flight to Kafka, of the 200 tenants with the most", "tenant")
    ]
    outgoing_limit_bytes: Annotated[int, gauge("limit of bytes in flight to clients, which all receivers share")]
    outgoing_bytes: Annotated[int, gauge("bytes sent to clients and neither read nor settled")]
    outgoing_receivers: Annotated[int, gauge("receivers with counted bytes in flight")]
    outgoing_waiting: Annotated[int, gauge("receivers that wait until others have read or settled something")]


class Budgets:
    """All budgets. A topic's parent is its tenant's budget or the process's; connections' budgets have no parent."""

    def __init__(self, limits: BudgetConfig, tenancy: Tenancy = NO_TENANTS) -> None:
        self.process = Budget(limits.process_bytes, limits.process_records)
        self.process.gate.subscribe(partial(pauses.gate_changed, PROCESS_BUDGET, PROCESS))
        # bytes in flight to clients; it counts receivers that hold some as its records
        self.outgoing = Budget(limits.outgoing_bytes, sys.maxsize)
        self._limits = limits
        self._tenancy = tenancy
        self._tenants: dict[str, GroupBudget] = {}
        self._topics: dict[str, Budget] = {}
        self._kept: set[str] = set()

    def topic(self, name: str) -> Budget:
        """Return the budget of a topic, created on first use. `forget` drops it unless `keep` was called."""
        budget = self._topics.get(name)
        if budget is None:
            budget = Budget(self._limits.topic_bytes, self._limits.process_records, parent=self._above(name))
            budget.gate.subscribe(partial(pauses.gate_changed, TOPIC_BUDGET, f"topic {name}"))
            self._topics[name] = budget
        return budget

    def of(self, topic: str) -> Budget:
        """Return the budget that a record of a topic is counted in now: the process's if the topic has none."""
        return self._topics.get(topic, self.process)

    def _above(self, topic: str) -> Budget:
        """Return the parent of a topic's budget: its tenant's budget, or the process's."""
        tenant = self._tenancy.of(topic).tenant
        if tenant is None:
            return self.process
        budget = self._tenants.get(tenant)
        if budget is None:
            budget = self._tenants[tenant] = GroupBudget(self.process)
        return budget

    def keep(self, name: str) -> Budget:
        """Return the budget of a known topic, which is kept even while empty, until `drop`."""
        self._kept.add(name)
        return self.topic(name)

    def drop(self, name: str) -> None:
        """Drop the budget of a deleted topic; batches that refer to it still release to it."""
        self._kept.discard(name)
        self._topics.pop(name, None)

    def forget(self, name: str) -> None:
        """Drop the budget of a topic if it is empty and not kept."""
        budget = self._topics.get(name)
        if budget is not None and not budget.records and name not in self._kept:
            del self._topics[name]

    def connection(self) -> ConnectionBudget:
        """Create a connection's budget."""
        return ConnectionBudget(self._limits.connection_bytes, self._limits.process_records)

    def flow(self, topics: int) -> list[BudgetFlow]:
        """Describe the process's and the receivers' budgets, and those of the fullest `topics` tenants and topics."""
        return [
            budget_flow(PROCESS, self.process),
            budget_flow(OUTGOING, self.outgoing),
            *(budget_flow(f"tenant {name}", each) for name, each in _fullest(self._tenants, topics)),
            *(budget_flow(f"topic {name}", each) for name, each in _fullest(self._topics, topics)),
        ]

    def statistics(self) -> BudgetStatistics:
        """Return the current statistics."""
        outgoing = self.outgoing
        return BudgetStatistics(
            limit_bytes=self.process.bytes_limit,
            topic_bytes={name: each.bytes for name, each in self._topics.items()},
            tenant_bytes={name: each.bytes for name, each in _fullest(self._tenants, TENANTS)},
            outgoing_limit_bytes=outgoing.bytes_limit,
            outgoing_bytes=outgoing.bytes,
            outgoing_receivers=outgoing.records,
            outgoing_waiting=outgoing.waiting,
        )


def _fullest(budgets: Mapping[str, Budget], most: int) -> list[tuple[str, Budget]]:
    return heapq.nlargest(most, budgets.items(), key=lambda item: item[1].bytes)
