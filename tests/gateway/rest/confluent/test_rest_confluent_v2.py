"""Confluent's REST proxy version 2 and Karapace: their operations, statuses, error codes and bodies, at both paths.

Every test runs below `/v2` of a gateway with Strimzi's dialect, and at the bare paths of one that is configured for
this dialect.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import aiohttp
import pytest
from aiokafka import TopicPartition

from gateway.kafka.cluster.lookup import Lookup
from tests.gateway.rest.conftest import (
    BINARY_RECORDS,
    CONTROL,
    JSON_RECORDS,
    TEXT_RECORDS,
    Gateway,
    read_topic,
    running_gateway,
)
from tests.support.one_task import in_one_task

V2 = "application/vnd.kafka.v2+json"
AVRO = {"Content-Type": "application/vnd.kafka.avro.v2+json"}
PLACE = {"offsets": [{"topic": "TOPIC", "partition": 0, "offset": 0}]}
NewTopic = Callable[..., Any]


class Way(NamedTuple):
    """A client, and the prefix of the dialect's paths."""

    session: aiohttp.ClientSession
    under: str

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and JSON body."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = headers if headers is not None else (CONTROL if data is not None else {})
        async with self.session.request(method, self.under + path, data=data, headers=given) as response:
            raw = await response.read()
            if raw and response.status >= 400:
                assert response.content_type == V2
            return response.status, json.loads(raw) if raw else None


@pytest.fixture(scope="module")
async def told(bootstrap: str) -> AsyncIterator[Gateway]:
    """A listener that is configured for this dialect."""
    async with in_one_task(running_gateway(bootstrap, http={"dialect": "confluent"})) as made:
        yield made


@pytest.fixture(params=["prefix", "setting"])
async def way(request: pytest.FixtureRequest, gateway: Gateway, told: Gateway) -> AsyncIterator[Way]:
    under = "/v2" if request.param == "prefix" else ""
    async with aiohttp.ClientSession((gateway if under else told).url) as session:
        yield Way(session, under)


@pytest.fixture
async def topic_of_one(new_topic: NewTopic) -> str:
    """A topic with one partition."""
    return str(await new_topic(1))


async def created(way: Way, **settings: Any) -> str:
    """The path of a new consumer in a group of its own."""
    group = f"g-{uuid.uuid4().hex[:8]}"
    wanted = {"format": "json", "auto.offset.reset": "earliest", "auto.commit.enable": "false", **settings}
    status, body = await way.ask("POST", f"/consumers/{group}", wanted)
    assert status == 200
    path = f"/consumers/{group}/instances/{body['instance_id']}"
    assert body["base_uri"].endswith(way.under + path)
    return path


def places(topic: str, *partitions: int) -> dict[str, Any]:
    return {"partitions": [{"topic": topic, "partition": partition} for partition in partitions]}


async def test_produced_records_are_answered_with_their_places(way: Way, new_topic: NewTopic, bootstrap: str) -> None:
    topic = await new_topic(1)
    records = [{"key": "k", "value": {"n": 1}}, {"value": None, "partition": 0}]
    status, body = await way.ask("POST", f"/topics/{topic}", {"records": records}, JSON_RECORDS)
    assert (status, body) == (
        200,
        {
            "offsets": [
                {"partition": 0, "offset": 0, "error_code": None, "error": None},
                {"partition": 0, "offset": 1, "error_code": None, "error": None},
            ],
            "key_schema_id": None,
            "value_schema_id": None,
        },
    )
    binary = {"records": [{"key": base64.b64encode(b"\x00k").decode(), "value": base64.b64encode(b"\xff").decode()}]}
    status, _ = await way.ask("POST", f"/topics/{topic}/partitions/0/", binary, BINARY_RECORDS)  # Karapace's slash
    assert status == 200
    stored = await read_topic(bootstrap, topic, 3)
    assert [(record.key, record.value) for record in stored] == [(b"k", b'{"n":1}'), (None, None), (b"\x00k", b"\xff")]


async def test_a_record_that_cannot_be_stored_has_its_own_number(way: Way, new_topic: NewTopic) -> None:
    topic = await new_topic(1)
    records = [{"value": 1}, {"value": 2, "partition": 7}]
    status, body = await way.ask("POST", f"/topics/{topic}", {"records": records}, JSON_RECORDS)
    assert status == 200
    assert body["offsets"][0]["error_code"] is None
    assert body["offsets"][1] | {"error": None} == {
        "partition": None, "offset": None, "error_code": 40402, "error": None,
    }  # fmt: skip
    assert body["offsets"][1]["error"]


