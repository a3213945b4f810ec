"""Keys from a file and from a URL: fetched, kept while the URL fails, fetched again for an unknown key."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import trustme
from aiohttp import web

from gateway.security.login import key_source
from gateway.security.login.key_source import DOCUMENT_LIMIT, UrlKeys, read_keys
from gateway.settings.config import ConfigError, OauthConfig
from gateway.settings.security import Algorithm
from tests.support.oauth import key_set
from tests.support.waiting import wait_until

ALL = get_args(Algorithm)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    with pytest.raises(ConfigError, match=r"^security\.oauth\.jwks_file: .*No such file"):
        read_keys(path, ALL)
    path.write_bytes(key_set("ec"))
    assert read_keys(path, ALL).find("ec", "ES256") is not None
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"^security\.oauth\.jwks_file: .*list of at most"):
        read_keys(path, ALL)


class Issuer:
    """A server of key sets that counts requests."""

    def __init__(self) -> None:
        self.asked = 0
        self.document = key_set("ec")
        self.status = 200
        self.headers: dict[str, str] = {}
        self.open = asyncio.Event()
        self.open.set()
        self.url = ""

    async def serve(self, _request: web.BaseRequest) -> web.Response:
        self.asked += 1
        await self.open.wait()
        return web.Response(body=self.document, status=self.status, headers=self.headers)


@contextlib.asynccontextmanager
async def issuing(tls: ssl.SSLContext | None = None) -> AsyncIterator[Issuer]:
    issuer = Issuer()
    runner = web.ServerRunner(web.Server(issuer.serve))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    issuer.url = f"https://localhost:{port}/jwks" if tls else f"http://127.0.0.1:{port}/jwks"
    try:
        yield issuer
    finally:
        issuer.open.set()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def fetching(url: str, *, clock: Callable[[], float] | None = None, **options: Any) -> AsyncIterator[UrlKeys]:
    config = OauthConfig(jwks_url=url, issuer="i", audience=("a",), **{"retry_s": 0.1, **options})
    keys = UrlKeys(config, clock=clock or asyncio.get_running_loop().time)
    task = asyncio.get_running_loop().create_task(keys.run())
    try:
        yield keys
        assert not task.done(), task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_login_waits_for_the_first_fetch() -> None:
    async with issuing() as issuer:
        issuer.open.clear()
        async with fetching(issuer.url) as keys:
            finding = [asyncio.ensure_future(keys.find("ec", "ES256")) for _ in range(3)]
            await wait_until(lambda: issuer.asked == 1)
            assert not any(task.done() for task in finding)
            issuer.open.set()
            assert all(await asyncio.gather(*finding))
            assert issuer.asked == 1


async def test_a_new_key_is_fetched_when_a_token_names_it() -> None:
    now = 0.0
    async with issuing() as issuer, fetching(issuer.url, clock=lambda: now, retry_s=100) as keys:
        assert await keys.find("ec", "ES256") is not None
        issuer.document = key_set("ec", "ed")
        assert await keys.find("ed", "EdDSA") is None, "not so soon"
        now = 100.0
        assert await keys.find("ed", "EdDSA") is not None
        assert issuer.asked == 2


async def test_made_up_keys_do_not_have_the_issuer_asked_again_and_again() -> None:
    async with issuing() as issuer, fetching(issuer.url, retry_s=1000) as keys:
        assert await keys.find("ec", "ES256") is not None
        for number in range(100):
            assert await keys.find(f"x{number}", "ES256") is None
        assert issuer.asked == keys.fetches == 1


FAULTS: dict[str, Callable[[Issuer], None]] = {
    "an error": lambda issuer: setattr(issuer, "status", 500),
    "a redirection": lambda issuer: (
        setattr(issuer, "status", 302),
        issuer.headers.update(Location=issuer.url),
    )[0],
    "no key set": lambda issuer: setattr(issuer, "document", b"<html>"),
    "no key": lambda issuer: setattr(issuer, "document", b'{"keys": []}'),
    "too much": lambda issuer: setattr(issuer, "document", key_set() + b" " * DOCUMENT_LIMIT),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_old_keys_stay_while_the_url_fails(fault: str) -> None:
    async with issuing() as issuer, fetching(issuer.url) as keys:
        assert await keys.find("ec", "ES256") is not None
        document = issuer.document
        FAULTS[fault](issuer)
        keys.refresh()
        await wait_until(lambda: keys.failures > 1)  # and it is tried again by itself
        assert await keys.find("ec", "ES256") is not None
        issuer.status, issuer.document = 200, document.replace(b'"ec"', b'"e2"')
        await wait_until(lambda: keys._keys.find("e2", "ES256") is not None)
        assert await keys.find("ec", "ES256") is None, "what the issuer has withdrawn is not believed"


async def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_source, "FETCH_LIMIT_S", 0.2)
    monkeypatch.setattr(key_source, "WAIT_LIMIT_S", 0.1)
    async with issuing() as issuer:
        issuer.open.clear()
        async with fetching(issuer.url) as keys, asyncio.timeout(60):
            assert await keys.find("ec", "ES256") is None
            await wait_until(lambda: keys.failures == 1)


async def test_few_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_source, "WAITING_LIMIT", 2)
    async with issuing() as issuer:
        issuer.open.clear()
        async with fetching(issuer.url) as keys, asyncio.timeout(60):
            waiting = [asyncio.ensure_future(keys.find("ec", "ES256")) for _ in range(2)]
            await wait_until(lambda: issuer.asked == 1)
            assert await keys.find("ec", "ES256") is None
            issuer.open.set()
            assert all(await asyncio.gather(*waiting))


async def test_nobody_there() -> None:
    async with fetching("http://127.0.0.1:1/jwks") as keys, asyncio.timeout(60):
        assert await keys.find("ec", "ES256") is None
        assert keys.failures >= 1


async def test_over_tls_only_from_who_the_authorities_know(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    for name, ca in (("good", authority), ("other", other)):
        ca.cert_pem.write_to_path(tmp_path / name)
    async with issuing(context) as issuer:
        async with fetching(issuer.url, jwks_cafile=tmp_path / "good") as keys:
            assert await keys.find("ec", "ES256") is not None
        async with fetching(issuer.url, jwks_cafile=tmp_path / "other") as keys:
            assert await keys.find("ec", "ES256") is None
            assert keys.failures >= 1
    with pytest.raises(ConfigError, match=r"^security\.oauth\.jwks_cafile: "):
        async with fetching("https://localhost", jwks_cafile=tmp_path / "none"):
            pass
