"""The publisher while the broker is frozen, killed or absent: no acknowledged record is lost, the order is kept."""

import asyncio
import itertools
import time

import pytest

from gateway.kafka.contracts import Refused
from gateway.kafka.driver import wire
from gateway.kafka.driver.produce.produce_requests import InFlight
from gateway.kafka.driver.produce.turn_requests import TurnRequest
from gateway.settings.config import BudgetConfig
from mapping.outcomes import Outcome
from mapping.record import Record
from tests.support.altering_proxy import PRODUCE, AlteringProxy, of_another_partition
from tests.support.topics import read_all

KEYS = [b"key-%d" % number for number in range(12)]


class Load:
    """Submits numbered records in a task, as fast as the gate lets it, and checks what was stored at the end."""

    def __init__(self, kit, topic):
        self.kit = kit
        self.topic = topic
        self.owner = kit.recorder()
        self.numbers = itertools.count()
        self.submitted = 0
        self.running = True

    async def run(self):
        while self.running:
            await self.kit.until(lambda: self.kit.publisher.gate.is_open or not self.running)
            for _ in range(50):
                number = next(self.numbers)
                record = Record(self.topic, KEYS[number % len(KEYS)], b"%d" % number, (("n", b"x" * 50),))
                self.kit.submit(record, self.owner, number)
                self.submitted += 1
            await asyncio.sleep(0.002)

    def check(self, stored, *, duplicates_allowed=False):
        """Check that acknowledged records are at their offsets, and that first occurrences per key are in order."""
        values = {(r.partition, r.offset): int(r.value) for records in stored.values() for r in records}
        acknowledged = {token for token, fate in self.owner.outcomes().items() if fate is Outcome.STORED}
        assert acknowledged <= set(values.values())
        for token in acknowledged:
            partition, offset = self.owner.offsets[token]
            if offset >= 0:
                assert values[partition, offset] == token
        for records in stored.values():
            numbers = [int(record.value) for record in records]
            if not duplicates_allowed:
                assert len(numbers) == len(set(numbers))
            firsts = list(dict.fromkeys(numbers))
            assert firsts == sorted(firsts)


async def until_stored(k, topic, owner, first):
    """Submit records one by one, numbered from `first`, until one is stored in time. Returns the next number."""
    number, outcome = first, Outcome.BUSY
    async with asyncio.timeout(60):
        while outcome is Outcome.BUSY:
            k.submit(Record(topic, b"k", b"%d" % number), owner, number)
            await k.until(lambda number=number: number in owner.fates)
            outcome = owner.outcomes()[number]
            number += 1
    assert outcome is Outcome.STORED
    return number


async def test_a_frozen_broker_acknowledges_nothing_and_loses_nothing(stoppable, own_topic, frozen, kit, read_topic):
    topic = await own_topic(3)
    # A request times out while the broker is frozen, so that the retry inside aiokafka is part of the test.
    async with kit(stoppable.bootstrap_servers, request_timeout_s=2.0) as k:
        load = Load(k, topic)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            await k.until(lambda: len(load.owner.fates) > 2000)
            with frozen():
                await asyncio.sleep(0.2)  # answers that have arrived already may still be read
                settled, submitted = len(load.owner.fates), load.submitted
                began = time.monotonic()
                await k.until(lambda: time.monotonic() - began > 5)
                assert len(load.owner.fates) == settled
                assert load.submitted > submitted
            await k.until(lambda: len(load.owner.fates) > settled)
            load.running = False
        assert await k.publisher.drain(30)
        assert set(load.owner.outcomes().values()) == {Outcome.STORED}
        assert len(load.owner.fates) == load.submitted
        assert k.publisher.statistics().producers == 1
    stored = await read_topic(stoppable.bootstrap_servers, topic)
    assert sum(map(len, stored.values())) == load.submitted
    load.check(stored)


