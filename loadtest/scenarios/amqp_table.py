"""Scenario `amqp`: measures the figures about AMQP's speed in `docs/performance.md`, on its own gateway.

For the use of processors see `table`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.clients.amqp import Sender, transfers
from loadtest.clients.amqp_messages import Kind, encodings, jms_text, many_keys, minimal, typical
from loadtest.clients.amqp_receiver import Receiver
from loadtest.clients.joining import join, join_all
from loadtest.clients.pace import Pace
from loadtest.clients.topics import create_topic, store
from loadtest.gateway import GatewayProcess, process_cpu
from loadtest.numbering import HEADER_BYTES, Numbering
from loadtest.report import Latencies
from loadtest.scenarios.steady import Load, send, verify_load
from loadtest.scenarios.table import Columns, Row, best_of
from loadtest.verify import Ledger

SIZE: Final = 100  # payload bytes
PARTITIONS: Final = 3
PATIENCE_S: Final = 10.0  # missing messages are lost after this time without a delivery
ROUND_TRIPS: Final = 4  # alternations between Kafka alone and the gateway
WARMING: Final = 1_500_000  # messages


class Sending(NamedTuple):
    """Senders of unsettled messages that keep their windows full; verified in Kafka."""

    connections: int
    window: int
    messages: int
    kind: Kind = minimal

    async def run(self, gateway: GatewayProcess, share: float) -> Columns:
        """See `Row`."""
        numbering, ledger = Numbering(), Ledger()
        topic = f"amqp-in-{numbering.run}"
        await create_topic(gateway.kafka, topic, PARTITIONS)
        messages = max(self.connections, int(self.messages * share))
        load = Load(
            "amqp", gateway.addresses["amqp"], topic, self.connections, self.window, messages, SIZE, kind=self.kind
        )
        measured = await send(load, numbering, ledger, gateway.pid)
        verdict = await verify_load(gateway.kafka, load, numbering, ledger)
        return {
            "a second": round(measured.answered / measured.seconds),
            "p50 ms": measured.latencies.milliseconds(50),
            "p99 ms": measured.latencies.milliseconds(99),
            "cpu us": round(measured.cpu_us, 2),
            **_faults(verdict.lost, verdict.duplicated, len(measured.errors) + sum(measured.refused.values())),
        }


class Draining(NamedTuple):
    """Receivers of a topic with stored messages.

    Attributes:
        receivers: number of receivers.
        messages: number of stored messages.
        settled: whether they are sent settled; otherwise each is accepted.
        queue: whether the receivers share the messages as a group; otherwise each gets all.
    """

    receivers: int
    messages: int
    settled: bool = False
    queue: bool = False

    async def run(self, gateway: GatewayProcess, share: float) -> Columns:
        """See `Row`."""
        numbering = Numbering()
        topic = f"amqp-out-{numbering.run}"
        await create_topic(gateway.kafka, topic, PARTITIONS)
        payloads = [numbering.payload(0, number, SIZE) for number in range(int(self.messages * share))]
        await store(gateway.kafka, topic, PARTITIONS, payloads)
        address = f"{topic}/group.id/{topic}" if self.queue else topic
        receivers = [
            Receiver(f"{topic}-{number}", address, size=SIZE, settled=self.settled, first=not self.queue)
            for number in range(self.receivers)
        ]
        cpu, began = process_cpu(gateway.pid), time.perf_counter()
        await join_all(receivers, gateway.address("amqp"), lambda one: one.attached)
        wanted = len(payloads) * (1 if self.queue else self.receivers)
        await _received(receivers, wanted)
        cpu = process_cpu(gateway.pid) - cpu
        took = max(receiver.last for receiver in receivers) - began
        got = [payload for receiver in receivers for payload in receiver.payloads]
        lost = sum(len(set(payloads) - set(receiver.payloads)) for receiver in receivers)
        if self.queue:
            lost = len(set(payloads) - set(got))
        for receiver in receivers:
            receiver.close()
        return {
            "a second": round(len(got) / took),
            "cpu us": round(cpu / max(1, len(got)) * 1e6, 2),
            **_faults(lost, len(got) - wanted + lost),
        }


class Through(NamedTuple):
    """One sender and one receiver of the same topic: at full speed, or with one message in flight.

    Attributes:
        messages: number of messages.
        window: unacknowledged messages.
    """

    messages: int
    window: int

    async def run(self, gateway: GatewayProcess, share: float) -> Columns:
        """See `Row`."""
        numbering = Numbering()
        topic = f"amqp-through-{numbering.run}"
        await create_topic(gateway.kafka, topic, PARTITIONS)
        payloads = [numbering.payload(0, number, SIZE) for number in range(int(self.messages * share))]
        latencies = Latencies()
        numbers = {payload[:HEADER_BYTES]: number for number, payload in enumerate(payloads)}
        due_at: Sequence[float] = ()

        def on_message(payload: bytes, now: float) -> None:
            latencies.record(now - due_at[numbers[payload[:HEADER_BYTES]]])

        receiver = Receiver(f"{topic}-receiver", topic, size=SIZE, on_message=on_message)
        await (await join(receiver, gateway.address("amqp"))).attached
        sender = await _connect_sender(gateway, topic, payloads, self.window)
        due_at = sender.due_at
        cpu, began = process_cpu(gateway.pid), time.perf_counter()
        sender.start()
        await sender.finished
        sent = time.perf_counter() - began
        await _received([receiver], len(payloads))
        cpu = process_cpu(gateway.pid) - cpu
        sender.close()
        receiver.close()
        got = len(receiver.payloads)
        return {
            "a second": round(len(payloads) / sent),
            "out a second": round(got / max(1e-9, receiver.last - began)),
            "p50 ms": latencies.milliseconds(50),
            "p99 ms": latencies.milliseconds(99),
            "cpu us": round(cpu / len(payloads) * 1e6, 2),
            **_faults(len(set(payloads) - set(receiver.payloads)), got - len(set(receiver.payloads))),
        }


class RoundTrip(NamedTuple):
    """One message in flight, compared in alternation with the round trip of aiokafka alone."""

    messages: int

    async def run(self, gateway: GatewayProcess, share: float) -> Columns:
        """See `Row`."""
        numbering = Numbering()
        topic = f"amqp-one-{numbering.run}"
        await create_topic(gateway.kafka, topic, PARTITIONS)
        each = max(1, int(self.messages * share) // ROUND_TRIPS)
        alone, ours = Latencies(), Latencies()
        cpu = 0.0
        async with AIOKafkaProducer(bootstrap_servers=gateway.kafka, acks="all", enable_idempotence=True) as producer:
            for turn in range(ROUND_TRIPS):
                payloads = [numbering.payload(turn, number, SIZE) for number in range(each)]
                for payload in payloads:
                    began = time.perf_counter()
                    await producer.send_and_wait(topic, payload)
                    alone.record(time.perf_counter() - began)
                sender = await _connect_sender(gateway, topic, payloads, 1)
                used = process_cpu(gateway.pid)
                sender.start()
                await sender.finished
                cpu += process_cpu(gateway.pid) - used
                sender.close()
                ours.merge(sender.latencies)
        return {
            "p50 ms": ours.milliseconds(50),
            "p99 ms": ours.milliseconds(99),
            "raw p50": alone.milliseconds(50),
            "raw p99": alone.milliseconds(99),
            "cpu us": round(cpu / (each * ROUND_TRIPS) * 1e6, 2),
        }


ROWS: Final[Mapping[str, Row]] = {
    "in, 10 links x 1,000": Sending(10, 1000, 600_000),
    "in, 10 links x 1,000, 100 keys": Sending(10, 1000, 400_000, many_keys),
    "in, 10 links x 1,000, typical": Sending(10, 1000, 300_000, typical),
    "in, 10 links x 1,000, jms": Sending(10, 1000, 300_000, jms_text),
    "in, 10 links x 1,000, any encoding": Sending(10, 1000, 300_000, encodings),
    "in, 10 links x 100": Sending(10, 100, 600_000),
    "in, 1 link x 1,000": Sending(1, 1000, 300_000),
    "in, 100 links x 100": Sending(100, 100, 400_000),
    "in, 1 in flight, beside aiokafka": RoundTrip(4_000),
    "out, 10 receivers of all, settled": Draining(10, 100_000, settled=True),
    "out, 10 receivers of all, accepted": Draining(10, 100_000),
    "out, 10 receivers of a queue, accepted": Draining(10, 300_000, queue=True),
    "in and out at once, 1 + 1": Through(300_000, 1000),
    "end to end, 1 in flight": Through(3_000, 1),
}


async def measure(
    gateway: GatewayProcess, rounds: int, share: float, wanted: str, say: Callable[[str], None]
) -> list[Columns]:
    """Measure the rows about AMQP; see `table.best_of`.

    The first run does not count, because the broker's JVM is still compiling.
    """
    await Sending(10, 1000, WARMING).run(gateway, share)
    return await best_of(ROWS, gateway, rounds, share, wanted=wanted, say=say)


def _faults(lost: int, doubled: int, errors: int = 0) -> Columns:
    """Return columns for violations; those that are 0 are omitted, except `lost`."""
    others = {"doubled": doubled, "errors": errors}
    return {"lost": lost, **{name: count for name, count in others.items() if count}}


async def _connect_sender(gateway: GatewayProcess, topic: str, payloads: list[bytes], window: int) -> Sender:
    sender = Sender(f"{topic}-sender", topic, transfers(payloads), Pace(window, None))
    await sender.join(gateway.address("amqp"))
    return sender


async def _received(receivers: list[Receiver], wanted: int) -> None:
    """Wait until the receivers have `wanted` messages in total, or nothing more arrives."""
    count, since = -1, time.perf_counter()
    while count < wanted and time.perf_counter() - since < PATIENCE_S:
        await asyncio.sleep(0.02)
        now = sum(len(receiver.payloads) for receiver in receivers)
        if now != count:
            count, since = now, time.perf_counter()
