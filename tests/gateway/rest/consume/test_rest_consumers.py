"""Consumer instances against a real broker: what is delivered, what is committed, and what is never lost."""

import asyncio
import base64
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor

from gateway.settings.config import AccessRule, OauthConfig, SecurityConfig
from tests.gateway.rest.conftest import CONTROL, JSON_RECORDS, Gateway, ask, running_gateway
from tests.support.oauth import oauth_options, token
from tests.support.receivers import connect_little
from tests.support.topics import until_gone
from tests.support.waiting import wait_until

SOCKET_TAKES: Final = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])  # of what is not read


class Consumer:
    """A consumer instance of a test."""

    def __init__(self, session: aiohttp.ClientSession, group: str, name: str, embedded: str = "json") -> None:
        self.session = session
        self.accept = {"Accept": f"application/vnd.kafka.{embedded}.v2+json"}
        self.group = group
        self.path = f"/consumers/{group}/instances/{name}"

    async def post(self, what: str, body: Any = None) -> Any:
        headers = CONTROL if body is not None else None
        return await ask(self.session, "POST", f"{self.path}/{what}", body, headers=headers)

    async def poll(self, **query: int) -> Any:
        return await ask(self.session, "GET", f"{self.path}/records", params=query, headers=self.accept)

    async def read(self, count: int, **query: int) -> list[Any]:
        """Poll until `count` records came."""
        records: list[Any] = []
        async with asyncio.timeout(60):
            while len(records) < count:
                status, page = await self.poll(**{"timeout": 5000, **query})
                assert status == 200
                records += page
        return records

    async def delete(self) -> Any:
        return await ask(self.session, "DELETE", self.path)


Make = Callable[..., Awaitable[Consumer]]


async def new_consumer(http: aiohttp.ClientSession, *topics: str, group: str = "", **settings: Any) -> Consumer:
    group = group or f"g-{uuid.uuid4().hex[:8]}"
    body = {"format": "json", "auto.offset.reset": "earliest", "enable.auto.commit": False, **settings}
    status, created = await ask(http, "POST", f"/consumers/{group}", body, headers=CONTROL)
    assert status == 200
    consumer = Consumer(http, group, created["instance_id"], body["format"])
    if topics:
        assert await consumer.post("subscription", {"topics": list(topics)}) == (204, None)
    return consumer


@pytest.fixture
async def make(http: aiohttp.ClientSession) -> Any:
    made: list[Consumer] = []

    async def new(*topics: str, **options: Any) -> Consumer:
        made.append(await new_consumer(http, *topics, **options))
        return made[-1]

    yield new
    for consumer in made:
        await consumer.delete()


async def send(http: aiohttp.ClientSession, topic: str, *values: Any, partition: int = 0) -> None:
    body = {"records": [{"value": value} for value in values]}
    assert (await ask(http, "POST", f"/topics/{topic}/partitions/{partition}", body, headers=JSON_RECORDS))[0] == 200


async def committed(admin: AIOKafkaAdminClient, group: str) -> dict[TopicPartition, int]:
    return {where: entry.offset for where, entry in (await admin.list_consumer_group_offsets(group)).items()}


