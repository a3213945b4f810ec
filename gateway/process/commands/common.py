"""Shared by the commands: options, configuration, exit codes, and access to the management port."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gateway.observe.management_client import ManagementClient
    from gateway.settings.config import Config

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A TOML file (default: trivium.toml where it exists).")
]
Url = Annotated[str | None, typer.Option(metavar="URL", help="Management address (default: from the configuration).")]
User = Annotated[
    str | None, typer.Option(help="User to log in; prompts for the password or reads it from standard input.")
]

NOT_STARTED = 2  # the exit code of a wrong option: the user must change something
FAILED = 1  # failed after a successful start: a restart may help


def fail(text: str, code: int = NOT_STARTED) -> typer.Exit:
    """Print the error on standard error and return the exception to raise."""
    typer.echo(f"trivium: {text}", err=True)
    return typer.Exit(code)


def read_config(file: Path | None, flags: dict[str, Any] | None = None) -> Config:
    """Load the configuration, or exit with its error."""
    from gateway.settings.config import ConfigError, load  # noqa: PLC0415 - slow, and not needed by `spark run`

    try:
        return load(file, flags)
    except ConfigError as error:
        raise fail(str(error)) from error


def without_secrets(text: str, settings: Config) -> str:
    """Return an error's text with the configuration's secrets blanked."""
    from gateway.runtime.secret import Redactor, secrets_in  # noqa: PLC0415

    return Redactor(secrets_in(settings)).clean(text)


def read_password(*, confirm: bool) -> str:
    """Read a password from the terminal, or from standard input if that is no terminal."""
    if sys.stdin.isatty():
        return str(typer.prompt("Password", hide_input=True, confirmation_prompt=confirm, err=True))
    return sys.stdin.readline().rstrip("\r\n")


@contextmanager
def management(config: Path | None, url: str | None, user: str | None) -> Iterator[ManagementClient]:
    """Yield a client of the gateway's management port. If the gateway gives no answer, exit with the reason."""
    from gateway.observe.management_client import ManagementClient, NoAnswer  # noqa: PLC0415

    if url is None:
        settings = read_config(config)
        address = settings.management.address
        tls = settings.security.tls_cert is not None and not address.is_loopback
        url = f"{'https' if tls else 'http'}://{address}"
    if not url.startswith(("http://", "https://")):
        raise fail(f"--url: {url} is not an HTTP URL")
    client = ManagementClient(url, None if user is None else (user, read_password(confirm=False)))
    try:
        yield client
    except NoAnswer as error:
        raise fail(str(error), FAILED) from error
