"""Inbound QoS 2: each message is stored once, for any order of events and any crash of the gateway.

The log and the sessions topic are lists here; the tests check the logic of sequences and offsets, on every interleaving
that hypothesis finds. `loadtest.scenarios.kills` shows the same with Kafka and SIGKILL.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from aiokafka import TopicPartition
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcontrol.budget import ConnectionBudget
from gateway.kafka.contracts import Result
from gateway.mqtt.registry.crash_recovery import CrashRecovery, Found, parse
from gateway.mqtt.session.acks import Slot
from gateway.mqtt.session.journal import Journal
from gateway.mqtt.session.qos2 import InboundQos2, Qos2Offsets, Qos2Parts
from gateway.mqtt.state.records import InflightRecord, decode, encode
from mapping.outcomes import Outcome
from mapping.record import MQTT_EXCHANGE, Record

TOPICS = ("t", "u")
PARTITIONS = 2


class Kafka:
    """A log that outlives gateways, and the last stored in-flight record."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.log: dict[TopicPartition, list[Record]] = {
            TopicPartition(topic, number): [] for topic in TOPICS for number in range(PARTITIONS)
        }
        self.inflight = encode(InflightRecord("n", 1))
        self.unknown: set[int] = set()  # messages for which it was silent

    async def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        return tuple(TopicPartition(topic, number) for number in range(PARTITIONS))

    async def ends(self, partitions: Any, *, led: bool = False) -> dict[TopicPartition, int]:
        return {partition: len(self.log[partition]) for partition in partitions}

    async def find(self, ranges: Any) -> Found:
        found: Found = {}
        for partition, offset in ranges.items():
            for record in self.log[partition][offset:]:
                for name, value in record.headers:
                    if name == MQTT_EXCHANGE:
                        parsed = parse(value)
                        assert parsed is not None
                        session_id, packet_id, sequence = parsed
                        found.setdefault(session_id, set()).add((packet_id, sequence))
        return found


class Link:
    """The gateway's end of one connection."""

    def __init__(self, *, v5: bool) -> None:
        self.reports_failures = v5
        self.completed: list[int] = []

    def answered(self) -> None:
        """Ignore that results are known."""

    def complete(self, packet_id: int) -> None:
        self.completed.append(packet_id)


class Gateway:
    """One gateway process with one session: writes are sent in order, and answered at any time."""

    def __init__(self, kafka: Kafka, *, v5: bool = True) -> None:
        self.kafka = kafka
        self.link = Link(v5=v5)
        self.was_busy = False
        self.waiting: list[tuple[str, Any]] = []  # writes on their way, in order
        self.tasks: list[asyncio.Task[None]] = []
        self.journal = Journal(self.write_inflight, lambda: None)
        self.inbound_qos2 = InboundQos2(
            "n",
            "somebody",
            Qos2Parts(
                publisher=self,  # type: ignore[arg-type]
                retained=self,  # type: ignore[arg-type]
                start_offsets=Qos2Offsets(kafka),  # type: ignore[arg-type]
                spawn=lambda work: self.tasks.append(asyncio.ensure_future(work)),
            ),
            budget=ConnectionBudget(1 << 30, 1 << 30),
            journal=self.journal,
            connection=lambda: self.link,  # type: ignore[arg-type, return-value]
        )

    async def recover(self) -> None:
        inflight = decode(InflightRecord, self.kafka.inflight)
        assert inflight is not None
        recovery = CrashRecovery(self.kafka.find, self.kafka.partitions)
        self.inbound_qos2.restore((await recovery.recover({"c": inflight}))["c"])

    def submit(self, record: Record, owner: InboundQos2, token: Any) -> None:
        self.waiting.append(("record", (record, owner, token)))

    def withdraw(self, owner: InboundQos2) -> None:
        """This process was not frozen."""

    async def topic(self, name: str, **_: Any) -> None:
        """Every topic is there."""

    def put(self, record: Record, topic: str, owner: InboundQos2, token: Any) -> None:
        self.submit(record, owner, token)

    def write_inflight(self, owner: Any) -> None:
        value = encode(InflightRecord("n", 1, **self.inbound_qos2.describe(leaving=False)))
        self.waiting.append(("inflight", (value, owner)))

    def store_one(self) -> None:
        """Have Kafka answer one of the writes, or not in time; those of one kind are answered in order."""
        kind = self.kafka.rng.choice([kind for kind, _ in self.waiting])
        position = next(number for number, (other, _) in enumerate(self.waiting) if other == kind)
        _, write = self.waiting.pop(position)
        if kind == "record" and self.kafka.rng.random() < 0.05:
            self.was_busy = True
            if self.kafka.rng.random() < 0.5:
                self.store(kind, write, tell=False)
            record, owner, token = write
            self.kafka.unknown.add(int(record.value or b""))
            owner.settle([token], [], Result(Outcome.BUSY))
        else:
            self.store(kind, write, tell=True)

    def store(self, kind: str, write: Any, *, tell: bool) -> None:
        if kind == "inflight":
            value, owner = write
            self.kafka.inflight = value
            if tell:
                owner.settle([None], [0], Result(Outcome.STORED, 0))
            return
        record, owner, token = write
        partition = TopicPartition(record.topic, int(record.key))
        self.kafka.log[partition].append(record)
        if tell:
            owner.settle([token], [len(self.kafka.log[partition]) - 1], Result(Outcome.STORED, partition.partition))

    def die(self) -> None:
        """Crash; some writes in flight are still stored, of each kind the first ones.

        If Kafka was silent, the record of uncertain messages is stored: the client may have got the error already.
        """
        rng = self.kafka.rng
        if self.was_busy:
            self.kafka.inflight = encode(InflightRecord("n", 1, **self.inbound_qos2.describe(leaving=False)))
            self.waiting = [write for write in self.waiting if write[0] == "record"]
        for kind in ("record", "inflight"):
            writes = [write for other, write in self.waiting if other == kind]
            for write in writes[: rng.randint(0, len(writes))]:
                self.store(kind, write, tell=False)
        self.journal.stop()
        for task in self.tasks:
            task.cancel()


