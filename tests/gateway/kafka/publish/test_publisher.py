"""The publisher with a real broker: each ticket is settled once, only bad records are refused, budgets are exact."""

import asyncio
import itertools
import random
import time
import uuid

import msgspec
import pytest

from gateway.kafka.contracts import Owner, Refused
from gateway.kafka.publish.partitioner import partition_of
from gateway.settings.config import BudgetConfig, KafkaConfig
from mapping.outcomes import Outcome
from mapping.record import Record
from tests.support.topics import remake


async def test_stores_records_whole_and_in_order(bootstrap, new_topic, kit, read_topic):
    topic = await new_topic(partitions=3)
    headers = (("a", b"1"), ("a", b"2"), ("none", None), ("empty", b""), ("ü", b"\xff"))
    async with kit(bootstrap) as k:
        owner = k.recorder()
        for number in range(200):
            k.submit(Record(topic, b"key-%d" % (number % 10), b"%d" % number, headers), owner, number)
        k.submit(Record(topic, b"t", None, timestamp=1_700_000_000_000), owner, "tombstone")
        k.submit(Record(topic, None, b"", partition=2), owner, "empty")
        await k.until(lambda: len(owner.fates) == 202)
    stored = await read_topic(bootstrap, topic)
    by_place = {(record.partition, record.offset): record for records in stored.values() for record in records}
    assert len(by_place) == 202
    for number in range(200):
        record = by_place[owner.offsets[number]]
        assert record.key == b"key-%d" % (number % 10)
        assert record.value == b"%d" % number
        assert tuple(record.headers) == headers
        assert record.partition == partition_of(record.key, 3)
        assert abs(record.timestamp - time.time() * 1000) < 60_000
    for records in stored.values():
        for key in {record.key for record in records}:
            values = [int(record.value) for record in records if record.key == key and record.value and key != b"t"]
            assert values == sorted(values)
    tombstone = by_place[owner.offsets["tombstone"]]
    assert (tombstone.value, tombstone.timestamp) == (None, 1_700_000_000_000)
    empty = by_place[owner.offsets["empty"]]
    assert (empty.key, empty.value, empty.partition) == (None, b"", 2)


async def test_settles_once_per_owner_and_batch(bootstrap, new_topic, kit):
    topic = await new_topic(partitions=1)
    async with kit(bootstrap) as k:
        first, second = k.recorder(), k.recorder()
        await k.publisher.topic(topic)
        for number in range(100):
            k.submit(Record(topic, b"k", b"v"), first if number % 3 else second, number)
        k.submit(Record(topic, b"k", b"v"), None)
        assert not first.calls  # nothing is settled before Kafka has answered
        await k.until(lambda: len(first.fates) + len(second.fates) == 100)
        assert (len(first.calls), len(second.calls)) == (1, 1)
        for owner in (first, second):
            tokens, offsets, result = owner.calls[0]
            assert tokens == sorted(tokens)
            assert offsets == tokens  # the only writer: offsets start at 0
            assert (result.outcome, result.partition) == (Outcome.STORED, 0)
        assert k.publisher.statistics().records[Outcome.STORED] == 101
        assert k.publisher.statistics().batches == 1


async def test_batches_grow_behind_the_one_in_flight(bootstrap, new_topic, kit):
    topic = await new_topic(partitions=1)
    async with kit(bootstrap) as k:
        await k.publisher.topic(topic)
        owner = k.recorder()
        for number in range(3000):
            k.submit(Record(topic, b"k", b"x" * 100), owner, number)
            if number % 10 == 0:
                await asyncio.sleep(0)
        await k.until(lambda: len(owner.fates) == 3000)
        assert [token for tokens, _, _ in owner.calls for token in tokens] == list(range(3000))
        assert len(owner.calls) < 300  # far fewer than the event-loop turns with a submit


