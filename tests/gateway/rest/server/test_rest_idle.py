"""Waiting consumers: they cost next to nothing, wake when a record is stored, and miss no record while they sleep."""

import asyncio
import uuid
from typing import Any

import aiohttp
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from gateway.kafka.groups import polled_member as member
from gateway.kafka.read.arrivals import Arrivals
from tests.gateway.rest.conftest import CONTROL, JSON_RECORDS, Gateway, ask, running_gateway
from tests.support.topics import until_led
from tests.support.waiting import wait_until

COUNT = 24
ACCEPT = {"Accept": "application/vnd.kafka.json.v2+json"}


async def made(http: aiohttp.ClientSession, body: dict[str, Any], **settings: Any) -> str:
    """The path of a new consumer that is subscribed or assigned by `body`."""
    group = f"g-{uuid.uuid4().hex[:8]}"
    create = {"name": "c", "format": "json", "auto.offset.reset": "earliest", "enable.auto.commit": False, **settings}
    assert (await ask(http, "POST", f"/consumers/{group}", create, headers=CONTROL))[0] == 200
    path = f"/consumers/{group}/instances/c"
    what = "assignments" if "partitions" in body else "subscription"
    assert (await ask(http, "POST", f"{path}/{what}", body, headers=CONTROL))[0] == 204
    return path


async def poll(http: aiohttp.ClientSession, path: str, timeout: int = 60_000) -> Any:
    status, records = await ask(http, "GET", f"{path}/records?timeout={timeout}", headers=ACCEPT)
    assert status == 200
    return [record["value"] for record in records]


async def send(http: aiohttp.ClientSession, topic: str, value: Any) -> None:
    body = {"records": [{"value": value}]}
    assert (await ask(http, "POST", f"/topics/{topic}", body, headers=JSON_RECORDS))[0] == 200


async def test_idle_polls_sleep_while_others_produce_and_one_record_wakes_them_all(
    bootstrap: str, new_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "RECHECK_S", 1000.0)  # nothing but the live reader wakes them
    topic, busy = await new_topic(partitions=1), await new_topic(partitions=1)
    async with running_gateway(bootstrap) as gateway:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(gateway.url, connector=connector) as http, asyncio.TaskGroup() as group:
            partition = {"partitions": [{"topic": topic, "partition": 0}]}
            paths = await asyncio.gather(
                *(made(http, partition if number % 4 else {"topics": [topic]}) for number in range(COUNT))
            )
            polls = [group.create_task(poll(http, path)) for path in paths]
            await wait_until(lambda: gateway.counts("consumers").sleeping == COUNT, timeout=60)
            await wait_until(lambda: gateway.tail_topics() == {topic}, timeout=60)  # one reader for all of them
            for number in range(50):
                await send(http, busy, number)
            assert gateway.counts("consumers").sleeping == COUNT
            assert not any(task.done() for task in polls)
            await send(http, topic, "now")
            assert [await task for task in polls] == [["now"]] * COUNT
            assert gateway.counts("consumers").sleeping == 0


async def test_records_stored_while_a_poll_falls_asleep_are_delivered(
    http: aiohttp.ClientSession, new_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are sent at different moments around the one when the poll stops fetching."""
    monkeypatch.setattr(member, "RECHECK_S", 1000.0)
    monkeypatch.setattr(member, "QUIET_S", 0.05)
    topic = await new_topic(partitions=1)
    path = await made(http, {"partitions": [{"topic": topic, "partition": 0}]})
    for number in range(25):
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(poll(http, path))
            await asyncio.wait([answer], timeout=number * 0.008)
            await send(http, topic, number)
            assert await asyncio.wait_for(answer, 60) == [number]


async def test_polls_that_do_not_wait_get_what_is_fetched_between_them(
    http: aiohttp.ClientSession, new_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "QUIET_S", 0.1)
    topic = await new_topic(partitions=1)
    path = await made(http, {"topics": [topic]})
    await send(http, topic, 1)
    got: list[Any] = []
    async with asyncio.timeout(60):
        while not got:
            got = await poll(http, path, timeout=0)
            await asyncio.sleep(0.3)  # longer than the poll fetches
    assert got == [1]


async def test_a_poll_that_sleeps_is_ended_by_a_deletion_and_its_consumer_is_forgotten(
    http: aiohttp.ClientSession, gateway: Gateway, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    path = await made(http, {"topics": [topic]})
    before = gateway.counts("consumers").sleeping
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(ask(http, "GET", f"{path}/records?timeout=60000", headers=ACCEPT))
        await wait_until(lambda: gateway.counts("consumers").sleeping == before + 1)
        assert await ask(http, "DELETE", path) == (204, None)
        assert (await answer)[0] == 404
    assert gateway.counts("consumers").sleeping == before


async def test_records_of_an_open_transaction_wake_at_the_latest_by_a_look(
    http: aiohttp.ClientSession, bootstrap: str, new_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The live reader sees only committed records; a consumer that reads uncommitted ones checks the log itself."""
    monkeypatch.setattr(member, "RECHECK_S", 0.5)
    monkeypatch.setattr(member, "QUIET_S", 0.1)
    topic = await new_topic(partitions=1)
    path = await made(http, {"topics": [topic]}, **{"isolation.level": "read_uncommitted"})
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"tx-{topic}") as producer:
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(poll(http, path))
            await asyncio.wait([answer], timeout=0.5)
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"1")
            assert await asyncio.wait_for(answer, 60) == [1]
        await producer.abort_transaction()