@pytest.mark.parametrize(
    "refused",
    [
        ("GET", "/topics/NONE", None, {}, 404, 40401),
        ("GET", "/topics/TOPIC/partitions/9", None, {}, 404, 40402),
        ("GET", "/topics/TOPIC/partitions/foo", None, {}, 404, 404),
        ("GET", "/topics/TOPIC/partitions/foo/offsets", None, {}, 404, 404),
        ("POST", "/topics/TOPIC/partitions/-1", {"records": [{"value": 1}]}, JSON_RECORDS, 404, 404),
        ("GET", "/topics/NONE/partitions", None, {}, 404, 40401),
        ("GET", "/topics/TOPIC/partitions/9/offsets", None, {}, 404, 40402),
        ("GET", "/topics/__consumer_offsets", None, {}, 404, 40401),
        ("POST", "/topics/__consumer_offsets", {"records": []}, JSON_RECORDS, 403, 40301),
        ("POST", "/topics/TOPIC/partitions/9", {"records": [{"value": 1}]}, JSON_RECORDS, 404, 40402),
        ("POST", "/topics/NONE", {"records": [{"value": 1}]}, JSON_RECORDS, 404, 40401),
        ("POST", "/topics/TOPIC", {"records": [{"value": 1}]}, {"Content-Type": "text/plain"}, 415, 415),
        ("POST", "/topics/TOPIC", {"records": [{"value": 1}]}, AVRO, 422, 42206),
        ("POST", "/topics/TOPIC", {"records": [{"value": 1, "else": 1}]}, JSON_RECORDS, 422, 422),
        ("POST", "/topics/TOPIC", {}, JSON_RECORDS, 422, 422),
        ("POST", "/topics/TOPIC", b"{", JSON_RECORDS, 400, 400),
        ("POST", "/topics/TOPIC", {"records": [{"value": "?"}]}, BINARY_RECORDS, 422, 422),
        ("POST", "/topics/TOPIC", {"records": [{"value": 1}]}, TEXT_RECORDS, 422, 422),
        ("POST", "/consumers/g", {"format": "avro"}, CONTROL, 422, 42204),
        ("POST", "/consumers/g", {"fetch.min.bytes": -10}, CONTROL, 422, 42204),
        ("POST", "/consumers/g", {"consumer.request.timeout.ms": "0"}, CONTROL, 422, 42204),
        ("POST", "/consumers/g", {"enable.auto.commit": True}, CONTROL, 422, 42204),
        ("POST", "/consumers/g", {"auto.commit.enable": "yes"}, CONTROL, 422, 42204),
        ("POST", "/consumers/g", b"", {"Content-Type": "text/plain"}, 200, None),
        ("POST", "/consumers/g", b"{}", {"Content-Type": "text/plain"}, 415, 415),
        ("GET", "/consumers/g/instances/nobody/records", None, {}, 404, 40403),
        ("GET", "/consumers/g/instances/nobody/offsets", None, {}, 404, 40403),
        ("GET", "/consumers/g/instances/nobody/assignments", None, {}, 404, 40403),
        ("DELETE", "/consumers/g/instances/nobody", None, {}, 404, 40403),
        ("POST", "/consumers/g/instances/nobody/subscription", {"topics": ["TOPIC"]}, CONTROL, 404, 40403),
        ("POST", "CONSUMER/subscription", {"topics": ["TOPIC"], "topic_pattern": "x"}, CONTROL, 409, 40903),
        ("POST", "CONSUMER/subscription", {}, CONTROL, 422, 422),
        ("POST", "CONSUMER/positions", PLACE, CONTROL, 409, 40903),
        ("POST", "CONSUMER/positions/end", {"partitions": [{"topic": "TOPIC", "partition": 0}]}, CONTROL, 409, 40903),
        ("POST", "CONSUMER/offsets", PLACE, CONTROL, 409, 40903),
        ("POST", "CONSUMER/assignments", {"partitions": [{"topic": "TOPIC", "partition": 9}]}, CONTROL, 404, 40402),
        ("GET", "CONSUMER/records", None, {}, 409, 40903),
        ("GET", "CONSUMER/records", None, {"Accept": "application/vnd.kafka.binary.v2+json"}, 406, 40601),
    ],
)  # fmt: skip
async def test_a_refusal_has_its_number(
    gateway: Gateway, topic_of_one: str, refused: tuple[str, str, Any, dict[str, str], int, int | None]
) -> None:
    method, path, body, headers, status, number = refused
    async with aiohttp.ClientSession(gateway.url) as session:
        way = Way(session, "/v2")
        topic = topic_of_one
        if path.startswith("CONSUMER"):
            path = path.replace("CONSUMER", await created(way))
        filled = json.loads(json.dumps(body).replace("TOPIC", topic)) if isinstance(body, dict) else body
        gave, answer = await way.ask(
            method, path.replace("TOPIC", topic).replace("NONE", "no such topic"), filled, headers
        )
        assert gave == status
        if number is not None:
            assert answer["error_code"] == number
            assert answer["message"]


