"""Retained messages on a real Kafka: written with the message, known to every gateway, removed when they expire."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from gateway.kafka.publish.partitioner import partition_of
from gateway.mqtt.routing.retained import GRACE_MS, Retained
from gateway.mqtt.routing.retained_entry import ENTRY_BYTES
from mapping.mqtt.incoming import Inbound
from mapping.outcomes import Outcome
from mapping.record import EXPIRY, MQTT_EXCHANGE, MQTT_RETAIN, MQTT_TOPIC, Received, Record
from mapping.rules import Rules
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import Properties
from tests.support.state import Answers, StateProcess, state_process
from tests.support.waiting import wait_until

WITHIN_S = 60
RULES = Rules()


class Clock:
    """Epoch milliseconds, set by the test."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now


class Store:
    """One process's retained messages."""

    def __init__(self, process: StateProcess, name: str, **options: Any) -> None:
        self.process = process
        self.clock = Clock()
        self.answers = Answers()
        self.inbound = Inbound(RULES, Version.V5, "sensor-1")
        limits = {"limit": 1000, "limit_bytes": 1 << 20} | options
        self.retained = Retained(
            process.state,
            process.publisher,
            RULES,
            spawn=process.spawn,
            wall_clock=self.clock,
            name=name,
            **limits,
        )

    def matching(self, topic_filter: str) -> list[str]:
        """The topics that a search finds, in order."""
        return sorted(topic for piece in self.retained.search(topic_filter) for topic, _ in piece)

    def record(self, topic: str, payload: bytes, properties: Properties | None = None) -> Record:
        return self.inbound.to_record(topic, payload, 1, True, properties, self.clock.now)

    def put(self, topic: str, payload: bytes, token: Any = None, properties: Properties | None = None) -> Any:
        token = token if token is not None else uuid.uuid4().hex
        self.retained.put(self.record(topic, payload, properties), topic, self.answers, token)
        return token

    async def publish(self, topic: str, payload: bytes, properties: Properties | None = None) -> Outcome:
        token = self.put(topic, payload, properties=properties)
        await wait_until(lambda: token in self.answers.outcomes, WITHIN_S)
        return self.answers.outcomes[token]

    def payload(self, topic: str) -> bytes | None:
        kept = self.retained.get(topic)
        return None if kept is None else kept.delivery.payload


@contextlib.asynccontextmanager
async def store(bootstrap: str, name: str, *, create: bool = True, **options: Any) -> AsyncIterator[Store]:
    async with state_process(bootstrap, create=create, partitions=3) as process:
        made = Store(process, name, **options)
        await process.state.start()
        await made.retained.start()
        await asyncio.wait_for(process.state.loaded.wait(), WITHIN_S)
        try:
            yield made
        finally:
            await process.publisher.drain(WITHIN_S)
            await made.retained.stop()


@pytest.fixture
def name() -> str:
    return f"__retained-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def root() -> str:
    """The first level of the topics: a Kafka topic of the test's own."""
    return f"r-{uuid.uuid4().hex[:12]}"