async def test_a_killed_broker_loses_nothing_acknowledged(stoppable, own_topic, kit, read_topic):
    topic = await own_topic(3)
    async with kit(stoppable.bootstrap_servers, request_timeout_s=5.0) as k:
        load = Load(k, topic)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            for _ in range(2):
                target = len(load.owner.fates) + 3000
                await k.until(lambda target=target: len(load.owner.fates) > target)
                await stoppable.kill()
                settled = len(load.owner.fates)
                assert load.submitted > settled
                await stoppable.start()
                await k.until(lambda settled=settled: len(load.owner.fates) > settled)
            load.running = False
        assert await k.publisher.drain(60)
        assert set(load.owner.outcomes().values()) == {Outcome.STORED}
        assert len(load.owner.fates) == load.submitted
    load.check(await read_topic(stoppable.bootstrap_servers, topic), duplicates_allowed=True)


async def test_a_silent_kafka_means_busy_in_time_and_order_afterwards(stoppable, own_topic, frozen, kit, read_topic):
    topic = await own_topic(1)
    async with kit(stoppable.bootstrap_servers, request_timeout_s=0.5, delivery_timeout_s=2.0) as k:
        load = Load(k, topic)
        owner = load.owner
        k.submit(Record(topic, b"k", b"0"), owner, 0)
        await k.until(lambda: owner.fates)
        with frozen():
            began = time.monotonic()
            for number in range(1, 2000):
                k.submit(Record(topic, b"k", b"%d" % number, (("n", b"x" * 200),)), owner, number)
                if number % 500 == 0:
                    await asyncio.sleep(0.01)
            await k.until(lambda: len(owner.fates) == 2000)
            assert 1.9 < time.monotonic() - began < 20
            assert {fate for token, fate in owner.outcomes().items() if token} == {Outcome.BUSY}
            assert (k.publisher.budget.bytes, k.publisher.budget.records) == (0, 0)
        again = await until_stored(k, topic, owner, 2000)
        for number in range(again, again + 500):
            k.submit(Record(topic, b"k", b"%d" % number), owner, number)
            await asyncio.sleep(0)
        await k.until(lambda: len(owner.fates) == again + 500)
        assert {fate for token, fate in owner.outcomes().items() if token >= again} == {Outcome.STORED}
    # Batches that were given up may be stored or not, but no record overtook another.
    load.check(await read_topic(stoppable.bootstrap_servers, topic))


async def test_without_kafka_everything_waits_and_then_says_busy(stoppable, own_topic, kit):
    topic = await own_topic(1)
    await stoppable.stop()
    async with kit(stoppable.bootstrap_servers, request_timeout_s=1.0, delivery_timeout_s=1.0) as k:
        assert not k.publisher.reachable
        owner = k.recorder()
        k.submit(Record(topic, b"k", b"v"), owner, "held")
        assert k.publisher.budget.records == 1
        await k.until(lambda: "held" in owner.fates)
        assert owner.outcomes() == {"held": Outcome.BUSY}
        with pytest.raises(Refused) as refused:
            await k.publisher.topic(topic)
        assert refused.value.outcome is Outcome.BUSY
        await stoppable.start()
        await k.until(lambda: k.publisher.reachable)
        await until_stored(k, topic, owner, 1)


async def test_drain_gives_up_in_time_and_says_busy(stoppable, own_topic, frozen, kit):
    topic = await own_topic(3)
    async with kit(stoppable.bootstrap_servers) as k:
        owner = k.recorder()
        k.submit(Record(topic, b"k", b"v"), owner, "stored")
        await k.until(lambda: owner.fates)
        with frozen():
            for number in range(5000):
                k.submit(Record(topic, KEYS[number % len(KEYS)], b"x" * 100), owner, number)
            k.submit(Record("unknown-topic", b"k", b"v"), owner, "held")
            began = time.monotonic()
            assert not await k.publisher.drain(0.5)
            assert time.monotonic() - began < 20
            assert len(owner.fates) == 5002
            assert {fate for token, fate in owner.outcomes().items() if token != "stored"} == {Outcome.BUSY}
            began = time.monotonic()
            await k.publisher.stop()
            assert time.monotonic() - began < 20


