"""OAUTHBEARER and XOAUTH2 through the authenticator: messages, refusals in two steps, delays per address."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.process.ports import check_exposure
from gateway.security.identity import Identity
from gateway.security.login.authentication import Authenticator, Exchange
from gateway.security.login.exchange import Continue, Done, Failed
from gateway.security.login.tokens import VerifiedToken
from gateway.settings.config import Address, AmqpConfig, Config, ConfigError, ManagementConfig, SecurityConfig
from tests.support.listeners import entrance
from tests.support.oauth import NOW_MS, key_set, oauth_options, token

PEER = "192.0.2.1:50000"
END_MS = NOW_MS + 3_630_000
ANN = Done(Identity("ann", "token"), b"", END_MS)
Make = Callable[..., Authenticator]


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def make(tmp_path: Path, pauses: list[float]) -> Make:
    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    def build(**options: Any) -> Authenticator:
        security = SecurityConfig(**{"allow_anonymous": False, "oauth": oauth_options(tmp_path / "jwks"), **options})
        return Authenticator(security, clock=lambda: 1000.0, wall_clock=lambda: NOW_MS, sleep=sleep)

    return build


def begin(authenticator: Authenticator, mechanism: str, user: str | None = None) -> Exchange:
    exchange = authenticator.exchange(mechanism, peer=PEER, user=user)
    assert exchange is not None
    return exchange


GOOD = {
    "the least": ("OAUTHBEARER", b"n,,\x01auth=Bearer %s\x01\x01"),
    "with a name": ("OAUTHBEARER", b"n,a=ann,\x01auth=Bearer %s\x01\x01"),
    "all of it": ("OAUTHBEARER", b"y,a=ann,\x01host=h.example\x01port=5671\x01auth=bearer %s\x01\x01"),
    "extensions": ("OAUTHBEARER", b"n,,\x01traceId=a=b c\x01auth=Bearer %s\x01\x01"),
    "spaces": ("OAUTHBEARER", b"n,,\x01auth=Bearer   %s \x01\x01"),
    "XOAUTH2": ("XOAUTH2", b"user=ann\x01auth=Bearer %s\x01\x01"),
    "XOAUTH2 without a name": ("XOAUTH2", b"auth=Bearer %s\x01\x01"),
}


@pytest.mark.parametrize("case", GOOD)
async def test_a_good_message(make: Make, pauses: list[float], case: str) -> None:
    mechanism, message = GOOD[case]
    authenticator = make()
    assert await begin(authenticator, mechanism).step(message % token().encode()) == ANN
    assert authenticator.statistics().accepted_total == 1
    assert pauses == []


BAD = {
    "no token": (b"n,,\x01auth=Bearer \x01\x01", "invalid_token"),
    "none": (b"", "invalid_request"),
    "asking for the way": (b"n,,\x01\x01", "invalid_request"),
    "no separator": (b"n,,auth=Bearer %s", "invalid_request"),
    "one at the end": (b"n,,\x01auth=Bearer %s\x01", "invalid_request"),
    "another scheme": (b"n,,\x01auth=Basic %s\x01\x01", "invalid_request"),
    "twice": (b"n,,\x01auth=Bearer %s\x01auth=Bearer %s\x01\x01", "invalid_request"),
    "a pair without a value": (b"n,,\x01host\x01auth=Bearer %s\x01\x01", "invalid_request"),
    "channel binding": (b"p=tls-unique,,\x01auth=Bearer %s\x01\x01", "invalid_request"),
    "no header": (b"\x01auth=Bearer %s\x01\x01", "invalid_request"),
    "a header of another form": (b"n,ann,\x01auth=Bearer %s\x01\x01", "invalid_request"),
    "a bare equals sign": (b"n,a=a=nn,\x01auth=Bearer %s\x01\x01", "invalid_request"),
    "for somebody else": (b"n,a=bob,\x01auth=Bearer %s\x01\x01", "invalid_token"),
    "not UTF-8": (b"n,,\x01auth=Bearer %s\xff\x01\x01", "invalid_request"),
    "too long": (b"n,,\x01auth=Bearer %s\x01\x01" + b"x" * 40_000, "invalid_request"),
    "changed": (b"n,,\x01auth=Bearer %s1\x01\x01", "invalid_token"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_refusal_is_said_as_json_and_then_as_the_outcome(make: Make, pauses: list[float], case: str) -> None:
    message, status = BAD[case]
    authenticator = make()
    exchange = begin(authenticator, "OAUTHBEARER")
    step = await exchange.step(message.replace(b"%s", token().encode()))
    assert isinstance(step, Continue)
    assert json.loads(step.data) == {"status": status}
    assert pauses == [1.0], "before the first word"
    assert isinstance(await exchange.step(b"\x01"), Failed)
    assert isinstance(await exchange.step(b"n,,\x01auth=Bearer " + token().encode() + b"\x01\x01"), Failed)
    statistics = authenticator.statistics()
    assert (statistics.accepted_total, statistics.refused_total) == (0, 1)


async def test_xoauth2_has_its_own_json(make: Make) -> None:
    for message, status in ((b"user=bob\x01auth=Bearer %s\x01\x01" % token().encode(), "401"), (b"", "400")):
        step = await begin(make(), "XOAUTH2").step(message)
        assert isinstance(step, Continue)
        assert json.loads(step.data) == {"status": status, "schemes": "bearer"}


async def test_a_client_that_begins_without_its_message_is_asked_for_it_once(make: Make) -> None:
    exchange = begin(make(), "OAUTHBEARER")
    assert await exchange.step(None) == Continue(b"")
    assert await exchange.step(b"n,,\x01auth=Bearer " + token().encode() + b"\x01\x01") == ANN
    exchange = begin(make(), "OAUTHBEARER")
    await exchange.step(None)
    step = await exchange.step(None)
    assert isinstance(step, Continue)
    assert b"invalid_request" in step.data


async def test_a_name_with_escapes(make: Make) -> None:
    message = b"n,a=a=2Cb=3Dc,\x01auth=Bearer " + token(sub="a,b=c").encode() + b"\x01\x01"
    step = await begin(make(), "OAUTHBEARER").step(message)
    assert isinstance(step, Done)
    assert step.identity.name == "a,b=c"


async def test_a_re_authentication_is_for_the_same_user(make: Make) -> None:
    message = b"n,,\x01auth=Bearer " + token().encode() + b"\x01\x01"
    assert await begin(make(), "OAUTHBEARER", user="ann").step(message) == ANN
    assert isinstance(await begin(make(), "OAUTHBEARER", user="bob").step(message), Continue)


@given(message=st.binary(max_size=60) | st.text("n,ay=\x01uthBer%s 2CD").map(str.encode))
async def test_any_message_is_answered(fuzzed: Authenticator, message: bytes) -> None:
    for mechanism in ("OAUTHBEARER", "XOAUTH2"):
        assert isinstance(await begin(fuzzed, mechanism).step(message), Continue)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Authenticator:
    oauth = oauth_options(tmp_path_factory.mktemp("fuzzed") / "jwks")
    return Authenticator(SecurityConfig(allow_anonymous=False, oauth=oauth, failed_attempt_delay_s=0))


async def test_what_is_offered(make: Make) -> None:
    authenticator = make()
    await authenticator.run()  # the keys are in a file: nothing to do
    assert entrance(authenticator).takes_tokens
    assert entrance(authenticator).offers() == ("OAUTHBEARER", "XOAUTH2")
    assert authenticator.exchange("SCRAM-SHA-256", peer=PEER) is None
    plain = Authenticator(SecurityConfig())
    assert plain.exchange("OAUTHBEARER", peer=PEER) is None
    assert await plain.authenticate_token(token(), peer=PEER) is None


async def test_a_token_alone(make: Make, pauses: list[float]) -> None:
    authenticator = make()
    assert await authenticator.authenticate_token(token(), peer=PEER) == VerifiedToken(ANN.identity, END_MS)
    assert await authenticator.authenticate_token(token() + "x", peer=PEER) is None
    assert pauses == [1.0]


async def test_a_key_that_is_withdrawn_amid_an_exchange_proves_nothing(make: Make, tmp_path: Path) -> None:
    authenticator = make()
    message = b"n,,\x01auth=Bearer " + token().encode() + b"\x01\x01"
    assert await begin(authenticator, "OAUTHBEARER").step(message) == ANN  # remembered
    exchange = begin(authenticator, "OAUTHBEARER")
    assert await exchange.step(None) == Continue(b"")
    (tmp_path / "jwks").write_bytes(key_set("ed"))
    assert await authenticator.reload()
    step = await exchange.step(message)
    assert isinstance(step, Continue)
    assert b"invalid_token" in step.data


async def test_reload_reads_the_keys_anew(make: Make, tmp_path: Path) -> None:
    authenticator = make()
    good = token("ec")
    assert await authenticator.authenticate_token(good, peer=PEER) is not None
    (tmp_path / "jwks").write_text("{}")
    assert not await authenticator.reload()
    assert await authenticator.authenticate_token(good, peer=PEER) is not None
    (tmp_path / "jwks").write_bytes(key_set("ed"))
    assert await authenticator.reload()
    assert await authenticator.authenticate_token(good, peer=PEER) is None
    assert await authenticator.authenticate_token(token("ed"), peer=PEER) is not None


def test_tokens_are_a_login(tmp_path: Path) -> None:
    everywhere = Address("0.0.0.0:0")
    security = SecurityConfig(allow_anonymous=False, oauth=oauth_options(tmp_path / "jwks"))
    (warning,) = check_exposure(Config(security=security, amqp=AmqpConfig(address=everywhere)))
    assert "accepts tokens unencrypted" in warning
    with pytest.raises(ConfigError, match=r"^management\.address"):  # it knows passwords only
        check_exposure(Config(security=security, management=ManagementConfig(address=everywhere)))
