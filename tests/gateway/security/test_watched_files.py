"""Changed files are noticed once they have stopped changing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gateway.security import watched_files
from gateway.security.watched_files import files_in, watch_files
from gateway.settings.config import SecurityConfig


@pytest.fixture
def files(tmp_path: Path) -> SecurityConfig:
    for name in ("cert", "key", "users"):
        (tmp_path / name).write_text("old")
    return SecurityConfig(tls_cert=tmp_path / "cert", tls_key=tmp_path / "key", password_file=tmp_path / "users")


def test_every_file_of_a_configuration_is_found(files: SecurityConfig) -> None:
    assert {path.name for path in files_in(files)} == {"cert", "key", "users"}


async def test_a_pair_that_is_replaced_in_steps_is_one_change(
    files: SecurityConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = [
        lambda: None,
        lambda: replace(tmp_path / "cert", "new"),
        (tmp_path / "key").unlink,
        lambda: replace(tmp_path / "key", "new"),
        lambda: None,
        lambda: None,
        lambda: replace(tmp_path / "users", "newer"),
        lambda: None,
    ]
    changes: list[int] = []
    monkeypatch.setattr(watched_files.asyncio, "sleep", steps(rounds))
    with pytest.raises(asyncio.CancelledError):
        await watch_files([files], 1.0, lambda: changes.append(len(rounds)))
    assert changes == [3, 0]  # one period after the key, and one after the users


def replace(path: Path, text: str) -> None:
    fresh = path.with_name("fresh")
    fresh.write_text(text)
    fresh.replace(path)


def steps(rounds: list[Callable[[], None]]) -> Callable[[float], Awaitable[None]]:
    """Return a sleep that does the next step; it is cancelled at the end."""

    async def sleep(_: float) -> None:
        if not rounds:
            raise asyncio.CancelledError
        rounds.pop(0)()

    return sleep