async def test_it_stops_though_more_is_written_than_a_frozen_broker_s_socket_takes(stoppable, own_topic, frozen, kit):
    topic = await own_topic(8)
    async with kit(stoppable.bootstrap_servers) as k:
        owner = k.recorder()
        k.submit(Record(topic, b"k", b"v"), owner, "stored")
        await k.until(lambda: owner.fates)
        with frozen():
            for number in range(8):
                k.submit(Record(topic, None, b"x" * 1_000_000, partition=number), owner, number)
            (connection,) = k.publisher._producers.current._producer.client._conns.values()
            await k.until(connection._writer.transport.get_write_buffer_size)
            assert not await k.publisher.drain(0)
            async with asyncio.timeout(60):
                await k.publisher.stop()
        assert {fate for token, fate in owner.outcomes().items() if token != "stored"} == {Outcome.BUSY}


async def test_memory_is_bounded_while_kafka_is_frozen(stoppable, own_topic, frozen, kit):
    """Senders that obey the gate keep the process within its budget, whatever Kafka does."""
    topic = await own_topic(3)
    limits = BudgetConfig(process_bytes=4 << 20)
    async with kit(stoppable.bootstrap_servers, limits=limits) as k:
        await k.publisher.topic(topic)
        owner = k.recorder()
        number = 0
        with frozen():
            while k.publisher.gate.is_open:
                k.submit(Record(topic, KEYS[number % len(KEYS)], b"x" * 1000), owner, number)
                number += 1
                if number % 10 == 0:
                    await asyncio.sleep(0)
            assert k.publisher.budget.bytes < limits.process_bytes * 1.05
        await k.until(lambda: len(owner.fates) == number)
        assert set(owner.outcomes().values()) == {Outcome.STORED}


@pytest.fixture(
    params=[(InFlight, "begin"), (TurnRequest, "write"), (wire, "produce_body")],
    ids=["when-aiokafka-has-it", "when-taken", "at-the-socket"],
)
def stop_at(request, monkeypatch):
    """Stops a clock (a list) where a batch was taken from its queue, or where its request is encoded."""
    owner, name = request.param
    step = getattr(owner, name)

    def stop_and_step(*arguments):
        if stopping:
            stopping.pop()[0] += 60
        return step(*arguments)

    stopping = []
    monkeypatch.setattr(owner, name, stop_and_step)
    return stopping.append


async def test_what_was_taken_before_a_freeze_is_not_sent_after_it(
    bootstrap, new_topic, kit, read_topic, *, stop_at, request
):
    cold = "aiokafka" in request.node.name  # the first batch of a producer, or of a lost connection, goes that way
    topic = await new_topic(partitions=1)
    async with kit(bootstrap) as k:
        ours, theirs = k.recorder(), k.recorder()
        await k.topics.get(topic)
        k.publisher.fence.guard(5.0, "table")
        before = [] if cold else [b"before"]
        for value in before:
            k.submit(Record(topic, b"k", value), ours, "before")
            await k.until(lambda: ours.fates)
        for number in range(3):
            k.submit(Record(topic, b"k", b"theirs-%d" % number), theirs, number)
        k.submit(Record(topic, b"k", b"ours"), ours, "ours")
        stop_at(k.slept)
        await k.until(lambda: not k.publisher.fence.is_open)
        k.publisher.withdraw(theirs)
        k.publisher.fence.open()
        await k.until(lambda: "ours" in ours.fates)
        k.submit(Record(topic, b"k", b"more"), ours, "more")
        await k.until(lambda: "more" in ours.fates)
        assert theirs.outcomes() == dict.fromkeys(range(3), Outcome.BUSY)
        assert set(ours.outcomes().values()) == {Outcome.STORED}
        k.publisher.fence.stop_guarding()
    assert [record.value for record in (await read_topic(bootstrap, topic))[0]] == [*before, b"ours", b"more"]


