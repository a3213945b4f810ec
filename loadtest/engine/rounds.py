"""Kills at random moments under a load of numbered messages, and the comparison of what was kept and delivered.

A book has the messages that a subscriber or a group of receivers got. At the end every acknowledged message must be in
Kafka, every stored one in every book, and nothing twice where the protocol promises once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from loadtest.clients.kept.amqp import KeptSender
from loadtest.clients.kept.lasting import Messages, progressed
from loadtest.clients.kept.mqtt import KeptPublisher
from loadtest.clients.kept.paho import PahoPublisher
from loadtest.clients.kept.proton_links import ProtonSender
from loadtest.clients.topics import create_topic
from loadtest.engine.redelivery import Group, Kill, Outage
from loadtest.gateway import GatewayProcess, children
from loadtest.numbering import Number, Numbering
from loadtest.verify import Arrivals, Ledger, read_places

PAYLOAD: Final = 64
SHOWN: Final = 5  # examples of each problem
STALLED_S: Final = 60.0  # without progress for this long, something hangs
RECOVERY_S: Final = 6.0
"""How long commits may fail after Kafka is back: their timeout, a pause, the group's coordinator."""
KAFKA_BACK_S: Final = 180.0
COMMIT_INTERVAL_S: Final = 1.0  # the gateway's
_TICK_S: Final = 0.01
_POLL_S: Final = 0.2


class Plan(NamedTuple):
    """Parameters; times in seconds.

    Attributes:
        protocol: of the clients.
        kills: number of kills.
        senders: MQTT: of each QoS, plus one Paho client of each; AMQP: plus one proton client.
        subscribers: MQTT: of each QoS, plus one Paho client.
        rate: messages per second of one sender.
        window: unacknowledged messages per sender.
        between: longest time between progress after a start and the next kill.
        early: share of kills that do not wait for the start to be finished.
        patient: share of kills that wait until every subscriber is served.
        broker: AMQP: share of kills of the broker, half of them together with the gateway.
        grace: AMQP: time from a client's acceptance to its commit, in addition to the commit interval.
        seed: of all random choices.
    """

    protocol: Literal["mqtt", "amqp"] = "mqtt"
    kills: int = 30
    senders: int = 2
    subscribers: int = 1
    rate: float = 200.0
    window: int = 20
    between: float = 1.5
    early: float = 0.2
    patient: float = 0.5
    broker: float = 0.25
    grace: float = 1.5
    seed: int = 0


class Client(Protocol):
    """A client that reconnects on its own."""

    client_id: str
    connects: int
    faults: list[str]

    def run(self) -> Coroutine[Any, Any, None]:
        """Run until `stop`."""

    def stop(self) -> None:
        """Disconnect."""


Sender = KeptPublisher | KeptSender | PahoPublisher | ProtonSender


class Book(NamedTuple):
    """What a subscriber got.

    Attributes:
        arrivals: the messages.
        ordered: whether those of a sender must arrive in order.
        once: whether messages of exact senders must arrive once.
    """

    arrivals: Arrivals
    ordered: bool = False
    once: bool = False


