"""Load of all three protocols by clients that never give up, what it saw, and whether it was told the truth.

What a server refuses is given up and not sent again, so that all that is stored of a sender must be in its order.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from loadtest.clients.kept import KeptPublisher
from loadtest.clients.kept_amqp import KeptSender
from loadtest.clients.kept_rest import KeptProducer
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess, process_resident
from loadtest.numbering import Numbering
from loadtest.scenarios.steady import PROTOCOLS
from loadtest.verify import Ledger, Verdict, read_topic

STEP_S: Final = 0.25  # between two samples
RECOVERED: Final = 0.9  # of the throughput before
OVER_S: Final = 1.0  # the time over which throughput counts as back
STEADY_S: Final = 0.01  # between two parts of the senders that are given messages
ALIVE_S: Final = 1.0  # of the senders: less than any idle time-out of the gateway that is tested

Sender = KeptPublisher | KeptSender | KeptProducer


class Terms(NamedTuple):
    """How much load.

    Attributes:
        connections: of each protocol.
        window: messages unanswered at a connection; records of an HTTP request.
        rate: messages a second of each protocol; 0: as fast as they are answered.
        size: payload bytes.
        exactly: of the connections by MQTT, how many are at QoS 2: the last ones.
        tick: seconds after which senders are given the messages that are due.
    """

    connections: int = 4
    window: int = 100
    rate: float = 0.0
    size: int = 100
    exactly: int = 1
    tick: float = STEADY_S


class Sample(NamedTuple):
    """The last `STEP_S`. Seconds since the load began; messages a second and ms by protocol; bytes."""

    at: float
    rates: dict[str, float]
    p99: dict[str, float]
    resident: int

    @property
    def rate(self) -> float:
        """Of all protocols."""
        return sum(self.rates.values())


class Stored(NamedTuple):
    """Held against Kafka, by protocol."""

    verdicts: dict[str, Verdict]
    doubled: int = 0  # of those at QoS 2 by MQTT, which are stored more than once

    def total(self, measure: str) -> int:
        """A measure of all protocols."""
        return sum(int(getattr(one, measure)) for one in self.verdicts.values())


class Load:
    """The load of one fault, in topics of its own.

    Attributes:
        senders: by protocol.
        all: every sender; its place is its number.
        ledgers: what each protocol's senders were told is stored.
        samples: so far.
        answers: how many were acknowledged, by protocol.
        pauses: of each sender that has lost its connection: seconds from the last answer before to the first behind.
    """

    def __init__(self, gateway: GatewayProcess, bootstrap: str, terms: Terms) -> None:
        """`bootstrap`: Kafka, without a proxy."""
        self.terms = terms
        self.numbering = Numbering()
        self.senders: dict[str, list[Sender]] = {}
        self.all: list[Sender] = []
        self.ledgers = {protocol: Ledger() for protocol in PROTOCOLS}
        self.samples: list[Sample] = []
        self._gateway = gateway
        self._bootstrap = bootstrap
        self._began = 0.0
        self._loading = True
        self._tasks: list[asyncio.Task[None]] = []
        self.answers = dict.fromkeys(PROTOCOLS, 0)
        self.pauses: list[float] = []
        self._latencies: dict[str, list[float]] = {protocol: [] for protocol in PROTOCOLS}
        self._first: dict[int, int] = {}  # of a sender's messages, that count

    @property
    def now(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._began

    def topic(self, protocol: str) -> str:
        """The Kafka topic of a protocol's senders."""
        return f"faults-{protocol}-{self.numbering.run}"

    async def start(self, group: asyncio.TaskGroup, replicas: int = 1, in_sync: int = 1) -> None:
        """Make the topics, connect, begin; so many `replicas`, and `in_sync` of them at least have what is stored.

        `group`: what runs until `finish` is of it.
        """
        configs = {"min.insync.replicas": str(in_sync)}
        for protocol in PROTOCOLS:
            await create_topic(self._bootstrap, self.topic(protocol), replicas=replicas, configs=configs)
            made = [self._sender(protocol, len(self.all) + n) for n in range(self.terms.connections)]
            self.senders[protocol] = made
            self.all += made
        for sender in self.all:
            sender.alive_s = ALIVE_S
        self._began = time.monotonic()
        works = (*(sender.run() for sender in self.all), self._push(), self._sample())
        self._tasks = [group.create_task(work) for work in works]

    def _sender(self, protocol: str, number: int) -> Sender:
        payload, acknowledged = self._books(protocol, number)
        address, topic, window = self._gateway.address(protocol), self.topic(protocol), self.terms.window
        name, key = f"{self.numbering.run}-{number}", f"sender-{number}"
        if protocol == "mqtt":
            qos = 2 if number >= self.terms.connections - self.terms.exactly else 1
            return KeptPublisher(
                address, name, f"{topic}/{key}", qos=qos, payload=payload, on_ack=acknowledged, window=window,
                again=False,
            )  # fmt: skip
        if protocol == "amqp":
            return KeptSender(
                address, name, topic, key=key, payload=payload, on_accepted=acknowledged, window=window, again=False
            )
        return KeptProducer(address, name, topic, key=key, payload=payload, on_ack=acknowledged, window=window)

    def _books(self, protocol: str, number: int) -> tuple[Callable[[int], bytes], Callable[[int], None]]:
        """What makes a sender's messages, and what notes their acknowledgements."""
        sent: dict[int, float] = {}
        ledger, latencies, answers = self.ledgers[protocol], self._latencies[protocol], self.answers
        answered_at = self._began
        numbering, size, first = self.numbering, self.terms.size, self._first

        def payload(sequence: int) -> bytes:
            sent.setdefault(sequence, time.monotonic())
            return numbering.payload(number, sequence, size)

        def acknowledged(sequence: int) -> None:
            nonlocal answered_at
            now = time.monotonic()
            sender = self.all[number]
            if sender.moved:
                sender.moved = False
                self.pauses.append(now - answered_at)
            answered_at = now
            if sequence >= first.get(number, 0):
                ledger.acknowledge(number, sequence)
            latencies.append(now - sent.pop(sequence))
            answers[protocol] += 1

        return payload, acknowledged

    async def _push(self) -> None:
        terms = self.terms
        parts = max(1, round(terms.tick / STEADY_S))
        for part in itertools.cycle(range(parts)):  # not all in one go: what else is timed would wait for it
            if not self._loading:
                return
            for sender in self.all[part::parts]:
                most = sender.answered + sender.given_up + 4 * terms.window
                due = int(self.now * terms.rate / terms.connections) if terms.rate else most
                sender.total = max(sender.total, min(due, most))
                sender.push()
            await asyncio.sleep(STEADY_S)

    async def _sample(self) -> None:
        before, last = dict(self.answers), self.now
        while True:
            await asyncio.sleep(STEP_S)
            now, answers = self.now, dict(self.answers)
            try:
                resident = process_resident(self._gateway.pid)
            except (FileNotFoundError, ProcessLookupError, IndexError):
                resident = 0  # it is dead
            rates = {protocol: (answers[protocol] - before[protocol]) / (now - last) for protocol in PROTOCOLS}
            p99 = {protocol: _p99(latencies) for protocol, latencies in self._latencies.items()}
            self.samples.append(Sample(now, rates, p99, resident))
            before, last = answers, now

    def stored(self) -> list[int]:
        """By sender, how many were acknowledged; without those at QoS 2, whose last answer comes after the record."""
        return [one.answered for one in self.all if not (isinstance(one, KeptPublisher) and one.qos == 2)]

    def progressed(self) -> Callable[[], bool]:
        """A condition: every sender has had an acknowledgement from now on."""
        before = [one.answered for one in self.all]
        return lambda: all(one.answered > then for one, then in zip(self.all, before, strict=True))

    def rate(self, begin: float, end: float) -> float:
        """Messages a second that were acknowledged from `begin` to `end`; -1 while there are no samples for that."""
        if not self.samples or self.samples[-1].at < end:
            return -1.0
        inside = [one.rate for one in self.samples if begin < one.at <= end]
        return sum(inside) / len(inside) if inside else 0.0

    def recovered(self, usual: float, since: float) -> float | None:
        """Seconds from `since` until the second began in which throughput was `RECOVERED` of `usual`; None: not yet."""
        starts = [since] + [one.at for one in self.samples if one.at > since]
        enough = (at for at in starts if self.rate(at, at + OVER_S) >= RECOVERED * usual)
        first = next(enough, None)
        return None if first is None else first - since

    def told(self) -> dict[str, collections.Counter[str]]:
        """What the senders of each protocol were told so far, beside acknowledgements."""
        return {
            protocol: sum((one.told for one in senders), collections.Counter[str]())
            for protocol, senders in self.senders.items()
        }

    def faults(self) -> list[str]:
        """What the gateway must never do, by sender; words of refusal are not of that kind."""
        return [
            f"{one.client_id}: {fault}"
            for one in self.all
            for fault in one.faults
            if not fault.startswith(tuple(one.told))
        ]

    def count_from_now(self, protocol: str) -> None:
        """Forget what was acknowledged of messages that are sent already: their topic is gone."""
        self.ledgers[protocol].acknowledged.clear()
        place = {id(sender): number for number, sender in enumerate(self.all)}
        for sender in self.senders[protocol]:
            self._first[place[id(sender)]] = sender.sent

    async def finish(self, limit_s: float) -> str | None:
        """No new messages; wait for the answers to all. Returns what went wrong."""
        self._loading = False
        for sender in self.all:
            sender.total = sender.sent
        waiting: list[str] = []
        try:
            async with asyncio.timeout(limit_s):
                while waiting := [one.client_id for one in self.all if not one.finished]:
                    for sender in self.all:
                        sender.push()
                    await asyncio.sleep(self.terms.tick)
        except TimeoutError:
            return f"no answers within {limit_s:g} s for {waiting}"
        finally:
            for sender in self.all:
                sender.stop()
            self._tasks[-1].cancel()
            await asyncio.wait(self._tasks)
        return None

    async def judge(self, *, by_partition: bool = False) -> Stored:
        """Hold what is stored against what was acknowledged; `by_partition`: a key may have moved to another one."""
        verdicts, doubled = {}, 0
        exactly = range(self.terms.connections - self.terms.exactly, self.terms.connections)
        for protocol, ledger in self.ledgers.items():
            topic = self.topic(protocol)
            arrivals = await read_topic(self._bootstrap, topic, self.numbering, by_partition=by_partition)
            verdicts[protocol] = arrivals.judge(ledger)
            doubled += sum(count > 1 for number, count in arrivals.counts.items() if number.sender in exactly)
        return Stored(verdicts, doubled)


def _p99(latencies: list[float]) -> float:
    """In ms; they are forgotten."""
    latencies.sort()
    found = latencies[len(latencies) * 99 // 100] * 1000 if latencies else 0.0
    latencies.clear()
    return found
