"""Groups, lag, topics' configuration and deletion against a real broker; and the rights for them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.settings.config import AccessRule, SecurityConfig
from tests.gateway.rest.conftest import CONTROL, Gateway, ask, running_gateway
from tests.support.topics import produce
from tests.support.waiting import wait_until

BOB = {"Authorization": aiohttp.encode_basic_auth("bob", "other")}


async def commit(bootstrap: str, group: str, topic: str, offset: int) -> None:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False)
    await consumer.start()
    consumer.assign([TopicPartition(topic, 0)])
    await consumer.commit({TopicPartition(topic, 0): offset})
    await consumer.stop()


async def test_the_lag_of_a_group(
    gateway: Gateway, http: aiohttp.ClientSession, new_topic: Any, bootstrap: str
) -> None:
    topic = await new_topic(partitions=2)
    group = f"lag of/{topic}"
    path = f"/groups/{quote(group, safe='')}"
    assert (await ask(http, "GET", f"{path}/lag"))[0] == 404
    assert (await ask(http, "GET", path))[0] == 404
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        for number in range(10):
            await producer.send_and_wait(topic, b"%d" % number, partition=0)
    await commit(bootstrap, group, topic, 3)
    status, lag = await ask(http, "GET", f"{path}/lag")
    assert status == 200
    place = {"topic": topic, "partition": 0, "committed_offset": 3, "end_offset": 10, "lag": 7}
    assert lag == {"group": group, "lag": 7, "partitions": [place]}
    status, names = await ask(http, "GET", "/groups")
    assert status == 200
    assert group in names
    assert names == sorted(names)
    status, view = await ask(http, "GET", path)
    assert (status, view["group"], view["members"]) == (200, group, [])


async def test_the_members_of_a_group(http: aiohttp.ClientSession, new_topic: Any) -> None:
    topic = await new_topic(partitions=2)
    group = f"members-{topic}"
    _, made = await ask(http, "POST", f"/consumers/{group}", {"name": "me"}, headers=CONTROL)
    subscription = f"/consumers/{group}/instances/me/subscription"
    assert (await ask(http, "POST", subscription, {"topics": [topic]}, headers=CONTROL))[0] == 204
    status, view = await ask(http, "GET", f"/groups/{group}")
    assert (status, view["state"], view["protocol_type"]) == (200, "Stable", "consumer")
    (member,) = view["members"]
    assert member["client_id"] == "me"
    assert member["partitions"] == [{"topic": topic, "partition": number} for number in range(2)]
    assert (await ask(http, "DELETE", f"/consumers/{group}/instances/{made['instance_id']}"))[0] == 204


async def test_a_topic_is_configured(http: aiohttp.ClientSession, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    path = f"/admin/topics/{topic}/configs"

    async def entry(name: str) -> dict[str, Any]:
        status, entries = await ask(http, "GET", path)
        assert status == 200
        assert [one["name"] for one in entries] == sorted(one["name"] for one in entries)
        (found,) = [one for one in entries if one["name"] == name]
        return found

    async def until_it_is(name: str, value: str) -> None:
        """The controller has stored a change when it answers; the broker shows it a moment later."""
        async with asyncio.timeout(60):
            while (await entry(name))["value"] != value:
                pass

    before = await entry("retention.ms")
    assert before["is_default"]
    change = {"configs": {"retention.ms": "60000", "cleanup.policy": "compact"}}
    assert (await ask(http, "PATCH", path, change, headers=CONTROL))[0] == 204
    await until_it_is("retention.ms", "60000")
    change = {"configs": {"retention.ms": None}}
    assert (await ask(http, "PATCH", path, change, headers=CONTROL))[0] == 204
    await until_it_is("retention.ms", before["value"])
    assert await entry("retention.ms") == before
    assert (await entry("cleanup.policy"))["value"] == "compact"  # entries that are not named stay
    for wrong in ({"retention.ms": "soon"}, {"no.such.entry": "1"}, {"retention.ms": "1", "cleanup.policy": "x"}):
        assert (await ask(http, "PATCH", path, {"configs": wrong}, headers=CONTROL))[0] == 422
    assert await entry("retention.ms") == before
    for malformed in ({}, {"configs": {"retention.ms": 1}}, {"configs": [], "more": 1}):
        assert (await ask(http, "PATCH", path, malformed, headers=CONTROL))[0] == 400
    assert (await ask(http, "PATCH", path, {"configs": {}}, headers=CONTROL))[0] == 204


async def test_a_topic_is_deleted(
    gateway: Gateway, http: aiohttp.ClientSession, new_topic: Any, bootstrap: str
) -> None:
    topic = await new_topic(partitions=1)
    await produce(bootstrap, topic, [b"x"])
    assert (await ask(http, "DELETE", f"/admin/topics/{topic}"))[0] == 204

    async def gone() -> bool:
        await gateway.topics.refresh()
        return topic not in gateway.topics.names

    async with asyncio.timeout(60):
        while not await gone():
            pass
    assert (await ask(http, "DELETE", f"/admin/topics/{topic}"))[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/admin/topics/no-such-topic/configs", None, 404),
        ("PATCH", "/admin/topics/no-such-topic/configs", {"configs": {"retention.ms": "1"}}, 404),
        ("PATCH", "/admin/topics/no-such-topic/configs", {"configs": {}}, 404),
        ("DELETE", "/admin/topics/no-such-topic", None, 404),
        ("DELETE", "/admin/topics/..", None, 404),
        ("DELETE", "/admin/topics/__consumer_offsets", None, 403),
        ("GET", "/admin/topics/__consumer_offsets/configs", None, 403),
        ("PATCH", "/admin/topics/__consumer_offsets/configs", {"configs": {"retention.ms": "1"}}, 403),
    ],
)
async def test_missing_and_internal_topics_are_refused(
    http: aiohttp.ClientSession, method: str, path: str, body: Any, status: int
) -> None:
    url = aiohttp.client.URL(f"{path}".replace("..", "%2E%2E"), encoded=True)
    assert (await ask(http, method, url, body, headers=CONTROL if body else {}))[0] == status  # type: ignore[arg-type]


@pytest.fixture
async def own(new_topic: Any) -> str:
    return await new_topic(partitions=1)


@pytest.fixture
async def guarded(bootstrap: str, tmp_path: Path, own: str) -> AsyncIterator[Gateway]:
    """bob administers one topic, and reads and writes all others."""
    path = tmp_path / "passwords"
    path.write_text(f"bob:{Argon2Hasher(time_cost=1, memory_cost=64, parallelism=1).hash('other')}\n")
    access = (
        AccessRule(principal="bob", action="admin", topic=own),
        AccessRule(principal="bob", action="subscribe", topic="#"),
        AccessRule(principal="bob", action="publish", topic="#"),
    )
    security = SecurityConfig(allow_anonymous=False, password_file=path, access=access)
    async with running_gateway(bootstrap, security=security) as gateway:
        yield gateway


async def test_a_client_sees_only_what_it_administers(
    guarded: Gateway, own: str, new_topic: Any, bootstrap: str
) -> None:
    other = await new_topic(partitions=1)
    await produce(bootstrap, other, [b"x"])
    await produce(bootstrap, own, [b"x"])
    await commit(bootstrap, f"both-{other}", other, 0)
    await commit(bootstrap, f"both-{other}", own, 0)
    await commit(bootstrap, f"other-{other}", other, 0)
    async with aiohttp.ClientSession(guarded.url, headers=BOB) as http:
        status, lag = await ask(http, "GET", f"/groups/both-{other}/lag")
        assert (status, {place["topic"] for place in lag["partitions"]}) == (200, {own})
        assert (await ask(http, "GET", f"/groups/both-{other}"))[0] == 200
        for path in (f"/groups/other-{other}", f"/groups/other-{other}/lag", "/groups", "/groups/nobody's"):
            assert (await ask(http, "GET", path))[0] == 403
        assert (await ask(http, "DELETE", f"/admin/topics/{other}"))[0] == 403
        assert (await ask(http, "GET", f"/admin/topics/{other}/configs"))[0] == 403
        assert (await ask(http, "GET", f"/admin/topics/{own}/configs"))[0] == 200


async def test_kafka_is_away(bootstrap: str) -> None:
    async with running_gateway("127.0.0.1:1", wait=False) as gateway, aiohttp.ClientSession(gateway.url) as http:
        for path in ("/groups", "/groups/g", "/groups/g/lag", "/admin/topics/t/configs"):
            async with http.get(path) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


async def end_with_markers(bootstrap: str, topic: str, aborted: int) -> None:
    """Store three committed transactions of a record each, and then aborted ones."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"tx-{topic}") as producer:
        for number in range(3 + aborted):
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"%d" % number, partition=0)
            await (producer.commit_transaction() if number < 3 else producer.abort_transaction())


