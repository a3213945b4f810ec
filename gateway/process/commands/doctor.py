"""The command `doctor`; an optional part."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

from gateway.process.commands.common import FAILED, ConfigFile, read_config, without_secrets


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("doctor")(doctor)


def doctor(
    config: ConfigFile = None,
    bootstrap_servers: Annotated[
        str | None, typer.Option(metavar="HOST:PORT,...", help="Kafka (default: that of the configuration).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each finding.")] = False,
) -> None:
    """Check whether Kafka and this machine meet the gateway's requirements; exit code 1 if not."""
    settings = read_config(config, {"kafka": {"bootstrap_servers": bootstrap_servers}})
    from gateway.kafka.cluster.doctor import Finding, examine  # noqa: PLC0415 - aiokafka loads slowly
    from gateway.observe.logs import configure_logs  # noqa: PLC0415
    from gateway.runtime.secret import secrets_in  # noqa: PLC0415

    configure_logs(settings.log, secrets=secrets_in(settings))

    def say(finding: Finding) -> None:
        typer.echo(without_secrets(json.dumps(finding._asdict()) if as_json else str(finding), settings))

    if not asyncio.run(examine(settings, say)):
        raise typer.Exit(FAILED)
