"""Records without a key: those of one sender are in one partition in order, and senders are spread by load."""

import asyncio
import uuid
from collections import Counter

import msgspec
from aiokafka.admin import NewPartitions, NewTopic

from gateway.kafka.publish.sender_partitions import REMEMBERED, Places, RememberedSender
from mapping.outcomes import Outcome
from mapping.record import Record
from tests.support.topics import until_led


def partition_of(owner, token):
    return owner.offsets[token][0]


async def send(k, topic, sender, owner, token):
    """Submit a record, wait until it is settled, and return its partition."""
    k.publisher.submit(Record(topic, None, b"%d" % len(owner.fates)), owner, token, sender)
    await k.until(lambda: token in owner.fates)
    assert owner.fates[token].outcome is Outcome.STORED
    return partition_of(owner, token)


async def test_a_senders_records_lie_in_order_in_one_partition(bootstrap, new_topic, kit, read_topic):
    """Over many batches, some waited for, in runs and one by one, with other senders in between."""
    topic = await new_topic(partitions=3)
    async with kit(bootstrap, batch_bytes=2000) as k:
        owner = k.recorder()
        senders = [RememberedSender(lasting=True) for _ in range(4)]
        for number in range(300):
            for index, sender in enumerate(senders):
                tokens = [(index, number, place) for place in range(3)]
                records = [Record(topic, None, b"%d %d %d" % token) for token in tokens]
                if number % 2:
                    k.publisher.submit_run(records, owner, tokens, sender)
                else:
                    for token, record in zip(tokens, records, strict=True):
                        k.publisher.submit(record, owner, token, sender)
            if not number % 50:
                await k.until(lambda number=number: all((index, number, 2) in owner.fates for index in range(4)))
        assert await k.publisher.drain(60)
        assert set(owner.outcomes().values()) == {Outcome.STORED}
        homes = [{partition_of(owner, token) for token in owner.offsets if token[0] == index} for index in range(4)]
        assert all(len(home) == 1 for home in homes)
        assert set.union(*homes) == {0, 1, 2}
    for records in (await read_topic(bootstrap, topic)).values():
        seen = [tuple(int(part) for part in record.value.split()) for record in records]
        for index in {one[0] for one in seen}:
            assert [one[1:] for one in seen if one[0] == index] == [
                (n, place) for n in range(300) for place in range(3)
            ]


async def test_senders_are_spread_and_make_room_when_they_leave(bootstrap, new_topic, kit):
    topic = await new_topic(partitions=3)
    async with kit(bootstrap) as k:
        owner = k.recorder()
        senders = [RememberedSender(lasting=True) for _ in range(9)]
        homes = [await send(k, topic, sender, owner, number) for number, sender in enumerate(senders)]
        assert sorted(Counter(homes).values()) == [3, 3, 3]
        for sender, home in zip(senders, homes, strict=True):
            if home == 1:
                sender.leave()
        again = [await send(k, topic, RememberedSender(lasting=True), owner, f"again {number}") for number in range(3)]
        assert again == [1, 1, 1]


async def test_a_backlog_counts_as_senders_do(bootstrap, new_topic, kit):
    topic = await new_topic(partitions=2)
    async with kit(bootstrap, batch_bytes=1024) as k:
        owner = k.recorder()
        busy = RememberedSender(lasting=True)
        home = await send(k, topic, busy, owner, "first")
        for number in range(200):
            k.publisher.submit(Record(topic, None, b"x" * 500), owner, number, busy)
        for number in range(20):  # before any of the backlog is sent
            k.publisher.submit(Record(topic, None, b"v"), owner, f"other {number}", RememberedSender(lasting=True))
        assert await k.publisher.drain(60)
        assert [partition_of(owner, f"other {number}") for number in range(20)] == [1 - home] * 20


async def test_a_named_sender_comes_back_to_its_place(bootstrap, new_topic, kit):
    topic = await new_topic(partitions=5)
    places = Places()
    async with kit(bootstrap) as k:
        owner = k.recorder()
        homes = {}
        for number in range(10):
            sender = places.sender("user", "container", f"link {number}")
            homes[number] = await send(k, topic, sender, owner, number)
            sender.leave()
            crowd = [
                RememberedSender(lasting=True) for _ in range(number)
            ]  # so that a choice by load would give another partition
            for place, other in enumerate(crowd):
                await send(k, topic, other, owner, (number, place))
        for number, home in homes.items():
            assert (
                await send(k, topic, places.sender("user", "container", f"link {number}"), owner, -1 - number) == home
            )


async def test_an_unknown_name_finds_the_same_place_at_every_gateway(bootstrap, new_topic, kit):
    topic = await new_topic(partitions=7)
    homes = []
    for _ in range(2):
        async with kit(bootstrap) as k:
            owner = k.recorder()
            homes.append(await send(k, topic, Places().sender("user", "container", "link"), owner, 0))
    assert homes[0] == homes[1]