async def test_a_missing_topic_has_karapaces_error(bootstrap: str) -> None:
    topic = f"t-{uuid.uuid4().hex[:12]}"
    async with running_gateway(bootstrap, create=False) as gateway, aiohttp.ClientSession(gateway.url) as session:
        way = Way(session, "/v2")
        said = (404, {"error_code": 40401, "message": f"Topic {topic} not found"})
        assert await way.ask("GET", f"/topics/{topic}") == said
        assert await way.ask("POST", f"/topics/{topic}", {"records": [{"value": 1}]}, JSON_RECORDS) == said


async def test_refusals_of_consumers_are_in_confluents_words(way: Way) -> None:
    status, body = await way.ask("GET", "/consumers/g/instances/nobody/records")
    assert (status, body) == (404, {"error_code": 40403, "message": "Consumer instance not found."})
    path = await created(way)
    _, _, group, _, name = path.split("/")
    status, body = await way.ask("POST", f"/consumers/{group}", {"name": name})
    taken = "Consumer with specified consumer ID already exists in the specified consumer group."
    assert (status, body) == (409, {"error_code": 40902, "message": taken})


async def test_a_consumers_name_is_unique(way: Way) -> None:
    path = await created(way)
    _, _, group, _, name = path.split("/")
    status, body = await way.ask("POST", f"/consumers/{group}", {"name": name})
    assert (status, body["error_code"]) == (409, 40902)
    assert (await way.ask("DELETE", path))[0] == 204
    assert (await way.ask("POST", f"/consumers/{group}", {"name": name}))[0] == 200


async def test_a_consumer_is_assigned_polled_committed_and_sought(way: Way, new_topic: NewTopic) -> None:
    topic = await new_topic(2)
    await way.ask(
        "POST", f"/topics/{topic}/partitions/1", {"records": [{"key": "k", "value": n} for n in range(3)]}, JSON_RECORDS
    )
    path = await created(way)
    assert await way.ask("GET", f"{path}/assignments", headers=JSON_RECORDS) == (200, {"partitions": []})
    assert (await way.ask("POST", f"{path}/assignments", places(topic, 0, 1), JSON_RECORDS))[0] == 204
    assert await way.ask("GET", f"{path}/assignments") == (200, places(topic, 0, 1))

    status, records = await way.ask("GET", f"{path}/records?timeout=20000&max_bytes=-1")
    assert status == 200
    assert [record["value"] for record in records] == [0, 1, 2]
    assert records[0].keys() == {"topic", "key", "value", "partition", "offset", "timestamp"}  # no headers

    # The offset in a commit is that of the last record: Kafka gets the next one.
    done = {"offsets": [{"topic": topic, "partition": 1, "offset": 0, "metadata": None}]}
    assert (await way.ask("POST", f"{path}/offsets", done, JSON_RECORDS))[0] == 200
    committed = {"topic": topic, "partition": 1, "offset": 1, "metadata": ""}
    assert await way.ask("GET", f"{path}/offsets", places(topic, 0, 1)) == (200, {"offsets": [committed]})
    assert await way.ask("GET", f"{path}/offsets") == (200, {"offsets": [committed]})
    assert (await way.ask("POST", f"{path}/offsets"))[0] == 200  # all that was delivered
    status, body = await way.ask("GET", f"{path}/offsets", places(topic, 1))
    assert body["offsets"][0]["offset"] == 3
    assert (await way.ask("POST", f"{path}/offsets", done, JSON_RECORDS))[0] == 200
    assert (await way.ask("POST", f"{path}/offsets", {}, JSON_RECORDS))[0] == 200  # the same, as Karapace's clients do
    status, body = await way.ask("GET", f"{path}/offsets", places(topic, 1))
    assert body["offsets"][0]["offset"] == 3

    assert (await way.ask("POST", f"{path}/positions/beginning", places(topic, 1)))[0] == 204
    assert [record["value"] for record in (await way.ask("GET", f"{path}/records"))[1]] == [0, 1, 2]
    place = {"offsets": [{"topic": topic, "partition": 1, "offset": 2, "metadata": None}]}
    assert (await way.ask("POST", f"{path}/positions", place))[0] == 204
    assert [record["value"] for record in (await way.ask("GET", f"{path}/records"))[1]] == [2]
    assert (await way.ask("DELETE", f"{path}/"))[0] == 204


