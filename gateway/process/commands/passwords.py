"""`trivium password`: lines for the password file and the SCRAM file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gateway.process.commands.common import fail, read_password

OWNER_ONLY = 0o600


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("password")(password_line)


def password_line(
    user: Annotated[str | None, typer.Argument(help="The name of the user or device.")] = None,
    device: Annotated[
        bool, typer.Option("--device", help="Generate a device's secret, which needs no slow hash; asks for nothing.")
    ] = False,
    names: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --device: the names of many devices, one per line.")
    ] = None,
    secrets: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --device: new file for name:secret lines (default: standard error)."),
    ] = None,
    scram: Annotated[
        bool, typer.Option("--scram", help="For security.scram_file, not security.password_file.")
    ] = False,
    mechanism: Annotated[str, typer.Option(help="With --scram: SCRAM-SHA-256 or SCRAM-SHA-512.")] = "SCRAM-SHA-256",
    iterations: Annotated[
        int, typer.Option(help="With --scram: hashes that each login costs the client; at least 4096.")
    ] = 16384,
) -> None:
    """Print a user's line for the password file; prompts for the password or reads it from standard input.

    With --device the password is a generated secret, which is shown once.
    """
    from gateway.security.login.user_files import argon2_line, new_scram_line  # noqa: PLC0415 - hashes load slowly

    if not device and (names is not None or secrets is not None):
        raise fail("--names and --secrets need --device: only generated secrets are made in bulk")
    if device and scram:
        raise fail("--device and --scram exclude each other")
    if (user is None) == (names is None):
        raise fail("exactly one of a name and --names is needed")
    if names is not None and secrets is None:
        raise fail("--names needs --secrets")
    if user is None or device:
        _add_devices([] if user is None else [user], names, secrets)
        return
    password = read_password(confirm=True)
    try:
        line = new_scram_line(user, password, mechanism, iterations) if scram else argon2_line(user, password)
    except ValueError as error:
        raise fail(str(error)) from error
    typer.echo(line)


def _add_devices(given: Sequence[str], file: Path | None, secrets: Path | None) -> None:
    """Print the lines of new devices. Their secrets go to a new file that only its owner may read, or are shown."""
    from gateway.security.login.user_files import new_device, read_names  # noqa: PLC0415
    from gateway.settings.config import ConfigError  # noqa: PLC0415

    try:
        made = [(name, *new_device(name)) for name in (given if file is None else read_names(file, "--names"))]
    except (ConfigError, ValueError) as error:
        raise fail(str(error)) from error
    shown = "".join(f"{name}:{secret}\n" for name, secret, _ in made)
    if secrets is None:
        typer.echo(shown, err=True, nl=False)
    else:
        try:
            descriptor = os.open(secrets, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
            with open(descriptor, "w", encoding="utf-8") as target:  # noqa: PTH123 - a descriptor
                target.write(shown)
        except OSError as error:
            raise fail(f"--secrets: cannot write {secrets}: {error.strerror}") from error
    typer.echo("".join(f"{line}\n" for _, _, line in made), nl=False)
