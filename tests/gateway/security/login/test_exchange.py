"""SCRAM through the authenticator: identities, delayed refusals, reload, and a configuration with only a scram_file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiokafka.conn import ScramAuthenticator

from gateway.process.ports import check_exposure
from gateway.security import throttle
from gateway.security.identity import Identity
from gateway.security.login.authentication import Authenticator, Exchange
from gateway.security.login.exchange import Continue, Done, Failed
from gateway.security.login.scram import derive
from gateway.security.login.user_files import scram_line
from gateway.settings.config import Config, ConfigError, MqttConfig, SecurityConfig
from tests.support.listeners import entrance

PEER = "192.0.2.1:50000"
MECHANISM = "SCRAM-SHA-256"


def line(user: str, password: str, mechanism: str = MECHANISM) -> str:
    return scram_line(user, mechanism, derive(mechanism, password, f"salt of {user}".encode(), 4096)) + "\n"


def write(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.fixture
def scram_file(tmp_path: Path) -> Path:
    path = tmp_path / "scram"
    path.write_text(line("ann", "secret") + line("bob", "other"))
    return path


class Sleeper:
    """A clock that stands still, and a sleep that is recorded or waits for a gate."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await self.gate.wait()


def make(scram_file: Path, sleeper: Sleeper | None = None, **options: Any) -> Authenticator:
    config = SecurityConfig(**{"allow_anonymous": False, "scram_file": scram_file, **options})
    return Authenticator(config, clock=lambda: 1000.0, sleep=(sleeper or Sleeper()).sleep)


async def run(exchange: Exchange | None, user: str, password: str, mechanism: str = MECHANISM) -> Done | Failed:
    """The whole exchange with aiokafka's client, which verifies the server too."""
    assert exchange is not None
    client = ScramAuthenticator(
        loop=None, sasl_plain_username=user, sasl_plain_password=password, sasl_mechanism=mechanism
    )
    step = await exchange.step(client.first_message().encode())
    assert isinstance(step, Continue)
    client.process_server_first_message(step.data.decode())
    step = await exchange.step(client.final_message().encode())
    assert not isinstance(step, Continue)
    if isinstance(step, Done):
        client.process_server_final_message(step.data.decode())
    return step


@pytest.mark.parametrize(
    ("user", "password", "right"),
    [
        ("ann", "secret", True),
        ("bob", "other", True),
        ("ann", "other", False),
        ("eve", "secret", False),
        ("anonymous", "secret", False),
    ],
)
async def test_who_knows_the_password_is_the_user(scram_file: Path, user: str, password: str, right: bool) -> None:
    sleeper = Sleeper()
    authenticator = make(scram_file, sleeper)
    verdict = await run(authenticator.exchange(MECHANISM, peer=PEER), user, password)
    statistics = authenticator.statistics()
    if right:
        assert isinstance(verdict, Done)
        assert verdict.identity == Identity(user, "scram")
        assert (statistics.accepted_total, statistics.refused_total, sleeper.pauses) == (1, 0, [])
    else:
        assert verdict == Failed("user name or password is wrong")
        assert (statistics.accepted_total, statistics.refused_total, sleeper.pauses) == (0, 1, [1.0])


async def test_a_client_that_waits_for_the_server_is_asked(scram_file: Path) -> None:
    authenticator = make(scram_file)
    exchange = authenticator.exchange(MECHANISM, peer=PEER)
    assert exchange is not None
    assert await exchange.step(None) == Continue(b"")
    assert isinstance(await run(exchange, "ann", "secret"), Done)
    for messages in ([None, None], [b"n,,n=ann,r=c", None]):
        exchange = authenticator.exchange(MECHANISM, peer=PEER)
        assert exchange is not None
        steps = [await exchange.step(message) for message in messages]
        assert isinstance(steps[-1], Failed)


async def test_failures_of_all_kinds_are_slowed_down_together(scram_file: Path) -> None:
    sleeper = Sleeper()
    authenticator = make(scram_file, sleeper)
    for _ in range(2):
        exchange = authenticator.exchange(MECHANISM, peer=PEER)
        assert exchange is not None
        assert await exchange.step(b"nonsense") == Failed("the GS2 header is missing")
    await run(authenticator.exchange(MECHANISM, peer=PEER), "ann", "wrong")
    assert sleeper.pauses == [1.0, 2.0, 4.0]


