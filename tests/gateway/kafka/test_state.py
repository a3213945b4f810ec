"""Compacted topics as tables on a real Kafka: loaded at the start, followed, and written through the publisher."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import IllegalStateError

from gateway.embedded.broker import EmbeddedBroker
from gateway.kafka import state as state_module
from gateway.kafka.contracts import Refused
from gateway.kafka.publish.partitioner import partition_of
from gateway.kafka.state import StateTopics
from gateway.settings.config import KafkaConfig
from mapping.outcomes import Outcome
from mapping.record import Record
from tests.support.frozen import freeze
from tests.support.state import Answers, Table, state_process
from tests.support.topics import produce, remake, until_led
from tests.support.waiting import wait_until

WITHIN_S = 60


@pytest.fixture
def name() -> str:
    return f"__state-{uuid.uuid4().hex[:12]}"


async def loaded(process: Any) -> None:
    await process.state.start()
    await asyncio.wait_for(process.state.loaded.wait(), WITHIN_S)


async def test_a_missing_topic_is_created_compacted_whatever_the_policy_for_clients_is(
    bootstrap: str, admin: Any, name: str
) -> None:
    async with state_process(bootstrap, create=False, partitions=5) as process:
        table = Table(process, name)
        await loaded(process)
        assert table.topic.partitions == 5
        assert not table.seen
        statistics = process.state.statistics()
        assert statistics.loaded == 1
    (answer,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
    configs = {entry[0]: entry[1] for entry in answer.resources[0][4]}
    assert configs["cleanup.policy"] == "compact"
    assert configs["max.message.bytes"] == str(KafkaConfig().max_request_bytes)
    assert int(configs["segment.bytes"]) == 16 * 1024 * 1024
    assert configs["delete.retention.ms"] == "86400000"


async def test_two_processes_see_each_others_writes_and_a_third_loads_them(bootstrap: str, name: str) -> None:
    answers = Answers()
    async with state_process(bootstrap) as here, state_process(bootstrap) as there:
        mine, theirs = Table(here, name), Table(there, name)
        await asyncio.gather(loaded(here), loaded(there))
        for number in range(300):
            mine.topic.write(b"k%d" % (number % 50), b"v%d" % number, (("h", b"1"),), owner=answers, token=number)
        mine.topic.write(b"k7", None, owner=answers, token="deleted")
        theirs.topic.write(b"other", b"process", owner=answers, token="other")
        await wait_until(lambda: len(answers.outcomes) == 302, WITHIN_S)
        assert set(answers.outcomes.values()) == {Outcome.STORED}
        await wait_until(lambda: len(mine.seen) == 302 and len(theirs.seen) == 302, WITHIN_S)
        expected = {b"k%d" % (number % 50): b"v%d" % number for number in range(300)} | {b"other": b"process"}
        del expected[b"k7"]
        assert mine.values == theirs.values == expected
        assert {record.headers for record in mine.seen} == {(("h", b"1"),), ()}
        assert process_lag(here) == 0
    async with state_process(bootstrap) as later:
        table = Table(later, name)
        await loaded(later)
        assert len(table.seen) == 302  # everything is there as soon as it is loaded
        assert table.values == expected


def process_lag(process: Any) -> int:
    return sum(table.lag for table in process.state.statistics().table.values())


async def test_one_consumer_serves_several_tables_and_keeps_the_order_of_a_place(bootstrap: str, name: str) -> None:
    answers = Answers()
    async with state_process(bootstrap, partitions=3) as process:
        first, second = Table(process, name), Table(process, f"{name}-2")
        await loaded(process)
        for number in range(200):
            first.topic.write(b"k%d" % number, b"%d" % number, partition_key=b"client", owner=answers, token=number)
            second.topic.write(b"k%d" % number, b"%d" % number, owner=answers, token=-1 - number)
        await wait_until(lambda: len(first.seen) == len(second.seen) == 200, WITHIN_S)
        assert [record.value for record in first.seen] == [b"%d" % number for number in range(200)]
        assert {record.partition for record in first.seen} == {partition_of(b"client", 3)}
        # Without a partition key the record's key decides, as in every Kafka client.
        assert all(record.partition == partition_of(record.key or b"", 3) for record in second.seen)
        assert {record.topic for record in first.seen} == {name}


async def test_what_any_kafka_client_wrote_is_loaded_and_a_bug_in_apply_stops_nothing(
    bootstrap: str, admin: Any, name: str
) -> None:
    await admin.create_topics([NewTopic(name, 2, 1, topic_configs={"cleanup.policy": "compact"})])
    await until_led(admin, name)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=5) as producer:
        for number in range(3000):
            await producer.send(name, b"%d" % number, key=b"%d" % (number % 1000))
        await producer.flush()
    async with state_process(bootstrap, partitions=7) as process:
        seen: list[Any] = []

        def apply(record: Any) -> None:
            seen.append(record)
            if record.value == b"77":
                raise ZeroDivisionError

        topic = process.state.open(name, apply, lambda partition: None)
        await loaded(process)
        assert topic.partitions == 2  # as it exists, not as Trivium would create it
        assert len(seen) == 3000
        for partition in (0, 1):
            offsets = [record.offset for record in seen if record.partition == partition]
            assert offsets == sorted(offsets)
        statistics = process.state.statistics().table[name]
        assert (statistics.records_total, statistics.failed_total) == (3000, 1)


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
async def test_a_topic_that_is_not_compacted_is_reported_by_name(
    bootstrap: str, admin: Any, name: str, policy: str
) -> None:
    await admin.create_topics([NewTopic(name, 1, 1, topic_configs={"cleanup.policy": policy})])
    await until_led(admin, name)
    async with state_process(bootstrap) as process:
        Table(process, name)
        await process.state.start()
        await wait_until(lambda: process.failures, WITHIN_S)
        assert not process.state.loaded.is_set()
        (error,) = process.failures
        assert name in str(error)
        assert f"cleanup.policy={policy}" in str(error)


async def test_a_recreated_topic_is_read_from_its_beginning(bootstrap: str, admin: Any, name: str) -> None:
    answers = Answers()
    async with state_process(bootstrap, partitions=1) as process:
        table = Table(process, name)
        await loaded(process)
        for number in range(20):
            table.topic.write(b"old%d" % number, b"1", owner=answers, token=number)
        await wait_until(lambda: len(table.seen) == 20, WITHIN_S)
        await admin.delete_topics([name])
        # The next write after the gateway noticed recreates it, compacted.
        number = 100

        async def written() -> bool:
            nonlocal number
            number += 1
            table.topic.write(b"new", b"%d" % number, owner=answers, token=number)
            await wait_until(lambda: number in answers.outcomes, WITHIN_S)
            return answers.outcomes[number] is Outcome.STORED and answers.offsets[number] < 20

        async with asyncio.timeout(WITHIN_S):
            while not await written():
                pass
        await wait_until(lambda: table.values.get(b"new") == b"%d" % number, WITHIN_S)
        assert table.restarted == [0]
        assert process.topics.known(name, internal=True).cleanup == "compact"


async def test_a_recreated_topic_with_as_many_records_is_read_too(bootstrap: str, admin: Any, name: str) -> None:
    answers = Answers()
    async with state_process(bootstrap, partitions=1) as process:
        table = Table(process, name)
        await loaded(process)
        for number in range(3):
            table.topic.write(b"old%d" % number, b"1", owner=answers, token=number)
        await wait_until(lambda: len(table.seen) == 3, WITHIN_S)
        await remake(admin, name, 1)
        await produce(bootstrap, name, [b"1", b"2", b"3"], key=b"new")
        await wait_until(lambda: table.values.get(b"new") == b"3", 60)
        assert set(table.restarted) == {0}


async def test_a_topic_that_is_recreated_before_the_first_records_came_is_read_from_its_beginning(
    bootstrap: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with state_process(bootstrap, partitions=1) as process:
        table = Table(process, name)
        lookup, poll = process.state.lookup, state_module.poll
        ids = {b"former"}

        async def poll_after_it_was_recreated(consumer: Any, *, wait_ms: int) -> Any:
            if ids == {b"former"}:
                ids.clear()
                await lookup.refresh()
            return await poll(consumer, wait_ms=wait_ms)

        identity = lookup.identity
        monkeypatch.setattr(lookup, "identity", lambda topic: b"former" if ids and lookup.topics else identity(topic))
        monkeypatch.setattr(state_module, "poll", poll_after_it_was_recreated)
        await loaded(process)
        await wait_until(lambda: table.restarted == [0], WITHIN_S)


async def test_early_writes_and_tables_that_clients_may_use_are_refused(bootstrap: str, name: str) -> None:
    async with state_process(bootstrap) as process:
        table = Table(process, name)
        with pytest.raises(RuntimeError, match="not loaded"):
            table.topic.write(b"k", b"v", owner=None)
        with pytest.raises(ValueError, match="clients may use"):
            Table(process, "readings")
        await process.state.start()
        with pytest.raises(RuntimeError, match="before the start"):
            Table(process, f"{name}-2")


async def test_internal_topics_stay_closed_to_clients(bootstrap: str, name: str) -> None:
    answers = Answers()
    async with state_process(bootstrap, create=True) as process:
        table = Table(process, name)
        await loaded(process)
        table.topic.write(b"k", b"ours", owner=answers, token="ours")
        await wait_until(lambda: "ours" in answers.outcomes, WITHIN_S)
        assert answers.outcomes["ours"] is Outcome.STORED
        # All that the protocols request from the publisher and the topics.
        process.publisher.submit(Record(name, b"k", b"theirs"), answers, "theirs")
        process.publisher.submit(Record(name, b"k", b"x", partition=0), answers, "placed")
        await wait_until(lambda: len(answers.outcomes) == 3, WITHIN_S)
        assert answers.outcomes["theirs"] is answers.outcomes["placed"] is Outcome.DENIED
        for ask in (process.topics.get, process.publisher.topic):
            with pytest.raises(Refused) as refused:
                await ask(name)
            assert refused.value.outcome is Outcome.DENIED
        assert process.publisher.known_topic(name) is None
        with pytest.raises(ValueError, match="not declared"):
            await process.topics.get("__consumer_offsets", internal=True)
        await process.topics.refresh()
        assert name not in process.topics.names
        assert table.values == {b"k": b"ours"}


async def test_a_gateway_that_started_before_kafka_loads_later_and_follows_across_a_restart(
    stoppable: EmbeddedBroker, name: str
) -> None:
    servers = stoppable.bootstrap_servers
    answers = Answers()
    async with state_process(servers, partitions=2) as process:
        table = Table(process, name)
        await loaded(process)
        table.topic.write(b"a", b"1", owner=answers, token=1)
        await wait_until(lambda: table.values == {b"a": b"1"}, WITHIN_S)
        await stoppable.kill()
        async with state_process(servers, partitions=2) as early:
            theirs = Table(early, name)
            await early.state.start()
            table.topic.write(b"a", b"2", owner=answers, token=2)  # waits for Kafka like every record
            await stoppable.start()
            await asyncio.wait_for(early.state.loaded.wait(), WITHIN_S)
            await wait_until(lambda: table.values == theirs.values == {b"a": b"2"}, WITHIN_S)
        await wait_until(lambda: 2 in answers.outcomes, WITHIN_S)  # a record may be seen before its answer
        assert answers.outcomes[2] is Outcome.STORED
        assert [record.value for record in table.seen] == [b"1", b"2"]  # positions were kept: no record came twice
        assert table.restarted == []
        # A write that Kafka does not accept in time is reported to the owner.
        freeze(stoppable.pid)
        try:
            table.topic.write(b"a", b"3", owner=answers, token=3)
            await process.publisher.drain(0.2)
        finally:
            os.kill(stoppable.pid, signal.SIGCONT)
        assert answers.outcomes[3] is Outcome.BUSY


async def test_partitions_that_are_not_assigned_yet_are_not_read_to_their_end() -> None:
    """A topic was recreated with more partitions, and its re-reading has not started."""

    class Consumer:
        def assignment(self) -> set[TopicPartition]:
            return {TopicPartition("t", 0)}

        async def position(self, partition: TopicPartition) -> int:
            if partition.partition:
                raise IllegalStateError(partition)
            return 5

    state: Any = StateTopics.__new__(StateTopics)
    assert not await state._is_behind(Consumer(), {TopicPartition("t", 0): 5})
    assert await state._is_behind(Consumer(), {TopicPartition("t", 0): 5, TopicPartition("t", 1): 0})
