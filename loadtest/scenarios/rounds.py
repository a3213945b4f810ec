"""What the kill scenarios have in common: load, kills at random moments, a time to settle, a judge."""

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
SHOWN: Final = 5  # examples of what went wrong
STALLED_S: Final = 60.0  # without any progress for so long something hangs
_TICK_S: Final = 0.01


class Plan(Protocol):
    """What every plan says. Rates are messages a second of one sender; times in seconds."""

    @property
    def kills(self) -> int:
        """How often to kill."""

    @property
    def rate(self) -> float:
        """Of each sender."""

    @property
    def window(self) -> int:
        """Messages without an answer at one sender."""

    @property
    def between(self) -> float:
        """At most, between progress after a start and the next kill."""

    @property
    def early(self) -> float:
        """The share of kills that do not wait for the start to be finished."""

    @property
    def seed(self) -> int:
        """Of all rng."""


class Client(Protocol):
    """A client that connects again by itself."""

    client_id: str
    connects: int
    faults: list[str]

    def run(self) -> Coroutine[Any, Any, None]:
        """Until `stop`."""

    def stop(self) -> None:
        """Disconnect."""


class Sender(Client, Protocol):
    """A client that sends `total` messages."""

    total: int
    answered: int

    @property
    def finished(self) -> bool:
        """Whether every message is through."""

    def push(self) -> None:
        """Send what may be sent."""


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
        """Start, kill and start again, let everything settle, judge."""
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
                problems.append(f"it hangs: {error}")
            finally:
                self._pushing = False
                for client in self.clients():
                    client.stop()
        for client in self.clients():
            problems += [f"{client.client_id}: {fault}" for fault in client.faults[:SHOWN]]
        return await self.judge(problems, time.monotonic() - began)

    @abc.abstractmethod
    def make_clients(self) -> None:
        """They do not connect yet."""

    @abc.abstractmethod
    def senders(self) -> Sequence[Sender]:
        """The place of each is its number."""

    @abc.abstractmethod
    def clients(self) -> Sequence[Client]:
        """All of them."""

    @abc.abstractmethod
    def all_receive(self) -> bool:
        """Whether every receiver will get what is sent from now on."""

    @abc.abstractmethod
    def all_delivered(self) -> bool:
        """Whether every receiver has got everything."""

    @abc.abstractmethod
    def received(self) -> int:
        """How many messages were received in all."""

    @abc.abstractmethod
    async def judge(self, problems: list[str], seconds: float) -> O:
        """Hold what is stored and what was received against what the senders were told."""

    def let_in(self, yes: bool) -> None:
        """Whether clients that must not try in vain may connect."""

    def payload_of(self, number: int) -> Callable[[int], bytes]:
        """The messages of a sender."""
        return lambda sequence: self.numbering.payload(number, sequence, PAYLOAD)

    def acknowledged_to(self, number: int) -> Callable[[int], None]:
        """What notes the acknowledgements of a sender."""
        return lambda sequence: self.ledger.acknowledge(number, sequence)

    async def _push(self) -> None:
        """Keep the senders at their rate while there is load, then let them finish what they have."""
        while self._pushing:
            due = int((time.monotonic() - self._started) * self.plan.rate) if self._loading else 0
            for sender in self.senders():
                # A sender that was held up does not catch up at once: that would be one burst, not load.
                sender.total = max(sender.total, min(due, sender.answered + 4 * self.plan.window))
                sender.push()
            await asyncio.sleep(_TICK_S)

    def progressed(self) -> Callable[[], bool]:
        """A condition: every sender has got an answer from now on."""
        before = [sender.answered for sender in self.senders()]
        return lambda: all(sender.answered > then for then, sender in zip(before, self.senders(), strict=True))

    async def kill(self, kill: int) -> None:
        """Kill the gateway at a random moment, and start it again at once."""
        when = await self.moment(kill)
        self.let_in(False)
        await self.gateway.kill()
        self.say(f"kill {kill + 1} of {self.plan.kills} {when}: {self.ledger.total} acknowledged so far")
        await self.gateway.launch()

    async def moment(self, kill: int) -> str:
        """Wait for the moment of a kill; returns what it is."""
        if kill and self.rng.random() < self.plan.early:
            await asyncio.sleep(self.rng.uniform(0, self.plan.between))
            return "while it was starting"
        await self.gateway.wait_ready()
        self.let_in(True)
        await self.until(self.progressed(), f"answers before kill {kill + 1}")
        await asyncio.sleep(self.rng.uniform(0, self.plan.between))
        return "under load"

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait; TimeoutError when nothing at all moves for `STALLED_S`."""
        moved, last = time.monotonic(), -1
        while not condition():
            now = self.ledger.total + self.received()
            if now != last:
                moved, last = time.monotonic(), now
            elif time.monotonic() - moved > STALLED_S:
                raise TimeoutError(f"waited in vain for {what}")
            await asyncio.sleep(_TICK_S)
