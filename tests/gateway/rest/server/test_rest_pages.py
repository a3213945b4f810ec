"""Web pages and an anonymous gateway: what a browser would send on behalf of one, over real sockets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.settings.config import SecurityConfig
from tests.gateway.rest.conftest import JSON_RECORDS, Gateway, ask, raw_exchange, running_gateway

RECORD = b'{"records":[{"value":1}]}'
EVIL = "https://evil.example"
PAGES: dict[str, Mapping[str, str]] = {
    "another site": {"Origin": EVIL},
    "a sandbox or a file": {"Origin": "null"},
    "an origin that says nothing": {"Origin": ""},
    "a name that was pointed here": {"Host": "evil.example", "Origin": "http://evil.example"},
    "that name without an origin": {"Host": "evil.example:8080", "Sec-Fetch-Site": "same-origin"},
    "an image or a script": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    "a sibling": {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    "a window that is opened": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
}
CLIENTS: dict[str, Mapping[str, str]] = {
    "curl": {},
    "behind a proxy": {"X-Forwarded-Host": "public.example", "Forwarded": "host=public.example", "Host": "bridge:8080"},
    "in a cluster": {"Host": "bridge.kafka.svc.cluster.local:8080"},
    "a page of this machine": {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"},
    "our own page": {"Host": "192.0.2.1:8080", "Origin": "http://192.0.2.1:8080", "Sec-Fetch-Site": "same-origin"},
    "the user": {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
}


async def end_of(gateway: Gateway, topic: str) -> int:
    async with aiohttp.ClientSession(gateway.url) as http:
        return int((await ask(http, "GET", f"/topics/{topic}/partitions/0/offsets"))[1]["end_offset"])


@pytest.mark.part("device requests")
@pytest.mark.parametrize("page", PAGES)
async def test_a_page_of_another_site_publishes_and_reads_nothing(gateway: Gateway, new_topic: Any, page: str) -> None:
    topic = await new_topic(partitions=1)
    async with aiohttp.ClientSession(gateway.url, headers=PAGES[page]) as http:
        for method, path, media, body in (
            ("POST", f"/requests/{topic}%2Fa?timeout=50", "text/plain", b"what a form can send"),
            ("POST", f"/topics/{topic}", "application/vnd.kafka.json.v2+json", RECORD),
            ("POST", f"/topics/{topic}/events", "text/plain", b"x"),
            ("POST", f"/topics/{topic}/records", "application/x-ndjson", b'{"value":1}\n'),
            ("POST", "/consumers/g", "application/vnd.kafka.v2+json", b"{}"),
            ("GET", f"/topics/{topic}/records", "", b""),
            ("GET", f"/topics/{topic}/stream?group=g", "", b""),
            ("GET", "/topics", "", b""),
            ("HEAD", "/topics", "", b""),
        ):
            headers = {"Content-Type": media} if media else {}
            async with http.request(method, path, data=body or None, headers=headers) as answer:
                assert (method, path, answer.status) == (method, path, 421 if "Host" in PAGES[page] else 403)
                assert "Access-Control-Allow-Origin" not in answer.headers
    assert await end_of(gateway, topic) == 0


@pytest.mark.parametrize("client", CLIENTS)
async def test_everybody_else_is_served(gateway: Gateway, new_topic: Any, client: str) -> None:
    topic = await new_topic(partitions=1)
    headers = {**CLIENTS[client], **JSON_RECORDS}
    async with aiohttp.ClientSession(gateway.url, headers=headers) as http:
        assert (await ask(http, "POST", f"/topics/{topic}", RECORD))[0] == 200
        assert (await ask(http, "GET", "/topics"))[0] == 200


async def test_what_is_configured_is_ours(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    security = SecurityConfig(hosts=("public.example",), origins=("https://app.example",))
    async with running_gateway(bootstrap, security=security) as gateway, aiohttp.ClientSession(gateway.url) as http:
        for fields, status in (
            ({"Host": "public.example"}, 200),
            ({"Host": "public.example", "Origin": "https://public.example"}, 200),
            ({"Host": "public.example", "Origin": "https://app.example"}, 200),
            ({"Origin": "https://app.example"}, 200),
            ({"Host": "public.example", "Origin": EVIL}, 403),
            ({"Host": "public.example.evil.example"}, 421),
        ):
            headers = {**JSON_RECORDS, **fields}
            assert (await ask(http, "POST", f"/topics/{topic}", RECORD, headers=headers))[0] == status, fields


async def test_a_password_that_a_browser_remembers_does_not_let_a_page_in(bootstrap: str, tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    path.write_text(f"ann:{Argon2Hasher(time_cost=1, memory_cost=64, parallelism=1).hash('secret')}\n")
    security = SecurityConfig(allow_anonymous=False, password_file=path)
    login = {"Authorization": aiohttp.encode_basic_auth("ann", "secret")}
    async with running_gateway(bootstrap, security=security) as gateway, aiohttp.ClientSession(gateway.url) as http:
        for fields, status in (
            ({"Host": "any.name.example"}, 200),
            ({"Host": "any.name.example", "Origin": "https://any.name.example"}, 200),
            ({"Origin": EVIL}, 403),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
        ):
            assert (await ask(http, "GET", "/topics", headers={**login, **fields}))[0] == status, fields


async def test_the_absolute_form_overrides_the_host_field(gateway: Gateway) -> None:
    for target, host, status in (
        (b"http://evil.example/topics", b"localhost", b"421"),
        (b"http://localhost/topics", b"evil.example", b"200"),
    ):
        request = b"GET %b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % (target, host)
        assert (await raw_exchange(gateway.listener.bound, request)).split()[1] == status
