"""Bodies and answers in content codings, over real sockets."""

import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from backports import zstd

from protocols.rest.media import preferred_coding
from tests.gateway.rest.conftest import JSON_RECORDS, Gateway, ask, raw_exchange, read_topic, running_gateway

CODED: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress}


@pytest.mark.parametrize("coding", CODED)
async def test_bodies_are_decompressed(
    http: aiohttp.ClientSession, new_topic: Any, bootstrap: str, coding: str
) -> None:
    topic = await new_topic(partitions=1)
    body = json.dumps({"records": [{"value": "x" * 100_000}]}).encode()
    headers = {**JSON_RECORDS, "Content-Encoding": coding}
    assert (await ask(http, "POST", f"/topics/{topic}", CODED[coding](body), headers=headers))[0] == 200
    lines = {"Content-Type": "application/x-ndjson", "Content-Encoding": coding}
    body = b"".join(b'{"value":%d}\n' % number for number in range(20_000))
    async with http.post(f"/topics/{topic}/records", data=CODED[coding](body), headers=lines) as answer:
        reports = (await answer.read()).splitlines()
    assert (len(reports), json.loads(reports[-1])) == (20_000, {"partition": 0, "offset": 20_000})
    assert len((await read_topic(bootstrap, topic, 1))[0].value or b"") == 100_002


@pytest.mark.parametrize("coding", CODED)
async def test_a_small_body_that_becomes_too_large_is_refused(bootstrap: str, new_topic: Any, coding: str) -> None:
    topic = await new_topic(partitions=1)
    bomb = CODED[coding](b" " * 50_000_000)
    async with (
        running_gateway(bootstrap, http={"max_body_bytes": 1 << 20}) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        headers = {**JSON_RECORDS, "Content-Encoding": coding}
        assert (await ask(http, "POST", f"/topics/{topic}", bomb, headers=headers))[0] == 413
        assert gateway.listener.statistics().produce.uploading_bytes == 0


@pytest.mark.parametrize(
    ("coding", "status"), [("br", {415}), ("rot13", {415}), ("gzip, gzip", {415}), ("gzip", {400}), ("zstd", {400})]
)
async def test_bodies_that_cannot_be_decompressed(
    gateway: Gateway, new_topic: Any, coding: str, status: set[int]
) -> None:
    topic = await new_topic(partitions=1)
    answer = await raw_exchange(
        gateway.listener.bound,
        f"POST /topics/{topic} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Encoding: {coding}\r\nContent-Length: 13\r\n\r\nno such thing".encode(),
    )
    assert int(answer.split(b" ", 2)[1]) in status
    assert b'"error_code"' in answer


@pytest.mark.parametrize("coding", CODED)
async def test_large_answers_are_compressed_for_clients_that_accept_it(
    gateway: Gateway, new_topic: Any, coding: str
) -> None:
    topic = await new_topic(partitions=1)
    async with aiohttp.ClientSession(gateway.url, headers={"Accept-Encoding": coding}) as http:
        records = {"records": [{"value": "x" * 1000}] * 200}
        assert (await ask(http, "POST", f"/topics/{topic}", records, headers=JSON_RECORDS))[0] == 200
        path = f"/topics/{topic}/records?partition=0&limit=100"
        async with http.get(path) as page:
            assert page.headers["Content-Encoding"] == coding
            assert "Accept-Encoding" in page.headers.getall("Vary")
            assert int(page.headers["Content-Length"]) < 10_000
            assert [record["offset"] for record in await page.json(content_type=None)] == list(range(100))
            tag = page.headers["ETag"]
            assert tag.startswith('W/"')
        async with http.get(path, headers={"If-None-Match": tag}) as page:
            assert page.status == 304
        async with http.get(f"/topics/{topic}") as small:
            assert "Content-Encoding" not in small.headers


@pytest.mark.parametrize(
    ("field", "chosen"),
    [
        (None, None),
        ("", None),
        ("gzip, deflate", "gzip"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("deflate;q=0.9, gzip;q=0.5", "deflate"),
        ("zstd;q=0, *", "gzip"),
        ("x-gzip", "gzip"),
        ("br", None),
        ("identity, gzip;q=0.5", None),
        ("GZIP;q=1.0", "gzip"),
    ],
)
def test_the_coding_that_is_preferred(field: str | None, chosen: str | None) -> None:
    assert preferred_coding(field, ("zstd", "gzip", "deflate")) == chosen