async def test_each_ticket_settles_once_whatever_is_submitted(bootstrap, new_topic, kit, read_topic):
    """Random records that meet every outcome, with a budget per owner."""
    rng = random.Random(20261121)
    plain = await new_topic(partitions=3)
    small = await new_topic(partitions=2, max_message_bytes="2000")
    compacted = await new_topic(partitions=1, cleanup_policy="compact")
    names = [plain, small, compacted, "absent-" + uuid.uuid4().hex, "__internal", "no name", "", "x" * 250]
    async with kit(bootstrap, batch_bytes=4096) as k:
        owners = [
            k.recorder(k.publisher.budgets.connection()),
            k.recorder(),
            k.recorder(k.publisher.budgets.connection()),
        ]
        expected = {}
        for token in range(5000):
            name = rng.choice(names) if rng.random() < 0.1 else rng.choice(names[:3])
            key = rng.choice((None, b"a", b"b", b"%d" % rng.randrange(1000)))
            value = rng.choice((b"", b"x" * rng.randrange(3000), b"%d" % token))
            partition = rng.choice((None, None, None, 0, 1, 9, -1))
            timestamp = rng.choice((None, None, 0, int(time.time() * 1000), 2**61, -5))
            record = Record(name, key, value, (("n", b"%d" % token),), timestamp, partition)
            k.submit(record, rng.choice(owners), token)
            expected[token] = record
            if rng.random() < 0.02:
                await asyncio.sleep(0)
        await k.until(lambda: sum(len(owner.fates) for owner in owners) == 5000)
        assert await k.publisher.drain(5)
        for owner in owners:
            assert owner.budget is None or (owner.budget.bytes, owner.budget.records) == (0, 0)
    fates = {token: fate for owner in owners for token, fate in owner.fates.items()}
    assert fates.keys() == expected.keys()
    by_outcome = {outcome: sum(fate.outcome is outcome for fate in fates.values()) for outcome in Outcome}
    for outcome in (Outcome.STORED, Outcome.UNFIT, Outcome.TOO_LARGE, Outcome.DENIED, Outcome.UNKNOWN_TOPIC):
        assert by_outcome[outcome] > 0, outcome
    assert by_outcome[Outcome.BUSY] + by_outcome[Outcome.BROKEN] + by_outcome[Outcome.EXPIRED] == 0
    places = {token: place for owner in owners for token, place in owner.offsets.items()}
    for topic in (plain, small, compacted):
        stored = await read_topic(bootstrap, topic)
        tokens = [int(dict(record.headers)["n"]) for records in stored.values() for record in records]
        assert sorted(tokens) == sorted(t for t, r in expected.items() if r.topic == topic and t in places)
        for records in stored.values():
            for record in records:
                assert places[int(dict(record.headers)["n"])] == (record.partition, record.offset)


async def test_a_too_large_record_is_refused_alone(bootstrap, new_topic, kit, read_topic):
    topic = await new_topic(partitions=1, max_message_bytes="3000")
    async with kit(bootstrap) as k:
        owner = k.recorder()
        for number in range(20):
            k.submit(Record(topic, b"k", b"x" * (5000 if number == 7 else 400)), owner, number)
        await k.until(lambda: len(owner.fates) == 20)
        assert [token for token, fate in owner.outcomes().items() if fate is not Outcome.STORED] == [7]
        assert owner.outcomes()[7] is Outcome.TOO_LARGE
        assert k.publisher.statistics().producers == 1  # refused before it was sent to Kafka
    assert len((await read_topic(bootstrap, topic))[0]) == 19