async def read(bootstrap: str, topic: str) -> list[Any]:
    """Every record of a Kafka topic, by partition and offset."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        numbers = await consumer._client._wait_on_metadata(topic)
        partitions = [TopicPartition(topic, number) for number in numbers]
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        found: list[Any] = []
        async with asyncio.timeout(WITHIN_S):
            while any([await consumer.position(one) < end for one, end in ends.items()]):
                for records in (await consumer.getmany(timeout_ms=100)).values():
                    found.extend(records)
    finally:
        await consumer.stop()
    return sorted(found, key=lambda record: (record.partition, record.offset))


@pytest.mark.clause("MQTT-3.3.1-5", "MQTT-3.3.1-6", "MQTT-3.3.1-7")
async def test_a_message_is_kept_replaced_and_deleted_by_an_empty_one(bootstrap: str, name: str, root: str) -> None:
    topic = f"{root}/kitchen/temp"
    properties = Properties(
        content_type="text/plain", response_topic="answers", correlation_data=b"\x00\x01",
        user_properties=(("a", "1"), ("a", "2")),
    )  # fmt: skip
    async with store(bootstrap, name) as here:
        assert await here.publish(topic, b"20", properties) is Outcome.STORED
        # Known as soon as it is acknowledged, whether the follower has it or not.
        kept = here.retained.get(topic)
        assert kept is not None
        delivery = kept.delivery
        assert (delivery.topic, delivery.payload, delivery.qos, delivery.retain) == (topic, b"20", 1, True)
        assert delivery.client == "sensor-1"
        assert delivery.properties == properties
        assert kept.partition == partition_of(topic.encode(), 3)
        assert await here.publish(topic, b"21") is Outcome.STORED
        assert here.payload(topic) == b"21"
        assert here.matching(f"{root}/#") == here.matching(topic) == [topic]
        assert await here.publish(topic, b"") is Outcome.STORED
        assert here.retained.get(topic) is None
        assert here.matching(f"{root}/#") == here.matching(topic) == []
        statistics = here.retained.statistics()
        assert (statistics.messages, statistics.bytes) == (0, 0)
    own = await read(bootstrap, root)
    assert [(record.key, record.value) for record in own] == [
        (b"kitchen/temp", b"20"),
        (b"kitchen/temp", b"21"),
        (b"kitchen/temp", b""),
    ]
    copies = await read(bootstrap, name)
    assert [(record.key, record.value) for record in copies] == [
        (topic.encode(), b"20"),
        (topic.encode(), b"21"),
        (topic.encode(), None),
    ]
    assert copies[0].headers == own[0].headers


async def test_the_answer_names_the_place_of_the_own_record(bootstrap: str, name: str, root: str) -> None:
    async with store(bootstrap, name) as here:
        for number in range(50):
            here.put(f"{root}/a", b"%d" % number, token=number)
            here.process.publisher.submit(Record(root, b"a", b"between"), None)
        await wait_until(lambda: len(here.answers.outcomes) == 50, WITHIN_S)
        assert set(here.answers.outcomes.values()) == {Outcome.STORED}
        assert here.payload(f"{root}/a") == b"49"
    values = {record.offset: record.value for record in await read(bootstrap, root)}
    assert [values[here.answers.offsets[number]] for number in range(50)] == [b"%d" % n for n in range(50)]
    # Both logs have one order.
    assert [record.value for record in await read(bootstrap, name)] == [b"%d" % number for number in range(50)]


async def test_every_gateway_knows_them_and_a_later_one_finds_them(bootstrap: str, name: str, root: str) -> None:
    async with store(bootstrap, name) as here, store(bootstrap, name) as there:
        for number in range(60):
            here.put(f"{root}/{number % 20}/state", b"here %d" % number)
        there.put(f"{root}/3/state", b"there")
        await wait_until(lambda: len(here.answers.outcomes) == 60 and there.answers.outcomes, WITHIN_S)
        here.put(f"{root}/7/state", b"")
        await wait_until(lambda: len(here.answers.outcomes) == 61, WITHIN_S)
        everything = here.matching("#")
        assert everything == sorted(f"{root}/{number}/state" for number in range(20) if number != 7)
        await wait_until(lambda: there.matching("#") == everything, WITHIN_S)
        await wait_until(lambda: here.payload(f"{root}/3/state") == there.payload(f"{root}/3/state"), WITHIN_S)
        expected = {topic: here.payload(topic) for topic in everything}
        assert {topic: there.payload(topic) for topic in everything} == expected
    async with store(bootstrap, name) as later:
        assert {topic: later.payload(topic) for topic in later.matching("+/+/state")} == expected


async def test_any_kafka_client_may_set_and_delete_them(bootstrap: str, name: str) -> None:
    async with (
        store(bootstrap, name) as here,
        AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer,
    ):
        # A partitioner of its own: the topic's versions stay in one partition all the same.
        elsewhere = (partition_of(b"plant/line/1", 3) + 1) % 3
        await producer.send(name, b"running", key=b"plant/line/1", partition=elsewhere, headers=[("unit", b"x")])
        for key in (b"", b"plant/+", b"plant/#", b"\xff\xfe", b"a\x00b"):
            await producer.send(name, b"nobody", key=key)
        await producer.send_and_wait(name, b"1", key=b"last", partition=0)
        await wait_until(lambda: here.payload("plant/line/1") and here.payload("last"), WITHIN_S)
        await wait_until(lambda: here.retained.statistics().invalid_total == 5, WITHIN_S)
        kept = here.retained.get("plant/line/1")
        assert kept is not None
        assert kept.delivery.client is None
        assert (kept.delivery.qos, kept.delivery.retain) == (1, True)
        assert kept.delivery.properties == Properties(user_properties=(("unit", "x"),))
        assert here.matching("#") == ["last", "plant/line/1"]
        assert await here.publish("plant/line/1", b"stopped") is Outcome.STORED
        assert await here.publish("plant/line/1", b"") is Outcome.STORED
        await producer.send_and_wait(name, None, key=b"last", partition=0)
        await wait_until(lambda: not here.matching("#"), WITHIN_S)
    versions = [record for record in await read(bootstrap, name) if record.key == b"plant/line/1"]
    assert [(record.partition, record.value) for record in versions] == [
        (elsewhere, b"running"), (elsewhere, b"stopped"), (elsewhere, None)
    ]  # fmt: skip


@pytest.mark.clause("MQTT-4.7.2-1")
async def test_wildcards_do_not_find_dollar_topics(bootstrap: str, name: str) -> None:
    async with store(bootstrap, name) as here, AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        for key in (b"$SYS/a", b"x/a", b"x"):
            await producer.send_and_wait(name, b"1", key=key)
        await wait_until(lambda: here.retained.statistics().messages == 3, WITHIN_S)
        assert here.matching("#") == ["x", "x/a"]
        assert here.matching("+/a") == ["x/a"]
        assert here.matching("$SYS/#") == ["$SYS/a"]
        assert here.matching("x/#") == ["x", "x/a"]


def copy_of(name: str, key: bytes, value: bytes | None, partition: int, offset: int, **fields: Any) -> Received:
    return Received(name, key, value, fields.get("headers", ()), fields.get("timestamp", 1000), partition, offset)


async def test_an_older_version_never_replaces_a_newer_one(bootstrap: str, name: str, root: str) -> None:
    topic = f"{root}/a"
    key = topic.encode()
    async with store(bootstrap, name) as here:
        retained = here.retained
        assert await here.publish(topic, b"first") is Outcome.STORED
        kept = retained.get(topic)
        assert kept is not None
        partition, offset = kept.partition, kept.offset
        # The order of Kafka's answers and of the follower's records is open: play the follower.
        await wait_until(lambda: not retained._ahead, WITHIN_S)
        answered = offset + 3

        class Put:
            def __init__(self, value: bytes | None) -> None:
                self.topic = topic
                self.record = Record(root, key, value)
                self.principal = None
                self.read = (0, -1)

        retained.stored(Put(b"third"), partition, answered)  # type: ignore[arg-type]
        retained._apply(copy_of(name, key, b"second", partition, answered - 1))
        assert here.payload(topic) == b"third"
        retained._apply(copy_of(name, key, b"third", partition, answered))
        assert here.payload(topic) == b"third"
        assert not retained._ahead
        # A deletion that Kafka answered is not undone by what lies before it in the log.
        retained.stored(Put(b""), partition, answered + 2)  # type: ignore[arg-type]
        retained._apply(copy_of(name, key, b"fourth", partition, answered + 1))
        assert here.payload(topic) is None
        retained._apply(copy_of(name, key, None, partition, answered + 2))
        # And an answer that comes after the follower changes nothing.
        retained._apply(copy_of(name, key, b"sixth", partition, answered + 4))
        retained.stored(Put(b"fifth"), partition, answered + 3)  # type: ignore[arg-type]
        assert here.payload(topic) == b"sixth"
        # In another partition offsets say nothing: the later time stamp wins.
        other = (partition + 1) % 3
        retained._apply(copy_of(name, key, b"old", other, 900, timestamp=999))
        assert here.payload(topic) == b"sixth"
        retained._apply(copy_of(name, key, b"new", other, 901, timestamp=1001))
        assert here.payload(topic) == b"new"


async def test_what_a_recreated_topic_has_stays_whatever_its_age(bootstrap: str, name: str, root: str) -> None:
    """For example restored from a backup, or written while this gateway did not reach Kafka."""
    there, gone = f"{root}/there", f"{root}/gone"
    async with store(bootstrap, name) as here:
        retained, old = here.retained, here.clock.now - 3_600_000
        for offset, topic in enumerate((there, gone)):
            retained._apply(copy_of(name, topic.encode(), b"before", 0, 7 + offset, timestamp=old))
        retained._restarted(0)
        retained._apply(copy_of(name, there.encode(), b"again", 0, 0, timestamp=old))
        retained._reread(0)
        assert (here.payload(there), here.payload(gone)) == (b"again", None)
        assert here.matching("#") == [there]


async def test_a_refused_message_is_not_retained(bootstrap: str, name: str, root: str, new_topic: Any) -> None:
    small = await new_topic(partitions=1, max_message_bytes="2000")
    async with store(bootstrap, name, create=False) as here:
        assert await here.publish(f"{root}/a", b"x") is Outcome.UNKNOWN_TOPIC
        assert await here.publish(f"{small}/a", b"x") is Outcome.STORED
        assert await here.publish(f"{small}/a", b"x" * 5000) is Outcome.TOO_LARGE
        assert here.matching("#") == [f"{small}/a"]
        assert here.payload(f"{small}/a") == b"x"
        assert not here.retained._writing
    assert len(await read(bootstrap, name)) == 1


async def test_a_message_that_cannot_be_retained_is_not_acknowledged(
    bootstrap: str, name: str, root: str, admin: Any
) -> None:
    from aiokafka.admin import NewTopic

    from tests.support.topics import until_led

    configs = {"cleanup.policy": "compact", "max.message.bytes": "2000"}
    await admin.create_topics([NewTopic(name, 3, 1, topic_configs=configs)])
    await until_led(admin, name)
    async with store(bootstrap, name) as here:
        token = here.put(f"{root}/a", b"x" * 5000)
        await wait_until(lambda: token in here.answers.outcomes, WITHIN_S)
        assert here.answers.outcomes[token] is Outcome.TOO_LARGE
        assert "could not be retained" in here.answers.reasons[token]
        assert not here.retained._writing


async def test_a_principal_has_its_own_limits(bootstrap: str, name: str, root: str) -> None:
    """They hold for what another gateway has read, and what is replaced or deleted makes room."""

    class Of(Answers):
        def __init__(self, principal: str) -> None:
            super().__init__()
            self.principal = principal

    async def publish(here: Store, principal: str, topic: str, payload: bytes) -> Outcome:
        answers = Of(principal)
        here.retained.put(here.record(topic, payload), topic, answers, topic)
        await wait_until(lambda: topic in answers.outcomes, WITHIN_S)
        return answers.outcomes[topic]

    async with (
        store(bootstrap, name, limits_of_principal=(2, 5_000)) as here,
        store(bootstrap, name, create=False, limits_of_principal=(2, 5_000)) as there,
    ):
        assert [await publish(here, "ann", f"{root}/{number}", b"x") for number in range(3)] == [
            Outcome.STORED,
            Outcome.STORED,
            Outcome.BUSY,
        ]
        assert await publish(here, "bob", f"{root}/3", b"x") is Outcome.STORED
        await wait_until(lambda: there.payload(f"{root}/3") == b"x", WITHIN_S)
        assert await publish(there, "ann", f"{root}/4", b"x") is Outcome.BUSY
        assert await publish(there, "ann", f"{root}/0", b"y") is Outcome.STORED
        assert await publish(there, "ann", f"{root}/0", b"y" * 5_000) is Outcome.BUSY
        assert await publish(there, "ann", f"{root}/0", b"") is Outcome.STORED
        assert await publish(there, "ann", f"{root}/4", b"x") is Outcome.STORED


async def test_more_than_the_limits_is_refused_and_told_later(bootstrap: str, name: str, root: str) -> None:
    async with store(bootstrap, name, limit=3, limit_bytes=10_000) as here:
        for number in range(3):
            assert await here.publish(f"{root}/{number}", b"x") is Outcome.STORED
        token = here.put(f"{root}/3", b"x")
        assert token not in here.answers.outcomes  # never from inside the call
        await wait_until(lambda: token in here.answers.outcomes)
        assert here.answers.outcomes[token] is Outcome.BUSY
        assert await here.publish(f"{root}/1", b"y") is Outcome.STORED  # one that is there may change
        assert await here.publish(f"{root}/3", b"") is Outcome.STORED
        assert await here.publish(f"{root}/1", b"y" * 9000) is Outcome.BUSY  # too many bytes
        assert await here.publish(f"{root}/1", b"") is Outcome.STORED
        assert await here.publish(f"{root}/3", b"x") is Outcome.STORED
        assert here.retained.statistics().refused_total == 2
    assert len(await read(bootstrap, root)) == 7  # a refused message is in no topic


def expiring(seconds: int) -> Properties:
    return Properties(message_expiry_interval=seconds)


@pytest.mark.clause("MQTT-3.3.2-5")
async def test_what_has_expired_is_not_delivered_and_is_deleted_from_the_log_later(
    bootstrap: str, name: str, root: str
) -> None:
    async with store(bootstrap, name) as here:
        for number, seconds in enumerate((10, 10, 100)):
            assert await here.publish(f"{root}/{number}", b"x", expiring(seconds)) is Outcome.STORED
        assert len(here.matching("#")) == 3
        here.clock.now += 10_000
        assert here.matching("#") == here.matching(f"{root}/2") == [f"{root}/2"]
        assert here.retained.get(f"{root}/0") is None
        await wait_until(lambda: here.retained.statistics().messages == 1, WITHIN_S)  # swept
        assert here.retained.statistics().expired_total == 2
        assert await here.publish(f"{root}/1", b"again") is Outcome.STORED
        here.clock.now += GRACE_MS
        await wait_until(lambda: not here.retained._tombstones, WITHIN_S)
    assert [record.value for record in await read(bootstrap, name) if record.key == f"{root}/0".encode()] == [
        b"x",
        None,
    ]
    async with store(bootstrap, name) as later:
        # A gateway that starts later ignores what ran out meanwhile.
        later.clock.now += 10_000 + GRACE_MS
        assert later.matching("#") == [f"{root}/1", f"{root}/2"]
        later.clock.now += 100_000
        assert later.matching("#") == [f"{root}/1"]


async def test_replaced_messages_leave_few_deadlines_behind(bootstrap: str, name: str) -> None:
    async with store(bootstrap, name) as here:
        for offset in range(10_000):
            expires = b"%d" % (here.clock.now + 10_000 + offset)
            here.retained._apply(copy_of(name, b"a/b", b"x", 0, offset, headers=((EXPIRY, expires),)))
        await wait_until(lambda: len(here.retained._deadlines) == 1, WITHIN_S)
        assert here.retained.statistics().messages == 1


async def test_headers_that_are_not_the_messages_are_left_out_of_the_copy(bootstrap: str, name: str, root: str) -> None:
    async with store(bootstrap, name) as here:
        record = here.record(f"{root}/a", b"x")
        record = Record(record.topic, record.key, record.value, (*record.headers, (MQTT_EXCHANGE, b"n/1/2")))
        here.retained.put(record, f"{root}/a", here.answers, 1)
        await wait_until(lambda: 1 in here.answers.outcomes, WITHIN_S)
    (own,), (copy,) = await read(bootstrap, root), await read(bootstrap, name)
    assert (MQTT_EXCHANGE, b"n/1/2") in own.headers
    assert copy.headers == tuple(header for header in own.headers if header[0] != MQTT_EXCHANGE)
    assert (MQTT_TOPIC, f"{root}/a".encode()) in copy.headers
    assert (MQTT_RETAIN, b"1") in copy.headers


async def test_nobody_need_answer_for_a_message(bootstrap: str, name: str, root: str) -> None:
    async with store(bootstrap, name) as here:
        here.retained.put(here.record(f"{root}/a", b"x"), f"{root}/a", None, None)
        await wait_until(lambda: here.payload(f"{root}/a") == b"x" and not here.retained._writing, WITHIN_S)


async def test_memory_of_a_message_is_what_it_is_counted_for(bootstrap: str, name: str) -> None:
    count = 20_000
    async with store(bootstrap, name) as here:
        headers = here.record("t", b"").headers
        make: Callable[[int], Received] = lambda number: copy_of(  # noqa: E731 - one expression
            name,
            b"site/%d/machine/%d/temperature" % (number % 100, number),
            b"21.5",
            number % 3,
            number,
            headers=headers,
        )
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            here.retained._apply(make(number))
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        counted = here.retained.statistics().bytes
    assert used < counted
    assert used / count < 600, used / count
    assert counted < count * (ENTRY_BYTES + 200)
