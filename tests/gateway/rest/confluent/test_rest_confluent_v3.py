"""Confluent's REST API version 3: streamed produce requests and their reports, batches, clusters and topics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from gateway.rest.confluent.v3 import RecordStream
from tests.gateway.rest.conftest import Gateway, read_topic, running_gateway
from tests.support.waiting import wait_until

JSON = {"Content-Type": "application/json"}
NewTopic = Callable[..., Any]
NO_REGISTRY = "Error: 42206 : Payload error. Schema Registry must be configured when using schemas."


def documents(body: bytes) -> list[Any]:
    """Concatenated JSON documents."""
    decoder, text, place = json.JSONDecoder(), body.decode().rstrip(), 0
    found = []
    while place < len(text):
        while text[place].isspace():
            place += 1
        document, place = decoder.raw_decode(text, place)
        found.append(document)
    return found


async def cluster_of(session: aiohttp.ClientSession) -> str:
    async with session.get("/v3/clusters") as response:
        assert response.status == 200
        return str((await response.json())["data"][0]["cluster_id"])


async def produced(session: aiohttp.ClientSession, topic: str, body: bytes) -> list[Any]:
    path = f"/v3/clusters/{await cluster_of(session)}/topics/{topic}/records"
    async with session.post(path, data=body, headers=JSON) as response:
        assert response.status == 200
        assert response.content_type == "application/json"
        return documents(await response.read())


async def test_records_of_each_type_are_stored_and_reported(
    http: aiohttp.ClientSession, new_topic: NewTopic, bootstrap: str
) -> None:
    topic = await new_topic(1)
    records = [
        {
            "key": {"type": "STRING", "data": "k"},
            "value": {"type": "JSON", "data": {"n": 1.10}},
            "headers": [{"name": "h", "value": "/w=="}, {"name": "h"}],
            "timestamp": "2023-11-14T22:13:20.001Z",
        },
        {"key": {"type": "binary", "data": "AAE="}, "value": {"type": "STRING", "data": "ü"}, "partition_id": 0},
        {"key": {"type": "JSON", "data": "k"}, "value": {"type": "BINARY", "data": None}},
        {"key": {"type": "STRING", "data": "gone"}},
        {"value": None},
    ]
    # No separators, white space, line ends: documents end where they end.
    body = b"".join(json.dumps(record).encode() + b" \n"[: index % 3] for index, record in enumerate(records))
    reports = await produced(http, topic, body)
    assert [report["offset"] for report in reports] == [0, 1, 2, 3, 4]
    cluster = await cluster_of(http)
    assert reports[0] == {
        "error_code": 200,
        "cluster_id": cluster,
        "topic_name": topic,
        "partition_id": 0,
        "offset": 0,
        "timestamp": "2023-11-14T22:13:20.001000Z",
        "key": {"type": "STRING", "size": 1},
        "value": {"type": "JSON", "size": 9},
    }
    assert reports[1]["key"] == {"type": "BINARY", "size": 2}
    assert reports[2]["value"] == {"type": "BINARY", "size": 0}
    assert reports[4].keys() == reports[0].keys() - {"key", "value"}
    stored = await read_topic(bootstrap, topic, 5)
    assert [(one.key, one.value) for one in stored] == [
        (b"k", b'{"n":1.1}'), (b"\x00\x01", "ü".encode()), (b'"k"', None), (b"gone", None), (None, None),
    ]  # fmt: skip
    assert stored[0].headers[:2] == (("h", b"\xff"), ("h", None))
    assert dict(stored[1].headers)["content-type"] == b"text/plain"
    assert stored[0].timestamp == 1_700_000_000_001


async def test_a_record_that_cannot_be_stored_costs_only_itself(
    http: aiohttp.ClientSession, new_topic: NewTopic
) -> None:
    topic = await new_topic(1)
    good = {"value": {"type": "STRING", "data": "x"}}
    rows: list[tuple[Any, int]] = [
        (good, 200),
        ({"value": {"type": "AVRO", "data": 1}}, 422),
        ({"value": {"type": "JSON", "data": 1, "schema_id": 7}}, 422),
        ({"value": {"subject": "s", "data": 1}}, 422),
        ({"value": {"type": "XML", "data": "x"}}, 400),
        ({"value": {"data": "x"}}, 400),
        (good, 200),
        ({"value": {"type": "STRING", "data": "x", "schema_id": None}}, 200),
        ({"value": {"type": "BINARY", "data": "?"}}, 422),
        ({"value": {"type": "STRING", "data": 1}}, 422),
        ({"else": 1}, 400),
        ([], 400),
        ({"partition_id": -1}, 422),
        ({"partition_id": 9}, 404),
        ({"timestamp": "2023-11-14T22:13:20"}, 400),
        ({"timestamp": "1969-01-01T00:00:00Z"}, 422),
        (good, 200),
    ]
    reports = await produced(http, topic, b"".join(json.dumps(record).encode() for record, _ in rows))
    assert [report["error_code"] for report in reports] == [status for _, status in rows]
    assert all(report["message"] for report in reports if report["error_code"] != 200)
    assert [report["message"] for report in reports[1:4]] == [NO_REGISTRY] * 3
    assert [reports[place]["offset"] for place in (0, 6, 7, 16)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("end", "status"),
    [(b"no json", 400), (b'{"value":', 400), (b'{"value":{"type":"STRING","data":"' + b"x" * 2048, 413)],
)
async def test_malformed_json_ends_the_stream(bootstrap: str, new_topic: NewTopic, end: bytes, status: int) -> None:
    topic = await new_topic(1)
    async with (
        running_gateway(bootstrap, http={"max_line_bytes": 1024}) as small,
        aiohttp.ClientSession(small.url) as session,
    ):
        reports = await produced(session, topic, b'{"value":{"type":"STRING","data":"a"}}' + end)
        assert [report["error_code"] for report in reports] == [200, status]


async def test_reports_come_while_the_request_is_being_sent(http: aiohttp.ClientSession, new_topic: NewTopic) -> None:
    topic = await new_topic(1)
    sent: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def body() -> AsyncIterator[bytes]:
        while (part := await sent.get()) is not None:
            yield part

    path = f"/v3/clusters/{await cluster_of(http)}/topics/{topic}/records"
    document = b'{"value":{"type":"STRING","data":"x"}}'
    sent.put_nowait(document[:9])  # aiohttp's client sends the request's head with the first part
    async with asyncio.timeout(60), http.post(path, data=body(), headers=JSON) as response:
        for number in range(3):
            sent.put_nowait(document[9:])
            sent.put_nowait(document[:9])
            report = json.loads(await response.content.readuntil(b"}\r\n"))
            assert (report["error_code"], report["offset"]) == (200, number)
        sent.put_nowait(document[9:])
        sent.put_nowait(None)
        assert json.loads(await response.content.read())["offset"] == 3


async def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(
    gateway: Gateway, http: aiohttp.ClientSession, new_topic: NewTopic, bootstrap: str
) -> None:
    topic = await new_topic(1)
    path = f"/v3/clusters/{await cluster_of(http)}/topics/{topic}/records"
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    document = b'{"value":{"type":"STRING","data":"a"}}'
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head.encode() + b"%x\r\n%s\r\n" % (len(document) + 5, document + b'{"val'))
    async with asyncio.timeout(60):
        await reader.readuntil(b'"offset":0')
    before = gateway.counts("uploads")
    assert before.active >= 1
    writer.transport.abort()
    await wait_until(lambda: gateway.counts("uploads").active == before.active - 1)
    assert gateway.counts("uploads").records_total == before.records_total + 1
    assert len(await read_topic(bootstrap, topic, 1)) == 1
    assert [report["offset"] for report in await produced(http, topic, document)] == [1]


async def test_ten_thousand_records_are_reported_in_order(http: aiohttp.ClientSession, new_topic: NewTopic) -> None:
    topic = await new_topic(3)
    body = b"".join(b'{"key":{"type":"STRING","data":"%d"}}' % number for number in range(10_000))
    reports = await produced(http, topic, body)
    assert [report["key"]["size"] for report in reports] == [len(str(number)) for number in range(10_000)]
    assert {report["partition_id"] for report in reports} == {0, 1, 2}
    last = dict.fromkeys(range(3), -1)
    for report in reports:
        assert report["offset"] == last[report["partition_id"]] + 1
        last[report["partition_id"]] += 1


@pytest.mark.parametrize(
    "refused",
    [
        ("other", "TOPIC", "application/json", 404, 404),
        ("CLUSTER", "no such topic", "application/json", 404, 40401),
        ("CLUSTER", "__consumer_offsets", "application/json", 403, 40301),
        ("CLUSTER", "TOPIC", "text/plain", 415, 415),
    ],
)
@pytest.mark.parametrize("batch", ["", ":batch"])
async def test_a_request_is_refused_before_its_body(
    http: aiohttp.ClientSession, new_topic: NewTopic, batch: str, refused: tuple[str, str, str, int, int]
) -> None:
    cluster, topic, media, status, number = refused
    names = {"CLUSTER": await cluster_of(http), "TOPIC": await new_topic(1) if topic == "TOPIC" else topic}
    path = f"/v3/clusters/{names.get(cluster, cluster)}/topics/{names.get(topic, topic)}/records{batch}"
    async with http.post(path, data=b"{}", headers={"Content-Type": media}) as response:
        assert response.status == status
        assert response.content_type == "application/json"
        assert (await response.json())["error_code"] == number


async def test_a_batch_lists_stored_and_failed_records(http: aiohttp.ClientSession, new_topic: NewTopic) -> None:
    topic = await new_topic(1)
    path = f"/v3/clusters/{await cluster_of(http)}/topics/{topic}/records:batch"

    async def batch(entries: list[Any]) -> tuple[int, Any]:
        async with http.post(path, json={"entries": entries}) as response:
            return response.status, await response.json()

    value = {"type": "STRING", "data": "x"}
    status, body = await batch(
        [{"id": "a", "value": value}, {"id": "b", "value": {"type": "AVRO"}}, {"id": "c", "value": value}]
    )
    assert status == 207
    assert [(one["id"], one["offset"]) for one in body["successes"]] == [("a", 0), ("c", 1)]
    assert body["failures"] == [{"id": "b", "error_code": 422, "message": NO_REGISTRY}]
    for entries in ([], [{"id": str(number)} for number in range(11)]):
        assert (await batch(entries))[0] == 422
    status, body = await batch([{"id": "a"}, {"id": "a"}])
    assert (status, body["error_code"]) == (422, 42208)
    assert (await batch([{}]))[0] == 422


async def test_clusters_and_topics_are_shown(
    http: aiohttp.ClientSession, gateway: Gateway, new_topic: NewTopic
) -> None:
    topic = await new_topic(2)
    cluster = await cluster_of(http)
    base = f"{gateway.url}/v3/clusters/{cluster}"

    async def get(path: str) -> Any:
        async with http.get(path) as response:
            assert response.status == 200
            return await response.json()

    assert (await get(base))["topics"]["related"] == f"{base}/topics"
    shown = await get(f"{base}/topics/{topic}")
    assert shown["metadata"]["self"] == f"{base}/topics/{topic}"
    assert (shown["topic_name"], shown["partitions_count"], shown["replication_factor"]) == (topic, 2, 1)
    assert shown in (await get(f"{base}/topics"))["data"]
    assert (await get("/v3/clusters"))["metadata"] == {"self": f"{gateway.url}/v3/clusters", "next": None}
    async with http.get(f"{base}/topics/nothing") as response:
        assert response.status == 404
        assert (await response.json())["error_code"] == 40401


async def test_a_fault_of_ours_in_the_middle_of_a_stream_ends_the_connection(
    http: aiohttp.ClientSession, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await new_topic(1)
    path = f"/v3/clusters/{await cluster_of(http)}/topics/{topic}/records"

    def broken(_stream: RecordStream, _part: bytes | None) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RecordStream, "feed", broken)
    with pytest.raises(aiohttp.ClientError):
        async with asyncio.timeout(60), http.post(path, data=b"{}", headers=JSON) as response:
            await response.read()
