"""Scenario `steady`: senders keep a window full, or a rate; then the log is compared with the acknowledgements."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Final, NamedTuple

from loadtest.clients import amqp, mqtt, rest
from loadtest.clients.amqp_messages import Kind, keyed
from loadtest.clients.connection import join
from loadtest.clients.pace import Pace
from loadtest.clients.sender import Sender
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess, process_cpu
from loadtest.numbering import Numbering
from loadtest.report import Latencies
from loadtest.verify import Ledger, Verdict, read_topic

PROTOCOLS: Final = ("mqtt", "amqp", "http")
_TICK_S: Final = 0.002


class Steady(NamedTuple):
    """The load to send."""

    protocol: str = "mqtt"
    connections: int = 10
    window: int = 100
    messages: int = 100_000  # in total, over all connections
    size: int = 100
    batch: int = 100  # records per request, HTTP only
    rate: float | None = None  # messages per second in total
    qos: int = 1  # MQTT only; at 0 only each connection's last message is acknowledged
    topics: int = 0  # MQTT only; topics per sender, with a user property each; 0: one
    kind: Kind | None = None  # AMQP only; None: payload, with the sender's key as an annotation
    name: str = "load"  # prefix of the clients' names
    first: int = 0  # number of the first sender


class Measured(NamedTuple):
    """The result. `cpu_us` is the CPU of the watched process per acknowledged message, in microseconds."""

    sent: int
    answered: int
    seconds: float
    latencies: Latencies
    refused: dict[int, int]
    errors: list[str]
    cpu_us: float


async def send(load: Steady, gateway: GatewayProcess, topic: str, numbering: Numbering, ledger: Ledger) -> Measured:
    """Run one load to its end; each connection is one sender with one key, so its order can be verified."""
    pid, address = gateway.pid, gateway.address(load.protocol)
    per_connection = load.messages // load.connections
    rate = None if load.rate is None else load.rate / load.connections
    senders: list[Sender] = []
    for number in range(load.first, load.first + load.connections):
        payloads = [numbering.payload(number, sequence, load.size) for sequence in range(per_connection)]
        pace = Pace(load.window, rate, phase=1 - (number - load.first) / load.connections)
        senders.append(await join(make_sender(load, topic, payloads, pace, sender=number, ledger=ledger), address))
    await asyncio.gather(*(sender.connected for sender in senders))
    cpu, started = process_cpu(pid), time.perf_counter()
    for sender in senders:
        sender.start()
    results = await until_finished(senders, paced=rate is not None)
    seconds = time.perf_counter() - started
    cpu = process_cpu(pid) - cpu
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


async def send_and_verify(load: Steady, gateway: GatewayProcess, partitions: int = 3) -> tuple[Measured, Verdict]:
    """Run one load to its end in a new topic, and compare the topic with the acknowledgements."""
    numbering, ledger = Numbering(), Ledger()
    topic = f"steady-{numbering.run}"
    await create_topic(gateway.kafka, topic, partitions)
    if load.protocol == "mqtt" and load.qos == 0:
        await _warm_up(topic, gateway.address("mqtt"))
    measured = await send(load, gateway, topic, numbering, ledger)
    arrivals = await read_topic(gateway.kafka, topic, numbering, by_partition=load.topics > 0 or load.kind is not None)
    return measured, arrivals.verdict(ledger)


async def _warm_up(topic: str, address: tuple[str, int]) -> None:
    """Send one message at QoS 1, because a QoS 0 flood cannot be paused while its topic is looked up."""
    one = mqtt.Publisher("load-warm-up", mqtt.publishes(f"{topic}/warm-up", [b"warm-up"]), Pace(1, None))
    await one.join(address)
    one.start()
    await one.finished
    one.close()


async def until_finished(senders: Collection[Sender], *, paced: bool) -> list[BaseException | None]:
    """Wait until all messages of senders are answered, and push them meanwhile; return their failures."""
    finished = asyncio.gather(*(sender.finished for sender in senders), return_exceptions=True)
    while paced and not finished.done():  # a rate needs a clock; a full window is refilled by acknowledgements
        await asyncio.wait((finished,), timeout=_TICK_S)
        for sender in senders:
            sender.push()
    return await finished


def make_sender(
    load: Steady, topic: str, payloads: list[bytes], pace: Pace, *, sender: int = 0, ledger: Ledger | None = None
) -> Sender:
    """Return a sender of the load's kind, not connected; its acknowledgements go to the ledger."""

    def acknowledge(first: int, behind: int) -> None:
        if ledger is not None:
            ledger.acknowledge_run(sender, first, behind)

    key = f"sender-{sender}"
    if load.protocol == "mqtt":
        if load.qos == 0:
            return mqtt.Flood(f"{load.name}-{key}", f"{topic}/{key}", payloads, pace, acknowledge)
        packets = mqtt.publishes(f"{topic}/{key}", payloads, load.qos, topics=load.topics)
        return mqtt.Publisher(f"{load.name}-{key}", packets, pace, acknowledge, qos=load.qos)
    if load.protocol == "amqp":
        transfers = amqp.transfers(payloads, load.kind or keyed(key))
        return amqp.Sender(f"{load.name}-{key}", topic, transfers, pace, acknowledge)
    posts = rest.requests(topic, payloads, batch=load.batch, key=key)
    return rest.Producer(posts, len(payloads), pace, acknowledge, batch=load.batch)
