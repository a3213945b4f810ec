"""The requests of a turn beside what goes another way: failing partitions, silent brokers, and bugs."""

import asyncio
import struct
import time
from collections.abc import Callable

import msgspec
import pytest
from aiokafka import TopicPartition, errors

from gateway.kafka.driver.produce.request_pace import RequestPace
from gateway.kafka.driver.produce.turn_requests import TurnRequests
from gateway.kafka.publish.batch import Batch
from gateway.kafka.publish.partition_queue import PartitionQueue
from mapping.outcomes import Outcome
from mapping.record import Record
from tests.support.altering_proxy import PRODUCE, AlteringProxy

ROW = struct.Struct(">ihqqq")  # of an answer to Produce: partition, error, first offset, time, start of the log


def failing(topic: str, partition: int, error: type[errors.KafkaError]) -> Callable[[bytes], bytes]:
    """Return a change of answers: the partition has failed."""
    name = struct.pack(">h", len(topic)) + topic.encode()

    def change(frame: bytes) -> bytes:
        at = frame.find(name)
        if at < 0:
            return frame
        at += len(name)
        (rows,) = struct.unpack_from(">i", frame, at)
        altered = bytearray(frame)
        for row in range(rows):
            begin = at + 4 + row * ROW.size
            number, _, *rest = ROW.unpack_from(frame, begin)
            if number == partition:
                ROW.pack_into(altered, begin, number, error.errno, *rest)
        return bytes(altered)

    return change


def proxy_of(bootstrap):
    host, _, port = bootstrap.rpartition(":")
    return AlteringProxy((host, int(port))).running()


async def store_one_in_each(k, topic, owner, partitions):
    for number in range(partitions):
        k.submit(Record(topic, None, b"first", partition=number), owner, ("first", number))
    await k.until(lambda: len(owner.fates) == partitions)


async def test_a_partition_that_fails_for_ever_delays_no_other(bootstrap, new_topic, kit, read_topic):
    """It is repeated every 0.1 s; the others of its broker are stored between these attempts."""
    topic = await new_topic(partitions=2)
    async with proxy_of(bootstrap) as proxy, kit(proxy.bootstrap, delivery_timeout_s=60) as k:
        owner = k.recorder()
        await store_one_in_each(k, topic, owner, 2)
        proxy.alter_answers(PRODUCE, failing(topic, 0, errors.NotEnoughReplicasError))
        k.submit(Record(topic, None, b"failing", partition=0), owner, "failing")
        began = time.monotonic()
        for number in range(40):
            k.submit(Record(topic, None, b"%d" % number, partition=1), owner, number)
            await k.until(lambda number=number: number in owner.fates)
        assert time.monotonic() - began < 3  # 40 pauses take 4 s
        assert "failing" not in owner.fates
        assert {owner.outcomes()[number] for number in range(40)} == {Outcome.STORED}
        del proxy.answers[PRODUCE]
        await k.until(lambda: "failing" in owner.fates)
        assert owner.outcomes()["failing"] is Outcome.STORED
        assert k.publisher.statistics().producers == 1
    assert [record.value for record in (await read_topic(bootstrap, topic))[0]] == [b"first", b"failing"]


async def test_a_partition_that_has_failed_once_is_sent_again_under_load(bootstrap, new_topic, kit):
    """Its batch is in aiokafka's queues, while in each turn the other partitions' requests follow each other."""
    topic = await new_topic(partitions=8)
    async with proxy_of(bootstrap) as proxy, kit(proxy.bootstrap, delivery_timeout_s=60) as k:
        owner = k.recorder()
        await store_one_in_each(k, topic, owner, 8)
        proxy.alter_answers(PRODUCE, failing(topic, 0, errors.NotEnoughReplicasError), times=1)
        k.submit(Record(topic, None, b"failing", partition=0), owner, "failing")
        began, number = time.monotonic(), 0
        while "failing" not in owner.fates and time.monotonic() - began < 20:
            if len(owner.fates) > number - 2000:
                for partition in range(1, 8):
                    k.submit(Record(topic, None, b"%d" % number, partition=partition), owner, number)
                    number += 1
            await asyncio.sleep(0)
        took = time.monotonic() - began
        assert owner.outcomes().get("failing") is Outcome.STORED
        assert took < 5
        await k.until(lambda: len(owner.fates) == 8 + 1 + number)


