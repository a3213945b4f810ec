"""A client's own messages come before their acknowledgements, if `mqtt.echo_wait_ms` is set, within that time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from flowcontrol.budget import ConnectionBudget
from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Fanout, Result
from gateway.kafka.read.catch_up_reader import CatchUpReader
from gateway.kafka.read.distributor import Distributor
from gateway.kafka.read.live_reader import LiveReader
from gateway.mqtt.session.acks import Slot
from gateway.mqtt.session.qos2 import InboundQos2, Qos2Offsets, Qos2Parts
from gateway.mqtt.session.self_delivery import OwnCopies, SelfDelivery
from gateway.mqtt.session.subscriptions import REMEMBERED_TOPICS, Subscriptions
from gateway.mqtt.state.records import SessionSubscription
from mapping.mqtt.outgoing import MqttDelivery
from mapping.outcomes import Outcome
from mapping.record import Received, Record
from protocols.mqtt import packets
from protocols.mqtt.packets import Publish, Subscription
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

LONG_S = 60.0
STORED = Result(Outcome.STORED, 0)


class MovedByHand:
    """A live reader whose position the test sets."""

    def __init__(self) -> None:
        self.distributor = Distributor({}, lambda *_: None)
        self.at: dict[tuple[str, int], int] = {("t", 0): 10, ("t", 1): 10}

    def position(self, topic: str, partition: int) -> int | None:
        return self.at.get((topic, partition))

    def move(self, topic: str, partition: int, position: int) -> None:
        self.at[topic, partition] = position
        assert self.distributor.passed is not None
        self.distributor.passed(topic, partition, position)


def make(wait_s: float = LONG_S) -> tuple[MovedByHand, SelfDelivery, list[str]]:
    live_reader = MovedByHand()
    return live_reader, SelfDelivery(live_reader, wait_s, asyncio.get_running_loop().time), []


def waiting(self_delivery: SelfDelivery) -> int:
    """How many callbacks wait."""
    return sum(one.then is not None for one in self_delivery._all)


async def test_what_the_tail_has_passed_waits_for_nothing() -> None:
    _, self_delivery, said = make()
    self_delivery.after("t", 0, 9, (said.append, "passed"))
    assert said == ["passed"]
    assert waiting(self_delivery) == 0


async def test_what_the_tail_does_not_read_yet_is_waited_for() -> None:
    live_reader, self_delivery, said = make()
    self_delivery.after("new", 0, 0, (said.append, "made by its first message"))
    assert said == []
    live_reader.move("new", 0, 1)
    await wait_until(lambda: said == ["made by its first message"])


async def test_the_rest_waits_for_the_tail() -> None:
    live_reader, self_delivery, said = make()
    for offset in (10, 11, 12):
        self_delivery.after("t", 0, offset, (said.append, f"a{offset}"))
    self_delivery.after("t", 1, 10, (said.append, "b10"))
    live_reader.move("t", 0, 12)
    await wait_until(lambda: said == ["a10", "a11"])
    live_reader.move("t", 1, 11)
    await wait_until(lambda: said == ["a10", "a11", "b10"])
    assert waiting(self_delivery) == 1
    self_delivery.release()
    assert said == ["a10", "a11", "b10", "a12"]
    live_reader.move("t", 0, 13)
    assert waiting(self_delivery) == 0


async def test_nothing_waits_longer_than_the_bound() -> None:
    live_reader, self_delivery, said = make(wait_s=0.05)
    begun = asyncio.get_running_loop().time()
    self_delivery.after("t", 0, 10, (said.append, "first"))
    self_delivery.later((said.append, "anyway"))
    self_delivery.after("t", 0, 11, (said.append, "second"))
    await wait_until(lambda: len(said) == 3)
    assert said == ["first", "anyway", "second"]
    assert round(asyncio.get_running_loop().time() - begun, 3) >= 0.05  # the loop's clock counts milliseconds
    live_reader.move("t", 0, 50)
    await asyncio.sleep(0)
    assert len(said) == 3  # each is called once
    self_delivery.after("t", 0, 50, (said.append, "third"))
    live_reader.move("t", 0, 51)
    await wait_until(lambda: said[-1] == "third")


async def test_a_frozen_tail_holds_no_longer_either(bootstrap: str, new_topic: Any) -> None:
    """The gateway's live reader was not started and never makes progress."""
    topic = await new_topic(1)
    tasks: list[asyncio.Task[None]] = []
    kafka = {"bootstrap_servers": bootstrap, "metadata_max_age_ms": 1000, "request_timeout_ms": 10_000}

    def spawn(work: Any) -> asyncio.Task[None]:
        tasks.append(asyncio.get_running_loop().create_task(work))
        return tasks[-1]

    lookup = Lookup(kafka, spawn=spawn, timeout_s=60.0)
    catch_up_reader = CatchUpReader(kafka, spawn, lookup, consumers=1)
    live_reader = LiveReader(kafka, spawn, lookup, catch_up_reader)
    said: list[str] = []

    class Nobody(Fanout):
        def select(self, records: Sequence[Received], at: int) -> tuple[tuple[()], int]:
            return (), 1

    try:
        await live_reader.watch(topic, Nobody())
        self_delivery = SelfDelivery(live_reader, 0.1, asyncio.get_running_loop().time)
        self_delivery.after(topic, 0, 0, (said.append, "late"))
        assert said == []
        await wait_until(lambda: said == ["late"])
    finally:
        await live_reader.stop()
        await catch_up_reader.stop()
        await lookup.stop()