async def until_refused(k, record, owner):
    """Submit until a change of the topic takes effect in the broker."""
    async with asyncio.timeout(60):
        for probe in itertools.count():
            k.submit(record, owner, f"probe {probe}")
            await k.until(lambda probe=probe: f"probe {probe}" in owner.fates)
            if owner.fates[f"probe {probe}"].outcome is not Outcome.STORED:
                return


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
async def test_compressed_batches(bootstrap, new_topic, kit, readers, compression):
    """Kafka validates a compressed batch before it stores it, and the live reader reads it."""
    topic = await new_topic(partitions=1, compression_type=compression)
    async with kit(bootstrap, compression=compression) as k:
        owner, sink = k.recorder(), readers.Sink()
        await readers.live_reader.watch_all([topic], readers.Fan(sink))
        for number in range(500):
            k.submit(Record(topic, b"k", b"%d " % number + b"x" * 100, (("h", b"v"),)), owner, number)
        await k.until(lambda: len(owner.fates) == 500)
        assert set(owner.outcomes().values()) == {Outcome.STORED}
        await readers.wait_until(lambda: len(sink.got) == 500)
    assert sink.values == [b"%d " % number + b"x" * 100 for number in range(500)]


async def test_a_record_that_only_the_broker_refuses_is_refused_alone(bootstrap, new_topic, kit, admin, read_topic):
    """The topic's limit was lowered after it was read: the batch is refused, and halving finds the large record."""
    from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

    topic = await new_topic(partitions=2)
    async with kit(bootstrap) as k:
        owner = k.recorder()
        assert (await k.publisher.topic(topic)).max_message_bytes > 100_000
        shrunk = ConfigResource(ConfigResourceType.TOPIC, topic, {"max.message.bytes": "3000"})
        await admin.alter_configs([shrunk])
        await until_refused(k, Record(topic, b"k", b"x" * 5000), owner)
        owner.fates.clear()
        owner.offsets.clear()
        for number in range(40):
            k.submit(Record(topic, b"k", b"x" * (5000 if number in {7, 30} else 400)), owner, number)
        await k.until(lambda: len(owner.fates) == 40)
        refused = {token: fate for token, fate in owner.outcomes().items() if fate is not Outcome.STORED}
        assert refused == {7: Outcome.TOO_LARGE, 30: Outcome.TOO_LARGE}
        stored = [token for token in range(40) if token in owner.offsets]
        first = owner.offsets[0][1]
        assert [owner.offsets[token][1] for token in stored] == list(range(first, first + 38))  # in order, once
        k.submit(Record(topic, b"k", b"afterwards"), owner, "afterwards")
        await k.until(lambda: "afterwards" in owner.fates)
        assert owner.outcomes()["afterwards"] is Outcome.STORED
    stored_values = [r.value for records in (await read_topic(bootstrap, topic)).values() for r in records]
    assert [len(value) for value in stored_values[-39:]] == [400] * 38 + [len(b"afterwards")]


async def test_a_topic_that_becomes_compacted_refuses_records_without_a_key_alone(bootstrap, new_topic, kit, admin):
    from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

    topic = await new_topic(partitions=1)
    async with kit(bootstrap) as k:
        owner = k.recorder()
        await k.publisher.topic(topic)
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {"cleanup.policy": "compact"})])
        await until_refused(k, Record(topic, None, b"probe"), owner)
        owner.fates.clear()
        for number in range(9):
            k.submit(Record(topic, None if number == 4 else b"k", b"v"), owner, number)
        await k.until(lambda: len(owner.fates) == 9)
        assert {token for token, fate in owner.outcomes().items() if fate is not Outcome.STORED} == {4}
        assert owner.outcomes()[4] is Outcome.BROKEN
        # When every part fails, the search ends long before there was a producer for each record.
        producers = k.publisher.statistics().producers
        for number in range(1000, 1400):
            k.submit(Record(topic, None, b"v"), owner, number)
        await k.until(lambda: 1399 in owner.fates)
        assert {owner.outcomes()[number] for number in range(1000, 1400)} == {Outcome.BROKEN}
        assert len(owner.calls) < 100
        assert k.publisher.statistics().producers - producers < 40


