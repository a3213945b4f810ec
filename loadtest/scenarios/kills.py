"""Scenario `kills`: the gateway is killed again and again under load; nothing acknowledged may be lost.

Senders at QoS 1 and QoS 2 and subscribers at QoS 1 and QoS 2, all with sessions that are kept, two of them Eclipse
Paho. At the end the log and what each subscriber got are held against what the senders were told:

- every acknowledged message is in Kafka, and every message of a QoS 2 sender is in it once;
- every subscriber got every message, and one at QoS 2 got those of QoS 2 senders once.
"""

from __future__ import annotations

import asyncio
import collections
import random
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer

from loadtest.clients.kept import KeptPublisher, KeptSubscriber
from loadtest.clients.kept_paho import PahoPublisher, PahoSubscriber
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Number, Numbering
from loadtest.verify import Arrivals, Ledger

PAYLOAD: Final = 64
STALLED_S: Final = 20.0  # without any progress: something hangs
_TICK_S: Final = 0.01
_SHOWN: Final = 5

Publisher = KeptPublisher | PahoPublisher
Subscriber = KeptSubscriber | PahoSubscriber


class Plan(NamedTuple):
    """What to do. Rates are messages a second of one sender; times in seconds."""

    kills: int = 30
    senders: int = 2  # of each QoS, beside one of Paho's of each
    subscribers: int = 1  # of each QoS, beside one of Paho's
    rate: float = 200.0
    window: int = 20
    between: float = 1.5  # at most, between progress after a start and the next kill
    early: float = 0.2  # share of kills that do not wait for the start to be finished
    seed: int = 0


class Outcome(NamedTuple):
    """What came of it; `problems` is empty when every promise was kept."""

    kills: int
    seconds: float
    sent: int
    acknowledged: int
    lost_in_kafka: int
    doubled_qos_1: int
    doubled_qos_2: int
    reconnects: int
    problems: list[str]

    def row(self) -> dict[str, Any]:
        """As columns of a report."""
        return {**self._asdict(), "problems": len(self.problems), "seconds": round(self.seconds, 1)}


class Receiver:
    """What one subscriber got."""

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self.counts: collections.Counter[Number] = collections.Counter()
        self.arrivals = Arrivals()
        self.foreign = 0

    def take(self, payload: bytes, qos: int) -> None:
        """A message came."""
        number = self._numbering.read(payload)
        if number is None:
            self.foreign += 1
            return
        self.counts[number] += 1
        self.arrivals.add(number)


