"""Passwords from amqtt's password file, and what does not depend on the plugin: cache, delays, secrecy."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog
from amqtt.plugins.base import BaseAuthPlugin
from amqtt.session import Session
from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.security import throttle
from gateway.security.fair_queue import Busy
from gateway.security.identity import ANONYMOUS, Identity
from gateway.security.login import amqtt_plugins, authentication, credentials
from gateway.security.login.authentication import Authenticator
from gateway.security.login.credentials import Credentials
from gateway.security.login.scram import derive
from gateway.security.login.user_files import scram_line
from gateway.settings.config import ConfigError, SecurityConfig
from tests.support.listeners import entrance
from tests.support.waiting import wait_until

PEER = "192.0.2.1:50000"
SECRET = "correct horse"
CREDENTIAL = derive("SCRAM-SHA-256", "secret", b"0123456789abcdef", 4096)
CHEAP = Argon2Hasher(time_cost=1, memory_cost=64, parallelism=1)


class Clock:
    """A clock that advances only by sleeping."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)


class CountingPlugin(BaseAuthPlugin):
    """A plugin with one password that records its calls; its configuration selects its behaviour."""

    @dataclass
    class Config:
        behaviour: str = "check"
        shared: Any = None
        starting_s: Any = None  # how long each start takes

    async def on_broker_pre_start(self) -> None:
        if self.config.starting_s:
            await asyncio.sleep(self.config.starting_s.pop(0))

    async def authenticate(self, *, session: Session) -> bool | None:
        if self.config.shared is not None:
            self.config.shared.append((session.username, session.client_id, session.remote_address))
        match self.config.behaviour:
            case "nice":
                self.config.shared.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            case "raise":
                raise ValueError(f"no luck with {session.password}")
            case "abstain":
                return None
            case "wait":
                await asyncio.sleep(0.3)
            case "block":
                time.sleep(0.3)  # noqa: ASYNC251 - what a plugin for LDAP does
        return session.password == SECRET


PLUGIN = f"{__name__}.CountingPlugin"


def with_plugin(**options: Any) -> SecurityConfig:
    return SecurityConfig(allow_anonymous=False, plugins={PLUGIN: options})


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "passwords"
    path.write_text(f"# users of the plant\n\nann:{CHEAP.hash(SECRET)}\nbob:{CHEAP.hash('other')}\n")
    return path


def write(path: Path, text: str) -> None:
    path.write_text(text)


async def login(
    config: SecurityConfig, user: str, password: str | bytes, clock: Clock | None = None
) -> Identity | None:
    clock = clock or Clock()
    authenticator = Authenticator(config, clock=clock, sleep=clock.sleep)
    await authenticator.start()
    try:
        return await authenticator.authenticate_password(user, password, peer=PEER)
    finally:
        await authenticator.stop()


@pytest.mark.parametrize(
    ("user", "password", "right"),
    [
        ("ann", SECRET, True),
        ("ann", SECRET.encode(), True),
        ("bob", "other", True),
        ("bob", SECRET, False),
        ("ann", "", False),
        ("ann", SECRET + " ", False),
        ("ann", b"\xff\xfe", False),
        ("nobody", SECRET, False),
        ("", SECRET, False),
        ("anonymous", SECRET, False),
        ("*", SECRET, False),
        ("ann", "x" * 100_000, False),
    ],
)
async def test_password_file(password_file: Path, user: str, password: str | bytes, right: bool) -> None:
    config = SecurityConfig(allow_anonymous=False, password_file=password_file)
    assert await login(config, user, password) == (Identity(user, "password") if right else None)


HASHES = {
    "argon2id": "$argon2id$v=19$m=8,t=1,p=1$g0YKawrzHOp+uDS+fCMRdA$UTp1C+jTWlzpe5fPLAfwiLEcmjcwXuPhARz2svuBjiE",
    "argon2i": "$argon2i$v=19$m=8,t=1,p=1$HE25Pk8741VnFt/o+9iEiw$Qhf+R7CPL/kZhHYA7+c4cEi/7Qy+my7BO78Vm86elIw",
    "argon2d": "$argon2d$v=19$m=8,t=1,p=1$wxHj+jeKhKA/vV5fFHGGKg$vbl4ATxzmXauAXQxV1LE39L9xG34noGHDk3Ruwn4vDU",
    "crypt": "$6$rounds=1000$abc$"
    "zaWpAwySRl8PX4W2aEMJwxpN82bCKtDZP0RBdOD6W7BQlilBqAsWnAZuS10iUyJZneS8Ob1gxs1BZkqJi1nTi.",
}
"""Hashes of the password x, of every kind that amqtt's plugin supports."""