class Rounds:
    """One run; whoever makes it adds the clients, and their books or groups.

    Attributes:
        senders: by number.
        receivers: all receivers; `started` has an event for each, set when it gets what is sent from then on.
        exact: numbers of the senders whose messages must be stored once.
        books: by name.
        groups: AMQP's consumer groups by name; their redeliveries are checked too.
        doors: events, set while clients may connect that must not try in vain.
    """

    def __init__(
        self, gateway: GatewayProcess, plan: Plan, say: Callable[[str], None], host: GatewayProcess | None = None
    ) -> None:
        """`host` has the Kafka to kill; without it the broker is not killed."""
        self.gateway = gateway
        self.plan = plan
        self.numbering = Numbering()
        self.topic = f"kills-{self.numbering.run}"
        self.ledger = Ledger()
        self.senders: list[Sender] = []
        self.receivers: list[Client] = []
        self.started: list[asyncio.Event] = []
        self.exact: set[int] = set()
        self.books: dict[str, Book] = {}
        self.groups: dict[str, Group] = {}
        self.doors: list[asyncio.Event] = []
        self.kills: list[Kill] = []
        self.problems: list[str] = []
        self._outages: list[Outage] = []
        self._host = host
        self._say = say
        self._rng = random.Random(plan.seed)
        self._loading = self._pushing = True

    def messages(self) -> Messages:
        """Return the messages of the next sender."""
        number = len(self.senders)
        return Messages(
            f"sender-{number}", lambda sequence: self.numbering.payload(number, sequence, PAYLOAD),
            lambda sequence: self.ledger.acknowledge(number, sequence), self.plan.window,
        )  # fmt: skip

    def group(self, name: str) -> Group:
        """Return a group with its book."""
        if name not in self.groups:
            self.groups[name] = Group(name, self.numbering)
            self.books[name] = Book(self.groups[name].arrivals)
        return self.groups[name]

    @property
    def clients(self) -> list[Client]:
        """All clients."""
        return [*self.senders, *self.receivers]

    @property
    def received(self) -> int:
        """The number of deliveries to all books."""
        return sum(book.arrivals.counts.total() for book in self.books.values())

    async def run(self) -> dict[str, Any]:
        """Start, kill and restart, let everything settle, verify; return the columns of a report."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for client in self.clients:
                tasks.create_task(client.run())
            self._let_in(True)
            try:
                await self._until(lambda: all(one.is_set() for one in self.started), "the receivers' start")
                tasks.create_task(self._push())
                for number in range(self.plan.kills):
                    await self._kill(number)
                await self.gateway.wait_ready()
                self._let_in(True)
                await self._until(progressed(self.senders), "answers after the last kill")
                self._loading = False
                await self._until(lambda: all(one.finished for one in self.senders), "all answers")
                sent = sum(one.total for one in self.senders)
                await self._until(
                    lambda: all(book.arrivals.total >= sent for book in self.books.values()), "all deliveries"
                )
            except TimeoutError as error:
                self.problems.append(f"no progress: {error}")
            finally:
                self._pushing = False
                for client in self.clients:
                    client.stop()
        for client in self.clients:
            self.problems += [f"{client.client_id}: {fault}" for fault in client.faults[:SHOWN]]
        return {"kills": self.plan.kills, "seconds": round(time.monotonic() - began, 1)} | await self.verify()

    async def create_topic(self) -> None:
        """Create its topic."""
        await create_topic(self.gateway.kafka, self.topic)

    # killing

    def _let_in(self, yes: bool) -> None:
        for door in self.doors:
            (door.set if yes else door.clear)()

    async def _push(self) -> None:
        """Keep the senders at their rate while there is load, then let them finish."""
        started = time.monotonic()
        while self._pushing:
            for sender in self.senders:
                sender.top_up((time.monotonic() - started) * self.plan.rate if self._loading else 0)
            await asyncio.sleep(_TICK_S)

    def _served(self) -> Callable[[], bool]:
        """Return a condition: every book has got a new message since this call."""
        before = {name: book.arrivals.total for name, book in self.books.items()}
        return lambda: all(book.arrivals.total > before[name] for name, book in self.books.items())

    async def _kill(self, number: int) -> None:
        """Kill the gateway, the broker, or both at a random moment, and restart them immediately."""
        host = self._host if self._rng.random() < self.plan.broker else None
        alone = host is not None and self._rng.random() < 0.5
        when = await self._moment(number)
        self._let_in(alone)
        killed = time.monotonic()
        if host is not None:
            for broker in children(host.pid):  # the gateway restarts it
                os.kill(broker, signal.SIGKILL)
        if not alone:
            await self.gateway.kill()
        name = "the broker" if alone else "the gateway" if host is None else "broker and gateway"
        self._say(f"kill {number + 1} of {self.plan.kills}, {name} {when}: {self.ledger.total} acknowledged so far")
        committed = await self._committed() if self.groups else {}
        if host is not None:
            self._outages.append(Outage(killed, time.monotonic() + RECOVERY_S))
        if alone:
            await self._until(self._served(), "deliveries after the broker came back")
        else:
            self.kills.append(Kill(killed, committed))
            await self.gateway.launch()

    async def _moment(self, number: int) -> str:
        """Wait for the moment of a kill; return its description."""
        if not number or self._rng.random() < self.plan.patient:
            await self.gateway.wait_ready()
            self._let_in(True)
            await self._until(self._served(), f"deliveries before kill {number + 1}")
        if number and self._rng.random() < self.plan.early:
            await asyncio.sleep(self._rng.uniform(0, self.plan.between))
            return "while it was starting"
        await self.gateway.wait_ready()
        self._let_in(True)
        await self._until(progressed(self.senders), f"answers before kill {number + 1}")
        await asyncio.sleep(self._rng.uniform(0, self.plan.between))
        return "under load"

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; TimeoutError if there is no progress at all for `STALLED_S`."""
        moved, last = time.monotonic(), -1
        while not condition():
            now = self.ledger.total + self.received
            if now != last:
                moved, last = time.monotonic(), now
            elif time.monotonic() - moved > STALLED_S:
                raise TimeoutError(f"waited in vain for {what}")
            await asyncio.sleep(_TICK_S)

    async def _committed(self) -> dict[str, dict[int, int]]:
        """Return the groups' committed offsets by partition; waits for Kafka."""
        host, _, port = self.gateway.kafka.rpartition(":")
        async with asyncio.timeout(KAFKA_BACK_S):
            while True:
                with contextlib.suppress(OSError, KafkaError):
                    _, writer = await asyncio.open_connection(host, int(port))  # aiokafka would log failed attempts
                    writer.close()
                    return await _read_committed(self.gateway.kafka, self.groups)
                await asyncio.sleep(_POLL_S)

    # verifying

    async def verify(self) -> dict[str, int | float]:
        """Compare Kafka and the books with the acknowledgements; return the columns of a report."""
        places, other = [
            await read_places(self.gateway.kafka, self.topic, self.numbering, isolation)
            for isolation in ("read_committed", "read_uncommitted")
        ]
        if places != other:
            self.problems.append("read_committed and read_uncommitted see different messages")
        lost, double = self.ledger.missing(places), [number for number, at in places.items() if len(at) > 1]
        self._add("acknowledged and not in Kafka", lost, places)
        exactly = [number for number in double if number.sender in self.exact]
        self._add("of a sender at QoS 2 and in Kafka more than once", exactly, places)
        found: dict[str, int | float] = {
            "sent": sum(one.total for one in self.senders), "acknowledged": self.ledger.total, "lost": len(lost),
            "stored twice": len(double), "stored twice at QoS 2": len(exactly), "delivered": self.received,
            "missing": sum(self._check_book(name, book, places) for name, book in self.books.items()),
            "reconnects": sum(client.connects - 1 for client in self.clients),
        }  # fmt: skip
        if self.groups:
            found |= self._check_groups()
        return found | {"broker kills": len(self._outages), "problems": len(self.problems)}

    def _check_book(self, name: str, book: Book, places: dict[Number, list[str]]) -> int:
        """Compare a book with what is stored; return how many messages are missing."""
        counts = book.arrivals.counts
        missing = [number for number in places if number not in counts]
        self._add(f"not delivered to {name}", missing, places)
        if book.once:
            twice = [number for number, count in counts.items() if count > 1 and number.sender in self.exact]
            self._add(f"delivered more than once to {name}", twice, places)
        if book.ordered and book.arrivals.reordered:
            self.problems.append(f"{name}: {book.arrivals.reordered} messages out of order")
        if book.arrivals.foreign:
            self.problems.append(f"{name}: {book.arrivals.foreign} messages of another origin")
        return len(missing)

    def _check_groups(self) -> dict[str, int | float]:
        """Check what was delivered again: nothing committed, and nothing accepted long before a kill."""
        limit, every = COMMIT_INTERVAL_S + self.plan.grace, []
        for name, group in self.groups.items():
            again = group.again(self.kills, self._outages)
            self._add(f"delivered again to {name} although committed", [one for one in again if one.below])
            late = [one for one in again if one.age is not None and one.age > limit]
            self._add(f"delivered again to {name}, accepted more than {limit:g} s before a kill", late)
            every += again
        ages = [one.age for one in every if one.age is not None]
        return {
            "again": len(every), "again after acceptance": len(ages),
            "again below the commit": sum(one.below for one in every),
            "oldest again s": round(max(ages, default=0.0), 2),
        }  # fmt: skip

    def _add(self, what: str, found: Sequence[Any], places: dict[Number, list[str]] | None = None) -> None:
        """Add a line for a problem, with some of its messages and where they are stored."""
        if found:
            self.problems.append(f"{len(found)} messages {what}")
            self.problems += [f"  {one}: {(places or {}).get(one, [])}" for one in found[:SHOWN]]


async def _read_committed(bootstrap: str, groups: Iterable[str]) -> dict[str, dict[int, int]]:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        await admin.start()
        found: dict[str, dict[int, int]] = {}
        for name in groups:
            offsets = await admin.list_consumer_group_offsets(name)
            found[name] = {one.partition: offset.offset for one, offset in offsets.items()}
        return found
    finally:
        await admin.close()
