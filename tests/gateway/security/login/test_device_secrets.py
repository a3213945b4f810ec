"""Secrets of devices: what is accepted, without waiting and without a plugin, and what never is."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.security import throttle
from gateway.security.fair_queue import Busy
from gateway.security.identity import Identity
from gateway.security.login.authentication import Authenticator
from gateway.security.login.device_secrets import DeviceSecrets, digest_of, new_secret, parse_verifier, verifier_of
from gateway.security.login.user_files import new_device
from gateway.settings.config import ConfigError, SecurityConfig
from tests.gateway.security.login.test_authentication import PLUGIN, Clock, write
from tests.support.waiting import wait_until

PEER = "192.0.2.1:50000"
PASSWORD = "correct horse"
DEVICE = Identity("pump", "password")
FORMED = st.from_regex(r"tds1_[A-Za-z0-9_-]{42,44}", fullmatch=True)
TEXTS = st.one_of(st.text(), st.text().map("tds1_".__add__), FORMED)
CHEAP = Argon2Hasher(time_cost=1, memory_cost=64, parallelism=1)


@asynccontextmanager
async def running(path: Path, content: str, **options: Any) -> AsyncIterator[Authenticator]:
    """An authenticator with this password file, whose refusals are not delayed."""
    write(path, content)
    plugins = options.pop("plugins", {})
    clock = options.pop("clock", Clock())
    options.setdefault("sleep", clock.sleep)
    config = SecurityConfig(allow_anonymous=False, password_file=path, plugins=plugins)
    authenticator = Authenticator(config, clock=clock, **options)
    await authenticator.start()
    yield authenticator
    await authenticator.stop()


@given(name=st.text(), other=TEXTS)
def test_only_the_secret_itself_matches(name: str, other: str) -> None:
    secret = new_secret()
    assert parse_verifier(verifier_of(secret)) == digest_of(secret)
    devices = DeviceSecrets({name: digest_of(secret)})
    assert devices.matches(name, secret)
    assert devices.matches(name, secret.encode())
    assert not devices.matches(name, other)
    assert not devices.matches(name, other.encode("utf-8", "surrogatepass"))
    assert not devices.matches(name + "x", secret)


@given(chosen=st.text())
def test_a_digest_of_a_chosen_password_lets_nobody_in(chosen: str) -> None:
    """However it came into the file."""
    devices = DeviceSecrets({"pump": hashlib.sha256(chosen.encode("utf-8", "surrogatepass")).digest()})
    assert not devices.matches("pump", chosen)


async def test_a_device_logs_in_from_memory_beside_users(tmp_path: Path) -> None:
    secret, line = new_device("pump")
    async with running(tmp_path / "passwords", f"ann:{CHEAP.hash(PASSWORD)}\n{line}\n") as authenticator:
        assert authenticator.cached_password("pump", secret) == DEVICE, "the first login needs no check in a thread"
        assert await authenticator.authenticate_password("ann", PASSWORD, peer=PEER) == Identity("ann", "password")
        for user, password in (("pump", PASSWORD), ("pump", ""), ("ann", secret), ("", secret), ("pump", b"\xff")):
            assert await authenticator.authenticate_password(user, password, peer=PEER) is None
        statistics = authenticator.statistics()
        assert (statistics.accepted_total, statistics.remembered_total, statistics.refused_total) == (2, 0, 5)


async def test_a_plugin_decides_about_users_and_never_about_devices(tmp_path: Path) -> None:
    asked: list[Any] = []
    secret, line = new_device("pump")
    async with running(tmp_path / "passwords", line, plugins={PLUGIN: {"shared": asked}}) as authenticator:
        assert await authenticator.authenticate_password("pump", secret, peer=PEER) == DEVICE
        assert await authenticator.authenticate_password("pump", PASSWORD, peer=PEER) is None
        assert not asked
        assert await authenticator.authenticate_password("ann", PASSWORD, peer=PEER) == Identity("ann", "password")


async def test_a_file_of_comments_still_lets_nobody_in_beside_a_plugin(tmp_path: Path) -> None:
    async with running(tmp_path / "passwords", "# nobody\n", plugins={PLUGIN: {}}) as authenticator:
        assert await authenticator.authenticate_password("ann", PASSWORD, peer=PEER) is None


async def test_wrong_secrets_are_slowed_and_right_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet behind one address: devices with withdrawn secrets do not lock out the others."""
    monkeypatch.setattr(throttle, "REFUSALS_PER_ADDRESS", 3)
    gate = asyncio.Event()
    clock = Clock()

    async def sleep(seconds: float) -> None:
        clock.pauses.append(seconds)
        await gate.wait()

    secret, line = new_device("pump")
    async with (
        running(tmp_path / "passwords", line, clock=clock, sleep=sleep) as authenticator,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(3):
            group.create_task(authenticator.authenticate_password("pump", new_secret(), peer=PEER))
        await wait_until(lambda: authenticator.statistics().refused_total == 3)
        with pytest.raises(Busy):
            await authenticator.authenticate_password("pump", new_secret(), peer=PEER)
        assert await authenticator.authenticate_password("pump", secret, peer=PEER) == DEVICE
        assert clock.pauses == [1.0, 2.0, 4.0]
        gate.set()


async def test_a_reload_withdraws_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    secret, line = new_device("pump")
    renewed, new_line = new_device("pump")
    async with running(path, line) as authenticator:
        assert await authenticator.authenticate_password("pump", secret, peer=PEER) == DEVICE
        path.write_text(new_line)
        assert await authenticator.reload()
        assert await authenticator.authenticate_password("pump", secret, peer=PEER) is None
        assert await authenticator.authenticate_password("pump", renewed, peer=PEER) == DEVICE


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("pump:$device-sha256$", "64 lower-case hexadecimal digits"),
        ("pump:$device-sha256$" + "0" * 63, "64 lower-case hexadecimal digits"),
        ("pump:$device-sha256$" + "A" * 64, "64 lower-case hexadecimal digits"),
        ("pump:" + "0" * 64, "neither Argon2"),
        ("anonymous:$device-sha256$" + "0" * 64, "reserved"),
        ("ann:$device-sha256$" + "0" * 64, "duplicate name"),
    ],
)
def test_a_bad_line_is_named_but_not_quoted(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "passwords"
    path.write_text(f"ann:{CHEAP.hash(PASSWORD)}\n{line}\n")
    with pytest.raises(ConfigError, match=rf"security\.password_file: .* line 2: .*{complaint}") as raised:
        Authenticator(SecurityConfig(allow_anonymous=False, password_file=path))
    assert "0" * 63 not in str(raised.value)


def test_devices_are_in_the_gateway_s_own_file_only(tmp_path: Path) -> None:
    """The plugin with a file of its own would take a device's line for a hash that it cannot check."""
    path = tmp_path / "passwords"
    path.write_text(new_device("pump")[1])
    plugins = {"amqtt.plugins.authentication.FileAuthPlugin": {"password_file": str(path)}}
    with pytest.raises(ConfigError, match=r"password_file: the lines of devices belong"):
        Authenticator(SecurityConfig.model_validate({"allow_anonymous": False, "plugins": plugins}))