class Round:
    """One run of the scenario."""

    def __init__(self, gateway: GatewayProcess, plan: Plan, say: Callable[[str], None]) -> None:
        self._gateway = gateway
        self._plan = plan
        self._say = say
        self._chance = random.Random(plan.seed)
        self._numbering = Numbering()
        self._topic = f"kills-{self._numbering.run}"
        self._ledger = Ledger()
        self._senders: list[tuple[int, Publisher]] = []  # with its QoS; its place is its number
        self._subscribers: list[tuple[int, Subscriber, Receiver]] = []
        self._started = 0.0
        self._loading = True
        self._pushing = True

    async def run(self) -> Outcome:
        """Start, kill and start again, let everything settle, judge."""
        await create_topic(self._gateway.kafka, self._topic)
        self._make_clients()
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for client in self._clients():
                tasks.create_task(client.run())
            self._let_in(True)
            problems = []
            try:
                await self._until(lambda: all(one.subscribed.is_set() for _, one, _ in self._subscribers), "SUBACK")
                self._started = time.monotonic()
                tasks.create_task(self._push())
                for kill in range(self._plan.kills):
                    await self._kill(kill)
                await self._gateway.wait_ready()
                self._let_in(True)
                await self._until(self._progressed(), "answers after the last kill")
                self._loading = False
                await self._until(lambda: all(one.finished for _, one in self._senders), "all answers")
                await self._until(self._all_delivered, "all deliveries")
            except TimeoutError as error:
                problems.append(f"it hangs: {error}")
            finally:
                self._pushing = False
                for client in self._clients():
                    client.stop()
        return await self._judge(problems, time.monotonic() - began)

    def _clients(self) -> list[Publisher | Subscriber]:
        return [one for _, one in self._senders] + [one for _, one, _ in self._subscribers]

    def _let_in(self, yes: bool) -> None:
        """Open or shut the door to Paho's clients; see `kept_paho`."""
        for client in self._clients():
            if isinstance(client, PahoPublisher | PahoSubscriber):
                (client.door.set if yes else client.door.clear)()

    def _make_clients(self) -> None:
        plan, address, run = self._plan, self._gateway.address("mqtt"), self._numbering.run
        for qos in (1, 2):
            for kind in (KeptPublisher,) * plan.senders + (PahoPublisher,):
                number = len(self._senders)
                sender = kind(
                    address, f"{run}-sender-{number}", f"{self._topic}/sender-{number}", qos=qos,
                    payload=self._payload_of(number), on_ack=self._acknowledged_to(number), window=plan.window,
                )  # fmt: skip
                self._senders.append((qos, sender))
        for qos in (1, 2):
            for make in (KeptSubscriber,) * plan.subscribers + (PahoSubscriber,) * (qos == 2):
                receiver = Receiver(self._numbering)
                name = f"{run}-subscriber-{len(self._subscribers)}"
                subscriber = make(address, name, f"{self._topic}/#", qos, receiver.take)
                self._subscribers.append((qos, subscriber, receiver))

    def _payload_of(self, number: int) -> Callable[[int], bytes]:
        return lambda sequence: self._numbering.payload(number, sequence, PAYLOAD)

    def _acknowledged_to(self, number: int) -> Callable[[int], None]:
        return lambda sequence: self._ledger.acknowledge(number, sequence)

    async def _push(self) -> None:
        """Keep the senders at their rate while there is load, then let them finish what they have."""
        while self._pushing:
            due = int((time.monotonic() - self._started) * self._plan.rate) if self._loading else 0
            for _, sender in self._senders:
                # A sender that was held up does not catch up at once: that would be one burst, not load.
                sender.total = max(sender.total, min(due, sender.answered + 4 * self._plan.window))
                sender.push()
            await asyncio.sleep(_TICK_S)

    def _progressed(self) -> Callable[[], bool]:
        before = [sender.answered for _, sender in self._senders]
        return lambda: all(sender.answered > then for then, (_, sender) in zip(before, self._senders, strict=True))

    async def _kill(self, kill: int) -> None:
        """Kill the gateway at a random moment, and start it again at once."""
        plan, chance = self._plan, self._chance
        if kill and chance.random() < plan.early:
            await asyncio.sleep(chance.uniform(0, plan.between))
            when = "while it was starting"
        else:
            await self._gateway.wait_ready()
            self._let_in(True)
            await self._until(self._progressed(), f"answers before kill {kill + 1}")
            await asyncio.sleep(chance.uniform(0, plan.between))
            when = "under load"
        self._let_in(False)
        await self._gateway.kill()
        self._say(f"kill {kill + 1} of {plan.kills} {when}: {self._ledger.total} acknowledged so far")
        await self._gateway.launch()

    def _all_delivered(self) -> bool:
        wanted = sum(sender.total for _, sender in self._senders)
        return all(len(receiver.counts) >= wanted for _, _, receiver in self._subscribers)

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait; TimeoutError when nothing at all moves for `STALLED_S`."""
        moved, last = time.monotonic(), -1
        while not condition():
            now = self._ledger.total + sum(receiver.counts.total() for _, _, receiver in self._subscribers)
            if now != last:
                moved, last = time.monotonic(), now
            elif time.monotonic() - moved > STALLED_S:
                raise TimeoutError(f"waited in vain for {what}")
            await asyncio.sleep(_TICK_S)

    async def _judge(self, problems: list[str], seconds: float) -> Outcome:
        sent = sum(sender.total for _, sender in self._senders)
        stored = {
            isolation: await read_counts(self._gateway.kafka, self._topic, self._numbering, isolation)
            for isolation in ("read_committed", "read_uncommitted")
        }
        if stored["read_committed"] != stored["read_uncommitted"]:
            problems.append("read_committed and read_uncommitted see different messages")
        places = stored["read_uncommitted"]
        lost = [
            Number(sender, sequence)
            for sender, sequences in self._ledger.acknowledged.items()
            for sequence in sorted(sequences)
            if Number(sender, sequence) not in places
        ]
        doubled = {qos: [n for n, at in places.items() if len(at) > 1 and self._qos(n) == qos] for qos in (1, 2)}
        self._tell(problems, "acknowledged and not in Kafka", lost, places)
        self._tell(problems, "of a QoS 2 sender and in Kafka more than once", doubled[2], places)
        for qos, subscriber, receiver in self._subscribers:
            name = f"{type(subscriber).__name__} at QoS {qos}"
            missing = [number for number in places if number not in receiver.counts]
            self._tell(problems, f"not delivered to {name}", missing, places)
            twice = [n for n, count in receiver.counts.items() if count > 1 and qos == 2 and self._qos(n) == 2]
            self._tell(problems, f"delivered more than once to {name}", twice, places)
            if receiver.arrivals.reordered:
                problems.append(f"{name}: {receiver.arrivals.reordered} messages out of order")
            if receiver.foreign:
                problems.append(f"{name}: {receiver.foreign} messages that nobody sent")
        for client in self._clients():
            problems += [f"{client.client_id}: {fault}" for fault in client.faults[:_SHOWN]]
        reconnects = sum(client.connects - 1 for client in self._clients())
        return Outcome(
            self._plan.kills, seconds, sent, self._ledger.total, len(lost), len(doubled[1]), len(doubled[2]),
            reconnects, problems,
        )  # fmt: skip

    def _qos(self, number: Number) -> int:
        return self._senders[number.sender][0]

    def _tell(self, problems: list[str], what: str, numbers: list[Number], places: dict[Number, list[str]]) -> None:
        """One line for the kind, and the story of some of them."""
        if not numbers:
            return
        problems.append(f"{len(numbers)} messages {what}")
        for number in numbers[:_SHOWN]:
            sender = self._senders[number.sender][1]
            story = ", ".join(
                f"{event.at:.3f} {event.what} id {event.packet_id} connection {event.connection}"
                for event in (sender.stories.get(number.sequence, ()) if isinstance(sender, KeptPublisher) else ())
            )
            problems.append(f"  sender {number.sender} message {number.sequence}: {places.get(number, [])}; {story}")


async def read_counts(bootstrap: str, topic: str, numbering: Numbering, isolation: str) -> dict[Number, list[str]]:
    """Where each message of the run is stored."""
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        isolation_level=isolation,
    )
    places: dict[Number, list[str]] = {}
    await consumer.start()
    try:
        partitions = sorted(consumer.assignment())
        ends = await consumer.end_offsets(partitions)
        while any([await consumer.position(partition) < ends[partition] for partition in partitions]):
            for records in (await consumer.getmany(timeout_ms=1000, max_records=5000)).values():
                for record in records:
                    number = numbering.read(record.value)
                    if number is not None:
                        exchange = b"".join(value for name, value in record.headers if name == "mqtt.exchange")
                        place = f"{record.partition}/{record.offset} at {record.timestamp / 1000:.3f}"
                        places.setdefault(number, []).append(f"{place} {exchange.decode()}".strip())
    finally:
        await consumer.stop()
    return places
