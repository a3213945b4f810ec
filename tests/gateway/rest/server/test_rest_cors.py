"""CORS: preflight requests, and the fields that a browser checks in answers."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.settings.config import SecurityConfig
from tests.gateway.rest.conftest import JSON_RECORDS, Gateway, raw_exchange, running_gateway
from tests.support.waiting import wait_until

PAGE = "https://app.example"
QUESTION = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,traceparent",
}


@pytest.fixture
async def locked(bootstrap: str, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway that requires a login and allows one origin."""
    path = tmp_path / "passwords"
    path.write_text(f"ann:{Argon2Hasher(time_cost=1, memory_cost=64, parallelism=1).hash('secret')}\n")
    security = SecurityConfig(allow_anonymous=False, password_file=path)
    async with running_gateway(bootstrap, http={"cors_origins": (PAGE,)}, security=security) as gateway:
        yield gateway


async def test_the_question_before_needs_no_login(locked: Gateway) -> None:
    async with aiohttp.ClientSession(locked.url) as http, http.options("/topics/t", headers=QUESTION) as answer:
        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE
        assert set(answer.headers["Access-Control-Allow-Methods"].split(", ")) >= {"GET", "POST"}
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type,traceparent"
        assert int(answer.headers["Access-Control-Max-Age"]) > 0
        assert "Origin" in answer.headers["Vary"]
        assert "Access-Control-Allow-Credentials" not in answer.headers


async def test_a_page_sees_why_it_was_refused(locked: Gateway) -> None:
    async with aiohttp.ClientSession(locked.url) as http:
        for path, status in (("/topics", 401), ("/nothing", 404)):
            async with http.get(path, headers={"Origin": PAGE}) as answer:
                assert answer.status == status
                assert answer.headers["Access-Control-Allow-Origin"] == PAGE
                assert answer.headers["Access-Control-Expose-Headers"] == "*"


async def test_a_page_of_another_origin_gets_no_cors_fields(locked: Gateway) -> None:
    async with aiohttp.ClientSession(locked.url) as http:
        for origin in ("https://evil.example", "https://app.example.evil", "null", ""):
            await asked_from(http, origin)


async def asked_from(http: aiohttp.ClientSession, origin: str) -> None:
    async with http.options("/topics/t", headers={**QUESTION, "Origin": origin}) as answer:
        assert answer.status == 403
        assert "CORS Rejected - Invalid origin" in await answer.text()  # the Strimzi bridge's tests check it
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert "Access-Control-Allow-Methods" not in answer.headers
    async with http.get("/topics", headers={"Origin": origin}) as answer:
        assert answer.status == 403
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert answer.headers["Vary"] == "Origin"


async def test_requests_other_than_preflights_are_answered_as_usual(locked: Gateway) -> None:
    async with aiohttp.ClientSession(locked.url) as http:
        async with http.options("/topics/t") as answer:
            assert answer.status == 405
        async with http.options("/nothing", headers=QUESTION) as answer:
            assert answer.status == 404


async def test_names_of_fields_are_looked_at(locked: Gateway) -> None:
    for names in (b"a b", b"a,,b", b"x" * 5000, b"a;b"):
        request = (
            b"OPTIONS /topics/t HTTP/1.1\r\nHost: x\r\nConnection: close\r\nOrigin: %s\r\n"
            b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: %s\r\n\r\n"
        ) % (PAGE.encode(), names)
        answer = await raw_exchange(locked.listener.bound, request)
        assert answer.startswith(b"HTTP/1.1 204 ")
        assert b"allow-headers" not in answer.lower()


async def test_every_origin_may_be_let_in(bootstrap: str) -> None:
    options = {"cors_origins": ("*",)}
    async with running_gateway(bootstrap, http=options) as gateway, aiohttp.ClientSession(gateway.url) as http:
        async with http.options("/topics/t", headers=QUESTION) as answer:
            assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (204, "*")
        fields = {**JSON_RECORDS, "Origin": PAGE, "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
        async with http.post("/topics/cors", data=b'{"records":[{"value":1}]}', headers=fields) as answer:
            assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, "*")
        async with http.get("/topics/cors/stream?limit=1&from=beginning", headers={"Origin": PAGE}) as answer:
            assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, "*")
        await wait_until(
            gateway.tail_topics
        )  # its reader is there: what is cut off while it connects is not closed well


async def test_without_origins_there_are_no_cors_fields(gateway: Gateway) -> None:
    async with aiohttp.ClientSession(gateway.url) as http:
        async with http.options("/topics/t", headers=QUESTION) as answer:
            assert answer.status == 403
        async with http.get("/", headers={"Origin": "http://localhost:3000"}) as answer:
            assert answer.status == 200
            assert not [name for name in answer.headers if name.startswith("Access-Control")]