def own(offset: int, *, client: str = "me", qos: int = 2) -> tuple[Received, MqttDelivery]:
    record = Received("t", None, b"", (), 0, 0, offset)
    return record, MqttDelivery("t", b"", qos, False, client, None, None)


def test_a_copy_is_early_until_kafka_has_answered() -> None:
    copies = OwnCopies("me")
    assert not copies.is_early(*own(5))  # it is of an earlier connection
    for _ in range(3):
        copies.published()
    assert not copies.answered(1, "t", 0, [5])  # nothing was held back
    assert not copies.is_early(*own(5))
    assert not copies.is_early(*own(6, client="you"))
    assert not copies.is_early(*own(6, qos=1))
    assert copies.is_early(*own(6))
    assert not copies.answered(1, "t", 1, [6])  # another partition
    assert copies.answered(1, "t", 0, [6])
    copies.published()
    assert copies.is_early(*own(7))
    assert copies.answered(1, "t", 0, [])  # refused: there is nothing to wait for


class Link:
    def __init__(self) -> None:
        self.reports_failures = True
        self.said: list[Any] = []

    def answered(self) -> None:
        self.said.append("PUBREC")

    def complete(self, packet_id: int) -> None:
        self.said.append(packet_id)

    def release_messages(self) -> None:
        self.said.append("let out")


