from __future__ import annotations

import asyncio
import random
import time
import uuid
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewPartitions, NewTopic, RecordsToDelete
from aiokafka.cluster import ClusterMetadata

from gateway.kafka.contracts import Refused
from gateway.kafka.driver.kafka_consumer import fetch_wait_ms
from mapping.outcomes import Outcome
from tests.support.steps import steps
from tests.support.topics import until_led


async def fill(producer: AIOKafkaProducer, topic: str, count: int, partitions: int = 3, size: int = 0) -> None:
    for number in range(count):
        await producer.send(topic, b"%d" % number + b"." * size, partition=number % partitions)
    await producer.flush()


async def test_offers_what_is_stored_after_watch_returned_in_order(readers, producer, new_topic) -> None:
    topic = await new_topic(partitions=3)
    await fill(producer, topic, 30)
    sink = readers.Sink()
    await readers.live_reader.watch(topic, readers.Fan(sink))
    await fill(producer, topic, 3000)
    await readers.wait_until(lambda: len(sink.got) >= 3000)
    sink.check_complete(3000)
    assert sink.by_partition() == {(topic, n): list(range(10, 1010)) for n in range(3)}
    statistics = readers.live_reader.statistics()
    assert statistics.positions == {topic: {0: 1010, 1: 1010, 2: 1010}}
    assert statistics.lag == {topic: 0}
    assert (statistics.records, statistics.offers, statistics.behind) == (3000, 3000, 0)


async def test_a_record_keeps_everything(readers, producer, new_topic) -> None:
    topic = await new_topic(partitions=1)
    sink = readers.Sink()
    await readers.live_reader.watch(topic, readers.Fan(sink))
    headers = [("a", b"1"), ("b", None), ("a", b"")]
    await producer.send_and_wait(topic, b"", key=b"k", headers=headers, timestamp_ms=1234567890123)
    await producer.send_and_wait(topic, None, key=b"k")
    await readers.wait_until(lambda: len(sink.got) == 2)
    first, second = sink.got
    assert (first.topic, first.key, first.value, first.headers) == (topic, b"k", b"", tuple(headers))
    assert (first.timestamp, first.partition, first.offset) == (1234567890123, 0, 0)
    assert (second.value, second.headers) == (None, ())


async def test_a_later_watcher_of_a_watched_topic_gets_only_later_records(readers, producer, new_topic) -> None:
    topic = await new_topic(partitions=1)
    early = readers.Sink()
    await readers.live_reader.watch(topic, readers.Fan(early))
    watching = []
    for number in range(40):
        await producer.send_and_wait(topic, b"%d" % number)
        late = readers.Sink()
        await readers.live_reader.watch(topic, readers.Fan(late))  # the live reader may not have reached the end yet
        watching.append((number + 1, late))
    await producer.send_and_wait(topic, b"last")
    await readers.wait_until(lambda: all(late.got and late.got[-1].offset == 40 for _, late in watching))
    for first, late in watching:
        assert [record.offset for record in late.got] == list(range(first, 41))
    early.check_complete(41)


async def test_topics_come_and_go_while_records_flow(readers, producer, admin) -> None:
    names = [f"t-{uuid.uuid4().hex[:12]}" for _ in range(21)]
    await admin.create_topics([NewTopic(name, 3, 1) for name in names])
    for name in names:
        await until_led(admin, name)
    main = readers.Sink()
    await readers.live_reader.watch(names[0], readers.Fan(main))
    stored = 0
    done = False

    async def flow() -> None:
        nonlocal stored
        while not done:
            await producer.send(names[0], b"%d" % stored, partition=stored % 3)
            stored += 1
            if stored % 50 == 0:
                await asyncio.sleep(0.002)

    flowing = asyncio.get_running_loop().create_task(flow())
    others = []
    for name in names[1:]:
        sink, fan = readers.Sink(), None
        fan = readers.Fan(sink)
        await readers.live_reader.watch(name, fan)
        for number in range(3):
            await producer.send_and_wait(name, b"x", partition=number)
        others.append((name, sink, fan))
    await readers.wait_until(lambda: all(len(sink.got) == 3 for _, sink, _ in others))
    for name, _, fan in others[::2]:
        readers.live_reader.unwatch(name, fan)
        await asyncio.sleep(0.01)
    done = True
    await flowing
    await producer.flush()
    for name, *_ in others:
        await producer.send_and_wait(name, b"y", partition=0)
    await readers.wait_until(lambda: len(main.got) >= stored)
    await readers.wait_until(lambda: all(len(sink.got) == 4 for _, sink, _ in others[1::2]))
    main.check_complete(stored)
    for number, (_, sink, _) in enumerate(others):
        sink.check_complete(3 if number % 2 == 0 else 4)
    assert len(readers.live_reader.statistics().positions) == 11
    assert readers.live_reader.statistics().assignments < 45  # neighbours share one