async def test_what_waits_for_a_silent_broker_is_busy_in_time(bootstrap, new_topic, kit, read_topic):
    """The request before it is aiokafka's, and the request timeout is longer than a record may take.

    It has never left, so it is not stored later.
    """
    topic = await new_topic(partitions=2)
    async with proxy_of(bootstrap) as proxy, kit(proxy.bootstrap, delivery_timeout_s=2, request_timeout_s=40) as k:
        owner = k.recorder()
        held = proxy.hold(PRODUCE)
        k.submit(Record(topic, None, b"in flight", partition=0), owner, "in flight")
        await asyncio.wait_for(held.wait(), 30)
        began = time.monotonic()
        k.submit(Record(topic, None, b"waiting", partition=1), owner, "waiting")
        await k.until(lambda: len(owner.fates) == 2)
        assert set(owner.outcomes().values()) == {Outcome.BUSY}
        assert time.monotonic() - began < 8
        del proxy.held[PRODUCE]
        (connection,) = [
            connection
            for (node, _), connection in k.publisher._producers.current._producer.client._conns.items()
            if node != "bootstrap" and connection._requests
        ]
        connection.close()
        k.submit(Record(topic, None, b"after", partition=1), owner, "after")
        await k.until(lambda: "after" in owner.fates)
        assert owner.outcomes()["after"] is Outcome.STORED
    assert [record.value for record in (await read_topic(bootstrap, topic))[1]] == [b"after"]


@pytest.mark.parametrize(
    ("where", "step"),
    [
        (PartitionQueue, "_take_next"),
        (Batch, "senders"),
        (RequestPace, "holds"),
        (RequestPace, "written"),
        (RequestPace, "answered"),
        (TurnRequests, "offer"),
    ],
)
async def test_a_bug_while_requests_are_made_costs_no_record(bootstrap, new_topic, kit, *, monkeypatch, where, step):
    """Of all partitions that wait for the same broker."""
    topic = await new_topic(partitions=4)
    sound = getattr(where, step)

    def broken(*arguments):
        monkeypatch.setattr(where, step, sound)
        raise RuntimeError("a bug")

    async with kit(bootstrap, delivery_timeout_s=600, linger_ms=3) as k:
        owner = k.recorder()
        await store_one_in_each(k, topic, owner, 4)
        monkeypatch.setattr(where, step, broken)
        count = 4
        async with asyncio.timeout(15):
            while getattr(where, step) is broken:
                for number in range(4):
                    k.submit(Record(topic, None, b"v", partition=number), owner, count + number)
                count += 4
                await k.until(lambda count=count: getattr(where, step) is sound or len(owner.fates) == count)
            await k.until(lambda: len(owner.fates) == count)
        assert set(owner.outcomes().values()) == {Outcome.STORED}
        producers = k.publisher._producers
        await k.until(lambda: producers.current is None or not producers.current.users)
        await k.until(lambda: not producers._retired)


async def test_a_bug_in_who_follows_the_ends_of_logs_costs_no_record(bootstrap, new_topic, kit):
    topic = await new_topic(partitions=1)
    async with kit(bootstrap) as k:
        owner = k.recorder()
        await store_one_in_each(k, topic, owner, 1)

        def broken(*_place):
            raise RuntimeError("a bug")

        k.publisher.stored = broken
        k.submit(Record(topic, None, b"v", partition=0), owner, "v")
        await k.until(lambda: "v" in owner.fates)
        assert owner.outcomes()["v"] is Outcome.STORED


async def test_a_producer_that_is_retired_without_users_is_closed(bootstrap, new_topic, kit):
    """A partition vanishes in the turn in which its request was left to a task, which has not begun."""
    topic = await new_topic(partitions=2)
    async with proxy_of(bootstrap) as proxy, kit(proxy.bootstrap) as k:
        owner = k.recorder()
        await store_one_in_each(k, topic, owner, 2)
        held = proxy.hold(PRODUCE)
        k.submit(Record(topic, None, b"v", partition=1), owner, "v")
        await asyncio.wait_for(held.wait(), 30)
        producers, writer = k.publisher._producers, k.publisher._writers[topic]
        leased = producers.current
        (request,) = leased.requests.in_flight
        request.pass_on()
        writer.update(msgspec.structs.replace(writer.info, partitions=1))
        assert producers.current is None
        await k.until(lambda: not producers._retired)
        assert leased.users == 0
        await k.until(lambda: "v" in owner.fates)
        assert owner.outcomes()["v"] is Outcome.UNKNOWN_TOPIC


async def test_after_two_billion_records_sequence_numbers_begin_again(bootstrap, new_topic, kit):
    topic = await new_topic(partitions=2)
    async with kit(bootstrap) as k:
        owner = k.recorder()
        k.submit(Record(topic, None, b"v", partition=0), owner, "connected")
        await k.until(lambda: owner.fates)
        numbers = k.publisher._producers.current._producer._txn_manager
        numbers._sequence_numbers[TopicPartition(topic, 1)] = 2**31 - 2
        for number in range(4):
            k.submit(Record(topic, None, b"v", partition=1), owner, number)
            await k.until(lambda number=number: number in owner.fates)
        assert set(owner.outcomes().values()) == {Outcome.STORED}
        assert k.publisher.statistics().producers == 1
