"""`trivium password` prints lines with which the user can log in, and errors for unusable input."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.config import SecurityConfig
from gateway.security.authentication import Authenticator
from gateway.security.identity import Identity
from gateway.security.scram import derive
from gateway.security.user_files import read_scram_file

PASSWORD = "correct horse"


def printed(*arguments: str, password: str = PASSWORD) -> str:
    result = CliRunner().invoke(app, ["password", *arguments], input=f"{password}\n")
    assert result.exit_code == 0, result.stderr
    assert PASSWORD not in result.output
    return result.stdout


async def test_a_line_of_the_password_file(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    path.write_text(printed("ann") + printed("bob", password="b"))
    authenticator = Authenticator(SecurityConfig(allow_anonymous=False, password_file=path, failed_attempt_delay_s=0))
    await authenticator.start()
    assert await authenticator.authenticate_password("ann", PASSWORD, peer="") == Identity("ann", "password")
    assert await authenticator.authenticate_password("bob", PASSWORD, peer="") is None
    await authenticator.stop()


@pytest.mark.parametrize(
    ("options", "mechanism", "iterations"),
    [
        ((), "SCRAM-SHA-256", 16384),
        (("--mechanism", "SCRAM-SHA-512", "--iterations", "4096"), "SCRAM-SHA-512", 4096),
    ],
)
def test_a_line_of_the_scram_file(tmp_path: Path, options: tuple[str, ...], mechanism: str, iterations: int) -> None:
    path = tmp_path / "scram"
    path.write_text(printed("--scram", *options, "\uff41nn") + printed("--scram", *options, "bob"), encoding="utf-8")
    users = read_scram_file(path, "security.scram_file")
    ann, bob = (users.credential(mechanism, name) for name in ("ann", "bob"))
    assert ann.salt != bob.salt
    assert ann == derive(mechanism, PASSWORD, ann.salt, iterations)


@pytest.mark.parametrize(
    ("arguments", "password", "complaint"),
    [
        (("a:b",), PASSWORD, "name"),
        (("",), PASSWORD, "name"),
        (("anonymous",), PASSWORD, "name"),
        (("#ann",), PASSWORD, "name"),
        ((" ann",), PASSWORD, "name"),
        (("ann",), "", "password is empty"),
        (("--scram", "ann"), "", "password is empty"),
        (("--scram", "a\u0221"), PASSWORD, "the name contains"),
        (("--scram", "ann\uff1ab"), PASSWORD, "name"),
        (("--scram", "ann"), "a\u0221", "Unicode 3.2"),
        (("--scram", "--iterations", "4095", "ann"), PASSWORD, "4096"),
        (("--scram", "--mechanism", "SCRAM-SHA-1", "ann"), PASSWORD, "SCRAM-SHA-256, SCRAM-SHA-512"),
    ],
)
def test_what_cannot_be_made_is_said(arguments: tuple[str, ...], password: str, complaint: str) -> None:
    result = CliRunner().invoke(app, ["password", *arguments], input=f"{password}\n")
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert not result.stdout
    assert PASSWORD not in result.stderr