async def test_a_slow_subscriber_falls_behind_and_rejoins_and_delays_no_other(readers, producer, new_topic) -> None:
    topic = await new_topic(partitions=3)
    fast, slow, lossy = readers.Sink(), readers.Sink(100), readers.Sink(100, lossy=True)
    await readers.live_reader.watch(topic, readers.Fan(fast, slow, lossy))
    await fill(producer, topic, 6000)
    await readers.wait_until(lambda: len(fast.got) == 6000)
    fast.check_complete(6000)
    assert len(slow.got) == 100
    assert len(lossy.got) == 100
    assert readers.live_reader.statistics().behind == 3
    assert readers.live_reader.statistics().dropped == 5900

    while len(slow.got) < 5000:
        slow.capacity += 100
        readers.live_reader.resume(slow)
        await readers.wait_until(lambda: slow.capacity == 0)
    assert readers.live_reader.statistics().behind > 0
    slow.capacity = None
    readers.live_reader.resume(slow)
    await readers.wait_until(lambda: readers.live_reader.statistics().behind == 0)
    slow.check_complete(6000)

    offered = readers.catch_up_reader.statistics().offered
    await fill(producer, topic, 300)
    await readers.wait_until(lambda: len(slow.got) == 6300 and len(fast.got) == 6300)
    slow.check_complete(6300)
    assert readers.catch_up_reader.statistics().offered == offered  # it is with the live reader again
    assert readers.catch_up_reader.statistics().subscribers == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_nothing_is_lost_duplicated_or_reordered_however_capacity_changes(readers, producer, admin, seed) -> None:
    rng = random.Random(seed)
    names = [f"t-{uuid.uuid4().hex[:12]}" for _ in range(3)]
    await admin.create_topics([NewTopic(name, 2, 1) for name in names])
    for name in names:
        await until_led(admin, name)
    sinks = [readers.Sink() for _ in range(6)]
    for name in names:
        await readers.live_reader.watch(name, readers.Fan(*sinks))
    stored = 0

    async def store(count: int) -> None:
        nonlocal stored
        for _ in range(count):
            await producer.send(rng.choice(names), b"%d" % stored, partition=rng.randrange(2))
            stored += 1

    async def all_fall_behind() -> None:
        """How often they do so in between is random: the reader may get everything in a few fetches."""
        for sink in sinks:
            sink.capacity, sink.refused = rng.randrange(200), 0
        await store(200)
        await readers.wait_until(lambda: all(sink.refused for sink in sinks))

    async def all_catch_up() -> None:
        await producer.flush()
        for sink in sinks:
            sink.capacity = None
            readers.live_reader.resume(sink)
        await readers.wait_until(lambda: min(len(sink.got) for sink in sinks) >= stored)
        for sink in sinks:
            sink.check_complete(stored)
        await readers.wait_until(lambda: readers.live_reader.statistics().behind == 0)

    await all_fall_behind()
    for _ in range(60):
        await store(rng.randrange(300))
        for sink in rng.sample(sinks, 3):
            sink.capacity += rng.choice((1, 10, 100, 1000))
            readers.live_reader.resume(sink)
        await asyncio.sleep(rng.choice((0, 0.001, 0.01)))
    await all_catch_up()
    await all_fall_behind()
    await all_catch_up()
    assert readers.live_reader.statistics().fell_behind > 6


