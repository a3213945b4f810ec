"""Sources of tokens for Kafka."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.kafka.driver.login import Login
from gateway.kafka.driver.tokens import LoginError, expiry_of
from gateway.settings.config import ConfigError, KafkaConfig
from tests.support.secured import TokenEndpoint, endpoint

__all__ = ["endpoint"]

SECRET = "s s+s"


def login_of(**oauth: Any) -> Login:
    return Login(
        KafkaConfig.model_validate(
            {
                "bootstrap_servers": "a:1", "security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER",
                "oauth": oauth,
            }
        )
    )  # fmt: skip


def from_endpoint(endpoint: TokenEndpoint, **more: Any) -> Login:
    return login_of(**{"token_url": endpoint.url, "client_id": "a:b", "client_secret": SECRET, **more})


def token(lasts_s: float) -> str:
    claims = json.dumps({"exp": time.time() + lasts_s}).encode()
    return f"h.{base64.urlsafe_b64encode(claims).rstrip(b'=').decode()}.s"


async def test_a_token_is_shared_until_half_of_its_life_is_over(endpoint: TokenEndpoint) -> None:
    endpoint.held = asyncio.Event()
    login = from_endpoint(endpoint, scope="kafka read")
    asking = [asyncio.ensure_future(login.token()) for _ in range(5)]
    asking[0].cancel()  # a cancelled caller does not affect the others
    endpoint.held.set()
    assert await asyncio.gather(*asking[1:]) == ["opaque"] * 4
    assert await login.token() == "opaque"
    assert endpoint.asked == [{"grant_type": "client_credentials", "scope": "kafka read"}]
    login.reload()
    endpoint.token = "another"
    assert await login.token() == "another"
    endpoint.token, endpoint.expires_in = "third", 0.001
    login.reload()
    assert await login.token() == "third"
    await asyncio.to_thread(time.sleep, 0.002)
    assert await login.token() == "third"
    assert len(endpoint.asked) == 4


async def test_while_the_endpoint_fails_the_last_token_is_used_for_as_long_as_it_is_good(
    endpoint: TokenEndpoint,
) -> None:
    login = from_endpoint(endpoint)
    assert await login.token() == "opaque"
    endpoint.answer = web.Response(status=503)
    login.reload()
    assert await login.token() == "opaque"
    assert (login.counts.tokens, login.counts.token_failures) == (1, 1)
    assert await login.token() == "opaque"
    assert len(endpoint.asked) == 2, "not requested again immediately"
    assert login._token is not None
    login._token = login._token._replace(ends=time.time() - 1)
    login.reload()
    login._token = login._token._replace(fresh_until=0)
    with pytest.raises(LoginError, match=r"no token: .*/token answers 503"):
        await login.token()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, r"answers 401 \(invalid_client\)"),
        (web.Response(status=200, body=b"{}"), "answers 200, without one"),
        (web.Response(status=200, body=b"[" * 60_000), "answers 200, without one"),
        (web.Response(status=200, body=b'{"access_token": "a\\u0001b"}'), "answers 200, without one"),
        (web.Response(status=200, body=b'{"access_token": "' + b"x" * 70_000 + b'"}'), "answers 200, without one"),
        (web.Response(status=302), "answers 302$"),
        (web.Response(status=400, body=b'{"error": "no ca/nary"}'), "answers 400$"),
    ],
)
async def test_an_endpoints_refusal_is_reported_without_a_secret(
    endpoint: TokenEndpoint, answer: web.Response | None, told: str
) -> None:
    endpoint.answer = answer
    login = from_endpoint(endpoint, client_secret="ca/nary", token_url=f"{endpoint.url}?key=ca/nary")
    with pytest.raises(LoginError, match=told) as caught:
        await login.token()
    assert "ca/nary" not in f"{caught.value} {caught.value!r}"


async def test_an_endpoint_that_does_not_answer(endpoint: TokenEndpoint) -> None:
    login = from_endpoint(endpoint, token_url="http://127.0.0.1:1/token")
    with pytest.raises(LoginError, match=r"http://127.0.0.1:1/token does not answer \(ClientConnectorError\)"):
        await login.token()


async def test_secret_of_a_file_is_read_for_each_token(endpoint: TokenEndpoint, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("wrong\n")
    login = from_endpoint(endpoint, client_secret=None, client_secret_file=secret)
    with pytest.raises(LoginError, match="invalid_client"):
        await login.token()
    secret.write_text(f"{SECRET}\n")
    login.reload()
    assert await login.token() == "opaque"
    secret.unlink()
    login.reload()
    assert await login.token() == "opaque", "the last token is still valid"
    assert login.counts.token_failures == 2


async def test_token_file_is_read_for_each_connection(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f" {token(60)}\n")
    login = login_of(token_file=file)
    first = await login.token()
    assert first == file.read_text().strip()
    file.write_text(token(120))
    assert await login.token() != first
    last = token(-34)
    file.write_text(last)
    login._token = None
    with pytest.raises(LoginError, match=rf"kafka.oauth.token_file: the token in {file} expired 3\d s ago") as caught:
        await login.token()
    assert last not in str(caught.value)
    file.unlink()
    login.reload()
    with pytest.raises(LoginError, match=f"kafka.oauth.token_file: cannot read {file}: No such file"):
        await login.token()


def test_unusable_settings_are_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for oauth, told in (
        ({}, "needs kafka.oauth.token_file, token_url or msk_region"),
        ({"token_file": tmp_path / "none"}, "kafka.oauth.token_file: cannot read"),
        ({"token_file": empty}, "kafka.oauth.token_file: .*empty is empty"),
        (
            {"token_url": "https://i/t", "client_id": "c", "client_secret_file": empty},
            "client_secret_file: .* is empty",
        ),
        ({"token_url": "https://i/t", "client_id": "c", "client_secret": "s", "cafile": empty}, "kafka.oauth.cafile"),
    ):
        with pytest.raises(ConfigError, match=told):
            login_of(**oauth)
    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer.MSKAuthTokenProvider", None)
    with pytest.raises(ConfigError, match=r"extra msk: pip install trivium\[msk\]"):
        login_of(msk_region="eu-central-1")


async def test_msk_tokens_are_signed_with_the_credentials_that_aws_s_library_finds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    login = login_of(msk_region="eu-central-1")
    with pytest.raises(LoginError, match="no token for MSK: AWS's library says"):
        await login.token()
    login.reload()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDCANARY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ca/nary")
    token = await login.token()
    url = base64.urlsafe_b64decode(token + "==").decode()
    assert url.startswith("https://kafka.eu-central-1.amazonaws.com/?Action=kafka-cluster%3AConnect&")
    assert "AKIDCANARY" in url
    assert login._token is not None
    assert login._token.ends is not None
    assert 0 < login._token.ends - time.time() <= 900
    assert await login.token() == token


@pytest.mark.parametrize("text", ["", "a.b.c", "a.e30.c", "a.W10.c", "a.eyJleHAiOiJ4In0.c", "a.eyJleHAiOjFlOTk5fQ.c"])
def test_a_token_without_an_end(text: str) -> None:
    assert expiry_of(text) in {None, float("inf")}


@pytest.mark.parametrize("life", [float("inf"), 1e300, 10**400], ids=["infinite", "long", "no float"])
async def test_a_life_without_end_counts_as_not_stated(endpoint: TokenEndpoint, life: float) -> None:
    endpoint.expires_in = life
    login = from_endpoint(endpoint)
    assert await login.token() == "opaque"
    assert login._token is not None
    assert login._token.fresh_until < time.time() + 3600


def test_an_expiry_without_end_counts_as_not_stated() -> None:
    claims = base64.urlsafe_b64encode(b'{"exp": 1e999}').decode()
    assert expiry_of(f"h.{claims}.s") is None