@pytest.mark.parametrize("turns", range(5))
async def test_it_stops_while_a_producer_that_was_replaced_is_closed(bootstrap, kit, turns):
    async with kit(bootstrap) as k:
        producers = k.publisher._producers
        leased = await producers.acquire()
        producers.retire(leased)
        producers.release(leased)
        for _ in range(turns):
            await asyncio.sleep(0)
        await k.publisher.stop()
        assert not any(one.connected() for one in leased._producer.client._conns.values())


async def test_what_waits_for_an_unknown_topic_is_not_overtaken(bootstrap, kit, new_topic, read_topic):
    topic = await new_topic(1)
    async with kit(bootstrap) as k:
        owner = k.recorder()
        submitted = 0
        async with asyncio.timeout(60):
            while not owner.fates:  # one record in every turn, so that any gap between lookup and result is hit
                k.submit(Record(topic, b"k", b"%d" % submitted), owner, submitted)
                submitted += 1
                await asyncio.sleep(0)
        await k.until(lambda: len(owner.fates) == submitted)
    stored = [int(record.value) for record in (await read_topic(bootstrap, topic))[0]]
    # Records beyond the limit were refused immediately; the rest is stored in the order of submission.
    assert stored == sorted(token for token, outcome in owner.outcomes().items() if outcome is Outcome.STORED)
    assert stored[:100] == list(range(min(100, submitted)))


async def test_unknown_topics_are_refused_or_created(bootstrap, kit, read_topic):
    name = "new-" + uuid.uuid4().hex
    async with kit(bootstrap) as k:
        owner = k.recorder()
        for number in range(5):
            k.submit(Record(name, b"k", b"v"), owner, number)
        await k.until(lambda: len(owner.fates) == 5)
        assert set(owner.outcomes().values()) == {Outcome.UNKNOWN_TOPIC}
        assert len(owner.calls) == 1
        with pytest.raises(Refused) as refused:
            await k.publisher.topic(name)
        assert refused.value.outcome is Outcome.UNKNOWN_TOPIC
        assert k.publisher.known_topic(name) is None
    async with kit(bootstrap, create=True, topic_partitions=2) as k:
        owner = k.recorder()
        for number in range(50):
            k.submit(Record(name, b"k", b"%d" % number), owner, number)
        await k.until(lambda: len(owner.fates) == 50)
        assert set(owner.outcomes().values()) == {Outcome.STORED}
        assert k.publisher.known_topic(name).partitions == 2
    stored = await read_topic(bootstrap, name)
    assert [record.value for records in stored.values() for record in records] == [b"%d" % n for n in range(50)]


async def test_a_deleted_topic_gives_its_records_back(bootstrap, new_topic, kit, admin):
    topic = await new_topic(partitions=1)
    async with kit(bootstrap, request_timeout_s=2) as k:
        owner = k.recorder()
        k.submit(Record(topic, b"k", b"v"), owner, "before")
        await k.until(lambda: "before" in owner.fates)
        await admin.delete_topics([topic])
        await until_refused(k, Record(topic, b"k", b"v"), owner)  # the broker learns of it a moment later
        k.submit(Record(topic, b"k", b"v"), owner, "later")
        await k.until(lambda: "later" in owner.fates)
        refused = [fate for fate in owner.outcomes().values() if fate is not Outcome.STORED]
        assert refused == [Outcome.UNKNOWN_TOPIC] * 2