async def test_a_thousand_subscribers_behind_share_a_few_consumers(readers, producer, new_topic) -> None:
    topic = await new_topic(partitions=1)
    sinks = [readers.Sink(0) for _ in range(1000)]
    await readers.live_reader.watch(topic, readers.Fan(*sinks))
    await fill(producer, topic, 20, partitions=1)
    await readers.wait_until(lambda: readers.live_reader.statistics().records == 20)
    assert readers.live_reader.statistics().behind == 1000
    most = 0
    for sink in sinks:
        sink.capacity = 15
        readers.live_reader.resume(sink)
    while min(len(sink.got) for sink in sinks) < 15:
        most = max(most, readers.catch_up_reader.statistics().consumers)
        await asyncio.sleep(0.005)
    for sink in sinks:
        sink.capacity = None
        readers.live_reader.resume(sink)
    await readers.wait_until(lambda: readers.live_reader.statistics().behind == 0, timeout=60)
    for sink in sinks:
        sink.check_complete(20)
    assert 1 <= most <= 2


async def test_subscribers_that_change_between_consumers_get_nothing_twice(readers, producer, new_topic) -> None:
    """Each subscriber gains a little capacity repeatedly, so records that another consumer has fetched are outdated."""
    topic = await new_topic(1)
    subscribers = [readers.Sink(0) for _ in range(3)]
    await readers.live_reader.watch(topic, readers.Fan(*subscribers))
    for number in range(2000):
        await producer.send(topic, b"%d" % number, partition=0)
    await producer.flush()
    await readers.wait_until(lambda: readers.live_reader.statistics().behind == len(subscribers))
    rng = random.Random(4)
    while readers.live_reader.statistics().behind:
        subscriber = rng.choice(subscribers)
        subscriber.capacity += rng.randrange(1, 40)
        readers.live_reader.resume(subscriber)
        await asyncio.sleep(rng.choice((0, 0, 0, 0.001, 0.003)))
    for subscriber in subscribers:
        subscriber.check_complete(2000)


async def test_subscribers_that_leave_while_behind_leave_nothing(readers, producer, new_topic) -> None:
    topic = await new_topic(partitions=2)
    gone, stays, ended = readers.Sink(1), readers.Sink(1), readers.Sink(1)
    fan, other = readers.Fan(gone, stays), readers.Fan(ended)
    await readers.live_reader.watch(topic, fan)
    await readers.live_reader.watch(topic, other)
    await fill(producer, topic, 100, partitions=2)
    await readers.wait_until(lambda: readers.live_reader.statistics().records == 100)
    assert readers.live_reader.statistics().behind >= 3
    fan.subscribers = (stays,)
    readers.live_reader.forget(gone)
    readers.live_reader.unwatch(topic, other)
    for sink in (gone, stays, ended):
        sink.capacity = None
        readers.live_reader.resume(sink)
    await readers.wait_until(lambda: readers.live_reader.statistics().behind == 0)
    stays.check_complete(100)
    assert len(gone.got) == len(ended.got) == 1
    assert readers.catch_up_reader.statistics().subscribers == 0


async def test_a_subscriber_that_leaves_while_its_partition_is_missing_leaves_nothing(
    readers, producer, new_topic
) -> None:
    topic = await new_topic(partitions=1)
    sink = readers.Sink(0)
    await readers.live_reader.watch(topic, readers.Fan(sink))
    await producer.send_and_wait(topic, b"no capacity for it")
    await readers.wait_until(lambda: readers.live_reader.statistics().behind == 1)
    readers.live_reader._metadata._check(ClusterMetadata())  # of a broker that has just started: it knows no topic yet
    readers.live_reader.forget(sink)
    await readers.lookup.refresh()
    assert readers.live_reader.position(topic, 0) is not None
    assert readers.live_reader.statistics().behind == 0


