"""SUBSCRIBE over many topics, with few parallel requests to Kafka; and over topics that do not exist."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.contracts import Fanout, Refused
from gateway.kafka.driver.client_settings import client_settings
from gateway.kafka.read.arrivals import Arrivals
from gateway.kafka.read.catch_up_reader import CatchUpReader
from gateway.kafka.read.live_reader import LiveReader
from gateway.mqtt.routing.router import Router
from gateway.settings.config import KafkaConfig, MqttConfig
from mapping.record import Received
from mapping.rules import Rules
from protocols.mqtt import packets
from protocols.mqtt.reasons import ReasonCode
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.mqtt_packets import encode_packet
from tests.support.topics import produce, until_led
from tests.support.waiting import wait_until

Connect = Callable[..., Awaitable[RawClient]]
MANY = 120
PATIENCE_S = 60.0  # a broker that has just started on a busy machine is slower than a gateway's clients would wait


class Parts:
    """Reader and router, wired as in the application; `seen` has the received records."""

    def __init__(self, bootstrap: str) -> None:
        config = KafkaConfig(bootstrap_servers=bootstrap)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.topics = Topics(config, create=False, spawn=self.spawn, clock=asyncio.get_running_loop().time)
        kafka = client_settings(config, "lookup")
        self.lookup = Lookup(kafka, spawn=self.spawn, ensure=self.topics.get, timeout_s=PATIENCE_S)
        self.questions: list[set[str]] = []  # the topics whose ends were asked for, by question
        self._ends, self.lookup.ends = self.lookup.ends, self._noted_ends  # type: ignore[method-assign]
        self.catch_up_reader = CatchUpReader(client_settings(config, "replay"), self.spawn, self.lookup)
        self.live_reader = LiveReader(client_settings(config, "tail"), self.spawn, self.lookup, self.catch_up_reader)
        self.router = Router(Rules(), self.topics, self.live_reader, self.spawn)
        self.seen: list[bytes | None] = []
        self.router.select = self._select  # type: ignore[method-assign]

    def _select(self, records: Sequence[Received], at: int) -> tuple[tuple[()], int]:
        self.seen.append(records[at].value)
        return (), 1

    async def _noted_ends(self, partitions: Collection[TopicPartition], **options: bool) -> dict[TopicPartition, int]:
        self.questions.append({place.topic for place in partitions})
        return await self._ends(partitions, **options)

    def questions_about(self, topics: Collection[str]) -> int:
        """The number of requests to Kafka for the ends of some of these topics."""
        return sum(not asked.isdisjoint(topics) for asked in self.questions)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        return task

    async def settled(self) -> None:
        """Wait for the logs of new topics, which a broker creates after it returns their metadata."""
        await self.topics.refresh()
        found = await self.lookup.existing(self.topics.names)
        await self.lookup.ends([one for numbers in found.values() for one in numbers], existing=True)
        self.lookup.requests = 0
        self.questions.clear()

    async def stop(self) -> None:
        await self.live_reader.stop()
        await self.catch_up_reader.stop()
        await self.lookup.stop()
        await self.topics.stop()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def parts(bootstrap: str) -> AsyncIterator[Parts]:
    made = Parts(bootstrap)
    await made.live_reader.start()
    yield made
    await made.stop()


@pytest.fixture
async def connect(gateway: GatewayProcess) -> AsyncIterator[Connect]:
    clients: list[RawClient] = []

    async def one(client_id: str | None = None, **options: Any) -> RawClient:
        clients.append(await RawClient.connect(gateway.address("mqtt"), client_id, **options))
        return clients[-1]

    yield one
    for client in clients:
        client.drop()


@pytest.fixture
async def many(admin: AIOKafkaAdminClient) -> AsyncIterator[list[str]]:
    """Many topics of one partition; deleted afterwards, since other tests subscribe to everything."""
    name = uuid.uuid4().hex[:8]
    names = [f"many-{name}-{number}" for number in range(MANY)]
    await admin.create_topics([NewTopic(one, 1, 1) for one in names])
    await until_led(admin, names[-1])
    yield names
    await admin.delete_topics(names)


def a_name() -> str:
    return f"sub-{uuid.uuid4().hex[:10]}"


async def test_everything_is_one_pass_and_the_next_subscriber_asks_nothing(
    parts: Parts, many: list[str], bootstrap: str
) -> None:
    await parts.settled()
    await parts.router.hold({"#": None})
    watched = parts.live_reader.statistics().positions
    assert watched.keys() >= set(many)
    assert parts.questions_about(many) == 1
    await wait_until(lambda: parts.live_reader.statistics().assignments == 1)
    await wait_until(
        lambda: parts.live_reader.statistics().fetches >= 2
    )  # the first has brought how far each log reaches

    filters = ("#", "+/x", f"{many[0]}/#")

    def asked() -> tuple[object, ...]:
        statistics = parts.live_reader.statistics()
        return parts.questions_about(many), parts.topics.creation.counted, statistics.assignments

    async def hold_without_a_question() -> bool:
        before = asked()
        for name in filters:
            await parts.router.hold({name: None})
        if asked() == before:
            return True
        for name in filters:
            parts.router.drop(name)
        return False

    await wait_until(hold_without_a_question)  # not while a fetch is late: the ends are uncertain then

    later = f"later in {many[-1]}".encode()  # others' messages come by `#`, too
    await produce(bootstrap, many[-1], [later])
    await wait_until(lambda: later in parts.seen)
    for name in ("#", *filters):
        parts.router.drop(name)
    assert parts.live_reader.statistics().positions == {}


async def test_many_filters_are_one_pass(parts: Parts, many: list[str]) -> None:
    filters = {f"{name}/#": None for name in many} | {f"{name}-none/#": None for name in many}
    await parts.settled()
    assert await parts.router.hold(filters) == {name: {} for name in filters}
    assert parts.live_reader.statistics().positions.keys() == set(many)
    assert parts.lookup.requests <= 4
    await wait_until(lambda: parts.live_reader.statistics().assignments == 1)


async def test_an_http_consumer_of_many_topics_sleeps_after_one_pass(parts: Parts, many: list[str]) -> None:
    """For example one with a `topic_pattern`: its fetcher sleeps until the live reader reads a record."""
    await parts.settled()
    woken = asyncio.Event()
    arrivals = Arrivals(parts.live_reader, parts.lookup)
    assert await arrivals.wait_for(woken, {TopicPartition(name, 0): 0 for name in many})
    assert parts.lookup.requests <= 4
    assert parts.live_reader.statistics().positions.keys() == set(many)
    with pytest.raises(Refused):
        await arrivals.wait_for(asyncio.Event(), {TopicPartition(a_name(), 0): 0})
    arrivals.stop()
    assert not woken.is_set()


async def test_what_is_stored_in_a_new_topic_before_it_is_found_is_not_missed(
    parts: Parts, admin: AIOKafkaAdminClient, bootstrap: str
) -> None:
    """Independent of which part found it first, and from where it is read."""
    names = [a_name(), a_name()]
    await parts.router.hold({f"{name}/#": None for name in names})
    await admin.create_topics([NewTopic(name, 1, 1) for name in names])
    for name in names:
        await until_led(admin, name)
        await produce(bootstrap, name, [b"1 " + name.encode(), b"2 " + name.encode()])
    other: list[bytes | None] = []

    class Other(Fanout):
        def select(self, records: Sequence[Received], at: int) -> tuple[tuple[()], int]:
            other.append(records[at].value)
            return (), 1

    await parts.live_reader.watch(names[0], Other())  # it wants what comes from now on, and is there before
    await parts.topics.refresh()
    await wait_until(lambda: len(parts.seen) == 4)
    for name in names:
        await produce(bootstrap, name, [b"3 " + name.encode()])
    await wait_until(lambda: len(parts.seen) == 6 and len(other) == 1)
    for name in names:
        mine = [value for value in parts.seen if value is not None and name.encode() in value]
        assert mine == [b"%d " % number + name.encode() for number in (1, 2, 3)]
    assert other == [b"3 " + names[0].encode()]


async def test_a_later_filter_does_not_move_a_new_topic_on(
    parts: Parts, admin: AIOKafkaAdminClient, bootstrap: str
) -> None:
    name = a_name()
    await parts.router.hold({f"{name}/#": None})
    await admin.create_topics([NewTopic(name, 1, 1)])
    await until_led(admin, name)
    first = f"first of {name}".encode()  # others' messages come by `#`, too
    await produce(bootstrap, name, [first])
    since = (await parts.router.hold({"#": None}))["#"]  # it is this look that finds the topic
    await wait_until(lambda: first in parts.seen)
    assert since in ({}, {(name, 0): 1})  # the later one begins behind it


@pytest.mark.parametrize("new", [False, True], ids=["read before", "new"])
async def test_a_topic_that_is_deleted_while_reading_begins_is_read_when_it_is_there_again(
    parts: Parts, admin: AIOKafkaAdminClient, bootstrap: str, new: bool
) -> None:
    """Reading begins of this topic, or of another one that the same SUBSCRIBE needs."""
    name, other = a_name(), a_name()

    async def create(*names: str) -> None:
        await admin.create_topics([NewTopic(one, 1, 1) for one in names])
        for one in names:
            await until_led(admin, one)
        await parts.topics.refresh()

    await create(*([other] if new else [name, other]))
    watch_all, deleted = parts.live_reader.watch_all, asyncio.Event()

    async def watch_and_delete(topics: Collection[str], *arguments: Any, **options: Any) -> set[str]:
        found = await watch_all(topics, *arguments, **options)
        if not deleted.is_set():
            await admin.delete_topics([name])
            while name in parts.topics.names:
                await parts.topics.refresh()
            deleted.set()
        return found

    await parts.router.hold({f"{name}/#": None})
    parts.live_reader.watch_all = watch_and_delete  # type: ignore[method-assign]
    if new:
        await create(name)
        await deleted.wait()
        await wait_until(lambda: not parts.router._new)
    else:
        await parts.router.hold({f"{name}/x": None, f"{other}/#": None})
    await create(name)
    later = f"later in {name}".encode()
    await produce(bootstrap, name, [later])
    await wait_until(lambda: later in parts.seen, 20)


async def test_plans_for_long_topics_take_bounded_memory(parts: Parts) -> None:
    for number in range(1000):
        parts.router._plan((f"{number}/" + 65_000 * "x", 0, False))
    assert sum(len(topic) for topic, _, _ in parts.router._plans) < 30_000_000


async def test_a_filter_of_very_many_levels_is_refused(connect: Connect) -> None:
    """Each level takes memory, and a filter may have 65,535."""
    client, name = await connect(), a_name()
    deep, deeper = name + 255 * "/x", name + 256 * "/x"
    assert (await client.subscribe(deep, deeper, f"$share/g/{deep}", f"$share/g/{deeper}")).reason_codes == (
        2, ReasonCode.QUOTA_EXCEEDED, 2, ReasonCode.QUOTA_EXCEEDED
    )  # fmt: skip
    assert await (await connect()).publish(deep, b"deep") == 0
    assert (await client.message()).payload == b"deep"


async def test_subscribing_makes_no_topic(connect: Connect, admin: AIOKafkaAdminClient, bootstrap: str) -> None:
    """For any number of filters: each is granted, and later messages are delivered."""
    names = [a_name() for _ in range(300)]
    client = await connect()
    assert (await client.subscribe(*(f"{name}/#" for name in names))).reason_codes == (2,) * 300
    assert set(names).isdisjoint(await admin.list_topics())
    sender = await connect()
    assert await sender.publish(f"{names[7]}/a", b"by a client of ours") == 0
    assert (await client.message()).payload == b"by a client of ours"
    await admin.create_topics([NewTopic(names[8], 1, 1)])
    await until_led(admin, names[8])
    await produce(bootstrap, names[8], [b"by somebody else"], key=b"b")
    message = await client.message()
    assert (message.topic, message.payload) == (f"{names[8]}/b", b"by somebody else")
    assert set(names).intersection(await admin.list_topics()) == {names[7], names[8]}


async def test_a_shared_subscription_makes_no_topic(connect: Connect, admin: AIOKafkaAdminClient) -> None:
    name = a_name()
    client = await connect()
    assert (await client.subscribe(f"$share/{name}/{name}/#")).reason_codes == (2,)
    assert name not in await admin.list_topics()
    sender = await connect()
    assert await sender.publish(f"{name}/a", b"later") == 0
    assert (await client.message(60)).payload == b"later"


async def test_a_subscriber_gets_what_is_acknowledged_later_and_nothing_that_was_before(connect: Connect) -> None:
    topic = a_name()
    publisher, first = await connect(), await connect()
    assert await publisher.publish(f"{topic}/t", b"warm") == 0
    await first.subscribe(f"{topic}/#")
    subscribers: list[RawClient] = []
    for number in range(15):
        assert await publisher.publish(f"{topic}/t", b"%d" % number) == 0
        subscribers.append(await connect())
        await subscribers[-1].subscribe(f"{topic}/#")  # at once: the live reader may not have the message yet
    assert await publisher.publish(f"{topic}/t", b"15") == 0
    for number, late in enumerate(subscribers, 1):
        came = [message.payload for message in await late.messages(16 - number)]
        assert came == [b"%d" % later for later in range(number, 16)]


async def test_what_was_acknowledged_is_old_for_a_new_subscriber_though_kafka_is_silent(
    parts: Parts, admin: AIOKafkaAdminClient
) -> None:
    name = a_name()
    await admin.create_topics([NewTopic(name, 1, 1)])
    await until_led(admin, name)
    await parts.router.hold({f"{name}/#": None})
    await parts.lookup.stop()  # nobody can be asked how far the log reaches
    parts.live_reader.note_stored(name, 0, 5)  # as Kafka has told the publisher; the fetch that brings it is slower
    assert await parts.router.hold({f"{name}/x": None}) == {f"{name}/x": {(name, 0): 5}}


async def test_what_is_stored_while_the_live_reader_begins_is_asked_for(
    parts: Parts, admin: AIOKafkaAdminClient
) -> None:
    name = a_name()
    await admin.create_topics([NewTopic(name, 1, 1)])
    await until_led(admin, name)
    await parts.router.hold({f"{name}/#": None})
    parts.live_reader.note_stored(name, 0, 5)  # its consumer is being started
    while not parts.live_reader.statistics().fetches:
        assert parts.live_reader._consumer.possibly_ahead({name}) == [TopicPartition(name, 0)]
        await asyncio.sleep(0)


async def test_a_filter_that_stands_twice_is_subscribed_to_once(connect: Connect) -> None:
    name = a_name()
    client = await connect()
    twice = packets.Subscription(f"{name}/#", 0), packets.Subscription(f"{name}/#", 1)
    assert (await client.subscribe(*twice)).reason_codes == (0, 1)
    sender = await connect()
    await sender.publish(f"{name}/a", b"once")
    assert (await client.message()).qos == 1
    assert (await client.unsubscribe(f"{name}/#")).reason_codes == (0,)
    await sender.publish(f"{name}/a", b"nobody's")
    await client.ping()


@pytest.mark.parametrize("last", ["#", "{}"])
async def test_a_subscribe_has_no_more_filters_than_a_session(connect: Connect, last: str) -> None:
    """Also when they are the same, since each is looked up, answered and gets retained messages."""
    client, name = await connect(), a_name()
    most = MqttConfig().max_subscriptions
    assert most == 10_000  # a home's automation has thousands
    codes = (await client.subscribe(*(f"{name}/{last.format(number)}" for number in range(most + 1)))).reason_codes
    assert codes == (2,) * most + (ReasonCode.QUOTA_EXCEEDED,)
    assert await client.publish(f"{name}/77", b"on") == 0
    assert (await client.message()).topic == f"{name}/77"


async def test_thousands_in_one_read_are_answered_one_by_one(connect: Connect) -> None:
    client = await connect()
    filters = [packets.Unsubscribe(number, ("a",)) for number in range(1, 3001)]
    client.send_bytes(b"".join(encode_packet(one, client.version) for one in filters))
    for number in range(1, 3001):
        assert (await client.expect(packets.Unsuback)).packet_id == number
    await client.ping()


async def test_what_is_sent_behind_a_subscribe_keeps_its_order(connect: Connect) -> None:
    """Much more than is read ahead; the subscription applies to all of it, and a close is handled last."""
    name, count = a_name(), 2000
    client, other = await connect(), await connect()
    await other.subscribe(packets.Subscription(f"{name}/#", 1))
    data = encode_packet(packets.Subscribe(1, (packets.Subscription(f"{name}/own", 0),)), client.version)
    for number in range(count):
        payload = b"%d" % number + b"." * 100
        data += encode_packet(packets.Publish(f"{name}/own", payload), client.version)
    client.send_bytes(data + encode_packet(packets.Pingreq(), client.version))
    client.close_writing()
    said = [one for one in await client.expect_end() if isinstance(one, packets.Suback)]
    assert [one.reason_codes for one in said] == [(0,)]
    numbers = [int((await other.message()).payload.partition(b".")[0]) for _ in range(count)]
    assert numbers == list(range(count))
