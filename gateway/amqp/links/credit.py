"""The budgets of the process and of topics as limits of link credit, besides each link's own window.

While a budget's gate is shut, its links get no credit; when it opens, all links that wait for it are topped up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from flowcontrol.budget import Budget
from flowcontrol.gate import Gate
from gateway.kafka.publish.publisher import Publisher
from gateway.views.pauses import PROCESS, PROCESS_BUDGET, TOPIC_BUDGET, Pause, pauses


class CreditGates:
    """The gates of all incoming links of the process."""

    def __init__(self, publisher: Publisher) -> None:
        self.senders = 0  # the number of incoming links
        self._publisher = publisher
        self._waiting: dict[Gate, set[Callable[[], None]]] = {}  # the links' methods that ask for credit again

    def shut_gate(self, topic: str | None) -> Gate | None:
        """Return the shut budget gate that blocks credit for `topic`, or None; without a topic, only the process's."""
        publisher = self._publisher
        if not publisher.gate.is_open:
            return publisher.gate
        if topic is None:
            return None
        gate = publisher.budgets.topic(topic).gate
        return None if gate.is_open else gate

    def paused(self, topic: str | None) -> Pause | None:
        """Return which budget blocks credit for `topic` and since when; see `shut_gate`."""
        shut = self.shut_gate(topic)
        if shut is self._publisher.gate:
            return pauses.since(PROCESS_BUDGET, PROCESS)
        return None if shut is None else pauses.since(TOPIC_BUDGET, f"topic {topic}")

    def budget(self, topic: str | None) -> Budget:
        """Return the budget of a link to `topic`, or the process's budget without a topic."""
        return self._publisher.budget if topic is None else self._publisher.budgets.topic(topic)

    def wait_for(self, gate: Gate, again: Callable[[], None]) -> None:
        """Call a link's `again` when `gate` opens."""
        if gate not in self._waiting:
            self._waiting[gate] = set()
            gate.subscribe(self._gate_changed)
        self._waiting[gate].add(again)

    def forget(self, again: Callable[[], None]) -> None:
        """Remove a link that has ended."""
        for links in self._waiting.values():
            links.discard(again)

    @property
    def waiting(self) -> int:
        """The number of links that wait for a budget."""
        return sum(len(links) for links in self._waiting.values())

    def _gate_changed(self, is_open: bool) -> None:
        if is_open:
            # In the next iteration of the loop: gates open in the middle of a settlement.
            asyncio.get_running_loop().call_soon(self._top_up)

    def _top_up(self) -> None:
        """Let the links that wait for a gate that is open ask again; each may wait again."""
        for gate in [gate for gate in self._waiting if gate.is_open]:
            gate.unsubscribe(self._gate_changed)
            for again in self._waiting.pop(gate):
                again()
