"""Scenario `steady`: senders keep a window full, or a rate; then the log is compared with the acknowledgements."""

from __future__ import annotations

import asyncio
import time
from typing import Final, NamedTuple

from loadtest.clients import amqp, mqtt, rest
from loadtest.clients.amqp_messages import Kind, keyed
from loadtest.clients.joining import join
from loadtest.clients.pace import Pace
from loadtest.clients.sender import Sender
from loadtest.gateway import process_cpu
from loadtest.numbering import Numbering
from loadtest.report import Latencies
from loadtest.verify import Ledger, Verdict, read_topic

PROTOCOLS: Final = ("mqtt", "amqp", "http")
_TICK_S: Final = 0.002


class Load(NamedTuple):
    """The load to send."""

    protocol: str
    address: str
    topic: str
    connections: int = 10
    window: int = 100
    messages: int = 100_000  # in total, over all connections
    size: int = 100
    batch: int = 100  # records per request, HTTP only
    rate: float | None = None  # messages per second in total
    qos: int = 1  # MQTT only; at 0 only each connection's last message is acknowledged
    topics: int = 0  # MQTT only; topics per sender, with a user property each; 0: one
    kind: Kind | None = None  # AMQP only; None: payload, with the sender's key as an annotation


class Measured(NamedTuple):
    """The result. `cpu_us` is the CPU of the watched process per acknowledged message, in microseconds."""

    sent: int
    answered: int
    seconds: float
    latencies: Latencies
    refused: dict[int, int]
    errors: list[str]
    cpu_us: float

    def row(self) -> dict[str, float | int | str]:
        """Return the columns of a report."""
        return {
            "messages": self.answered,
            "per second": round(self.answered / self.seconds) if self.seconds else 0,
            **{f"{name} ms": value for name, value in self.latencies.summary().items()},
            "cpu us/msg": round(self.cpu_us, 2),
            "refused": sum(self.refused.values()),
            "errors": len(self.errors),
        }


async def send(load: Load, numbering: Numbering, ledger: Ledger, pid: int | None = None) -> Measured:
    """Run one load to its end; each connection is one sender with one key, so its order can be verified."""
    host, _, port = load.address.rpartition(":")
    address = host, int(port)
    per_connection = load.messages // load.connections
    rate = None if load.rate is None else load.rate / load.connections
    if load.qos == 0:
        await _warm_up(load, address)
    senders: list[Sender] = []
    for number in range(load.connections):
        payloads = [numbering.payload(number, sequence, load.size) for sequence in range(per_connection)]
        pace = Pace(load.window, rate, phase=1 - number / load.connections)
        senders.append(await join(make_sender(load, number, payloads, pace, ledger), address))
    await asyncio.gather(*(sender.connected for sender in senders))
    cpu = process_cpu(pid) if pid is not None else 0.0
    started = time.perf_counter()
    for sender in senders:
        sender.start()
    results = await _until_finished(senders, paced=rate is not None)
    seconds = time.perf_counter() - started
    cpu = process_cpu(pid) - cpu if pid is not None else 0.0
    latencies = Latencies()
    refused: dict[int, int] = {}
    for sender in senders:
        latencies.merge(sender.latencies)
        for reason, count in sender.refused.items():
            refused[reason] = refused.get(reason, 0) + count
        sender.close()
    answered = sum(sender.answered for sender in senders)
    return Measured(
        sum(sender.sent for sender in senders),
        answered,
        seconds,
        latencies,
        refused,
        [str(result) for result in results if isinstance(result, BaseException)],
        cpu / answered * 1e6 if answered else 0.0,
    )


async def verify_load(bootstrap: str, load: Load, numbering: Numbering, ledger: Ledger) -> Verdict:
    """Read the topic and compare it with the ledger."""
    return (await read_topic(bootstrap, load.topic, numbering, by_partition=load.topics > 0)).verdict(ledger)


async def _warm_up(load: Load, address: tuple[str, int]) -> None:
    """Send one message at QoS 1, because a QoS 0 flood cannot be paused while its topic is looked up."""
    one = mqtt.Publisher("load-warm-up", mqtt.publishes(f"{load.topic}/warm-up", [b"warm-up"]), Pace(1, None))
    await one.join(address)
    one.start()
    await one.finished
    one.close()


async def _until_finished(senders: list[Sender], *, paced: bool) -> list[BaseException | None]:
    finished = asyncio.gather(*(sender.finished for sender in senders), return_exceptions=True)
    while paced and not finished.done():  # a rate needs a clock; a full window is refilled by acknowledgements
        await asyncio.wait((finished,), timeout=_TICK_S)
        for sender in senders:
            sender.push()
    return await finished


def make_sender(load: Load, sender: int, payloads: list[bytes], pace: Pace, ledger: Ledger) -> Sender:
    """Return a sender of the load's kind, not connected."""

    def acknowledge(first: int, behind: int) -> None:
        ledger.acknowledge_run(sender, first, behind)

    key = f"sender-{sender}"
    if load.protocol == "mqtt":
        topic = f"{load.topic}/{key}"
        if load.qos == 0:
            return mqtt.Flood(f"load-{key}", topic, payloads, pace, acknowledge)
        packets = mqtt.publishes(topic, payloads, load.qos, topics=load.topics)
        return mqtt.Publisher(f"load-{key}", packets, pace, acknowledge, qos=load.qos)
    if load.protocol == "amqp":
        transfers = amqp.transfers(payloads, load.kind or keyed(key))
        return amqp.Sender(key, load.topic, transfers, pace, acknowledge)
    posts = rest.requests(load.address, load.topic, payloads, batch=load.batch, key=key)
    return rest.Producer(posts, len(payloads), pace, acknowledge, batch=load.batch)