async def test_a_batch_that_was_given_up_is_not_stored_after_later_ones(bootstrap, new_topic, kit, admin, read_topic):
    """The producer that has the batch stays open, since it has a batch of another partition in flight."""
    topic = await new_topic(partitions=1)
    async with kit(bootstrap) as k:
        owner = k.recorder()

        async def stored(value: bytes) -> bool:
            token = object()
            k.submit(Record(topic, b"k", value), owner, token)
            await k.until(lambda: token in owner.fates)
            return owner.fates[token].outcome is Outcome.STORED

        producers = k.publisher._producers
        leased = await producers.acquire()
        # until it has a batch that was given up; the topic may be known to be gone before it gets one
        while producers.current is leased:
            while not await stored(b"former"):
                pass
            await admin.delete_topics([topic])
            while await stored(b"given up"):  # the broker learns of it a moment later
                pass
            await remake(admin, topic, 1)
        while not await stored(b"new"):
            pass
        await leased._producer.flush()  # it has tried everything that it still had
        (found,) = (await read_topic(bootstrap, topic)).values()
        assert [record.value for record in found] == [b"new"]
        producers.release(leased)


async def test_the_budget_shuts_the_gate_and_opens_it_again(bootstrap, new_topic, kit):
    topic = await new_topic(partitions=1)
    limits = BudgetConfig(process_bytes=1 << 20, connection_bytes=65536, topic_bytes=1 << 20)
    async with kit(bootstrap, limits=limits) as k:
        await k.publisher.topic(topic)
        owner = k.recorder(k.publisher.budgets.connection())
        news, own_news = [], []
        k.publisher.gate.subscribe(news.append)
        owner.budget.gate.subscribe(own_news.append)
        topic_gate = k.publisher.budgets.topic(topic).gate
        number = 0
        while k.publisher.gate.is_open:
            k.submit(Record(topic, b"k", b"x" * 1000), owner, number)
            number += 1
        # Exact to one accounting step, even within one turn of the event loop.
        assert 1 << 20 <= k.publisher.budget.bytes <= (1 << 20) + 17_500
        assert not topic_gate.is_open
        assert own_news == [False]
        await k.until(lambda: len(owner.fates) == number)
        assert news == own_news == [False, True]
        assert topic_gate.is_open


async def test_an_owner_that_raises_does_not_affect_others(bootstrap, new_topic, kit, logged):
    class Broken(Owner):
        def settle(self, tokens, offsets, result):
            raise RuntimeError("broken owner")

    topic = await new_topic(partitions=1)
    async with kit(bootstrap) as k:
        await k.publisher.topic(topic)
        owner = k.recorder()
        k.submit(Record(topic, b"k", b"v"), owner, 1)
        k.publisher.submit(Record(topic, b"k", b"v"), Broken(), 2)
        k.submit(Record(topic, b"k", b"v"), owner, 3)
        await k.until(lambda: len(owner.fates) == 2)
        (line,) = [line for line in logged if line["event"] == "an unexpected failure was contained"]
        assert line["what"] == "Broken: 1 tokens not settled"
    assert k.publisher.statistics().records[Outcome.STORED] == 3


async def test_records_without_a_key_spread_over_the_partitions(bootstrap, new_topic, kit):
    topic = await new_topic(partitions=4)
    async with kit(bootstrap) as k:
        owner = k.recorder()
        for number in range(40):
            k.submit(Record(topic, None, b"v"), owner, number)
            await k.until(lambda number=number: number in owner.fates)
        assert {partition for partition, _ in owner.offsets.values()} == {0, 1, 2, 3}


async def test_new_partitions_are_used_after_the_next_refresh(bootstrap, new_topic, kit, admin):
    from aiokafka.admin import NewPartitions

    topic = await new_topic(partitions=1)
    async with kit(bootstrap) as k:
        owner = k.recorder()
        k.submit(Record(topic, None, b"v", partition=2), owner, "too early")
        k.submit(Record(topic, None, b"v", partition=0), owner, "known")
        await k.until(lambda: len(owner.fates) == 2)
        assert owner.outcomes() == {"too early": Outcome.UNKNOWN_TOPIC, "known": Outcome.STORED}
        await admin.create_partitions({topic: NewPartitions(3)})
        async with asyncio.timeout(60):
            while k.publisher.known_topic(topic).partitions < 3:
                await k.topics.refresh()
        k.submit(Record(topic, None, b"v", partition=2), owner, "now")
        await k.until(lambda: "now" in owner.fates)
        assert owner.offsets["now"] == (2, 0)