async def test_what_kafka_has_lost_is_not_sent_again_after_a_freeze(stoppable, own_topic, kit, frozen, read_topic):
    """It was sent before the freeze. Its session is at another gateway now, to which the client has sent it again."""
    topic = await own_topic(1)
    bootstrap = stoppable.bootstrap_servers
    async with kit(bootstrap) as k:
        ours, theirs = k.recorder(), k.recorder()
        k.submit(Record(topic, b"k", b"first"), theirs, "first")
        await k.until(lambda: theirs.fates)
        k.publisher.fence.guard(5.0, "table")
        with frozen():
            k.submit(Record(topic, b"k", b"lost"), theirs, "lost")
            queue = await the_queue(k, topic)
            await k.until(lambda: queue.in_flight and queue.in_flight[0].numbered)
            await stoppable.kill()
            await k.until(lambda: queue.in_flight[0].may_be_stored)
            k.submit(Record(topic, b"k", b"behind"), theirs, "behind")
            k.submit(Record(topic, b"k", b"ours"), ours, "ours")
            k.slept[0] += 60
            k.publisher.fence.now()
            k.publisher.withdraw(theirs)
            await stoppable.start()
        k.publisher.fence.open()
        await k.until(lambda: ours.fates)
        assert theirs.outcomes() == {"first": Outcome.STORED, "lost": Outcome.BUSY, "behind": Outcome.BUSY}
        assert ours.outcomes() == {"ours": Outcome.STORED}
        k.publisher.fence.stop_guarding()
    assert [record.value for record in (await read_topic(bootstrap, topic))[0]] == [b"first", b"ours"]


async def test_what_may_be_stored_is_there_once_for_those_who_have_stayed(
    stoppable, own_topic, kit, frozen, read_topic
):
    """The batch has records of a withdrawn session and of others; it is resent under its sequence number."""
    topic = await own_topic(1)
    bootstrap = stoppable.bootstrap_servers
    async with kit(bootstrap, request_timeout_s=1) as k:
        ours, theirs = k.recorder(), k.recorder()
        k.submit(Record(topic, b"k", b"first"), ours, "first")
        await k.until(lambda: ours.fates)
        k.publisher.fence.guard(5.0, "table")
        with frozen():
            k.submit(Record(topic, b"k", b"theirs"), theirs, "theirs")
            k.submit(Record(topic, b"k", b"ours"), ours, "ours")
            queue = await the_queue(k, topic)
            await k.until(lambda: queue.in_flight and queue.in_flight[0].may_be_stored)
            k.slept[0] += 60
            k.publisher.fence.now()
            k.publisher.withdraw(theirs)
        k.publisher.fence.open()
        await k.until(lambda: "ours" in ours.fates)
        assert theirs.outcomes() == {"theirs": Outcome.STORED}
        assert ours.outcomes() == dict.fromkeys(("first", "ours"), Outcome.STORED)
        k.publisher.fence.stop_guarding()
    assert [record.value for record in (await read_topic(bootstrap, topic))[0]] == [b"first", b"theirs", b"ours"]


@pytest.mark.parametrize(
    ("owner_of_step", "step"),
    [
        (wire, "produce_body"),
        (TurnRequest, "_settle"),
        (InFlight, "begin"),
        (InFlight, "handle_response"),
        (InFlight, "_connect"),
        (InFlight, "_requeue"),
    ],
)
async def test_a_bug_in_the_sender_costs_a_producer_and_no_record(
    stoppable, own_topic, kit, read_topic, *, monkeypatch, owner_of_step, step
):
    topic = await own_topic(1)
    sound = getattr(owner_of_step, step)

    def broken(request, *arguments):
        monkeypatch.setattr(owner_of_step, step, sound)
        raise RuntimeError("a bug")

    async with kit(stoppable.bootstrap_servers) as k:
        owner = k.recorder()
        k.submit(Record(topic, b"k", b"first"), owner, "first")
        await k.until(lambda: owner.fates)
        monkeypatch.setattr(owner_of_step, step, broken)
        if owner_of_step is InFlight:  # what comes after a lost connection
            await stoppable.kill()
            k.submit(Record(topic, b"k", b"second"), owner, "second")
            await stoppable.start()
        else:
            k.submit(Record(topic, b"k", b"second"), owner, "second")
        await k.until(lambda: "second" in owner.fates)
        assert owner.outcomes() == dict.fromkeys(("first", "second"), Outcome.STORED)
        assert k.publisher.statistics().producers == 2
    values = [record.value for record in (await read_topic(stoppable.bootstrap_servers, topic))[0]]
    assert list(dict.fromkeys(values)) == [b"first", b"second"]


