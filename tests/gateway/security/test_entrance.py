"""Which of the configured login methods a listener accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.security.identity import ANONYMOUS, Identity
from gateway.security.login.authentication import Authenticator
from gateway.security.login.user_files import argon2_line, new_scram_line
from gateway.settings.config import SecurityConfig
from tests.support.listeners import entrance

CERTIFICATE = {"subject": ((("commonName", "pump-7"),),)}
PEER = "192.0.2.1:1"


@pytest.fixture
async def authenticator(tmp_path: Path) -> Authenticator:
    (tmp_path / "passwords").write_text(argon2_line("ann", "secret") + "\n")
    (tmp_path / "scram").write_text(new_scram_line("ann", "secret", "SCRAM-SHA-256", 4096) + "\n")
    config = SecurityConfig(
        password_file=tmp_path / "passwords", scram_file=tmp_path / "scram", failed_attempt_delay_s=0
    )
    made = Authenticator(config)
    await made.start()
    return made


async def test_each_way_is_open_where_it_is_named_and_nowhere_else(authenticator: Authenticator) -> None:
    async def who(*logins: str) -> list[object]:
        door = entrance(authenticator, *logins)
        return [
            await door.authenticate_password("ann", "secret", peer=PEER),
            door.identify_certificate(CERTIFICATE),
            door.anonymous(),
            door.exchange("SCRAM-SHA-256", peer=PEER) is not None,
        ]

    ann, pump = Identity("ann", "password"), Identity("pump-7", "certificate")
    assert await who("password") == [ann, None, None, False]
    assert await who("certificate") == [None, pump, None, False]
    assert await who("scram") == [None, None, None, True]
    assert await who("anonymous") == [ANONYMOUS, None, ANONYMOUS, False]  # nobody looks at the password
    assert await who() == [ann, pump, ANONYMOUS, True]


async def test_what_was_right_elsewhere_is_remembered_nowhere_else(authenticator: Authenticator) -> None:
    open_one, closed = entrance(authenticator, "password"), entrance(authenticator, "certificate")
    assert await open_one.authenticate_password("ann", "secret", peer=PEER) is not None
    assert open_one.cached_password("ann", "secret") == Identity("ann", "password")
    assert closed.cached_password("ann", "secret") is None


async def test_sasl_offers_what_the_listener_takes(authenticator: Authenticator) -> None:
    assert entrance(authenticator, "password").offers(certificate=True) == ("PLAIN",)
    assert entrance(authenticator, "scram").offers() == ("SCRAM-SHA-256",)
    assert entrance(authenticator, "certificate").offers(certificate=True) == ("EXTERNAL",)
    assert entrance(authenticator, "certificate").offers() == ()
    assert entrance(authenticator).offers() == ("SCRAM-SHA-256", "PLAIN", "ANONYMOUS")


async def test_a_page_gains_nothing_only_where_everybody_is_asked(authenticator: Authenticator) -> None:
    assert entrance(authenticator, "password", "token").needs_explicit_login
    assert not entrance(authenticator, "password", "certificate").needs_explicit_login
    assert not entrance(authenticator, "password", "anonymous").needs_explicit_login