async def test_drain_waits_for_the_answers(bootstrap, new_topic, kit):
    topic = await new_topic(partitions=3)
    async with kit(bootstrap) as k:
        owner = k.recorder()
        for number in range(1000):
            k.submit(Record(topic, b"%d" % number, b"v"), owner, number)
        assert await k.publisher.drain(30)
        assert set(owner.outcomes().values()) == {Outcome.STORED}
        assert len(owner.fates) == 1000


async def test_statistics_and_reachability(bootstrap, new_topic, kit):
    topic = await new_topic(partitions=1)
    async with kit(bootstrap) as k:
        assert k.publisher.reachable
        owner = k.recorder()
        k.submit(Record(topic, b"k", b"v" * 100), owner, 1)
        k.submit(Record(topic, b"k", b"v" * 12_000_000), None)
        before = k.publisher.statistics()
        assert before.records_in_flight == 2
        await k.until(lambda: owner.fates)
        after = k.publisher.statistics()
        assert (after.records_in_flight, after.bytes_in_flight, after.batches, after.producers) == (0, 0, 1, 1)
        assert sum(after.batch_latency_s.counts) == 1
        assert after.batch_latency_s.total > 0
        assert [sum(waits.counts) for waits in after.acknowledged_s.values()] == [0, 0, 0]  # no client waits for it
        assert after.unowned[Outcome.TOO_LARGE] == 1


def test_settings_for_clients():
    from gateway.kafka.driver.client_settings import client_settings
    from gateway.settings.config import ConfigError

    settings = client_settings(
        KafkaConfig(
            bootstrap_servers="a:1, b:2", security_protocol="SASL_SSL", sasl_mechanism="SCRAM-SHA-512",
            sasl_username="u", sasl_password="p", request_timeout_s=1.5,
        ),
        "reader",
    )  # fmt: skip
    assert settings["bootstrap_servers"] == ["a:1", "b:2"]
    assert settings["client_id"] == "trivium-reader"
    assert settings["request_timeout_ms"] == 1500
    assert settings["sasl_mechanism"] == "SCRAM-SHA-512"
    assert settings["ssl_context"].check_hostname
    with pytest.raises(ConfigError, match="bootstrap_servers"):
        client_settings(KafkaConfig())
    with pytest.raises(ConfigError, match="ssl_cafile"):
        client_settings(KafkaConfig(bootstrap_servers="a:1", security_protocol="SSL", ssl_cafile="/does/not/exist"))


async def test_drain_waits_for_what_an_owner_submits_as_it_settles(bootstrap, new_topic, kit):
    name = await new_topic(partitions=1)
    async with kit(bootstrap) as k:
        last = k.recorder()

        class Chain(Owner):
            """Submits a second record when the first is stored."""

            def settle(self, tokens, offsets, result):
                k.publisher.submit(Record(name, b"k", b"second"), last, "second")

        await k.publisher.topic(name)
        k.publisher.submit(Record(name, b"k", b"first"), Chain(), "first")
        assert await k.publisher.drain(20)
        assert last.outcomes() == {"second": Outcome.STORED}