class Client:
    """A client that keeps its state as the standard requires, and resends messages without PUBREC."""

    def __init__(self, rng: random.Random, *, v5: bool) -> None:
        self.rng = rng
        self.v5 = v5
        self.refused: set[int] = set()  # what PUBREC said that it failed: it may be stored, or not
        self.sent: dict[int, Record] = {}  # no PUBREC yet
        self.releasing: set[int] = set()  # no PUBCOMP yet
        self.slots: dict[int, Slot] = {}
        self.number = 0

    def publish(self, gateway: Gateway) -> None:
        free = [number for number in range(1, 5) if number not in self.sent and number not in self.releasing]
        if free:
            packet_id = self.rng.choice(free)
            key = b"%d" % self.rng.randrange(PARTITIONS)
            record = Record(self.rng.choice(TOPICS), key, b"%d" % self.number)
            self.number += 1
            self.sent[packet_id] = record
            self.send(gateway, packet_id)

    def send(self, gateway: Gateway, packet_id: int) -> None:
        slot = Slot(packet_id, None, 2)
        self.slots.setdefault(packet_id, slot)
        gateway.inbound_qos2.publish(self.sent[packet_id], packet_id, slot)

    async def read(self, gateway: Gateway) -> None:
        for packet_id, slot in list(self.slots.items()):
            if slot.result is not None and self.rng.random() < 0.7:
                if slot.result.outcome is not Outcome.STORED:
                    if not self.v5:
                        await self.reconnect(gateway)  # 3.1.1 has no words for it
                        return
                    del self.slots[packet_id]
                    self.refused.add(int(self.sent.pop(packet_id).value or b""))
                    continue
                del self.slots[packet_id], self.sent[packet_id]
                self.releasing.add(packet_id)
                self.release(gateway, packet_id)
        for packet_id in gateway.link.completed:
            self.releasing.discard(packet_id)
        gateway.link.completed.clear()

    def release(self, gateway: Gateway, packet_id: int) -> None:
        if not gateway.inbound_qos2.release(packet_id):
            self.releasing.discard(packet_id)  # PUBCOMP at once

    async def reconnect(self, gateway: Gateway) -> None:
        self.slots.clear()
        gateway.link = Link(v5=self.v5)
        if gateway.inbound_qos2.has_uncertain:
            await CrashRecovery(gateway.kafka.find, gateway.kafka.partitions).confirm(gateway.inbound_qos2)
        for packet_id in list(self.sent):
            self.send(gateway, packet_id)
        for packet_id in list(self.releasing):
            self.release(gateway, packet_id)


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.mark.clause("MQTT-4.3.3-10")
@pytest.mark.clause("MQTT311-4.3.3-2")
@given(st.randoms(use_true_random=False), st.integers(1, 120), st.booleans())
@settings(max_examples=50, deadline=None)
def test_each_message_is_stored_once_wherever_the_gateway_dies(rng: random.Random, steps: int, v5: bool) -> None:
    async def run() -> None:
        kafka, client = Kafka(rng), Client(rng, v5=v5)
        gateway = Gateway(kafka, v5=v5)
        for _ in range(steps):
            step = rng.random()
            if step < 0.3:
                client.publish(gateway)
            elif step < 0.75:
                if gateway.waiting:
                    gateway.store_one()
            elif step < 0.9:
                await client.read(gateway)
            elif step < 0.94:
                await client.reconnect(gateway)
            elif step < 0.96:
                if gateway.inbound_qos2.drop_idle_offsets():
                    gateway.journal.save()
            else:
                gateway.die()
                gateway = Gateway(kafka, v5=v5)
                await gateway.recover()
                await client.reconnect(gateway)
            await turns()
        for _ in range(1000):
            if gateway.waiting:
                gateway.store_one()
            await turns()
            await client.read(gateway)
            if not (client.sent or client.releasing):
                break
        assert client.sent == {}, "everything is answered in the end"
        assert client.releasing == set()
        values = sorted(int(record.value or b"") for log in kafka.log.values() for record in log)
        # Without words for a failure nothing is given up; with them what failed is over, stored or not (ADR 0100).
        unclear = kafka.unknown if v5 else set()
        assert client.refused <= unclear
        assert set(range(client.number)) - set(values) <= client.refused
        assert [one for one in values if one not in unclear] == sorted(set(range(client.number)) - unclear)

    asyncio.run(run())