async def test_what_is_withdrawn_while_the_sender_connects_is_not_sent(
    stoppable, own_topic, kit, read_topic, monkeypatch
):
    topic = await own_topic(1)
    connect = InFlight._connect
    connecting, may_connect = asyncio.Event(), asyncio.Event()

    async def connect_later(request):
        connecting.set()
        await may_connect.wait()
        await connect(request)

    async with kit(stoppable.bootstrap_servers) as k:
        theirs, ours = k.recorder(), k.recorder()
        k.submit(Record(topic, b"k", b"first"), ours, "first")
        await k.until(lambda: ours.fates)
        k.publisher.fence.guard(5.0, "table")
        monkeypatch.setattr(InFlight, "_connect", connect_later)
        await stoppable.kill()
        k.submit(Record(topic, b"k", b"theirs"), theirs, "theirs")
        await asyncio.wait_for(connecting.wait(), 60)
        k.slept[0] += 60
        k.publisher.fence.now()
        k.publisher.withdraw(theirs)
        k.publisher.fence.open()
        await stoppable.start()
        may_connect.set()
        await k.until(lambda: theirs.fates)
        k.submit(Record(topic, b"k", b"ours"), ours, "ours")
        await k.until(lambda: "ours" in ours.fates)
        assert theirs.outcomes() == {"theirs": Outcome.BUSY}
        k.publisher.fence.stop_guarding()
    values = [record.value for record in (await read_topic(stoppable.bootstrap_servers, topic))[0]]
    assert values == [b"first", b"ours"]


async def test_a_request_is_not_larger_than_allowed(bootstrap, new_topic, kit, read_topic, monkeypatch):
    """A broker would close the connection of a request that is too large for it, every time."""
    topic = await new_topic(partitions=8)
    sizes = []
    encode = wire.produce_body

    def noted(batches, timeout_ms):
        body = encode(batches, timeout_ms)
        sizes.append(sum(map(len, body)))
        return body

    monkeypatch.setattr(wire, "produce_body", noted)
    async with kit(bootstrap, max_request_bytes=100_000) as k:
        await k.publisher.topic(topic)
        owner = k.recorder()
        for number in range(40):
            k.submit(Record(topic, b"k", b"%2d" % number * 20_000, (), None, number % 8), owner, number)
        await k.until(lambda: len(owner.fates) == 40)
        assert set(owner.outcomes().values()) == {Outcome.STORED}
    assert 80_000 < max(sizes) < 101_000
    for partition, records in (await read_topic(bootstrap, topic)).items():
        assert [int(record.value[:2]) for record in records] == list(range(partition, 40, 8))


async def the_queue(k, topic):
    """The queue of the topic's only partition, when there is one."""
    await k.until(lambda: topic in k.publisher._writers)
    return k.publisher._writers[topic].queues[0]


async def test_an_answer_for_another_partition_is_none(bootstrap, new_topic, kit):
    """The batch is sent again at once, under its sequence number, and not when its time is over."""
    topic = await new_topic(partitions=1)
    host, _, port = bootstrap.rpartition(":")
    async with AlteringProxy((host, int(port))).running() as proxy:
        alteration = proxy.alter_answers(PRODUCE, of_another_partition(topic), times=2)
        async with kit(proxy.bootstrap, delivery_timeout_s=600) as k:
            owner = k.recorder()
            k.submit(Record(topic, b"k", b"v"), owner, 1)
            await k.until(lambda: owner.outcomes() == {1: Outcome.STORED})
    assert alteration.done == 2
    assert [record.value for record in await read_all(bootstrap, topic)] == [b"v"]