async def test_what_waits_for_an_unknown_topic_keeps_its_order(bootstrap, kit, read_topic):
    name = "new-" + uuid.uuid4().hex
    async with kit(bootstrap, create=True, topic_partitions=3, batch_bytes=1024) as k:
        owner, sender = k.recorder(), RememberedSender(lasting=True)
        for number in range(500):
            k.publisher.submit(Record(name, None, b"%d" % number), owner, number, sender)
        await k.until(lambda: len(owner.fates) == 500)
        sender.leave()
    stored = [records for records in (await read_topic(bootstrap, name)).values() if records]
    assert [[int(record.value) for record in records] for records in stored] == [list(range(500))]


async def test_new_partitions_are_for_new_senders(bootstrap, new_topic, kit, admin):
    topic = await new_topic(partitions=1)
    async with kit(bootstrap) as k:
        owner, old = k.recorder(), RememberedSender(lasting=True)
        assert await send(k, topic, old, owner, "before") == 0
        await admin.create_partitions({topic: NewPartitions(3)})
        async with asyncio.timeout(60):
            while k.publisher.known_topic(topic).partitions < 3:
                await k.topics.refresh()
        assert {await send(k, topic, RememberedSender(lasting=True), owner, number) for number in range(2)} == {1, 2}
        assert await send(k, topic, old, owner, "after") == 0


async def test_a_topic_made_anew_with_fewer_partitions_has_a_place_for_every_sender(bootstrap, new_topic, kit, admin):
    topic = await new_topic(partitions=4)
    async with kit(bootstrap, request_timeout_s=2) as k:
        owner = k.recorder()
        senders = [RememberedSender(lasting=True) for _ in range(4)]
        homes = [await send(k, topic, sender, owner, number) for number, sender in enumerate(senders)]
        assert set(homes) == {0, 1, 2, 3}
        await admin.delete_topics([topic])
        async with asyncio.timeout(60):
            while k.publisher.known_topic(topic) is not None:
                await k.topics.refresh()
        await admin.create_topics([NewTopic(topic, 2, 1)])
        await until_led(admin, topic)
        again = []
        for number, sender in enumerate(senders):
            for attempt in range(1000):  # the change may not have reached all of the broker yet
                token = (number, attempt)
                k.publisher.submit(Record(topic, None, b"v"), owner, token, sender)
                await k.until(lambda token=token: token in owner.fates)
                if owner.fates[token].outcome is Outcome.STORED:
                    again.append(partition_of(owner, token))
                    break
        assert all(new == old for new, old in zip(again, homes, strict=True) if old < 2)
        assert set(again) == {0, 1}


async def test_senders_leave_a_partition_without_a_leader_when_nothing_is_in_flight(bootstrap, new_topic, kit):
    topic = await new_topic(partitions=3)
    async with kit(bootstrap) as k:
        owner, sender = k.recorder(), RememberedSender(lasting=True)
        home = await send(k, topic, sender, owner, "with a leader")
        writer = k.publisher._writers[topic]
        known = writer.info
        leaderless = msgspec.structs.replace(known, available=tuple({0, 1, 2} - {home}))
        k.publisher.submit(Record(topic, None, b"v"), owner, "on the way", sender)
        writer.update(leaderless)
        k.publisher.submit(Record(topic, None, b"v"), owner, "behind it", sender)
        await k.until(lambda: "behind it" in owner.fates)
        assert {partition_of(owner, "on the way"), partition_of(owner, "behind it")} == {home}
        await k.until(lambda: not writer.queues[home].open.count and writer.queues[home].shut)
        moved = await send(k, topic, sender, owner, "moved")
        assert moved != home
        writer.update(known)
        assert await send(k, topic, sender, owner, "stays") == moved
        assert [queue.senders for queue in writer.queues].count(1) == 1
        sender.leave()
        assert [queue.senders for queue in writer.queues] == [0, 0, 0]


async def test_requests_share_a_batch_and_then_take_turns(bootstrap, new_topic, kit):
    topic = await new_topic(partitions=3)
    async with kit(bootstrap) as k:
        owner = k.recorder()
        await k.publisher.topic(topic)
        for number in range(30):  # in one turn of the loop
            for place in range(2):
                k.publisher.submit(
                    Record(topic, None, b"v"), owner, (number, place), RememberedSender() if place else None
                )
        await k.until(lambda: len(owner.fates) == 60)
        assert k.publisher.statistics().batches == 1


def test_places_are_bounded_and_the_oldest_goes_first():
    places = Places()
    for number in range(REMEMBERED + 10):
        places[number] = 3
    known = [number for number in range(REMEMBERED + 10) if number in places]
    assert known == list(range(10, REMEMBERED + 10))