async def test_a_seek_by_time_finds_the_first_record_that_is_not_older(way: Way, new_topic: NewTopic) -> None:
    topic = await new_topic(1)
    records = [{"value": n, "timestamp": 1_700_000_000_000 + n} for n in range(3)]
    await way.ask("POST", f"/topics/{topic}", {"records": records}, JSON_RECORDS)
    path = await created(way)
    await way.ask("POST", f"{path}/assignments", places(topic, 0))

    async def sought(time: str) -> int:
        wanted = {"timestamps": [{"topic": topic, "partition": 0, "timestamp": time}]}
        return (await way.ask("POST", f"{path}/positions", wanted))[0]

    assert await sought("2023-11-14T22:13:20.001Z") == 204
    assert [record["value"] for record in (await way.ask("GET", f"{path}/records"))[1]] == [1, 2]
    assert await sought("2099-01-01T00:00:00+01:00") == 204  # no record is as new: the end
    assert (await way.ask("GET", f"{path}/records?timeout=0"))[1] == []
    assert await sought("2023-11-14T22:13:20") == 422
    assert await sought("yesterday") == 422


async def test_a_partition_is_looked_up_once_however_many_times_are_sought(
    way: Way, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await new_topic(1)
    path = await created(way)
    await way.ask("POST", f"{path}/assignments", places(topic, 0))
    asked: list[int] = []
    since = Lookup.since

    async def counted(self: Lookup, partitions: Any, timestamp: int, **options: bool) -> dict[TopicPartition, int]:
        asked.append(timestamp)
        return await since(self, partitions, timestamp, **options)

    monkeypatch.setattr(Lookup, "since", counted)
    times = [f"2023-11-14T22:13:{second}Z" for second in range(20, 60)]
    wanted = {"timestamps": [{"topic": topic, "partition": 0, "timestamp": time} for time in times]}
    assert (await way.ask("POST", f"{path}/positions", wanted))[0] == 204
    assert asked == [1_700_000_039_000]


async def test_a_subscription_shows_its_topics(way: Way, new_topic: NewTopic) -> None:
    topic = await new_topic(1)
    taken = {"topic.metadata.refresh.interval.ms": "100"}
    path = await created(way, **{"consumer.request.timeout.ms": "20000", "fetch.min.bytes": "-1", **taken})
    assert await way.ask("GET", f"{path}/subscription") == (200, {"topics": []})
    assert (await way.ask("POST", f"{path}/subscription", {"topics": [topic]}, BINARY_RECORDS))[0] == 204
    assert await way.ask("GET", f"{path}/subscription") == (200, {"topics": [topic]})
    status, body = await way.ask("POST", f"{path}/assignments", places(topic, 0))
    assert (status, body["error_code"]) == (409, 40903)
    assert body["message"].startswith("IllegalStateError: You must choose only one way to configure your consumer: ")
    await way.ask("POST", f"/topics/{topic}", {"records": [{"value": 1}]}, JSON_RECORDS)
    # The poll has no timeout: the consumer's setting is used.
    assert [record["value"] for record in (await way.ask("GET", f"{path}/records"))[1]] == [1]
    assert (await way.ask("DELETE", f"{path}/subscription"))[0] == 204
    assert await way.ask("GET", f"{path}/subscription") == (200, {"topics": []})


async def test_topics_and_brokers_are_shown(way: Way, new_topic: NewTopic) -> None:
    topic = await new_topic(2)
    status, shown = await way.ask("GET", f"/topics/{topic}")
    assert (status, shown["name"], len(shown["partitions"])) == (200, topic, 2)
    assert (await way.ask("GET", f"/topics/{topic}/partitions/1"))[1] == shown["partitions"][1]
    assert (await way.ask("GET", f"/topics/{topic}/partitions"))[1] == shown["partitions"]
    assert (await way.ask("GET", f"/topics/{topic}/partitions/0/offsets"))[1]["end_offset"] == 0
    assert topic in (await way.ask("GET", "/topics"))[1]
    status, brokers = await way.ask("GET", "/brokers")
    assert status == 200
    assert shown["partitions"][0]["leader"] in brokers["brokers"]


async def test_the_setting_leaves_other_operations_where_they_are(told: Gateway, topic_of_one: str) -> None:
    topic = topic_of_one
    async with aiohttp.ClientSession(told.url) as session:
        way = Way(session, "")
        assert (await way.ask("GET", f"/topics/{topic}/records"))[0] == 200
        assert (await way.ask("GET", f"/v2/topics/{topic}/"))[0] == 200
        assert (await way.ask("GET", f"/v2/v2/topics/{topic}"))[0] == 404
        status, body = await way.ask("PUT", f"/topics/{topic}")
        assert (status, body["error_code"]) == (405, 405)