async def test_one_address_cannot_guess_in_parallel(scram_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "REFUSALS_PER_ADDRESS", 2)
    sleeper = Sleeper()
    sleeper.gate.clear()
    authenticator = make(scram_file, sleeper)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(run(authenticator.exchange(MECHANISM, peer=PEER), "ann", f"guess {number}"))
            for number in range(2)
        ]
        while len(sleeper.pauses) < 2:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        exchange = authenticator.exchange(MECHANISM, peer=PEER)
        assert exchange is not None
        assert isinstance(await exchange.step(b"n,,n=ann,r=c"), Failed)
        assert authenticator.statistics().throttled_total == 1
        assert isinstance(await run(authenticator.exchange(MECHANISM, peer="192.0.2.9:1"), "ann", "secret"), Done)
        sleeper.gate.set()
    assert all(isinstance(task.result(), Failed) for task in tasks)


async def test_the_user_that_is_expected(scram_file: Path) -> None:
    authenticator = make(scram_file)
    assert isinstance(await run(authenticator.exchange(MECHANISM, peer=PEER, user="ann"), "ann", "secret"), Done)
    verdict = await run(authenticator.exchange(MECHANISM, peer=PEER, user="bob"), "ann", "secret")
    assert verdict == Failed("the user has changed")
    assert authenticator.statistics().refused_total == 1


def test_only_mechanisms_that_somebody_has_are_offered(scram_file: Path) -> None:
    authenticator = make(scram_file)
    assert entrance(authenticator).offers() == (MECHANISM,)
    assert entrance(authenticator).offers(certificate=True) == ("EXTERNAL", MECHANISM)
    assert authenticator.exchange("SCRAM-SHA-512", peer=PEER) is None
    assert authenticator.exchange("PLAIN", peer=PEER) is None
    scram_file.write_text(line("ann", "secret") + line("ann", "secret", "SCRAM-SHA-512"))
    assert entrance(make(scram_file, allow_anonymous=True)).offers() == ("SCRAM-SHA-512", MECHANISM, "ANONYMOUS")
    assert Authenticator(SecurityConfig()).exchange(MECHANISM, peer=PEER) is None


async def test_a_password_proves_nothing_where_only_scram_is_served(scram_file: Path) -> None:
    authenticator = make(scram_file)
    await authenticator.start()
    assert await authenticator.authenticate_password("ann", "secret", peer=PEER) is None
    assert entrance(authenticator).anonymous() is None
    await authenticator.stop()


async def test_reload_takes_new_users_and_keeps_the_old_on_a_fault(scram_file: Path) -> None:
    authenticator = make(scram_file)
    await authenticator.start()
    begun = authenticator.exchange(MECHANISM, peer=PEER)
    write(scram_file, "hunter2")
    assert not await authenticator.reload()
    assert isinstance(await run(authenticator.exchange(MECHANISM, peer=PEER), "ann", "secret"), Done)
    write(scram_file, line("eve", "new"))
    assert await authenticator.reload()
    assert isinstance(await run(authenticator.exchange(MECHANISM, peer=PEER), "eve", "new"), Done)
    assert isinstance(await run(authenticator.exchange(MECHANISM, peer=PEER), "ann", "secret"), Failed)
    assert isinstance(await run(begun, "ann", "secret"), Done)  # what had begun ends with the users of its beginning
    await authenticator.stop()


async def test_a_fault_in_one_file_keeps_both(scram_file: Path, tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    write(passwords, "")
    authenticator = make(scram_file, password_file=passwords)
    await authenticator.start()
    write(scram_file, line("eve", "new"))
    write(passwords, "broken")
    assert not await authenticator.reload()
    assert isinstance(await run(authenticator.exchange(MECHANISM, peer=PEER), "ann", "secret"), Done)
    await authenticator.stop()


def test_a_bad_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^security\.scram_file: "):
        make(tmp_path / "none")


def test_scram_protects_the_clients_and_not_management(scram_file: Path) -> None:
    security = SecurityConfig(allow_anonymous=False, scram_file=scram_file)
    exposed = MqttConfig(address="0.0.0.0:0")  # type: ignore[arg-type]
    assert check_exposure(Config(security=security, mqtt=exposed)) == []
    with pytest.raises(ConfigError, match=r"^management\.address"):
        check_exposure(Config(security=security, management={"address": "0.0.0.0:0"}))  # type: ignore[arg-type]
