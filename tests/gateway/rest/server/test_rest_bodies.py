"""Truncated and damaged bodies, in every coding and for every operation that reads one, over real sockets."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from backports import zstd

from tests.gateway.rest.conftest import Gateway, raw_exchange, read_topic, running_gateway
from tests.support.waiting import wait_until

Body = Callable[[bytes], bytes]
CODED: dict[str, Body] = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress}
RECORD = b'{"records":[{"value":1}]}'
OPERATIONS = {
    "produce": ("/topics/T", "application/vnd.kafka.json.v2+json", RECORD),
    "produce to a partition": ("/topics/T/partitions/0", "application/vnd.kafka.json.v2+json", RECORD),
    "event": (
        "/topics/T/events",
        "application/cloudevents+json",
        b'{"specversion":"1.0","id":"1","source":"s","type":"t"}',
    ),
    "binary event": ("/topics/T/events", "text/plain", b"anything"),
    "request": ("/requests/T%2Fa?timeout=100", "text/plain", b"anything"),
    "consumer": ("/consumers/G", "application/vnd.kafka.v2+json", b'{"name":"one"}'),
    "topic": ("/admin/topics", "application/json", b'{"topic_name":"T-new"}'),
    "v2 produce": ("/v2/topics/T", "application/vnd.kafka.json.v2+json", RECORD),
    "v2 consumer": ("/v2/consumers/G", "application/vnd.kafka.v2+json", b'{"name":"two"}'),
    "v3 batch": (
        "/v3/clusters/C/topics/T/records:batch",
        "application/json",
        b'{"entries":[{"id":"1","value":{"type":"JSON","data":1}}]}',
    ),
}


async def post(gateway: Gateway, path: str, media: str, coding: str, body: bytes, *, chunked: bool) -> tuple[int, Any]:
    """Status and JSON body of one request."""
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    sent = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n" if chunked else body
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{framing}\r\n"
    fields = f"Content-Type: {media}\r\nContent-Encoding: {coding}\r\nce-id: 1\r\nce-source: s\r\nce-type: t\r\n"
    answer = await raw_exchange(gateway.listener.bound, f"{head}{fields}ce-specversion: 1.0\r\n\r\n".encode() + sent)
    head_bytes, _, content = answer.partition(b"\r\n\r\n")
    return int(head_bytes.split()[1]), content


@pytest.mark.part("confluent")
@pytest.mark.parametrize("coding", CODED)
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_body_that_breaks_off_in_its_coding_is_refused(
    gateway: Gateway, new_topic: Any, coding: str, operation: str
) -> None:
    topic = await new_topic(partitions=1)
    path, media, body = OPERATIONS[operation]
    path = path.replace("/T", f"/{topic}").replace("/G", f"/{topic}").replace("/C/", f"/{await cluster(gateway)}/")
    body = body.replace(b"T-new", f"{topic}-new".encode())
    whole = CODED[coding](body)
    answers = await asyncio.gather(
        *(
            post(gateway, path, media, coding, broken, chunked=chunked)
            for broken in (whole[:-1], whole[: len(whole) // 2], whole + b"x")
            for chunked in (False, True)
        )
    )
    assert [(status, coding in str(content)) for status, content in answers] == [(400, True)] * 6
    async with aiohttp.ClientSession(gateway.url) as http:
        async with http.get(f"/topics/{topic}/partitions/0/offsets") as offsets:
            assert (await offsets.json(content_type=None))["end_offset"] == 0
        async with http.get(f"/topics/{topic}-new") as made:
            assert made.status == 404
    status, content = await post(gateway, path, media, coding, whole, chunked=True)
    assert status not in {400, 408, 413, 415, 500}, content


@pytest.mark.parametrize("coding", CODED)
async def test_a_body_cut_at_any_byte_stores_nothing(
    gateway: Gateway, new_topic: Any, bootstrap: str, coding: str
) -> None:
    topic = await new_topic(partitions=1)
    whole = CODED[coding](RECORD)
    answers = await asyncio.gather(
        *(
            post(gateway, f"/topics/{topic}", "application/vnd.kafka.json.v2+json", coding, whole[:end], chunked=True)
            for end in range(len(whole))
        )
    )
    assert {status for status, _ in answers} == {400}
    await post(gateway, f"/topics/{topic}", "application/vnd.kafka.json.v2+json", coding, whole, chunked=False)
    assert [record.offset for record in await read_topic(bootstrap, topic, 1)] == [0]


@pytest.mark.part("confluent")
@pytest.mark.parametrize("coding", CODED)
async def test_a_large_body_that_is_cut_is_not_stored_in_part(gateway: Gateway, new_topic: Any, coding: str) -> None:
    """The bug was: 1,000,000 bytes became 493,823 in the topic, with 200."""
    topic = await new_topic(partitions=1)
    whole = CODED[coding](bytes(number * number % 251 for number in range(1_000_000)))
    status, _ = await post(
        gateway, f"/topics/{topic}/events", "text/plain", coding, whole[: len(whole) // 2], chunked=False
    )
    async with aiohttp.ClientSession(gateway.url) as http, http.get(f"/topics/{topic}/partitions/0/offsets") as offsets:
        assert (status, (await offsets.json(content_type=None))["end_offset"]) == (400, 0)


@pytest.mark.parametrize("coding", CODED)
async def test_a_truncated_upload_has_stored_the_records_that_it_reported(
    gateway: Gateway, new_topic: Any, bootstrap: str, coding: str
) -> None:
    topic = await new_topic(partitions=1)
    lines = b"".join(b'{"value":%d}\n' % number for number in range(50_000)) + b'{"value":"last"}'
    whole = CODED[coding](lines)
    status, content = await post(
        gateway, f"/topics/{topic}/records", "application/x-ndjson", coding, whole[:-3], chunked=False
    )
    *reports, end = unchunked(content).splitlines()
    told = [json.loads(report) for report in reports]
    assert (status, json.loads(end)["error_code"], json.loads(end)["ended"]) == (200, 400, True)
    assert [report["offset"] for report in told] == list(range(len(told)))
    async with aiohttp.ClientSession(gateway.url) as http, http.get(f"/topics/{topic}/partitions/0/offsets") as offsets:
        assert (await offsets.json(content_type=None))["end_offset"] == len(told) <= 50_000


@pytest.mark.part("confluent")
@pytest.mark.parametrize("coding", CODED)
async def test_a_truncated_stream_of_version_3_has_stored_the_records_that_it_reported(
    gateway: Gateway, new_topic: Any, coding: str
) -> None:
    topic = await new_topic(partitions=1)
    one = b'{"value":{"type":"JSON","data":1}}'
    path = f"/v3/clusters/{await cluster(gateway)}/topics/{topic}/records"
    whole = CODED[coding](one * 1000)
    status, content = await post(gateway, path, "application/json", coding, whole[:-3], chunked=False)
    *reports, end = unchunked(content).splitlines()
    assert (status, json.loads(end)["error_code"]) == (200, 400)
    assert [json.loads(report)["offset"] for report in reports] == list(range(len(reports)))
    async with aiohttp.ClientSession(gateway.url) as http, http.get(f"/topics/{topic}/partitions/0/offsets") as offsets:
        assert (await offsets.json(content_type=None))["end_offset"] == len(reports) <= 1000


async def cluster(gateway: Gateway) -> str:
    async with aiohttp.ClientSession(gateway.url) as http, http.get("/v3/clusters") as clusters:
        return (await clusters.json())["data"][0]["cluster_id"]


def unchunked(content: bytes) -> bytes:
    found = b""
    while content:
        size, _, content = content.partition(b"\r\n")
        found += content[: int(size, 16)]
        content = content[int(size, 16) + 2 :]
    return found


@pytest.fixture(scope="module")
async def impatient(bootstrap: str) -> AsyncIterator[Gateway]:
    """A gateway that waits for bodies half a second."""
    ready: asyncio.Queue[Gateway] = asyncio.Queue()
    over = asyncio.Event()

    async def serve() -> None:
        async with running_gateway(bootstrap, http={"header_timeout_s": 0.5, "max_body_bytes": 1 << 20}) as made:
            ready.put_nowait(made)
            await over.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(serve())
        yield await ready.get()
        over.set()


@pytest.mark.part("confluent")
@pytest.mark.parametrize("coding", [*CODED, "identity"])
async def test_no_body_is_waited_for_without_end(impatient: Gateway, coding: str) -> None:
    cluster_id = await cluster(impatient)

    async def stall(path: str, media: str, body: bytes, framing: str) -> bytes:
        part = CODED.get(coding, bytes)(body)[:8]
        sent = b"%x\r\n%b" % (50, part) if "chunked" in framing else part
        head = f"POST {path.replace('/C/', f'/{cluster_id}/')} HTTP/1.1\r\nHost: localhost\r\n{framing}\r\n"
        fields = f"Content-Type: {media}\r\nContent-Encoding: {coding}\r\n\r\n"
        return await raw_exchange(impatient.listener.bound, f"{head}{fields}".encode() + sent)

    framings = ("Content-Length: 100", "Transfer-Encoding: chunked")
    answers = await asyncio.gather(*(stall(*one, framing) for one in OPERATIONS.values() for framing in framings))
    assert {answer.split()[1] for answer in answers} == {b"408"}


@pytest.mark.parametrize("coding", CODED)
@pytest.mark.parametrize("chunked", [True, False])
async def test_a_bomb_gets_its_answer(impatient: Gateway, coding: str, chunked: bool) -> None:
    bomb = CODED[coding](bytes(200_000_000))
    status, content = await post(impatient, "/topics/t", "application/json", coding, bomb, chunked=chunked)
    assert (status, json.loads(content)["error_code"]) == (413, 413)


@pytest.mark.parametrize("broken", [b"zz\r\n", b"5\r\n123456789\r\n", b"5;a\nb\r\n", b"-1\r\n", b"\r\n"])
async def test_a_body_with_broken_framing_is_answered_immediately(
    gateway: Gateway, new_topic: Any, broken: bytes
) -> None:
    topic = await new_topic(partitions=1)
    head = f"POST /topics/{topic} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    start = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b'5\r\n{"rec\r\n'
    for together in (True, False):
        host, _, port = gateway.listener.bound.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.timeout(20):  # the time limit of a body is 30
                if together:
                    writer.write(start + broken)
                else:
                    before = gateway.listener.statistics().load.active
                    writer.write(start)
                    await asyncio.wait_for(_active(gateway, before + 1), 20)
                    writer.write(broken)
                assert (await reader.read()).split()[1] == b"400"
        finally:
            writer.close()


async def _active(gateway: Gateway, count: int) -> None:
    await wait_until(lambda: gateway.listener.statistics().load.active >= count)
