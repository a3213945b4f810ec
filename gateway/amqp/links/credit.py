"""What credit depends on besides a link's own window: the budgets of the process and of the topic.

While a budget's gate is shut no link gets credit for it; when it opens, all that waited for it are topped up.
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
        """The budget that had shut has capacity again."""


class CreditGates:
    """The gates of all incoming links of the process."""

    def __init__(self, publisher: Publisher) -> None:
        self.senders = 0  # how many incoming links there are
        self._publisher = publisher
        self._waiting: dict[Gate, set[Waiter]] = {}
        self._callbacks: dict[Gate, Callable[[bool], None]] = {}

    def shut_gate(self, topic: str | None) -> Gate | None:
        """The budget gate that forbids more credit for `topic` now, if any; None is no topic in particular."""
        publisher = self._publisher
        if not publisher.gate.is_open:
            return publisher.gate
        if topic is None:
            return None
        gate = publisher.budgets.topic(topic).gate
        return None if gate.is_open else gate

    def paused(self, topic: str | None) -> Pause | None:
        """Since when a budget forbids more credit for `topic`, and which; as `shut_gate`."""
        shut = self.shut_gate(topic)
        if shut is self._publisher.gate:
            return pauses.since(PROCESS_BUDGET, PROCESS)
        return None if shut is None else pauses.since(TOPIC_BUDGET, f"topic {topic}")

    def budget(self, topic: str | None) -> Budget:
        """The budget that a link to `topic` takes from; None is no topic in particular."""
        return self._publisher.budget if topic is None else self._publisher.budgets.topic(topic)

    def wait_for(self, gate: Gate, link: Waiter) -> None:
        """Top `link` up when `gate` opens."""
        links = self._waiting.get(gate)
        if links is None:
            links = self._waiting[gate] = set()

            def opened(is_open: bool) -> None:
                if is_open:
                    # In the next iteration: a gate opens in the middle of somebody's settlement.
                    asyncio.get_running_loop().call_soon(self._gate_opened, gate)

            self._callbacks[gate] = opened
            gate.subscribe(opened)
        links.add(link)

    def forget(self, link: Waiter) -> None:
        """The link is gone."""
        for links in self._waiting.values():
            links.discard(link)

    @property
    def waiting(self) -> int:
        """How many links wait for a budget."""
        return sum(len(links) for links in self._waiting.values())

    def _gate_opened(self, gate: Gate) -> None:
        if not gate.is_open:
            return
        callback = self._callbacks.pop(gate, None)
        if callback is not None:
            gate.unsubscribe(callback)
        for link in self._waiting.pop(gate, ()):
            link.gate_opened()
