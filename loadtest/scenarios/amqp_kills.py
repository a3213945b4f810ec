"""Scenario `kills --protocol amqp`: kills gateway and broker under load, with consumer groups.

Senders send unsettled messages; receivers of a queue, of a named group, of a durable and of a shared durable
subscription accept everything. At the end:

- every accepted message is in Kafka;
- every record was delivered to each group;
- no record was delivered again that its group had committed before a kill: the committed offsets are read from Kafka
  while the gateway is down, and nothing below them may be delivered on a connection to a later gateway;
- a record delivered again although it was accepted was accepted within the commit interval before the kill plus
  `Plan.grace`, for the way to the gateway and to Kafka. Time without Kafka does not count, since nothing could be
  committed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from loadtest.clients.kept_amqp import Delivery, KeptReceiver, KeptSender, Place
from loadtest.clients.kept_proton import ProtonReceiver, ProtonSender
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Number, Numbering
from loadtest.scenarios.rounds import SHOWN, Rounds
from loadtest.verify import Arrivals, read_places

COMMIT_INTERVAL_S: Final = 1.0  # the gateway's
RECOVERY_S: Final = 6.0
"""How long commits may fail after Kafka is back: their timeout, a pause, the group's coordinator."""

KAFKA_BACK_S: Final = 180.0
_POLL_S: Final = 0.2

Sender = KeptSender | ProtonSender
Receiver = KeptReceiver | ProtonReceiver


class Plan(NamedTuple):
    """Parameters. Rates are messages per second of one sender; times in seconds."""

    kills: int = 30
    senders: int = 3  # plus one proton client
    rate: float = 200.0
    window: int = 20
    between: float = 1.5  # at most, between progress after a start and the next kill
    early: float = 0.2  # share of kills that do not wait for the start to be finished
    patient: float = 0.7  # share of the other kills that wait until every group is served
    broker: float = 0.25  # share of kills of the broker, half of them together with the gateway
    grace: float = 1.5  # from a client's acceptance to its commit, plus the commit interval
    seed: int = 0


class Outcome(NamedTuple):
    """The result; `problems` is empty if nothing was violated."""

    kills: int
    broker_kills: int
    seconds: float
    sent: int
    accepted: int
    lost_in_kafka: int
    stored_twice: int
    delivered: int
    missing: int
    again: int
    again_after_acceptance: int
    again_below_the_commit: int
    oldest_again_s: float
    reconnects: int
    problems: list[str]

    def row(self) -> dict[str, Any]:
        """Return the columns of a report."""
        rounded = {"seconds": round(self.seconds, 1), "oldest_again_s": round(self.oldest_again_s, 2)}
        return {**self._asdict(), **rounded, "problems": len(self.problems)}


class Again(NamedTuple):
    """A record that was delivered to a group again.

    `age` is the time from its acceptance to the next kill, without Kafka's outages; infinite if there was no kill, None
    if it was not accepted. `below` is whether it was committed before that kill.
    """

    place: Place
    age: float | None
    below: bool


class Kill(NamedTuple):
    """A kill of the gateway: its time, and the committed offsets of each group."""

    at: float
    committed: dict[str, dict[int, int]]


class Outage(NamedTuple):
    """A time when Kafka was down, or groups could not commit yet."""

    begin: float
    end: float


class Group:
    """The deliveries to one consumer group."""

    def __init__(self, name: str, numbering: Numbering) -> None:
        self.name = name
        self.arrivals = Arrivals(numbering)
        self._deliveries: dict[Place, list[tuple[int, float]]] = collections.defaultdict(list)  # (generation, at)
        self._accepted: dict[Place, list[tuple[int, float]]] = collections.defaultdict(list)

    def take(self, delivery: Delivery) -> None:
        """Record a delivery."""
        if self.arrivals.take(delivery.payload):
            self._deliveries[delivery.place].append((delivery.generation, delivery.at))

    def accepted(self, delivery: Delivery, at: float) -> None:
        """Record that its acceptance was sent."""
        self._accepted[delivery.place].append((delivery.generation, at))

    def again(self, kills: Sequence[Kill], outages: Sequence[Outage]) -> list[Again]:
        """Return every repeated delivery."""
        return [
            self._check(place, generation, at, kills, outages)
            for place, deliveries in self._deliveries.items()
            for generation, at in deliveries[1:]
        ]

    def _check(
        self, place: Place, generation: int, at: float, kills: Sequence[Kill], outages: Sequence[Outage]
    ) -> Again:
        """`generation` counts the kills before a connection, so kill number `generation` ended it."""
        below = any(kill.committed[self.name].get(place.partition, 0) > place.offset for kill in kills[:generation])
        ages: list[float] = []
        for earlier, accepted in self._accepted[place]:
            if earlier < generation:
                ages.append(_age(accepted, kills[earlier].at, outages))
            elif accepted < at:  # by the same gateway, which rejoined its group after the broker was killed
                died = max((outage.begin for outage in outages if outage.begin < at), default=math.inf)
                ages.append(_age(accepted, died, outages))
        return Again(place, max(ages, default=None), below)