async def test_a_consumer_from_creation_to_deletion(
    http: aiohttp.ClientSession, gateway: Gateway, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    body = {"name": "one", "format": "json", "auto.offset.reset": "earliest"}
    group = f"g-{topic}"
    status, created = await ask(http, "POST", f"/consumers/{group}", body, headers=CONTROL)
    path = f"/consumers/{group}/instances/one"
    assert (status, created) == (200, {"instance_id": "one", "base_uri": f"{gateway.url}{path}"})
    assert (await ask(http, "POST", f"/consumers/{group}", body, headers=CONTROL))[0] == 409
    consumer = Consumer(http, group, "one")
    assert await consumer.post("subscription", {"topics": [topic]}) == (204, None)
    assert await ask(http, "GET", f"{path}/subscription") == (
        200,
        {"topics": [topic], "partitions": [{topic: [0]}]},
    )
    stamp = {"records": [{"key": "k", "value": {"n": 1}, "timestamp": 1700000000000}]}
    await ask(http, "POST", f"/topics/{topic}", stamp, headers=JSON_RECORDS)
    (record,) = await consumer.read(1)
    headers = record.pop("headers")
    assert record == {
        "topic": topic, "key": "k", "value": {"n": 1}, "partition": 0, "offset": 0, "timestamp": 1700000000000,
    }  # fmt: skip
    assert [(field["key"], base64.b64decode(field["value"])) for field in headers] == [
        ("content-type", b"application/json"),
        ("gw.protocol", b"http"),
        ("gw.client", b"anonymous"),
    ]
    assert await consumer.delete() == (204, None)
    assert (await consumer.delete())[0] == 404
    assert (await consumer.poll())[0] == 404


async def test_a_group_whose_members_have_another_assignor_is_told_at_the_subscription(
    bootstrap: str, make: Make, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    consumer = await make()
    native = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, group_id=consumer.group,
        partition_assignment_strategy=(RoundRobinPartitionAssignor,),
    )  # fmt: skip
    async with native:
        status, error = await consumer.post("subscription", {"topics": [topic]})
        assert status == 500
        assert "members that do not know Kafka's assignor 'range'" in error["message"]
        status, error = await consumer.poll()
        assert status == 409  # it has no subscription


async def test_records_stored_after_the_subscription_are_delivered_even_with_latest(
    http: aiohttp.ClientSession, make: Make, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    await send(http, topic, "before")
    consumer = await make(topic, **{"auto.offset.reset": "latest"})
    await send(http, topic, "after")
    assert [record["value"] for record in await consumer.read(1)] == ["after"]


async def test_a_long_poll_returns_with_the_first_record(
    http: aiohttp.ClientSession, make: Make, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    consumer = await make(topic)
    async with asyncio.TaskGroup() as group:
        poll = group.create_task(consumer.poll(timeout=30_000))
        done, _ = await asyncio.wait([poll], timeout=0.3)
        assert not done
        began = time.monotonic()
        await send(http, topic, 1)
        status, records = await poll
    assert (status, len(records)) == (200, 1)
    assert time.monotonic() - began < 20
    began = time.monotonic()
    assert await consumer.poll(timeout=200) == (200, [])
    assert round(time.monotonic() - began, 2) >= 0.2  # the gateway's clock counts milliseconds


def as_json(value: str) -> str:
    return value


def as_text(value: str) -> str:
    return f'"{value}"'


def as_binary(value: str) -> str:
    return base64.b64encode(as_text(value).encode()).decode()


SEEN: dict[str, Callable[[str], str]] = {"json": as_json, "text": as_text, "binary": as_binary}


@pytest.mark.parametrize(
    ("embedded", "limit"),
    [*(("json", limit) for limit in (0, 1, 300, 700, 10_000, 10**9)), ("text", 1), ("text", 700), ("binary", 1),
     ("binary", 700)],
)  # fmt: skip
async def test_any_max_bytes_delivers_every_record_once(
    http: aiohttp.ClientSession, make: Make, new_topic: Any, embedded: str, limit: int
) -> None:
    topic = await new_topic(partitions=2)
    values = ["x" * (number * 37 % 400) + str(number) for number in range(30)]
    await send(http, topic, *values[:15], partition=0)
    await send(http, topic, *values[15:], partition=1)
    values = [SEEN[embedded](value) for value in values]
    consumer = await make(topic, format=embedded)
    records = await consumer.read(30, max_bytes=limit)
    for number, expected in ((0, values[:15]), (1, values[15:])):
        assert [record["value"] for record in records if record["partition"] == number] == expected
    assert await consumer.poll() == (200, [])


async def test_the_accepted_type_must_be_the_consumers(http: aiohttp.ClientSession, make: Make, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    consumer = await make(topic)
    await send(http, topic, 1)
    for accept, status in (("application/vnd.kafka.binary.v2+json", 406), ("text/html", 406), ("*/*", 200)):
        answer = await ask(http, "GET", f"{consumer.path}/records?timeout=5000", headers={"Accept": accept})
        assert answer[0] == status
    assert len(answer[1]) == 1


async def test_a_poll_without_subscription_is_a_409(make: Make) -> None:
    consumer = await make()
    status, error = await consumer.poll()
    assert status == 409
    assert "not subscribed" in error["message"]


async def test_a_record_that_is_no_json_stops_its_partition_and_nothing_else(
    http: aiohttp.ClientSession, make: Make, new_topic: Any
) -> None:
    topic = await new_topic(partitions=2)
    consumer = await make(topic)
    await send(http, topic, "before")
    text = {"records": [{"value": "no json"}]}
    headers = {"Content-Type": "application/vnd.kafka.text.v2+json"}
    assert (await ask(http, "POST", f"/topics/{topic}/partitions/0", text, headers=headers))[0] == 200
    await send(http, topic, "behind")
    assert [record["value"] for record in await consumer.read(1)] == ["before"]
    for _ in range(3):  # and the position does not move
        status, error = await consumer.poll(timeout=20_000)
        assert status == 406
        assert f"offset 1 of {topic}, partition 0" in error["message"]
    await send(http, topic, "elsewhere", partition=1)
    async with asyncio.timeout(60):
        while (answer := await consumer.poll(timeout=100))[0] == 406:
            pass
    assert [record["value"] for record in answer[1]] == ["elsewhere"]
    await consumer.post("positions", {"offsets": [{"topic": topic, "partition": 0, "offset": 2}]})
    assert [record["value"] for record in await consumer.read(1)] == ["behind"]
    assert await consumer.post("offsets") == (204, None)


async def test_a_client_that_leaves_in_mid_poll_takes_nothing_along(
    http: aiohttp.ClientSession, gateway: Gateway, make: Make, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    consumer = await make(topic)
    host, _, port = gateway.listener.bound.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    polling = gateway.counts("consumers").polling
    writer.write(f"GET {consumer.path}/records?timeout=60000 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await wait_until(lambda: gateway.counts("consumers").polling == polling + 1)
    writer.close()
    await wait_until(lambda: gateway.counts("consumers").polling == polling)
    await send(http, topic, 1, 2)
    assert [record["value"] for record in await consumer.read(2)] == [1, 2]


async def test_nothing_holds_a_commit_or_a_deletion_while_a_poll_waits(
    http: aiohttp.ClientSession, make: Make, new_topic: Any, admin: AIOKafkaAdminClient
) -> None:
    topic = await new_topic(partitions=1)
    await send(http, topic, 1, 2, 3)
    consumer = await make(topic)
    await consumer.read(3)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        poll = group.create_task(consumer.poll(timeout=60_000))
        second = group.create_task(consumer.poll(timeout=50))  # waits for its turn no longer than its timeout
        assert await second == (200, [])
        assert await consumer.post("offsets") == (204, None)
        assert await committed(admin, consumer.group) == {TopicPartition(topic, 0): 3}
        assert not poll.done()
        assert await consumer.delete() == (204, None)
        assert (await poll)[0] == 404


async def test_offsets_are_committed_as_they_are_given(
    http: aiohttp.ClientSession, make: Make, new_topic: Any, admin: AIOKafkaAdminClient
) -> None:
    topic = await new_topic(partitions=2)
    await send(http, topic, *range(5))
    consumer = await make(topic)
    offsets = {"offsets": [{"topic": topic, "partition": 0, "offset": 2}]}
    assert await consumer.post("offsets", offsets) == (204, None)
    assert await committed(admin, consumer.group) == {TopicPartition(topic, 0): 2}
    await consumer.delete()
    again = await make(topic, group=consumer.group)
    assert [record["value"] for record in await again.read(3)] == [2, 3, 4]
    foreign = {"offsets": [{"topic": "elsewhere", "partition": 0, "offset": 2}]}
    assert (await again.post("offsets", foreign))[0] == 404
    assert (await again.post("offsets", {"offsets": [{"topic": topic}]}))[0] == 400


@pytest.mark.parametrize("length", [5000, 40_000])  # more than Kafka accepts, and than a request can have
async def test_metadata_of_an_offset_that_are_too_large_are_refused(
    http: aiohttp.ClientSession, make: Make, new_topic: Any, length: int
) -> None:
    topic = await new_topic(partitions=1)
    consumer = await make(topic)
    assert await consumer.read(0) == []
    offset = {"topic": topic, "partition": 0, "offset": 0, "metadata": "m" * length}
    status, answer = await consumer.post("offsets", {"offsets": [offset]})
    assert (status, "metadata" in str(answer)) == (422, True)
    assert (await consumer.post("offsets", {"offsets": [offset | {"metadata": "m" * 4000}]}))[0] == 204


async def test_only_records_of_an_earlier_poll_are_committed_automatically(
    bootstrap: str, new_topic: Any, admin: AIOKafkaAdminClient
) -> None:
    topic = await new_topic(partitions=1)
    async with running_gateway(bootstrap) as gateway, aiohttp.ClientSession(gateway.url) as http:
        await send(http, topic, *range(6))
        consumer = await new_consumer(http, topic, **{"enable.auto.commit": True})
        first = await consumer.read(1, max_bytes=1)
        second = await consumer.read(1, max_bytes=1)  # shows that the first one has arrived
        assert [first[0]["value"], second[0]["value"]] == [0, 1]
    # The gateway went; nobody asked for more after the second.
    assert await committed(admin, consumer.group) == {TopicPartition(topic, 0): 1}


async def test_a_deletion_commits_everything_that_was_delivered(
    http: aiohttp.ClientSession, make: Make, new_topic: Any, admin: AIOKafkaAdminClient
) -> None:
    topic = await new_topic(partitions=1)
    await send(http, topic, 1, 2)
    consumer = await make(topic, **{"enable.auto.commit": True})
    await consumer.read(2)
    await consumer.delete()
    assert await committed(admin, consumer.group) == {TopicPartition(topic, 0): 2}


async def test_without_commits_a_new_member_gets_everything_again(
    http: aiohttp.ClientSession, make: Make, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    await send(http, topic, 1, 2)
    consumer = await make(topic)
    await consumer.read(2)
    await consumer.delete()
    again = await make(topic, group=consumer.group)
    assert [record["value"] for record in await again.read(2)] == [1, 2]


async def test_two_members_share_the_partitions(http: aiohttp.ClientSession, make: Make, new_topic: Any) -> None:
    topic = await new_topic(partitions=2)
    one = await make(topic)
    other = await make(topic, group=one.group)

    async def shares() -> list[int]:
        counts = []
        for consumer in (one, other):
            _, subscription = await ask(http, "GET", f"{consumer.path}/subscription")
            counts.append(sum(len(numbers) for entry in subscription["partitions"] for numbers in entry.values()))
        return counts

    async with asyncio.timeout(60):
        while await shares() != [1, 1]:
            await asyncio.gather(one.poll(timeout=100), other.poll(timeout=100))
    await send(http, topic, "a", partition=0)
    await send(http, topic, "b", partition=1)
    first, second = await asyncio.gather(one.read(1), other.read(1))
    assert {first[0]["value"], second[0]["value"]} == {"a", "b"}


async def test_assignments_and_positions(http: aiohttp.ClientSession, make: Make, new_topic: Any) -> None:
    topic = await new_topic(partitions=2)
    await send(http, topic, *range(4), partition=1)
    consumer = await make()
    where = {"topic": topic, "partition": 1}
    assert (await consumer.post("positions", {"offsets": [{**where, "offset": 1}]}))[0] == 404
    assert await consumer.post("assignments", {"partitions": [where]}) == (204, None)
    assert (await consumer.post("subscription", {"topics": [topic]}))[0] == 409
    assert [record["value"] for record in await consumer.read(4)] == [0, 1, 2, 3]
    assert await consumer.post("positions", {"offsets": [{**where, "offset": 2}]}) == (204, None)
    assert [record["value"] for record in await consumer.read(2)] == [2, 3]
    assert await consumer.post("positions/beginning", {"partitions": [where]}) == (204, None)
    assert [record["value"] for record in await consumer.read(4)] == [0, 1, 2, 3]
    assert await consumer.post("positions/beginning", {"partitions": [where]}) == (204, None)
    assert await consumer.post("positions/end", {"partitions": [where]}) == (204, None)
    assert await consumer.poll() == (200, [])
    assert (await consumer.post("assignments", {"partitions": [{"topic": topic, "partition": 5}]}))[0] == 404
    assert (await ask(http, "DELETE", f"{consumer.path}/subscription"))[0] == 204
    assert (await consumer.poll())[0] == 409
    assert await consumer.post("subscription", {"topics": [topic]}) == (204, None)
    assert (await consumer.post("assignments", {"partitions": [where]}))[0] == 409
    assert await consumer.post("subscription", {"topics": []}) == (204, None)
    assert (await consumer.poll())[0] == 409


async def test_an_unknown_topic_cannot_be_subscribed_to_where_none_may_be_created(bootstrap: str) -> None:
    async with running_gateway(bootstrap, create=False) as gateway, aiohttp.ClientSession(gateway.url) as http:
        consumer = await new_consumer(http)
        assert (await consumer.post("subscription", {"topics": ["no-such-topic-here"]}))[0] == 404
        assert (await consumer.post("subscription", {"topics": ["__consumer_offsets"]}))[0] == 403


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"format": "avro"}, 422),
        ({"auto.offset.reset": "sideways"}, 422),
        ({"enable.auto.commit": "true"}, 400),
        ({"max.poll.records": 5}, 400),
    ],
)
async def test_bad_settings(http: aiohttp.ClientSession, body: Any, status: int) -> None:
    assert (await ask(http, "POST", "/consumers/g", body, headers=CONTROL))[0] == status


async def test_a_control_request_needs_the_control_type(http: aiohttp.ClientSession, make: Make) -> None:
    assert (await ask(http, "POST", "/consumers/g", b"{}", headers=JSON_RECORDS))[0] == 400
    consumer = await make()
    assert (await consumer.post("subscription"))[0] == 400


@pytest.mark.part("confluent")
async def test_abandoned_consumers_are_removed_and_their_number_is_bounded(
    bootstrap: str, new_topic: Any, admin: AIOKafkaAdminClient
) -> None:
    topic = await new_topic(partitions=1)
    limits = {"consumer_idle_s": 3.0, "max_consumers": 1}
    async with running_gateway(bootstrap, http=limits) as gateway, aiohttp.ClientSession(gateway.url) as http:
        await send(http, topic, 1, 2)
        consumer = await new_consumer(http, topic, **{"enable.auto.commit": True})
        async with http.post("/consumers/other", json={}, headers=CONTROL) as response:
            assert response.status == 429
            assert "Retry-After" in response.headers
        assert [record["value"] for record in await consumer.read(1, max_bytes=1)] == [1]
        assert await consumer.poll(timeout=20_000, max_bytes=1) != (200, [])
        assert await consumer.poll(timeout=3500) == (200, [])  # a poll that waits longer is not idle
        await wait_until(lambda: gateway.counts("consumers").reaped_total == 1)
        assert (await consumer.poll())[0] == 404
        await wait_until(lambda: gateway.counts("consumers").instances == 0)
        another = await new_consumer(http, topic, group=consumer.group)
        assert await another.poll(timeout=500) == (200, [])
    assert await committed(admin, consumer.group) == {TopicPartition(topic, 0): 2}


async def test_a_consumer_that_reads_no_answers_is_abandoned_too(bootstrap: str, new_topic: Any) -> None:
    """Its group gets the records again. A poll on another connection is answered: the unread connection is aborted."""
    topic = await new_topic(partitions=1)
    values = [f"{number:065536d}" for number in range((SOCKET_TAKES + 2**21) // 2**16)]
    async with (
        running_gateway(bootstrap, http={"consumer_idle_s": 3.0}) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        for value in values:
            await send(http, topic, value)
        consumer = await new_consumer(http, topic)
        reader, writer = await unread_polls(gateway, consumer, len(values))
        status, records = await consumer.poll(timeout=60_000)
        assert status == 200
        first = values.index(records[0]["value"])
        assert [record["value"] for record in records] == values[first : first + len(records)]
        assert len(await rest_of(reader)) < 2**16 * len(values)
        writer.close()
        assert gateway.counts("consumers").reaped_total == 0
        await consumer.delete()
        abandoned = await new_consumer(http, topic)
        _, writer = await unread_polls(gateway, abandoned, len(values))
        await wait_until(lambda: gateway.counts("consumers").reaped_total == 1)
        heir = await new_consumer(http, topic, group=abandoned.group)
        assert [record["value"] for record in await heir.read(len(values), timeout=60_000)] == values
        writer.close()


async def unread_polls(
    gateway: Gateway, consumer: Consumer, count: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send polls on a connection with small buffers until an answer is not read."""
    host, _, port = str(gateway.listener.bound).rpartition(":")
    reader, writer = await connect_little((host, int(port)))
    accept = consumer.accept["Accept"]
    head = f"GET {consumer.path}/records?timeout=60000 HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n\r\n"
    writer.write(head.encode() * count)
    await wait_until(lambda: gateway.publisher.budgets.outgoing.bytes)
    return reader, writer


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes that the kernel had when the connection was aborted."""
    found = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            found += data
    return bytes(found)


async def test_a_waiting_poll_ends_when_the_gateway_stops(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    async with running_gateway(bootstrap) as gateway, aiohttp.ClientSession(gateway.url) as http:
        consumer = await new_consumer(http, topic)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            poll = group.create_task(consumer.poll(timeout=60_000))
            await wait_until(lambda: gateway.counts("consumers").polling == 1)
            gateway.listener.stop_receiving()
            assert (await poll)[0] == 503


async def test_topics_can_be_looked_at(http: aiohttp.ClientSession, new_topic: Any) -> None:
    topic = await new_topic(partitions=2, retention_ms="3600000")
    await send(http, topic, 1, 2, partition=1)
    assert topic in (await ask(http, "GET", "/topics"))[1]
    status, described = await ask(http, "GET", f"/topics/{topic}")
    assert (status, described["name"], described["configs"]["retention.ms"]) == (200, topic, "3600000")
    replica = {"broker": 1, "leader": True, "in_sync": True}
    view = {"partition": 1, "leader": 1, "replicas": [replica]}
    assert described["partitions"][1] == view
    assert (await ask(http, "GET", f"/topics/{topic}/partitions"))[1] == described["partitions"]
    assert await ask(http, "GET", f"/topics/{topic}/partitions/1") == (200, view)
    offsets = {"beginning_offset": 0, "end_offset": 2}
    assert await ask(http, "GET", f"/topics/{topic}/partitions/1/offsets") == (200, offsets)
    assert (await ask(http, "GET", f"/topics/{topic}/partitions/7"))[0] == 404
    assert (await ask(http, "GET", f"/topics/{topic}/partitions/7/offsets"))[0] == 404
    assert (await ask(http, "GET", f"/topics/{topic}/partitions/x"))[0] == 400
    assert (await ask(http, "GET", "/topics/no-such-topic"))[0] == 404
    assert set((await ask(http, "GET", "/"))[1]) == {"bridge_version"}


async def test_the_list_of_topics_is_kafkas_at_this_moment(
    http: aiohttp.ClientSession, admin: AIOKafkaAdminClient, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    listed = await asyncio.gather(*(ask(http, "GET", "/topics") for _ in range(20)))
    assert all(topic in names for _, names in listed)
    await admin.delete_topics([topic])
    await until_gone(admin, topic)
    # No test waits for the gateway's own check of Kafka, every 5 minutes.
    assert topic not in (await ask(http, "GET", "/topics"))[1]


@pytest.mark.part("confluent")
async def test_missing_settings_of_a_consumer_are_the_gateways(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    settings = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
    async with (
        running_gateway(bootstrap, http={"consumer": settings}) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        await send(http, topic, 1)
        for prefix in ("", "/v2"):
            path = f"{prefix}/consumers/g-{uuid.uuid4().hex[:8]}"
            for wanted, values in (({}, [1]), ({"auto.offset.reset": "latest"}, [])):
                body = {"format": "json", **wanted}
                _, made = await ask(http, "POST", path, body, headers=CONTROL)
                one = f"{path}/instances/{made['instance_id']}"
                place = {"partitions": [{"topic": topic, "partition": 0}]}
                assert (await ask(http, "POST", f"{one}/assignments", place, headers=CONTROL))[0] == 204
                _, records = await ask(http, "GET", f"{one}/records?timeout={20000 if values else 500}")
                assert [record["value"] for record in records] == values
                assert (await ask(http, "DELETE", one))[0] == 204  # and nothing is committed with it


async def test_base_uri_is_the_clients_view(http: aiohttp.ClientSession) -> None:
    group = f"g-{uuid.uuid4().hex[:8]}"
    path = f"/bridge/consumers/{group}"  # of the request, before a proxy took its own part away
    forwarded = {"Forwarded": "host=api.example;proto=https", "X-Forwarded-Path": path}
    status, created = await ask(http, "POST", f"/consumers/{group}", {"name": "a"}, headers=CONTROL | forwarded)
    assert status == 200
    assert created == {"instance_id": "a", "base_uri": f"https://api.example:443{path}/instances/a"}
    assert (await ask(http, "DELETE", f"/consumers/{group}/instances/a"))[0] == 204


async def test_a_new_pattern_is_not_undone_by_a_topic_that_the_former_one_matches(
    http: aiohttp.ClientSession, make: Make, new_topic: Any, admin: AIOKafkaAdminClient
) -> None:
    base = await new_topic(partitions=1)
    consumer = await make()
    assert await consumer.post("subscription", {"topic_pattern": f"{base}.*"}) == (204, None)
    await admin.create_topics([NewTopic(f"{base}-late", 1, 1)])  # found when the next pattern looks for its topics
    assert await consumer.post("subscription", {"topic_pattern": f"none-{base}"}) == (204, None)
    await asyncio.sleep(0)
    assert (await ask(http, "GET", f"{consumer.path}/subscription"))[1]["topics"] == []


async def test_a_subscription_and_an_assignment_at_once_exclude_each_other(
    http: aiohttp.ClientSession, make: Make
) -> None:
    new = [f"new-{uuid.uuid4().hex[:8]}" for _ in range(2)]  # both requests wait for their topics to be created
    consumer = await make()
    answers = await asyncio.gather(
        consumer.post("subscription", {"topics": new[:1]}),
        consumer.post("assignments", {"partitions": [{"topic": new[1], "partition": 0}]}),
    )
    assert sorted(status for status, _ in answers) == [204, 409]


async def test_a_consumer_ends_with_its_clients_right_to_the_group(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    all_topics = [AccessRule(action=action) for action in ("publish", "subscribe")]
    async with running_gateway(bootstrap) as gateway, aiohttp.ClientSession(gateway.url) as http:
        gateway.use_rules(*all_topics)
        kept = await new_consumer(http, topic)
        lost = await new_consumer(http, topic)
        await send(http, topic, 1)
        assert len(await lost.read(1)) == 1
        gateway.use_rules(*all_topics, AccessRule(action="read", group=lost.group, allow=False))
        await wait_until(lambda: gateway.counts("consumers").instances == 1)
        assert (await lost.poll())[0] == 404
        assert len(await kept.read(1)) == 1


async def test_a_token_without_the_right_to_the_group_joins_it_no_more(
    bootstrap: str, new_topic: Any, tmp_path: Path
) -> None:
    topic = await new_topic(partitions=1)
    rules = [
        AccessRule(action="read", principal="group:readers", group="*"),
        AccessRule(action="read", group="*", allow=False),
    ]
    oauth = OauthConfig(**oauth_options(tmp_path / "keys.json"), groups_claim="groups")
    security = SecurityConfig(allow_anonymous=False, oauth=oauth, access=rules)
    async with running_gateway(bootstrap, security=security) as gateway, aiohttp.ClientSession(gateway.url) as http:
        http.headers["Authorization"] = f"Bearer {token(groups=['readers'])}"
        consumer = await new_consumer(http)
        http.headers["Authorization"] = f"Bearer {token(groups=['others'])}"
        assert (await consumer.post("subscription", {"topics": [topic]}))[0] == 403
        assert (await consumer.post("subscription", {"topic_pattern": topic}))[0] == 403
        assert (await consumer.post("assignments", {"partitions": [{"topic": topic, "partition": 0}]}))[0] == 403
        assert (await consumer.delete())[0] == 204
