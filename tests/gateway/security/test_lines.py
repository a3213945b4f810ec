"""`trivium password` prints lines with which the user can log in, and errors for unusable input."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.process.cli import app
from gateway.security.identity import Identity
from gateway.security.login.authentication import Authenticator
from gateway.security.login.device_secrets import DeviceSecrets
from gateway.security.login.scram import derive
from gateway.security.login.user_files import read_password_file, read_scram_file
from gateway.settings.config import SecurityConfig

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


def device(*arguments: str) -> tuple[str, str]:
    """Return the printed lines and secrets; the command reads nothing."""
    result = CliRunner().invoke(app, ["password", "--device", *arguments], input="")
    assert result.exit_code == 0, result.stderr
    return result.stdout, result.stderr


async def test_a_device_gets_a_secret_that_is_not_in_its_line(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    line, shown = device("site-1/pump 7")
    name, _, secret = shown.rstrip("\n").partition(":")
    assert name == "site-1/pump 7"
    assert line.startswith("site-1/pump 7:$device-sha256$")
    assert secret not in line
    assert device("site-1/pump 7") != (line, shown)
    path.write_text(line)
    authenticator = Authenticator(SecurityConfig(allow_anonymous=False, password_file=path))
    await authenticator.start()
    assert await authenticator.authenticate_password(name, secret, peer="") == Identity(name, "password")
    await authenticator.stop()


def test_a_fleet_is_provisioned_by_one_command(tmp_path: Path) -> None:
    names, secrets, path = (tmp_path / name for name in ("names", "secrets", "passwords"))
    names.write_text("# hall 1\n" + "".join(f"pump-{number}\n" for number in range(2000)))
    lines, shown = device("--names", str(names), "--secrets", str(secrets))
    assert not shown
    assert secrets.stat().st_mode & 0o777 == 0o600
    path.write_text(lines)
    users = read_password_file(path, "security.password_file")
    pairs = [line.split(":") for line in secrets.read_text().splitlines()]
    assert [name for name, _ in pairs] == list(users.devices) == [f"pump-{number}" for number in range(2000)]
    assert len({secret for _, secret in pairs}) == 2000
    assert all(DeviceSecrets(users.devices).matches(name, secret) for name, secret in pairs)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "exactly one"),
        (("--device",), "exactly one"),
        (("--device", "pump", "--names", "{names}", "--secrets", "{new}"), "exactly one"),
        (("--device", "--names", "{names}"), "--secrets"),
        (("--device", "--names", "{missing}", "--secrets", "{new}"), "cannot read"),
        (("--device", "--names", "{twice}", "--secrets", "{new}"), "line 2: duplicate name"),
        (("--device", "--names", "{colon}", "--secrets", "{new}"), "line 1: the name"),
        (("--device", "--names", "{empty}", "--secrets", "{new}"), "has no name"),
        (("--device", "--names", "{names}", "--secrets", "{names}"), "File exists"),
        (("--device", "--scram", "pump"), "exclude each other"),
        (("--secrets", "{new}", "pump"), "--device"),
        (("--names", "{names}"), "--device"),
        (("--device", "anonymous"), "the name"),
    ],
)
def test_what_no_device_can_have_is_said(tmp_path: Path, arguments: tuple[str, ...], complaint: str) -> None:
    """A human's password is never taken for a device: `--device` reads no input, and bulk is for devices only."""
    contents = {"names": "a\nb\n", "twice": "a\na\n", "colon": "a:b\n", "empty": "# none\n"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    places = {name: str(tmp_path / name) for name in (*contents, "new", "missing")}
    given = [argument.format_map(places) for argument in arguments]
    result = CliRunner().invoke(app, ["password", *given], input=f"{PASSWORD}\n")
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert not result.stdout
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "names").read_text() == contents["names"]


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