@pytest.mark.parametrize("aborted", [0, 2])
@pytest.mark.parametrize("way", ["consumer, commit", "consumer, delete", "event stream"])
async def test_the_lag_is_0_when_all_is_read_though_the_log_ends_with_markers(
    http: aiohttp.ClientSession, new_topic: Any, bootstrap: str, way: str, aborted: int
) -> None:
    topic = await new_topic(partitions=1)
    await end_with_markers(bootstrap, topic, aborted)
    group = f"marked-{topic}"

    async def has_no_lag() -> bool:
        status, lag = await ask(http, "GET", f"/groups/{group}/lag")
        return status == 200 and lag["lag"] == 0 and lag["partitions"][0]["committed_offset"] == 6 + 2 * aborted

    if way == "event stream":
        async with http.get(f"/topics/{topic}/stream?from=beginning&group={group}") as answer:
            assert answer.status == 200
            seen = 0
            while seen < 3:
                seen += (await answer.content.readline()).startswith(b"data:")
            await wait_until(has_no_lag)
        return
    settings = {"auto.offset.reset": "earliest", "enable.auto.commit": way == "consumer, delete", "format": "json"}
    await ask(http, "POST", f"/consumers/{group}", {"name": "me", **settings}, headers=CONTROL)
    me = f"/consumers/{group}/instances/me"
    await ask(http, "POST", f"{me}/subscription", {"topics": [topic]}, headers=CONTROL)
    values: list[int] = []
    polls = 0
    while len(values) < 3 or polls < 2:
        accept = {"Accept": "application/vnd.kafka.json.v2+json"}
        _, page = await ask(http, "GET", f"{me}/records?timeout=2000", headers=accept)
        values += [record["value"] for record in page]
        polls += len(values) == 3
    assert values == [0, 1, 2]
    if way == "consumer, commit":
        assert (await ask(http, "POST", f"{me}/offsets"))[0] == 204
    assert (await ask(http, "DELETE", me))[0] == 204
    await wait_until(has_no_lag)
