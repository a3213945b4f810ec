"""Common parts of the kill scenarios: load, kills at random moments, settling, verification."""

from __future__ import annotations

import abc
import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Numbering
from loadtest.verify import Ledger

PAYLOAD: Final = 64
SHOWN: Final = 5  # examples of each problem
STALLED_S: Final = 60.0  # without progress for this long, something hangs
_TICK_S: Final = 0.01


class Plan(Protocol):
    """Parameters of every plan. Rates are messages per second of one sender; times in seconds."""

    @property
    def kills(self) -> int:
        """The number of kills."""

    @property
    def rate(self) -> float:
        """The rate of each sender."""

    @property
    def window(self) -> int:
        """Unacknowledged messages per sender."""

    @property
    def between(self) -> float:
        """The longest time between progress after a start and the next kill."""

    @property
    def early(self) -> float:
        """The share of kills that do not wait for the start to be finished."""

    @property
    def seed(self) -> int:
        """The seed of all random choices."""


class Client(Protocol):
    """A client that reconnects on its own."""

    client_id: str
    connects: int
    faults: list[str]

    def run(self) -> Coroutine[Any, Any, None]:
        """Run until `stop`."""

    def stop(self) -> None:
        """Disconnect."""


class Sender(Client, Protocol):
    """A client that sends `total` messages."""

    total: int
    answered: int

    @property
    def finished(self) -> bool:
        """Whether every message is acknowledged."""

    def push(self) -> None:
        """Send as many messages as allowed."""


P = TypeVar("P", bound=Plan)
O = TypeVar("O")  # noqa: E741 - the outcome


class Rounds(abc.ABC, Generic[P, O]):
    """One run of a kill scenario."""

    def __init__(self, gateway: GatewayProcess, plan: P, say: Callable[[str], None]) -> None:
        self.gateway = gateway
        self.plan = plan
        self.say = say
        self.rng = random.Random(plan.seed)
        self.numbering = Numbering()
        self.topic = f"kills-{self.numbering.run}"
        self.ledger = Ledger()
        self._started = 0.0
        self._loading = True
        self._pushing = True

    async def run(self) -> O:
        """Start, kill and restart, let everything settle, verify."""
        await create_topic(self.gateway.kafka, self.topic)
        self.make_clients()
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for client in self.clients():
                tasks.create_task(client.run())
            self.let_in(True)
            problems: list[str] = []
            try:
                await self.until(self.all_receive, "the receivers' start")
                self._started = time.monotonic()
                tasks.create_task(self._push())
                for kill in range(self.plan.kills):
                    await self.kill(kill)
                await self.gateway.wait_ready()
                self.let_in(True)
                await self.until(self.progressed(), "answers after the last kill")
                self._loading = False
                await self.until(lambda: all(one.finished for one in self.senders()), "all answers")
                await self.until(self.all_delivered, "all deliveries")
            except TimeoutError as error:
                problems.append(f"no progress: {error}")
            finally:
                self._pushing = False
                for client in self.clients():
                    client.stop()
        for client in self.clients():
            problems += [f"{client.client_id}: {fault}" for fault in client.faults[:SHOWN]]
        return await self.check(problems, time.monotonic() - began)

    @abc.abstractmethod
    def make_clients(self) -> None:
        """Create the clients, without connecting them."""

    @abc.abstractmethod
    def senders(self) -> Sequence[Sender]:
        """Return the senders by number."""

    @abc.abstractmethod
    def clients(self) -> Sequence[Client]:
        """Return all clients."""

    @abc.abstractmethod
    def all_receive(self) -> bool:
        """Whether every receiver will get messages sent from now on."""

    @abc.abstractmethod
    def all_delivered(self) -> bool:
        """Whether every receiver has got everything."""

    @abc.abstractmethod
    def received(self) -> int:
        """Return the number of received messages in total."""

    @abc.abstractmethod
    async def check(self, problems: list[str], seconds: float) -> O:
        """Compare stored and received messages with the acknowledged ones."""

    def let_in(self, yes: bool) -> None:
        """Allow or forbid connecting to clients that must not try in vain."""

    def payload_of(self, number: int) -> Callable[[int], bytes]:
        """Return the function that makes a sender's messages."""
        return lambda sequence: self.numbering.payload(number, sequence, PAYLOAD)

    def acknowledged_to(self, number: int) -> Callable[[int], None]:
        """Return the function that records a sender's acknowledgements."""
        return lambda sequence: self.ledger.acknowledge(number, sequence)

    async def _push(self) -> None:
        """Keep the senders at their rate while there is load, then let them finish."""
        while self._pushing:
            due = int((time.monotonic() - self._started) * self.plan.rate) if self._loading else 0
            for sender in self.senders():
                # A delayed sender does not catch up in one burst.
                sender.total = max(sender.total, min(due, sender.answered + 4 * self.plan.window))
                sender.push()
            await asyncio.sleep(_TICK_S)

    def progressed(self) -> Callable[[], bool]:
        """Return a condition: every sender has got an acknowledgement since this call."""
        before = [sender.answered for sender in self.senders()]
        return lambda: all(sender.answered > then for then, sender in zip(before, self.senders(), strict=True))

    async def kill(self, kill: int) -> None:
        """Kill the gateway at a random moment, and restart it immediately."""
        when = await self.moment(kill)
        self.let_in(False)
        await self.gateway.kill()
        self.say(f"kill {kill + 1} of {self.plan.kills} {when}: {self.ledger.total} acknowledged so far")
        await self.gateway.launch()

    async def moment(self, kill: int) -> str:
        """Wait for the moment of a kill; return its description."""
        if kill and self.rng.random() < self.plan.early:
            await asyncio.sleep(self.rng.uniform(0, self.plan.between))
            return "while it was starting"
        await self.gateway.wait_ready()
        self.let_in(True)
        await self.until(self.progressed(), f"answers before kill {kill + 1}")
        await asyncio.sleep(self.rng.uniform(0, self.plan.between))
        return "under load"

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; TimeoutError if there is no progress at all for `STALLED_S`."""
        moved, last = time.monotonic(), -1
        while not condition():
            now = self.ledger.total + self.received()
            if now != last:
                moved, last = time.monotonic(), now
            elif time.monotonic() - moved > STALLED_S:
                raise TimeoutError(f"waited in vain for {what}")
            await asyncio.sleep(_TICK_S)