def stored(gateway: Gateway, kafka: Kafka) -> list[bytes | None]:
    return [record.value for log in kafka.log.values() for record in log]


async def settle_all(gateway: Gateway) -> None:
    await turns()
    while gateway.waiting:
        kind, write = gateway.waiting.pop(0)
        gateway.store(kind, write, tell=True)
        await turns()


@pytest.mark.clause("MQTT-4.3.3-10")
async def test_a_message_that_comes_twice_before_kafka_has_answered_is_answered_twice() -> None:
    """Otherwise the acknowledgements behind the first one would wait forever."""
    kafka = Kafka(random.Random(0))
    gateway = Gateway(kafka)
    slots = [Slot(5, None, 2), Slot(5, None, 2)]
    for slot in slots:
        gateway.inbound_qos2.publish(Record("t", b"0", b"x"), 5, slot)
    await settle_all(gateway)
    assert [slot.result and slot.result.outcome for slot in slots] == [Outcome.STORED] * 2
    assert stored(gateway, kafka) == [b"x"]


async def test_pubcomp_goes_to_the_connection_that_sent_pubrel() -> None:
    """A client could take a second one for the answer to the next message with that identifier."""
    gateway = Gateway(Kafka(random.Random(0)))
    old, new = gateway.link, Link(v5=True)
    gateway.inbound_qos2.publish(Record("t", b"0", b"x"), 5, Slot(5, None, 2))
    await settle_all(gateway)
    assert gateway.inbound_qos2.release(5)
    gateway.link = new
    await settle_all(gateway)
    assert (old.completed, new.completed) == ([], [])
    assert not gateway.inbound_qos2.release(5), "it is over, so the connection answers at once"


async def test_what_is_held_counts_against_the_client() -> None:
    gateway = Gateway(Kafka(random.Random(0)))
    budget = gateway.inbound_qos2.budget
    for packet_id in range(1, 4):
        gateway.inbound_qos2.publish(Record("t", b"0", b"x" * 1000), packet_id, Slot(packet_id, None, 2))
    assert (budget.records, budget.bytes > 3000) == (3, True)
    await settle_all(gateway)
    assert (budget.records, budget.bytes) == (0, 0)
    assert len(stored(gateway, gateway.kafka)) == 3


async def test_a_session_that_goes_elsewhere_waits_for_kafka() -> None:
    gateway = Gateway(Kafka(random.Random(0)))
    gateway.inbound_qos2.publish(Record("t", b"0", b"one"), 1, Slot(1, None, 2))
    await turns()
    kind, write = gateway.waiting.pop(0)
    gateway.store(kind, write, tell=True)  # the start offsets of t
    await turns()
    assert [kind for kind, _ in gateway.waiting] == ["record"]
    gateway.inbound_qos2.publish(Record("u", b"0", b"held"), 2, Slot(2, None, 2))
    gone: list[dict[str, Any]] = []
    gateway.inbound_qos2.when_idle(lambda: gone.append(gateway.inbound_qos2.describe(leaving=True)))
    assert gone == []
    assert gateway.inbound_qos2.budget.records == 0
    await settle_all(gateway)
    assert [(one["open"], one["low_water_mark"], one["scan_from"]) for one in gone] == [({1: 0}, 2, {})]
    assert stored(gateway, gateway.kafka) == [b"one"]