async def test_a_check_of_what_the_live_reader_has_passed_wakes_no_poll(
    http: aiohttp.ClientSession, gateway: Gateway, new_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "RECHECK_S", 0.1)
    looks: list[tuple[bool, int]] = []  # with the number of earlier sleepers
    falls: list[Any] = []
    look, fall_asleep = Arrivals.may_have_more, Arrivals.wait_for

    def noted(self: Arrivals, positions: Any) -> bool:
        looks.append((look(self, positions), len(falls)))
        return looks[-1][0]

    async def counted(self: Arrivals, *arguments: Any) -> bool:
        falls.append(arguments)
        return await fall_asleep(self, *arguments)

    monkeypatch.setattr(Arrivals, "may_have_more", noted)
    monkeypatch.setattr(Arrivals, "wait_for", counted)
    topic = await new_topic(partitions=1)
    path = await made(http, {"topics": [topic]})
    await send(http, topic, 0)
    assert await poll(http, path) == [0]
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(poll(http, path))
        # The first checks may come before the live reader's first fetch, which wakes it once.
        await wait_until(lambda: looks[-6:] == [(False, len(falls))] * 6, timeout=60)
        await send(http, topic, 1)
        assert await asyncio.wait_for(answer, 60) == [1]


async def test_a_pattern_is_followed(
    http: aiohttp.ClientSession, admin: AIOKafkaAdminClient, gateway: Gateway, new_topic: Any
) -> None:
    first = await new_topic(partitions=1)
    stem = first[:-2]
    path = await made(http, {"topic_pattern": f"{stem}.{{2}}(-later)?"})
    subscribed = await ask(http, "GET", f"{path}/subscription")
    assert subscribed == (200, {"topics": [first], "partitions": [{first: [0]}]})
    await send(http, first, 1)
    assert await poll(http, path) == [1]
    assert await ask(http, "POST", f"{path}/offsets") == (204, None)  # else it comes again after a rebalance
    body = {"topics": [first]}
    assert (await ask(http, "POST", f"{path}/subscription", body, headers=CONTROL))[0] == 409
    later = f"{first}-later"
    await admin.create_topics([NewTopic(later, 1, 1)])
    await until_led(admin, later)
    await gateway.topics.refresh()
    await send(http, later, 2)
    async with asyncio.timeout(60):
        while (got := await poll(http, path)) == []:
            pass
    assert got == [2]
    assert (await ask(http, "GET", f"{path}/subscription"))[1]["topics"] == [first, later]
    assert await ask(http, "DELETE", f"{path}/subscription") == (204, None)
    assert await ask(http, "GET", f"{path}/subscription") == (200, {"topics": [], "partitions": []})


async def test_a_pattern_that_fits_nothing_yet_waits_for_topics(
    http: aiohttp.ClientSession, admin: AIOKafkaAdminClient, gateway: Gateway
) -> None:
    topic = f"t-{uuid.uuid4().hex[:12]}"
    path = await made(http, {"topic_pattern": f"{topic}.*"})
    assert await poll(http, path, timeout=100) == []
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(poll(http, path))
        await admin.create_topics([NewTopic(topic, 1, 1)])
        await until_led(admin, topic)
        await gateway.topics.refresh()
        await send(http, topic, "first")
        assert await asyncio.wait_for(answer, 60) == ["first"]