async def test_a_session_resumes_from_stored_positions(readers, producer, new_topic) -> None:
    topic = await new_topic(partitions=2)
    await fill(producer, topic, 2000, partitions=2)
    sink = readers.Sink(10)
    fan = readers.Fan(sink)
    await readers.live_reader.watch(topic, fan)
    assert readers.live_reader.catch_up(topic, fan, sink, 0, 400)
    assert readers.live_reader.catch_up(topic, fan, sink, 1, 1000)  # at the end already
    assert not readers.live_reader.catch_up(topic, fan, sink, 7, 0)
    await fill(producer, topic, 200, partitions=2)
    await readers.wait_until(lambda: sink.capacity == 0)
    sink.capacity = None
    readers.live_reader.resume(sink)
    await readers.wait_until(lambda: readers.live_reader.statistics().behind == 0)
    await readers.wait_until(lambda: len(sink.got) == 800)
    assert sink.by_partition() == {(topic, 0): list(range(400, 1100)), (topic, 1): list(range(1000, 1100))}


async def test_retention_that_passes_a_slow_subscriber_is_a_counted_gap(
    readers, producer, new_topic, admin, logged
) -> None:
    topic = await new_topic(partitions=1)
    sink = readers.Sink(10)
    await readers.live_reader.watch(topic, readers.Fan(sink))
    await fill(producer, topic, 100, partitions=1)
    await readers.wait_until(lambda: readers.live_reader.statistics().behind == 1)
    await readers.wait_until(lambda: readers.live_reader.statistics().records == 100)
    await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=60)})
    sink.capacity = None
    readers.live_reader.resume(sink)
    await readers.wait_until(lambda: readers.live_reader.statistics().behind == 0)
    assert [record.offset for record in sink.got] == [*range(10), *range(60, 100)]
    assert readers.catch_up_reader.statistics().gaps == 50
    assert [line["lost"] for line in logged if line["event"] == "catch-up reader: an offset is gone"] == [50]


async def test_records_of_an_aborted_transaction_are_not_messages(readers, producer, new_topic) -> None:
    topic = await new_topic(partitions=1)
    sink, slow = readers.Sink(), readers.Sink(1)
    await readers.live_reader.watch(topic, readers.Fan(sink, slow))
    async with AIOKafkaProducer(bootstrap_servers=readers.bootstrap, transactional_id=f"x-{topic}") as transactional:
        await transactional.begin_transaction()
        await transactional.send_and_wait(topic, b"aborted")
        await transactional.abort_transaction()
        async with transactional.transaction():
            await transactional.send_and_wait(topic, b"committed")
            await transactional.send_and_wait(topic, b"too")
        await transactional.begin_transaction()
        await transactional.send_and_wait(topic, b"aborted")
        await transactional.abort_transaction()
    await readers.wait_until(lambda: len(sink.got) == 2)
    await readers.wait_until(lambda: readers.live_reader.statistics().behind == 1)
    slow.capacity = None
    readers.live_reader.resume(slow)
    await readers.wait_until(lambda: readers.live_reader.statistics().behind == 0)
    await producer.send_and_wait(topic, b"plain")
    await readers.wait_until(lambda: len(sink.got) == 3 and len(slow.got) == 3)
    assert sink.values == slow.values == [b"committed", b"too", b"plain"]


async def test_new_partitions_are_read_from_their_first_record(readers, producer, new_topic, admin) -> None:
    topic = await new_topic(partitions=1)
    sink = readers.Sink()
    await readers.live_reader.watch(topic, readers.Fan(sink))
    await admin.create_partitions({topic: NewPartitions(total_count=2)})
    async with AIOKafkaProducer(bootstrap_servers=readers.bootstrap) as fresh:
        await readers.wait_until(
            lambda: fresh.client.cluster.partitions_for_topic(topic) or fresh.client.add_topic(topic)
        )
        await readers.wait_until(lambda: len(fresh.client.cluster.partitions_for_topic(topic) or ()) == 2)
        await fresh.send_and_wait(topic, b"new", partition=1)
    await readers.wait_until(lambda: sink.values == [b"new"])