@pytest.mark.parametrize("kind", HASHES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # amqtt's own, about crypt
async def test_every_hash_of_amqtt(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "passwords"
    write(path, f"ann:{HASHES[kind]}\n")
    config = SecurityConfig(allow_anonymous=False, password_file=path)
    if kind == "crypt" and sys.version_info >= (3, 13):
        with pytest.raises(ConfigError, match=r"line 1: this Python cannot check SHA-512 crypt"):
            await login(config, "ann", "x")
        return
    assert await login(config, "ann", "x") == Identity("ann", "password")
    assert await login(config, "ann", "y") is None
    assert await login(config, "bob", "x") is None


def test_sha_512_crypt_stops_the_start_where_python_cannot_check_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = tmp_path / "passwords"
    write(path, f"ann:{HASHES['crypt']}\n")
    with pytest.raises(ConfigError, match=r"line 1: this Python cannot check SHA-512 crypt; use Argon2"):
        Authenticator(SecurityConfig(password_file=path))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("ann:hunter2", "line 1: the hash is neither"),
        ("hunter2", "line 1: expected name:hash"),
        (":hunter2", "line 1: expected name:hash"),
        ("# fine\nann:$argon2id$x\nann:$argon2id$hunter2", "line 3: duplicate name"),
    ],
)
def test_a_bad_password_file_is_named_but_not_quoted(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "passwords"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        Authenticator(SecurityConfig(password_file=path))
    assert str(caught.value).startswith("security.password_file: ")
    assert complaint in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_missing_password_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^security\.password_file: cannot read .*No such file"):
        Authenticator(SecurityConfig(password_file=tmp_path / "none"))


async def test_without_a_back_end_a_name_proves_nothing() -> None:
    assert await login(SecurityConfig(), "ann", "x") == ANONYMOUS
    assert entrance(Authenticator(SecurityConfig())).anonymous() == ANONYMOUS


def test_anonymous_only_where_allowed(password_file: Path) -> None:
    closed = Authenticator(SecurityConfig(allow_anonymous=False, password_file=password_file))
    assert entrance(closed).anonymous() is None
    assert entrance(closed).offers() == ("PLAIN",)
    assert entrance(closed).offers(certificate=True) == ("EXTERNAL", "PLAIN")
    mixed = Authenticator(SecurityConfig(password_file=password_file))
    assert entrance(mixed).offers() == ("PLAIN", "ANONYMOUS")
    assert entrance(Authenticator(SecurityConfig())).offers() == ("ANONYMOUS",)


async def test_a_wrong_password_is_not_anonymous_where_both_are_allowed(password_file: Path) -> None:
    assert await login(SecurityConfig(password_file=password_file), "ann", "wrong") is None


async def test_reload_takes_new_users_and_keeps_the_old_on_a_fault(password_file: Path) -> None:
    clock = Clock()
    config = SecurityConfig(allow_anonymous=False, password_file=password_file)
    authenticator = Authenticator(config, clock=clock, sleep=clock.sleep)
    await authenticator.start()
    assert await authenticator.authenticate_password("ann", SECRET, peer=PEER)
    write(password_file, "broken")
    assert not await authenticator.reload()
    assert await authenticator.authenticate_password("bob", "other", peer=PEER)
    write(password_file, f"eve:{CHEAP.hash('new')}\n")
    assert await authenticator.reload()
    assert await authenticator.authenticate_password("eve", "new", peer=PEER)
    assert await authenticator.authenticate_password("ann", SECRET, peer=PEER) is None
    await authenticator.stop()


async def test_a_reload_lets_the_logins_in_progress_end() -> None:
    """The old plugins are closed when they have answered, whether by yes or by no."""
    asked: list[Any] = []
    authenticator = Authenticator(with_plugin(behaviour="wait", shared=asked), sleep=Clock().sleep)
    await authenticator.start()
    async with asyncio.TaskGroup() as group:
        right = group.create_task(authenticator.authenticate_password("ann", SECRET, peer=PEER))
        wrong = group.create_task(authenticator.authenticate_password("ann", "wrong", peer=PEER))
        await wait_until(lambda: len(asked) == 2)
        assert await authenticator.reload()
    assert (right.result(), wrong.result()) == (Identity("ann", "password"), None)
    assert authenticator.statistics().errors_total == 0
    await authenticator.stop()


async def test_a_later_reload_counts_even_if_an_earlier_one_takes_longer(tmp_path: Path) -> None:
    users = tmp_path / "scram"
    users.write_text("".join(scram_line(name, "SCRAM-SHA-256", CREDENTIAL) + "\n" for name in ("ann", "bob")))
    starting_s = [0.0] * credentials.WORKERS
    config = with_plugin(starting_s=starting_s).model_copy(update={"scram_file": users})
    authenticator = Authenticator(config)
    await authenticator.start()
    starting_s += [0.5, 0.0]
    async with asyncio.TaskGroup() as group:
        group.create_task(authenticator.reload())
        await wait_until(lambda: len(starting_s) < credentials.WORKERS)
        write(users, scram_line("ann", "SCRAM-SHA-256", CREDENTIAL) + "\n")
        group.create_task(authenticator.reload())
    assert authenticator._scram is not None
    assert authenticator._scram.credential("SCRAM-SHA-256", "ann") == CREDENTIAL
    assert authenticator._scram.credential("SCRAM-SHA-256", "bob") != CREDENTIAL
    await authenticator.stop()


async def test_success_is_remembered_for_a_while() -> None:
    clock = Clock()
    asked: list[Any] = []
    authenticator = Authenticator(with_plugin(shared=asked), clock=clock, sleep=clock.sleep)
    await authenticator.start()
    for _ in range(3):
        identity = await authenticator.authenticate_password("ann", SECRET, peer=PEER, client_id="c1")
        assert identity == Identity("ann", "password")
    assert asked == [("ann", "c1", PEER)]
    assert await authenticator.authenticate_password("bob", SECRET, peer=PEER)
    assert len(asked) == 2
    clock.now += authentication.CACHE_S
    assert await authenticator.authenticate_password("ann", SECRET, peer=PEER)
    assert len(asked) == 3
    statistics = authenticator.statistics()
    assert (statistics.accepted_total, statistics.remembered_total, statistics.refused_total) == (5, 2, 0)
    await authenticator.stop()


@pytest.mark.parametrize(
    ("settings", "later_s", "checks"),
    [
        ({"password_cache_s": 10.0}, 9.0, 1),
        ({"password_cache_s": 10.0}, 10.0, 2),
        ({"password_cache_s": 600.0}, authentication.CACHE_S, 1),
        ({"password_cache_s": 0.0}, 0.0, 2),
        ({"password_cache_entries": 0}, 0.0, 2),
    ],
)
async def test_size_and_life_of_the_cache_are_settings(settings: dict[str, Any], later_s: float, checks: int) -> None:
    clock = Clock()
    asked: list[Any] = []
    config = with_plugin(shared=asked).model_copy(update=settings)
    authenticator = Authenticator(config, clock=clock, sleep=clock.sleep)
    await authenticator.start()
    assert await authenticator.authenticate_password("ann", SECRET, peer=PEER)
    clock.now += later_s
    assert await authenticator.authenticate_password("ann", SECRET, peer=PEER)
    assert len(asked) == checks
    await authenticator.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
async def test_checks_leave_the_processor_to_the_messages() -> None:
    """A crowd of logins with Argon2 would otherwise take eight shares of the processor, and the event loop one."""
    asked: list[Any] = []
    authenticator = Authenticator(with_plugin(behaviour="nice", shared=asked))
    await authenticator.start()
    assert await authenticator.authenticate_password("ann", SECRET, peer=PEER)
    assert asked[1] > os.getpriority(os.PRIO_PROCESS, 0)
    await authenticator.stop()


async def test_one_check_for_many_at_once_and_the_loop_goes_on() -> None:
    asked: list[Any] = []
    authenticator = Authenticator(with_plugin(behaviour="block", shared=asked))
    await authenticator.start()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    async with asyncio.TaskGroup() as group:
        ticking = group.create_task(tick())
        impatient = group.create_task(authenticator.authenticate_password("ann", SECRET, peer=PEER))
        tasks = [group.create_task(authenticator.authenticate_password("ann", SECRET, peer=PEER)) for _ in range(50)]
        await wait_until(lambda: bool(asked))
        impatient.cancel()  # the one that asked goes away: the others must not suffer
        await asyncio.wait(tasks)
        ticking.cancel()
    assert {task.result() for task in tasks} == {Identity("ann", "password")}
    assert len(asked) == 2
    assert ticks > 4  # none, if the plugin held the loop
    await authenticator.stop()


async def test_failures_are_answered_late_and_later_each_time() -> None:
    clock = Clock()
    authenticator = Authenticator(with_plugin(), clock=clock, sleep=clock.sleep)
    await authenticator.start()
    for number in range(5):
        assert await authenticator.authenticate_password("ann", f"guess {number}", peer=f"192.0.2.1:{number}") is None
    assert clock.pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert await authenticator.authenticate_password("ann", "guess", peer="192.0.2.2:1") is None
    assert clock.pauses[-1] == 1.0
    assert await authenticator.authenticate_password("ann", SECRET, peer=PEER)
    assert len(clock.pauses) == 6
    clock.now += throttle.FORGET_S + 1
    assert await authenticator.authenticate_password("ann", "guess", peer=PEER) is None
    assert clock.pauses[-1] == 1.0
    await authenticator.stop()


async def test_a_delay_counts_from_the_beginning_of_the_attempt() -> None:
    clock = Clock()
    asked: list[Any] = []
    authenticator = Authenticator(with_plugin(shared=asked), clock=lambda: 1000.0 + 0.3 * len(asked), sleep=clock.sleep)
    await authenticator.start()
    assert await authenticator.authenticate_password("ann", "guess", peer=PEER) is None
    assert clock.pauses == [pytest.approx(0.7)]  # 0.3 s of the second went by in the check
    await authenticator.stop()


async def test_one_address_cannot_guess_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "REFUSALS_PER_ADDRESS", 3)
    asked: list[Any] = []
    gate = asyncio.Event()

    async def sleep(seconds: float) -> None:
        await gate.wait()

    authenticator = Authenticator(with_plugin(shared=asked), sleep=sleep)
    await authenticator.start()
    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(authenticator.authenticate_password("ann", f"{number}", peer=PEER))
        await wait_until(lambda: authenticator.statistics().refused_total == 3)
        with pytest.raises(Busy):
            await authenticator.authenticate_password("ann", SECRET, peer=PEER)
        assert len(asked) == 3
        assert authenticator.statistics().throttled_total == 1
        assert await authenticator.authenticate_password("ann", SECRET, peer="192.0.2.9:1")
        gate.set()
    await authenticator.stop()


