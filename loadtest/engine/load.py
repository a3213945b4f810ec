"""The load of all three protocols by persistent clients, its measurements, and its verification.

Refused messages are given up and not sent again, so the stored messages of a sender must be in order.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import math
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from loadtest.clients.kept.amqp import KeptSender
from loadtest.clients.kept.lasting import Messages, progressed
from loadtest.clients.kept.mqtt import KeptPublisher
from loadtest.clients.kept.rest import KeptProducer
from loadtest.clients.topics import create_topic
from loadtest.engine.steady import PROTOCOLS
from loadtest.gateway import process_resident
from loadtest.numbering import Numbering
from loadtest.report import Latencies
from loadtest.verify import Ledger, Verdict, read_topic

STEP_S: Final = 0.25  # interval of samples
RECOVERED: Final = 0.9  # share of the usual throughput
OVER_S: Final = 1.0  # how long throughput must be back
STEADY_S: Final = 0.01  # pause between parts of the senders
ALIVE_S: Final = 1.0  # heartbeat, shorter than any idle timeout of the gateway

Sender = KeptPublisher | KeptSender | KeptProducer


class Terms(NamedTuple):
    """The size of the load.

    Attributes:
        connections: of each protocol.
        window: unacknowledged messages per connection; records of an HTTP request.
        rate: messages per second of each protocol. 0 means as fast as they are acknowledged.
        size: payload bytes.
        exactly: how many of the MQTT connections use QoS 2: the last ones.
        tick: interval at which senders get their due messages.
    """

    connections: int = 4
    window: int = 100
    rate: float = 0.0
    size: int = 100
    exactly: int = 1
    tick: float = STEADY_S


class Sample(NamedTuple):
    """One interval of `STEP_S`: seconds since the start, messages per second and ms by protocol, bytes."""

    at: float
    rates: dict[str, float]
    p99: dict[str, float]
    resident: int

    @property
    def rate(self) -> float:
        """The rate of all protocols."""
        return sum(self.rates.values())


class Stored(NamedTuple):
    """The verification against Kafka, by protocol."""

    verdicts: dict[str, Verdict]
    doubled: int = 0  # MQTT QoS 2 messages stored more than once

    def total(self, measure: str) -> int:
        """Return the sum of a measure over all protocols."""
        return sum(int(getattr(one, measure)) for one in self.verdicts.values())

    def problems(self) -> list[str]:
        """Return the violations of every load: what was acknowledged is stored, and in order."""
        return [f"{protocol}: {one}" for protocol, verdict in self.verdicts.items() for one in verdict.problems()]


class Served(Protocol):
    """What the load is sent to: a gateway, or several behind one address."""

    def address(self, protocol: str) -> tuple[str, int]:
        """Return the address of a protocol."""

    @property
    def pid(self) -> int:
        """The process whose memory is sampled."""


class Load:
    """The load of one fault, in its own topics.

    Attributes:
        senders: by protocol.
        all: every sender, by its number.
        ledgers: the acknowledged messages of each protocol.
        samples: the samples so far.
        answers: number of acknowledged messages, by protocol.
        latencies: of all acknowledged messages that the samples cover.
        pauses: for each lost connection, seconds from the last acknowledgement before to the first one after.
    """

    def __init__(self, gateway: Served, bootstrap: str, terms: Terms) -> None:
        """`bootstrap` is Kafka's address, without a proxy."""
        self.terms = terms
        self.numbering = Numbering()
        self.senders: dict[str, list[Sender]] = {}
        self.all: list[Sender] = []
        self.ledgers = {protocol: Ledger() for protocol in PROTOCOLS}
        self.samples: list[Sample] = []
        self._exact = range(terms.connections - terms.exactly, terms.connections)  # senders at QoS 2
        self._gateway = gateway
        self._bootstrap = bootstrap
        self._began = 0.0
        self._loading = True
        self._tasks: list[asyncio.Task[None]] = []
        self.answers = dict.fromkeys(PROTOCOLS, 0)
        self.pauses: list[float] = []
        self.latencies = Latencies()
        self._latencies: dict[str, list[float]] = {protocol: [] for protocol in PROTOCOLS}
        self._first: dict[int, int] = {}  # first counted message of each sender

    @property
    def now(self) -> float:
        """Seconds since the load started."""
        return time.monotonic() - self._began

    def topic(self, protocol: str) -> str:
        """Return the Kafka topic of a protocol's senders."""
        return f"faults-{protocol}-{self.numbering.run}"

    async def start(self, group: asyncio.TaskGroup, replicas: int = 1, in_sync: int = 1) -> None:
        """Create the topics with `replicas` and `in_sync` (min.insync.replicas), connect, and start sending.

        The tasks run in `group` until `finish`.
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
        messages = Messages(f"sender-{number}", *self._callbacks(protocol, number), self.terms.window)
        address, topic, name = self._gateway.address(protocol), self.topic(protocol), f"{self.numbering.run}-{number}"
        if protocol == "mqtt":
            qos = 2 if number in self._exact else 1
            return KeptPublisher(address, name, topic, messages, qos=qos, again=False)
        if protocol == "amqp":
            return KeptSender(address, name, topic, messages, again=False)
        return KeptProducer(address, name, topic, messages)

    def _callbacks(self, protocol: str, number: int) -> tuple[Callable[[int], bytes], Callable[[int], None]]:
        """Return the functions that make a sender's messages, and record their acknowledgements."""
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
        for part in itertools.cycle(range(parts)):  # in parts, so as not to delay timed tasks
            if not self._loading:
                return
            for sender in self.all[part::parts]:
                sender.top_up(self.now * terms.rate / terms.connections if terms.rate else math.inf)
            await asyncio.sleep(STEADY_S)

    async def _sample(self) -> None:
        before, last = dict(self.answers), self.now
        while True:
            await asyncio.sleep(STEP_S)
            now, answers = self.now, dict(self.answers)
            try:
                resident = process_resident(self._gateway.pid)
            except (FileNotFoundError, ProcessLookupError, IndexError):
                resident = 0  # the gateway is down
            for found in self._latencies.values():
                self.latencies.extend(found)
            rates = {protocol: (answers[protocol] - before[protocol]) / (now - last) for protocol in PROTOCOLS}
            p99 = {protocol: _p99(latencies) for protocol, latencies in self._latencies.items()}
            self.samples.append(Sample(now, rates, p99, resident))
            before, last = answers, now

    def stored(self) -> list[int]:
        """Return acknowledged messages by sender, without QoS 2, whose last acknowledgement follows the record."""
        return [one.answered for number, one in enumerate(self.all) if number not in self._exact]

    def progressed(self) -> Callable[[], bool]:
        """Return a condition: every sender has got an acknowledgement since this call."""
        return progressed(self.all)

    def rate(self, begin: float, end: float) -> float:
        """Return acknowledged messages per second from `begin` to `end`; -1 until the samples cover it."""
        if not self.samples or self.samples[-1].at < end:
            return -1.0
        inside = [one.rate for one in self.samples if begin < one.at <= end]
        return sum(inside) / len(inside) if inside else 0.0

    def recovered(self, usual: float, since: float) -> float | None:
        """Return the seconds from `since` until throughput was back at `RECOVERED` of `usual`; None if it is not."""
        starts = [since] + [one.at for one in self.samples if one.at > since]
        enough = (at for at in starts if self.rate(at, at + OVER_S) >= RECOVERED * usual)
        first = next(enough, None)
        return None if first is None else first - since

    def refusals(self) -> dict[str, collections.Counter[str]]:
        """Return the refusals and lost connections of each protocol's senders."""
        return {
            protocol: sum((one.refusals for one in senders), collections.Counter[str]())
            for protocol, senders in self.senders.items()
        }

    def faults(self) -> list[str]:
        """Return the gateway's violations by sender, which do not include refusals."""
        return [
            f"{one.client_id}: {fault}"
            for one in self.all
            for fault in one.faults
            if not fault.startswith(tuple(one.refusals))
        ]

    def count_from_now(self, protocol: str) -> None:
        """Ignore the acknowledged messages sent so far: their topic was deleted."""
        self.ledgers[protocol].acknowledged.clear()
        place = {id(sender): number for number, sender in enumerate(self.all)}
        for sender in self.senders[protocol]:
            self._first[place[id(sender)]] = sender.sent

    async def finish(self, limit_s: float) -> str | None:
        """Stop sending, and wait for all acknowledgements; return what went wrong."""
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
            return f"no acknowledgements within {limit_s:g} s for {waiting}"
        finally:
            for sender in self.all:
                sender.stop()
            self._tasks[-1].cancel()
            await asyncio.wait(self._tasks)
        return None

    async def verify(self, *, by_partition: bool = False) -> Stored:
        """Compare stored with acknowledged messages; `by_partition` if keys may have moved to other partitions."""
        verdicts, doubled = {}, 0
        for protocol, ledger in self.ledgers.items():
            topic = self.topic(protocol)
            arrivals = await read_topic(self._bootstrap, topic, self.numbering, by_partition=by_partition)
            verdicts[protocol] = arrivals.verdict(ledger)
            doubled += sum(count > 1 for number, count in arrivals.counts.items() if number.sender in self._exact)
        return Stored(verdicts, doubled)


def _p99(latencies: list[float]) -> float:
    """Return the 99th percentile in ms, and clear the list."""
    latencies.sort()
    found = latencies[len(latencies) * 99 // 100] * 1000 if latencies else 0.0
    latencies.clear()
    return found