async def test_a_run_keeps_timestamps_and_refuses_those_that_its_topic_refuses(bootstrap, new_topic, kit, read_topic):
    topic = await new_topic(
        partitions=1, message_timestamp_before_max_ms="60000", message_timestamp_after_max_ms="60000"
    )
    async with kit(bootstrap) as k:
        owner = k.recorder()
        now = time.time_ns() // 1_000_000
        stamps = [None, now - 30_000, None, now - 90_000, now + 30_000, now + 90_000, -1, now, None]
        for _ in range(2):  # held until the topic is known, and at once
            records = [Record(topic, b"k", b"%d" % place, (), stamp) for place, stamp in enumerate(stamps)]
            k.publisher.submit_run(records, owner, list(range(len(stamps))))
            await k.until(lambda: len(owner.fates) == len(stamps))
            outcomes = owner.outcomes()
            assert {token for token, fate in outcomes.items() if fate is Outcome.UNFIT} == {3, 5, 6}
            assert {fate for token, fate in outcomes.items() if token not in {3, 5, 6}} == {Outcome.STORED}
            owner.fates.clear()
        (stored,) = (await read_topic(bootstrap, topic)).values()
    assert [record.value for record in stored] == [b"%d" % place for place in (0, 1, 2, 4, 7, 8)] * 2
    for record in stored:
        stamp = stamps[int(record.value)]
        assert record.timestamp == stamp if stamp is not None else now <= record.timestamp < now + 60_000


async def test_a_run_is_what_its_records_are_one_by_one(bootstrap, new_topic, kit, read_topic):
    """Over several batches, between other records, before the topic is known, and with a record that is too large."""
    topic = await new_topic(partitions=3, max_message_bytes="20000")
    compacted = await new_topic(partitions=1, cleanup_policy="compact")
    async with kit(bootstrap) as k:
        one, two = k.recorder(k.publisher.budgets.connection()), k.recorder(k.publisher.budgets.connection())
        like = Record(topic, b"k", None, (("h", b"x"),))

        def run(owner, numbers, like=like):
            values = [b"%d|" % number + b"x" * (30_000 if number == 150 else 300) for number in numbers]
            records = [msgspec.structs.replace(like, value=value) for value in values]
            k.publisher.submit_run(records, owner, [(like.key, number) for number in numbers])

        run(one, range(100))  # held until the topic is known
        await k.until(lambda: len(one.fates) == 100)
        run(one, range(100, 200))
        run(two, range(200, 210))
        run(one, range(210, 220))
        keyless = Record(topic, None, None)
        run(two, range(300, 400), keyless)
        run(two, range(400, 401), Record(compacted, None, None))
        run(two, range(500, 503), Record(compacted, b"k", None))
        run(two, range(503, 506), Record(compacted, None, None))
        await k.until(lambda: len(one.fates) == 210 and len(two.fates) == 117)
        outcomes = one.outcomes() | two.outcomes()
        assert {token for token, fate in outcomes.items() if fate is Outcome.TOO_LARGE} == {(b"k", 150)}
        unfit = {token[1] for token, fate in outcomes.items() if fate is Outcome.UNFIT}
        assert unfit == {400, 503, 504, 505}
        assert {fate for token, fate in outcomes.items() if token[1] not in {150, *unfit}} == {Outcome.STORED}
        assert k.publisher.budget.records == one.budget.records == two.budget.records == 0
        places = one.offsets | two.offsets
        stored = await read_topic(bootstrap, topic)
        for partition, records in stored.items():
            for record in records:
                number = int(record.value.partition(b"|")[0])
                assert places[record.key, number] == (partition, record.offset)
                assert list(record.headers) == ([("h", b"x")] if record.key else [])
        keyed = [int(r.value.partition(b"|")[0]) for records in stored.values() for r in records if r.key]
        assert keyed == [*range(150), *range(151, 220)]
        assert sum(r.key is None for records in stored.values() for r in records) == 100


async def test_results_are_crowded_when_more_waits_than_keeps_kafka_busy(bootstrap, new_topic, kit):
    """Six batches submitted together: behind each of the first three, at least two full ones wait."""
    topic = await new_topic(partitions=1)
    async with kit(bootstrap, batch_bytes=1024) as k:
        owner = k.recorder()
        await k.publisher.topic(topic)
        for token in range(6):
            k.submit(Record(topic, None, b"x" * 700), owner, token)
        await k.until(lambda: len(owner.fates) == 6)
        assert [owner.fates[token].crowded for token in range(6)] == [True, True, True, False, False, False]