async def test_who_leaves_before_the_refusal_waits_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An HTTP request is cancelled with its connection: closing it must not be a way to guess faster."""
    monkeypatch.setattr(throttle, "REFUSALS_PER_ADDRESS", 3)
    clock = Clock()
    authenticator = Authenticator(with_plugin(), clock=clock, sleep=lambda _: asyncio.sleep(60))
    await authenticator.start()
    for number in range(3):
        guess = asyncio.create_task(authenticator.authenticate_password("ann", f"{number}", peer=PEER))
        await wait_until(lambda number=number: authenticator.statistics().refused_total == number + 1)
        guess.cancel()
        await asyncio.wait([guess])
    with pytest.raises(Busy):
        await authenticator.authenticate_password("ann", SECRET, peer=PEER)
    clock.now += throttle.DELAY_LIMIT_S
    assert await authenticator.authenticate_password("ann", SECRET, peer=PEER)
    await authenticator.stop()


async def test_who_was_right_before_is_checked_again_beside_those_who_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "REFUSALS_PER_ADDRESS", 3)
    clock = Clock()
    authenticator = Authenticator(with_plugin(), clock=clock, sleep=clock.sleep)
    await authenticator.start()
    assert await authenticator.authenticate_password("ann", SECRET, peer=PEER)
    clock.now += authentication.CACHE_S
    for number in range(3):
        assert await authenticator.authenticate_password("ann", f"{number}", peer=PEER) is None
    with pytest.raises(Busy):
        await authenticator.authenticate_password("bob", SECRET, peer=PEER)
    assert await authenticator.authenticate_password("ann", SECRET, peer=PEER)
    await authenticator.stop()


async def test_the_table_of_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "ADDRESSES", 10)
    clock = Clock()
    config = with_plugin().model_copy(update={"password_cache_entries": 10})
    authenticator = Authenticator(config, clock=clock, sleep=clock.sleep)
    await authenticator.start()
    for number in range(30):
        assert await authenticator.authenticate_password("ann", "x", peer=f"192.0.2.{number}:1") is None
        assert await authenticator.authenticate_password(f"user {number}", SECRET, peer=PEER)
    assert authenticator.statistics().addresses_slowed == 10
    assert len(authenticator._remembered) == 10
    await authenticator.stop()


@pytest.mark.parametrize("behaviour", ["raise", "abstain"])
async def test_doubt_is_a_refusal(behaviour: str) -> None:
    assert await login(with_plugin(behaviour=behaviour), "ann", SECRET) is None


async def test_every_plugin_that_answers_must_agree(password_file: Path) -> None:
    both = SecurityConfig(allow_anonymous=False, password_file=password_file, plugins={PLUGIN: {}})
    assert await login(both, "ann", SECRET) == Identity("ann", "password")
    assert await login(both, "bob", "other") is None  # the plugin does not know it
    one = SecurityConfig(password_file=password_file, plugins={PLUGIN: {"behaviour": "abstain"}})
    assert await login(one, "bob", "other") == Identity("bob", "password")


@pytest.mark.parametrize("behaviour", ["check", "raise"])
async def test_no_password_is_ever_told(
    behaviour: str, password_file: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    config = SecurityConfig(password_file=password_file, plugins={PLUGIN: {"behaviour": behaviour}})
    authenticator = Authenticator(config, clock=clock, sleep=clock.sleep)
    with caplog.at_level(logging.DEBUG), structlog.testing.capture_logs() as lines:
        await authenticator.start()
        for password in (SECRET, "wrong guess"):
            await authenticator.authenticate_password("ann", password, peer=PEER)
            await authenticator.authenticate_password("ann", password + " again", peer=PEER)
        told = [repr(vars(authenticator)), str(authenticator.statistics()), repr(lines), caplog.text]
        await authenticator.stop()
    told += capfd.readouterr()
    credentials = Credentials("ann", SECRET)
    told += [repr(credentials), str(credentials), f"{credentials}"]
    assert not [text for text in told if SECRET in text or "wrong guess" in text]
    errors = [line for line in lines if line["log_level"] == "error"]
    if behaviour == "raise":  # once, not per attempt
        assert [line["error"] for line in errors] == ["ValueError"]
        assert authenticator.statistics().errors_total == 4
    else:
        assert not errors


@pytest.mark.parametrize(
    ("peercert", "name"),
    [
        (None, None),
        ({}, None),
        ({"subject": ((("countryName", "DE"),), (("commonName", "pump-7"),))}, "pump-7"),
        ({"subject": (), "subjectAltName": (("IP Address", "::1"), ("DNS", "pump-8"))}, "pump-8"),
        ({"subject": ((("commonName", "a"), ("commonName", "b")),), "subjectAltName": (("URI", "urn:x"),)}, "urn:x"),
        ({"subject": ((("commonName", "anonymous"),),)}, None),
        ({"subject": ((("commonName", "*"),),)}, None),
    ],
)
def test_names_in_certificates(peercert: dict[str, Any] | None, name: str | None) -> None:
    identity = entrance(Authenticator(SecurityConfig())).identify_certificate(peercert)
    assert identity == (Identity(name, "certificate") if name else None)


async def test_a_crowd_waits_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients reconnect after a restart: a queue longer than a check's time-out refuses no login."""
    monkeypatch.setattr(amqtt_plugins, "CHECK_TIMEOUT_S", 1.0)
    monkeypatch.setattr(authentication, "CHECKS_AT_ONCE", 1)
    authenticator = Authenticator(with_plugin(behaviour="block"))
    await authenticator.start()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(authenticator.authenticate_password(f"user {number}", SECRET, peer=PEER))
            for number in range(16)
        ]
    assert all(task.result() for task in tasks)
    assert authenticator.statistics().errors_total == 0
    await authenticator.stop()
