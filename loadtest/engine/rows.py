"""The rows of a table: what is sent or received, and the columns that are measured."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Final, NamedTuple

from loadtest.clients.amqp import Sender, transfers
from loadtest.clients.amqp_receiver import Receiver
from loadtest.clients.connection import join_all
from loadtest.clients.http_wire import Connection
from loadtest.clients.pace import Pace
from loadtest.clients.topics import create_topic, store
from loadtest.engine.fan_out import Fan, fan_out
from loadtest.engine.steady import Measured, Steady, send_and_verify
from loadtest.gateway import GatewayProcess, process_cpu
from loadtest.numbering import HEADER_BYTES, Numbering
from loadtest.report import Latencies
from loadtest.verify import Verdict, stored

Columns = dict[str, Any]
SIZE: Final = 100  # payload bytes
PATIENCE_S: Final = 10.0  # missing messages are lost after this time without a delivery
POLLED_BYTES: Final = 1 << 20
BAD: Final = ("lost", "doubled", "out of order", "errors", "wrong")
"""Columns that must be 0."""


class Draining(NamedTuple):
    """AMQP receivers of a topic with stored messages.

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

    async def run(self, gateway: GatewayProcess, topic: str, payloads: list[bytes]) -> Columns:
        """Store, then receive."""
        await store(gateway.kafka, topic, 3, payloads)
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
        got = [payload for receiver in receivers for payload in receiver.payloads]
        each = [got] if self.queue else [receiver.payloads for receiver in receivers]
        lost = sum(len(set(payloads) - set(one)) for one in each)
        for receiver in receivers:
            receiver.close()
        took = max(receiver.last for receiver in receivers) - began
        return _columns(round(len(got) / took), cpu / max(1, len(got)), lost=lost, doubled=len(got) - wanted + lost)


class Through(NamedTuple):
    """One AMQP sender and one receiver of the same topic, with a window of unacknowledged messages."""

    messages: int
    window: int

    async def run(self, gateway: GatewayProcess, topic: str, payloads: list[bytes]) -> Columns:
        """Send and receive at once."""
        latencies = Latencies()
        numbers = {payload[:HEADER_BYTES]: number for number, payload in enumerate(payloads)}
        sender = await _connected(gateway, topic, payloads, self.window)

        def on_message(payload: bytes, now: float) -> None:
            latencies.record(now - sender.due_at[numbers[payload[:HEADER_BYTES]]])

        receiver = Receiver(f"{topic}-receiver", topic, size=SIZE, on_message=on_message)
        await join_all([receiver], gateway.address("amqp"), lambda one: one.attached)
        cpu, began = process_cpu(gateway.pid), time.perf_counter()
        sender.start()
        await sender.finished
        sent = time.perf_counter() - began
        await _received([receiver], len(payloads))
        cpu = process_cpu(gateway.pid) - cpu
        sender.close()
        receiver.close()
        got = receiver.payloads
        found = _columns(
            round(len(payloads) / sent), cpu / len(payloads), latencies, lost=len(set(payloads) - set(got)),
            doubled=len(got) - len(set(got)),
        )  # fmt: skip
        return {"out a second": round(len(got) / max(1e-9, receiver.last - began)), **found}


class Uploading(NamedTuple):
    """HTTP uploads: one long request of lines on each connection."""

    connections: int
    messages: int

    async def run(self, gateway: GatewayProcess, topic: str, payloads: list[bytes]) -> Columns:
        """Send the lines, and read a report for each."""
        lines = [json.dumps({"value": payload.decode()}).encode() + b"\n" for payload in payloads]
        ways = [await Connection.open(gateway.address("http")) for _ in range(self.connections)]
        cpu, began = process_cpu(gateway.pid), time.perf_counter()
        parts = [lines[number :: self.connections] for number in range(self.connections)]
        works = zip(ways, parts, strict=True)
        reports = await asyncio.gather(*(one.upload(f"/topics/{topic}/records", part) for one, part in works))
        took, cpu = time.perf_counter() - began, process_cpu(gateway.pid) - cpu
        for one in ways:
            one.close()
        there = {json.loads(record.value) async for record in stored(gateway.kafka, topic)}
        lost = sum(payload.decode() not in there for payload in payloads)
        return _columns(round(sum(reports) / took), cpu / len(lines), lost=lost, errors=len(lines) - sum(reports))


