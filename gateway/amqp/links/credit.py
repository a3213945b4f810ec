"""The budgets of the process and of topics as limits of link credit, besides each link's own window.

While a budget's gate is shut, its links get no credit; when it opens, all links that wait for it are topped up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from flowcontrol.budget import Budget
from flowcontrol.gate import Gate
from gateway.kafka.publish.publisher import Publisher
from gateway.pauses import PROCESS, PROCESS_BUDGET, TOPIC_BUDGET, Pause, pauses


class Waiter(Protocol):
    """A link that waits for credit."""

    def gate_opened(self) -> None:
        """Ask for credit again: the budget has capacity again."""


class CreditGates:
    """The gates of all incoming links of the process."""

    def __init__(self, publisher: Publisher) -> None:
        self.senders = 0  # the number of incoming links
        self._publisher = publisher
        self._waiting: dict[Gate, set[Waiter]] = {}
        self._callbacks: dict[Gate, Callable[[bool], None]] = {}

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

    def wait_for(self, gate: Gate, link: Waiter) -> None:
        """Top `link` up when `gate` opens."""
        links = self._waiting.get(gate)
        if links is None:
            links = self._waiting[gate] = set()

            def opened(is_open: bool) -> None:
                if is_open:
                    # In the next iteration of the loop: gates open in the middle of a settlement.
                    asyncio.get_running_loop().call_soon(self._gate_opened, gate)

            self._callbacks[gate] = opened
            gate.subscribe(opened)
        links.add(link)

    def forget(self, link: Waiter) -> None:
        """Remove a link that has ended."""
        for links in self._waiting.values():
            links.discard(link)

    @property
    def waiting(self) -> int:
        """The number of links that wait for a budget."""
        return sum(len(links) for links in self._waiting.values())

    def _gate_opened(self, gate: Gate) -> None:
        if not gate.is_open:
            return
        callback = self._callbacks.pop(gate, None)
        if callback is not None:
            gate.unsubscribe(callback)
        for link in self._waiting.pop(gate, ()):
            link.gate_opened()