def _age(accepted: float, ended: float, outages: Sequence[Outage]) -> float:
    away = sum(max(0.0, min(ended, outage.end) - max(accepted, outage.begin)) for outage in outages)
    return max(0.0, ended - accepted - away)


class AmqpRound(Rounds[Plan, Outcome]):
    """One run of the scenario."""

    def __init__(
        self, gateway: GatewayProcess, plan: Plan, say: Callable[[str], None], host: GatewayProcess | None = None
    ) -> None:
        """`host` has the embedded Kafka; without it the broker is not killed."""
        super().__init__(gateway, plan, say)
        self._host = host
        self._senders: list[Sender] = []
        self._receivers: list[Receiver] = []
        self._groups: dict[str, Group] = {}
        self._kills: list[Kill] = []
        self._outages: list[Outage] = []

    def make_clients(self) -> None:
        """See `Rounds`."""
        plan, address, run = self.plan, self.gateway.address("amqp"), self.numbering.run
        for sends in (KeptSender,) * plan.senders + (ProtonSender,):
            number = len(self._senders)
            sender = sends(
                address, f"{run}-sender-{number}", self.topic, key=f"sender-{number}",
                payload=self.payload_of(number), on_accepted=self.acknowledged_to(number), window=plan.window,
            )  # fmt: skip
            self._senders.append(sender)
        topic = self.topic
        named = f"{run}-named"
        for group, receives, container, link, source, durable, capabilities in (
            (topic, KeptReceiver, "queue-1", "q", topic, False, ("queue",)),
            (topic, ProtonReceiver, "queue-2", "q", f"queue://{topic}", False, ()),
            (named, KeptReceiver, "named-1", "n", f"{topic}/group.id/{named}", False, ()),
            (named, KeptReceiver, "named-2", "n", f"{topic}/group.id/{named}", False, ()),
            (f"{run}-durable:d", KeptReceiver, "durable", "d", topic, True, ("topic",)),
            (f"{run}-shared", KeptReceiver, "shared-1", f"{run}-shared|1", topic, True, ("shared", "global", "topic")),
            (f"{run}-shared", KeptReceiver, "shared-2", f"{run}-shared|2", topic, True, ("shared", "global", "topic")),
        ):
            book = self._groups.setdefault(group, Group(group, self.numbering))
            receiver = receives(
                address, f"{run}-{container}", link, source, on_delivery=book.take, on_accept=book.accepted,
                generation=lambda: len(self._kills), durable=durable, capabilities=capabilities,
            )  # fmt: skip
            self._receivers.append(receiver)

    def senders(self) -> list[Sender]:
        """See `Rounds`."""
        return self._senders

    def clients(self) -> list[Sender | Receiver]:
        """See `Rounds`."""
        return [*self._senders, *self._receivers]

    def all_receive(self) -> bool:
        """Return whether every source was attached once."""
        return all(receiver.attached.is_set() for receiver in self._receivers)

    def received(self) -> int:
        """See `Rounds`."""
        return sum(group.arrivals.counts.total() for group in self._groups.values())

    def all_delivered(self) -> bool:
        """See `Rounds`."""
        wanted = sum(sender.total for sender in self._senders)
        return all(group.arrivals.total >= wanted for group in self._groups.values())

    def _served(self) -> Callable[[], bool]:
        """Return a condition: every group has received a new message since this call."""
        before = {name: group.arrivals.total for name, group in self._groups.items()}
        return lambda: all(group.arrivals.total > before[name] for name, group in self._groups.items())

    async def moment(self, kill: int) -> str:
        """Let some kills wait until the groups are served again, after Kafka's session timeout."""
        if not kill or self.rng.random() < self.plan.patient:
            await self.gateway.wait_ready()
            await self.until(self._served(), f"deliveries before kill {kill + 1}")
        return await super().moment(kill)

    async def kill(self, kill: int) -> None:
        """Kill the gateway, the broker, or both."""
        host = self._host if self.rng.random() < self.plan.broker else None
        broker = host is not None
        alone = broker and self.rng.random() < 0.5
        when = await self.moment(kill)
        killed = time.monotonic()
        if host is not None:
            kill_broker(host)
        if not alone:
            await self.gateway.kill()
        name = "the broker" if alone else "broker and gateway" if broker else "the gateway"
        self.say(f"kill {kill + 1} of {self.plan.kills}, {name} {when}: {self.ledger.total} accepted so far")
        committed = await self._committed()
        if broker:
            self._outages.append(Outage(killed, time.monotonic() + RECOVERY_S))
        if alone:
            await self.until(self._served(), "deliveries after the broker came back")
        else:
            self._kills.append(Kill(killed, committed))
            await self.gateway.launch()

    async def _committed(self) -> dict[str, dict[int, int]]:
        """Return the groups' committed offsets by partition; waits for Kafka."""
        async with asyncio.timeout(KAFKA_BACK_S):
            while True:
                with contextlib.suppress(OSError, KafkaError):
                    return await self._read_committed()
                await asyncio.sleep(_POLL_S)

    async def _read_committed(self) -> dict[str, dict[int, int]]:
        host, _, port = self.gateway.kafka.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))  # aiokafka would log every failed attempt
        writer.close()
        admin = AIOKafkaAdminClient(bootstrap_servers=self.gateway.kafka)
        try:
            await admin.start()
            found: dict[str, dict[int, int]] = {}
            for name in self._groups:
                offsets = await admin.list_consumer_group_offsets(name)
                found[name] = {one.partition: offset.offset for one, offset in offsets.items()}
            return found
        finally:
            await admin.close()

    async def check(self, problems: list[str], seconds: float) -> Outcome:
        """See `Rounds`."""
        places = await read_places(self.gateway.kafka, self.topic, self.numbering, "read_committed")
        lost = self.ledger.missing(places)
        _add_problem(problems, "accepted and not in Kafka", lost)
        twice = [number for number, at in places.items() if len(at) > 1]
        missing: list[Number] = []
        again: list[Again] = []
        for name, group in self._groups.items():
            absent = [number for number in places if number not in group.arrivals.counts]
            _add_problem(problems, f"not delivered to {name}", absent)
            missing += absent
            if group.arrivals.foreign:
                problems.append(f"{name}: {group.arrivals.foreign} messages of another origin")
            came_again = group.again(self._kills, self._outages)
            _add_problem(
                problems, f"delivered again to {name} although committed", [one for one in came_again if one.below]
            )
            limit = COMMIT_INTERVAL_S + self.plan.grace
            late = [one for one in came_again if one.age is not None and one.age > limit]
            _add_problem(problems, f"delivered again to {name}, accepted more than {limit:g} s before a kill", late)
            again += came_again
        ages = [one.age for one in again if one.age is not None]
        return Outcome(
            kills=self.plan.kills,
            broker_kills=len(self._outages),
            seconds=seconds,
            sent=sum(sender.total for sender in self._senders),
            accepted=self.ledger.total,
            lost_in_kafka=len(lost),
            stored_twice=len(twice),
            delivered=self.received(),
            missing=len(missing),
            again=len(again),
            again_after_acceptance=len(ages),
            again_below_the_commit=sum(one.below for one in again),
            oldest_again_s=max(ages, default=0.0),
            reconnects=sum(client.connects - 1 for client in self.clients()),
            problems=problems,
        )


def _add_problem(problems: list[str], what: str, found: Sequence[object]) -> None:
    if found:
        problems.append(f"{len(found)} messages {what}: {list(found[:SHOWN])}")


def kill_broker(host: GatewayProcess) -> None:
    """Kill the only child of a gateway with an embedded Kafka, with SIGKILL; the gateway restarts it."""
    for children in Path(f"/proc/{host.pid}/task").glob("*/children"):
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)