class Polling(NamedTuple):
    """An HTTP consumer that reads stored records page by page."""

    embedded: str
    messages: int

    async def run(self, gateway: GatewayProcess, topic: str, payloads: list[bytes]) -> Columns:
        """Store, then poll until everything is read, or nothing more comes."""
        values = [json.dumps(payload.decode()).encode() for payload in payloads]
        await store(gateway.kafka, topic, 3, values)
        one = await Connection.open(gateway.address("http"))
        group = f"/consumers/{topic}"
        await one.ask("POST", group, {"name": "c", "format": self.embedded, "auto.offset.reset": "earliest"})
        await one.ask("POST", f"{group}/instances/c/subscription", {"topics": [topic]})
        path, got, empty = f"{group}/instances/c/records?timeout=1000&max_bytes={POLLED_BYTES}", 0, 0
        cpu, began = process_cpu(gateway.pid), time.perf_counter()
        while got < len(values) and empty < PATIENCE_S:
            found = (await one.ask("GET", path)).count(b'"offset":')
            if not got:  # the first page waits for the group
                cpu, began = process_cpu(gateway.pid), time.perf_counter()
            got += found
            empty = 0 if found else empty + 1
        took, cpu = time.perf_counter() - began, process_cpu(gateway.pid) - cpu
        await one.ask("DELETE", f"{group}/instances/c")
        one.close()
        return _columns(round(got / max(1e-9, took)), cpu / max(1, got), lost=max(0, len(values) - got))


Row = Steady | Fan | Draining | Through | Uploading | Polling


async def measure(row: Row, gateway: GatewayProcess, share: float) -> Columns:
    """Run a row once with a share of its messages; return its columns, among them `cpu us`, of a message."""
    messages = max(getattr(row, "connections", 1), int(row.messages * share))
    if isinstance(row, Steady):
        load = row._replace(messages=messages)
        measured, verdict = await send_and_verify(load, gateway)
        return sent_columns(load, measured, verdict)
    if isinstance(row, Fan):
        spread = await fan_out(gateway, row._replace(messages=messages))
        found = _columns(
            round(spread.deliveries / max(1e-9, spread.seconds)), spread.cpu_us / 1e6, spread.latencies,
            lost=spread.lost, wrong=spread.wrong,
        )  # fmt: skip
        beside = {"PUBACK p99 ms": spread.puback_ms["p99"], "beside p99 ms": spread.modest_ms["p99"]}
        return {**found, **beside, "generator": round(spread.generator, 2)}
    numbering = Numbering()
    topic = f"row-{numbering.run}"
    await create_topic(gateway.kafka, topic)
    return await row.run(gateway, topic, [numbering.payload(0, number, SIZE) for number in range(messages)])


def sent_columns(load: Steady, measured: Measured, verdict: Verdict) -> Columns:
    """Return the columns of a steady load; at QoS 0 every message counts that was sent."""
    whole = load.messages // load.connections * load.connections
    return _columns(
        round(measured.answered / measured.seconds), measured.cpu_us / 1e6, measured.latencies if load.qos else None,
        lost=verdict.lost if load.qos else whole - verdict.stored, doubled=verdict.duplicated,
        errors=len(measured.errors) + sum(measured.refused.values()), **{"out of order": verdict.reordered},
    )  # fmt: skip


def _columns(rate: int, cpu_s: float, latencies: Latencies | None = None, **bad: int) -> Columns:
    """Return the columns of a row; violations that are 0 are omitted, except `lost`."""
    times = {f"p{at} ms": latencies.milliseconds(at) if latencies else "" for at in (50, 99)}
    faults = {name: count for name, count in bad.items() if count or name == "lost"}
    return {"per second": rate, **times, "cpu us": round(cpu_s * 1e6, 2), **faults}


async def _connected(gateway: GatewayProcess, topic: str, payloads: list[bytes], window: int) -> Sender:
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