async def test_a_deleted_topic_disturbs_no_other_and_may_come_back(readers, producer, new_topic, admin) -> None:
    doomed, other = await new_topic(partitions=1), await new_topic(partitions=1)
    sink = readers.Sink()
    for topic in (doomed, other):
        await readers.live_reader.watch(topic, readers.Fan(sink))
    await fill(producer, doomed, 5, partitions=1)
    await readers.wait_until(lambda: len(sink.got) == 5)
    await admin.delete_topics([doomed])
    await readers.wait_until(lambda: "is gone" in "".join(gone(readers, doomed)))
    await fill(producer, other, 5, partitions=1)
    await readers.wait_until(lambda: len(sink.got) == 10)
    await admin.create_topics([NewTopic(doomed, 1, 1)])
    async with AIOKafkaProducer(bootstrap_servers=readers.bootstrap) as fresh:
        await fresh.send_and_wait(doomed, b"back")
    await readers.wait_until(lambda: len(sink.got) == 11)
    assert sink.values[-1] == b"back"


def gone(readers: Any, topic: str) -> list[str]:
    return ["is gone" for part in readers.live_reader._topics[topic].partitions.values() if part.missing_since]


@pytest.mark.parametrize(
    ("topic", "outcome"),
    [
        ("no-such-topic", Outcome.UNKNOWN_TOPIC),
        ("__consumer_offsets", Outcome.DENIED),
        ("no/topic", Outcome.UNKNOWN_TOPIC),
        ("", Outcome.UNKNOWN_TOPIC),
    ],
)
async def test_topics_that_cannot_be_watched_are_refused(readers, topic, outcome) -> None:
    with pytest.raises(Refused) as refused:
        await readers.live_reader.watch(topic, readers.Fan())
    assert refused.value.outcome is outcome
    assert refused.value.reason


async def test_a_missing_topic_is_created_before_the_look_up(readers, admin) -> None:
    shell = readers.another()
    name = f"t-{uuid.uuid4().hex[:12]}"

    async def create(topic: str) -> None:
        await admin.create_topics([NewTopic(topic, 1, 1)])
        await until_led(admin, topic)

    shell.lookup._ensure = create
    assert await shell.lookup.partitions(name) == (TopicPartition(name, 0),)
    await shell.stop()


async def test_many_look_ups_share_a_request(readers, new_topic) -> None:
    topics = [await new_topic(partitions=1) for _ in range(3)]
    partitions = [await readers.lookup.partitions(topic) for topic in topics]
    before = readers.lookup.requests
    answers = await asyncio.gather(*(readers.lookup.ends(partitions[n % 3]) for n in range(300)))
    assert all(answer == {partitions[n % 3][0]: 0} for n, answer in enumerate(answers))
    assert readers.lookup.requests - before <= 3


async def test_acknowledgements_are_not_starved_by_a_flood(readers, producer, new_topic) -> None:
    topic = await new_topic(partitions=3)
    sinks = [readers.Sink() for _ in range(20)]
    await readers.live_reader.watch(topic, readers.Fan(*sinks))
    await fill(producer, topic, 10_000)
    worst, last = 0.0, time.thread_time()  # without the time that other processes use
    while len(sinks[0].got) < 10_000:
        await asyncio.sleep(0)
        now = time.thread_time()
        worst, last = max(worst, now - last), now
    assert worst < 0.25  # 10,000 records x 20 subscribers in one go would take longer
    for sink in sinks:
        sink.check_complete(10_000)


@pytest.mark.parametrize(("partitions", "wait"), [(0, 100), (1000, 100), (5000, 500), (100_000, 1000)])
async def test_an_empty_fetch_of_many_partitions_is_held_longer(partitions: int, wait: int) -> None:
    assert fetch_wait_ms(partitions) == wait


async def test_leaving_costs_the_same_however_many_are_behind(readers, producer, new_topic) -> None:
    topic = await new_topic(partitions=1)
    fans = [readers.Fan(readers.Sink(capacity=0)) for _ in range(400)]
    for fan in fans:
        await readers.live_reader.watch(topic, fan)
    await producer.send_and_wait(topic, b"no capacity for it")
    await readers.wait_until(lambda: readers.live_reader.statistics().behind == 400)
    first = steps(lambda: readers.live_reader.unwatch(topic, fans[0]))
    for fan in fans[1:399]:
        readers.live_reader.unwatch(topic, fan)
    assert first <= steps(lambda: readers.live_reader.unwatch(topic, fans[399])) + 10
    assert readers.live_reader.statistics().behind == 0