class Sink:
    """Stands in for the publisher, and never answers."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []

    def submit(self, record: Record, owner: Any, token: Any) -> None:
        self.tokens.append(token)


def inbound_qos2(self_delivery: SelfDelivery, link: Link) -> tuple[InboundQos2, Sink]:
    sink = Sink()
    parts = Qos2Parts(sink, sink, Qos2Offsets(None), lambda _: None, self_delivery)  # type: ignore[arg-type]
    made = InboundQos2(
        "n",
        "somebody",
        parts,
        budget=ConnectionBudget(1 << 30, 1 << 30),
        journal=None,
        connection=lambda: link,  # type: ignore[arg-type, return-value]
        copies=OwnCopies("me"),
    )
    return made, sink


@pytest.mark.parametrize("first", ["answer", "pubrel"])
async def test_pubcomp_waits_for_the_copy_and_is_said_once(first: str) -> None:
    live_reader, self_delivery, _ = make()
    link = Link()
    one, sink = inbound_qos2(self_delivery, link)
    one.publish(Record("t", None, b""), 1, Slot(1), self_delivered=True)
    if first == "pubrel":
        assert one.release(1)
    one.settle(sink.tokens, [10], STORED)
    for _ in range(3):
        assert one.release(1)  # again and again
    slot = Slot(1)
    one.publish(Record("t", None, b""), 1, slot, self_delivered=True)
    assert slot.result is not None  # it came before [MQTT-4.3.3-10]
    assert len(sink.tokens) == 1
    assert link.said == ["PUBREC"]
    live_reader.move("t", 0, 11)
    await wait_until(lambda: link.said == ["PUBREC", 1])
    assert one.open_ids == []


async def test_what_is_not_stored_waits_for_nothing() -> None:
    _, self_delivery, _ = make()
    link = Link()
    one, sink = inbound_qos2(self_delivery, link)
    slot = Slot(1)
    one.publish(Record("t", None, b""), 1, slot, self_delivered=True)
    one.settle(sink.tokens, [], Result(Outcome.BUSY))
    assert slot.result == Result(Outcome.BUSY)
    assert waiting(self_delivery) == 0


@pytest.fixture(scope="module")
async def echoing(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    config = "[kafka]\ncreate_topics = true\n[mqtt]\necho_wait_ms = 60000\n"
    gateway = GatewayProcess(tmp_path_factory.mktemp("echoing"), bootstrap, config=config)
    yield await gateway.start()
    await gateway.stop()


KEPT = {"clean_start": False, "session_expiry_interval": 60}


async def order(client: RawClient, topic: str, qos: int, granted: int, number: int) -> list[type]:
    """Publish one message to oneself; return the received packets in order."""
    client.send(Publish(topic, b"%d" % number, qos, packet_id=number))
    came: list[type] = []
    last = packets.Puback if qos == 1 else packets.Pubcomp
    while not came or came[-1] is not last:
        packet = await client.receive(30)
        came.append(type(packet))
        if isinstance(packet, Publish):
            assert packet.payload == b"%d" % number
            if granted == 1:
                client.send(packets.Puback(packet.packet_id))
            elif granted == 2:
                client.send(packets.Pubrec(packet.packet_id))
        elif isinstance(packet, packets.Pubrec):
            client.send(packets.Pubrel(number))
        elif isinstance(packet, packets.Pubrel):
            came.pop()
            client.send(packets.Pubcomp(packet.packet_id))
    return came


@pytest.mark.parametrize("options", [{}, KEPT], ids=["", "kept"])
async def test_the_copy_is_before_puback(echoing: GatewayProcess, options: dict[str, Any]) -> None:
    name = f"echo-{uuid.uuid4().hex[:8]}"
    client = await RawClient.connect(echoing.address("mqtt"), **options)
    await client.subscribe(Subscription(f"{name}/#", 1))
    for number in range(1, 201):
        assert await order(client, f"{name}/a", 1, 1, number) == [Publish, packets.Puback]
    client.drop()


@pytest.mark.parametrize("granted", [0, 2])
async def test_the_copy_is_between_pubrec_and_pubcomp(echoing: GatewayProcess, granted: int) -> None:
    name = f"echo-{uuid.uuid4().hex[:8]}"
    client = await RawClient.connect(echoing.address("mqtt"))
    await client.subscribe(Subscription(f"{name}/#", granted))
    for number in range(1, 201):
        assert await order(client, f"{name}/a", 2, granted, number) == [packets.Pubrec, Publish, packets.Pubcomp]
    client.drop()


async def test_many_at_once_come_all_and_in_order(echoing: GatewayProcess) -> None:
    """Messages of all QoS in one burst."""
    name = f"echo-{uuid.uuid4().hex[:8]}"
    client = await RawClient.connect(echoing.address("mqtt"))
    await client.subscribe(Subscription(f"{name}/#", 2))
    await client.subscribe(Subscription(f"other-{name}/#", 2, no_local=True))
    for number in range(1, 201):
        client.send(Publish(f"{name}/{number % 3}", b"%d" % number, number % 3, packet_id=number if number % 3 else 0))
    client.send(Publish(f"other-{name}/a", b"not for me", 1, packet_id=201))
    got: dict[bytes, int] = {}
    completed: set[int] = set()
    while len(got) < 200 or len(completed) < 134:
        packet = await client.receive(30)
        if isinstance(packet, Publish):
            assert packet.payload not in got
            got[packet.payload] = packet.qos
            if packet.qos == 1:
                client.send(packets.Puback(packet.packet_id))
            elif packet.qos == 2:
                client.send(packets.Pubrec(packet.packet_id))
        elif isinstance(packet, packets.Pubrec):
            client.send(packets.Pubrel(packet.packet_id))
        elif isinstance(packet, packets.Pubrel):
            client.send(packets.Pubcomp(packet.packet_id))
        else:
            assert isinstance(packet, packets.Puback | packets.Pubcomp)
            completed.add(packet.packet_id)
    for qos in range(3):
        mine = [int(payload) for payload, granted in got.items() if granted == qos]
        assert mine == sorted(mine)
    client.drop()


def test_what_is_remembered_of_own_topics_is_bounded() -> None:
    subscriptions = Subscriptions()
    subscriptions.put(SessionSubscription(Subscription("a/#", 1)))
    for number in range(2 * REMEMBERED_TOPICS):
        assert subscriptions.matches_own(f"a/{number}")
        assert subscriptions.matches_own(f"a/{number}" + 60_000 * "x")
    assert len(subscriptions._own_matches) <= REMEMBERED_TOPICS
    assert max(map(len, subscriptions._own_matches)) < 300
