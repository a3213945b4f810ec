"""A partition without a leader delays no reader of other partitions, and is read when it has a leader again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from gateway.embedded.broker import EmbeddedBroker
from gateway.kafka.driver.fetch.fetching import LEADERS_RETRY_S
from gateway.kafka.driver.kafka_consumer import log_consumer, on_metadata
from gateway.kafka.driver.lifecycle import open_consumer
from gateway.kafka.driver.produce.kafka_producer import force_close, new_producer
from gateway.settings.config import KafkaConfig
from tests.gateway.mqtt.routing.test_router import Parts
from tests.gateway.rest.consume.test_rest_consumers import Consumer, new_consumer
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.topics import until_led
from tests.support.two_brokers import second_broker, until_leaderless
from tests.support.waiting import wait_until

LED, LED_BY_SECOND = 0, 1
KEPT = {"session_expiry_interval": 600}


async def next_values(consumer: Consumer, polls: int = 5) -> list[Any]:
    """Return the values of the first page that has records; a poll is shorter than the limit for a silent Kafka."""
    for _ in range(polls):
        status, page = await consumer.poll(timeout=5000)
        assert status == 200
        if page:
            return [record["value"] for record in page]
    return []


async def check_metadata_rate(bootstrap: str) -> None:
    """Check that metadata is requested once a second; plain aiokafka clients repeat the request immediately."""
    producer = new_producer(KafkaConfig(bootstrap_servers=bootstrap), "test", enable_idempotence=True)
    await producer.start()
    await producer.send("read", b'"written"', partition=LED_BY_SECOND)
    written: list[float] = []
    producer.client.cluster.add_listener(lambda _: written.append(time.monotonic()))
    asked: list[float] = []
    kafka = {"bootstrap_servers": bootstrap}
    async with open_consumer(log_consumer(kafka), asyncio.create_task) as consumer:
        on_metadata(consumer, lambda _: asked.append(time.monotonic()))
        consumer.assign([TopicPartition("read", LED), TopicPartition("read", LED_BY_SECOND)])
        await wait_until(lambda: len(asked) >= 5 and len(written) >= 9)
    assert asked[-1] - asked[0] > 2 * LEADERS_RETRY_S
    assert written[8] - written[0] > 2 * LEADERS_RETRY_S
    await force_close(producer, asyncio.create_task)


async def test_readers_continue_when_a_partition_has_no_leader(
    new_broker: Callable[..., EmbeddedBroker], new_gateway: Callable[..., GatewayProcess]
) -> None:
    first = new_broker("first")
    await first.start()
    bootstrap = first.bootstrap_servers
    gateway = await new_gateway(bootstrap).start()
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    http = aiohttp.ClientSession(f"http://{gateway.addresses['http']}")
    connect = partial(RawClient.connect, gateway.address("mqtt"))

    async def store(topic: str, partition: int, value: bytes) -> None:
        async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
            await producer.send_and_wait(topic, value, partition=partition, key=b"k")

    # Everything that the gateway itself needs is on the first broker, including the offsets of groups.
    await admin.create_topics([NewTopic("warm", 1, 1)])
    await until_led(admin, "warm")
    await new_consumer(http, "warm")
    second = await second_broker(new_broker, first)
    names = ("read", "kept", "watched")
    await admin.create_topics([NewTopic(name, -1, -1, {LED: [1], LED_BY_SECOND: [2]}) for name in names])
    for name in names:
        await until_led(admin, name)

    watching, watching_later = Parts(bootstrap), Parts(bootstrap)
    for parts in (watching, watching_later):
        await parts.live_reader.start()
    await watching.router.hold({"watched/#": None})
    await store("watched", LED_BY_SECOND, b"old")
    await wait_until(lambda: watching.seen == [b"old"])
    early = await new_consumer(http, "read")
    await store("read", LED_BY_SECOND, b'"old"')
    assert await next_values(early) == ["old"]
    assert (await early.poll(timeout=3000)) == (200, [])  # from now on it waits for the live reader
    session = await connect("kept", clean_start=False, **KEPT)
    assert (await session.subscribe("kept/#")).reason_codes == (2,)
    await session.disconnect()
    for partition in (LED, LED_BY_SECOND):
        await store("kept", partition, b"while away %d" % partition)

    await second.kill()
    await until_leaderless(admin, "read")
    for filters in ("#", "watched/#", "watched/k"):
        assert await watching_later.router.hold({filters: None}) == {filters: {}}
    await store("watched", LED, b"served")
    await wait_until(lambda: b"served" in watching.seen and b"served" in watching_later.seen)
    await wait_until(lambda: watching.live_reader.statistics().leaderless == 1)
    assert watching_later.live_reader.statistics().leaderless == len(names)
    await store("read", LED, b'"served"')
    assert await next_values(early) == ["served"]
    late = await new_consumer(http, "read", **{"auto.offset.reset": "latest"})
    shared = await connect()
    assert (await shared.subscribe("$share/workers/read/#")).reason_codes == (2,)
    async with http.get("/topics/read/records", params={"from": "beginning"}) as page:
        assert (page.status, page.headers["Next-Position"]) == (200, "0:1,1:0")
    await check_metadata_rate(bootstrap)
    stream = await http.get("/topics/read/stream", params={"from": "beginning"})
    assert stream.status == 200
    session = await connect("kept", clean_start=False, **KEPT)
    assert (await session.message()).payload == b"while away 0"
    await store("read", LED, b'"later"')
    assert await next_values(late) == ["later"]
    assert (await shared.message()).payload == b'"later"'

    await second.start()
    await until_led(admin, "kept")
    assert (await session.message()).payload == b"while away 1"
    await store("read", LED_BY_SECOND, b'"back"')
    assert (await shared.message()).payload == b'"back"'
    values = await next_values(early)
    while len(values) < 2:  # two brokers lead the two partitions, so either may be read first
        values += await next_values(early)
    assert set(values) == {"later", "back"}
    seen = b""
    while b"old" not in seen or b"back" not in seen:
        seen += await stream.content.readany()
    assert [b'"served"' in seen, b'"later"' in seen] == [True, True]
    await store("watched", LED_BY_SECOND, b"back")
    await wait_until(lambda: watching.seen == [b"old", b"served", b"back"])
    await wait_until(lambda: b"back" in watching_later.seen and b"old" not in watching_later.seen)
    for parts in (watching, watching_later):
        await wait_until(lambda parts=parts: parts.live_reader.statistics().leaderless == 0)  # type: ignore[misc]
        await parts.stop()
    for client in (session, shared):
        client.drop()
    stream.close()
    await http.close()
    await admin.close()
