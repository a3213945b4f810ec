"""Scenario `kills`: kills the gateway repeatedly under load; no acknowledged message may be lost.

Senders and subscribers at QoS 1 and 2 have persistent sessions, and two more of each are Eclipse Paho. At the end the
log and the messages of each subscriber are compared with the acknowledged messages:

- every acknowledged message is in Kafka, and every message of a QoS 2 sender exactly once;
- every subscriber got every message, and a QoS 2 subscriber got those of QoS 2 senders exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from loadtest.clients.kept import KeptPublisher, KeptSubscriber
from loadtest.clients.kept_paho import PahoPublisher, PahoSubscriber
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Number
from loadtest.scenarios.rounds import SHOWN, Rounds
from loadtest.verify import Arrivals, read_places

Publisher = KeptPublisher | PahoPublisher
Subscriber = KeptSubscriber | PahoSubscriber


class Plan(NamedTuple):
    """Parameters. Rates are messages per second of one sender; times in seconds."""

    kills: int = 30
    senders: int = 2  # of each QoS, plus one Paho client of each
    subscribers: int = 1  # of each QoS, plus one Paho client
    rate: float = 200.0
    window: int = 20
    between: float = 1.5  # longest time between progress after a start and the next kill
    early: float = 0.2  # share of kills that do not wait for the start to be finished
    seed: int = 0


class Outcome(NamedTuple):
    """The result; `problems` is empty if nothing was violated."""

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
        """Return the columns of a report."""
        return {**self._asdict(), "problems": len(self.problems), "seconds": round(self.seconds, 1)}


def _take(arrivals: Arrivals, payload: bytes, _qos: int) -> None:
    arrivals.take(payload)


class Round(Rounds[Plan, Outcome]):
    """One run of the scenario."""

    def __init__(self, gateway: GatewayProcess, plan: Plan, say: Callable[[str], None]) -> None:
        super().__init__(gateway, plan, say)
        self._senders: list[tuple[int, Publisher]] = []  # with its QoS, by number
        self._subscribers: list[tuple[int, Subscriber, Arrivals]] = []

    def senders(self) -> list[Publisher]:
        """See `Rounds`."""
        return [one for _, one in self._senders]

    def clients(self) -> list[Publisher | Subscriber]:
        """See `Rounds`."""
        return [*self.senders(), *(one for _, one, _ in self._subscribers)]

    def let_in(self, yes: bool) -> None:
        """Open or close the door for Paho's clients; see `kept_paho`."""
        for client in self.clients():
            if isinstance(client, PahoPublisher | PahoSubscriber):
                (client.door.set if yes else client.door.clear)()

    def make_clients(self) -> None:
        """See `Rounds`."""
        plan, address, run = self.plan, self.gateway.address("mqtt"), self.numbering.run
        for qos in (1, 2):
            for kind in (KeptPublisher,) * plan.senders + (PahoPublisher,):
                number = len(self._senders)
                sender = kind(
                    address, f"{run}-sender-{number}", f"{self.topic}/sender-{number}", qos=qos,
                    payload=self.payload_of(number), on_ack=self.acknowledged_to(number), window=plan.window,
                )  # fmt: skip
                self._senders.append((qos, sender))
        for qos in (1, 2):
            for make in (KeptSubscriber,) * plan.subscribers + (PahoSubscriber,) * (qos == 2):
                arrivals = Arrivals(self.numbering)
                take = partial(_take, arrivals)
                name = f"{run}-subscriber-{len(self._subscribers)}"
                subscriber = make(address, name, f"{self.topic}/#", qos, take)
                self._subscribers.append((qos, subscriber, arrivals))

    def all_receive(self) -> bool:
        """Return whether every SUBACK was received."""
        return all(one.subscribed.is_set() for _, one, _ in self._subscribers)

    def received(self) -> int:
        """See `Rounds`."""
        return sum(arrivals.counts.total() for _, _, arrivals in self._subscribers)

    def all_delivered(self) -> bool:
        """See `Rounds`."""
        wanted = sum(sender.total for _, sender in self._senders)
        return all(arrivals.total >= wanted for _, _, arrivals in self._subscribers)

    async def check(self, problems: list[str], seconds: float) -> Outcome:
        """See `Rounds`."""
        sent = sum(sender.total for _, sender in self._senders)
        stored = {
            isolation: await read_places(self.gateway.kafka, self.topic, self.numbering, isolation)
            for isolation in ("read_committed", "read_uncommitted")
        }
        if stored["read_committed"] != stored["read_uncommitted"]:
            problems.append("read_committed and read_uncommitted see different messages")
        places = stored["read_uncommitted"]
        lost = self.ledger.missing(places)
        doubled = {qos: [n for n, at in places.items() if len(at) > 1 and self._qos(n) == qos] for qos in (1, 2)}
        self._add_problem(problems, "acknowledged and not in Kafka", lost, places)
        self._add_problem(problems, "of a QoS 2 sender and in Kafka more than once", doubled[2], places)
        for qos, subscriber, arrivals in self._subscribers:
            name = f"{type(subscriber).__name__} at QoS {qos}"
            missing = [number for number in places if number not in arrivals.counts]
            self._add_problem(problems, f"not delivered to {name}", missing, places)
            twice = [n for n, count in arrivals.counts.items() if count > 1 and qos == 2 and self._qos(n) == 2]
            self._add_problem(problems, f"delivered more than once to {name}", twice, places)
            if arrivals.reordered:
                problems.append(f"{name}: {arrivals.reordered} messages out of order")
            if arrivals.foreign:
                problems.append(f"{name}: {arrivals.foreign} messages of another origin")
        reconnects = sum(client.connects - 1 for client in self.clients())
        return Outcome(
            self.plan.kills, seconds, sent, self.ledger.total, len(lost), len(doubled[1]), len(doubled[2]),
            reconnects, problems,
        )  # fmt: skip

    def _qos(self, number: Number) -> int:
        return self._senders[number.sender][0]

    def _add_problem(
        self, problems: list[str], what: str, numbers: list[Number], places: dict[Number, list[str]]
    ) -> None:
        """Add one line for the problem, and the events of some of the messages."""
        if not numbers:
            return
        problems.append(f"{len(numbers)} messages {what}")
        for number in numbers[:SHOWN]:
            sender = self._senders[number.sender][1]
            history = ", ".join(
                f"{event.at:.3f} {event.what} id {event.packet_id} connection {event.connection}"
                for event in (sender.histories.get(number.sequence, ()) if isinstance(sender, KeptPublisher) else ())
            )
            problems.append(f"  sender {number.sender} message {number.sequence}: {places.get(number, [])}; {history}")
