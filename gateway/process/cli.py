"""The `trivium` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.process.commands import operating, passwords
from gateway.process.commands.common import FAILED, NOT_STARTED, ConfigFile, fail, read_config, without_secrets
from gateway.runtime.parts import commands
from gateway.runtime.version import LibraryError, check_libraries, version

app = typer.Typer(
    help="MQTT 5, AMQP 1.0 and HTTP into Apache Kafka and back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Show and check the configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")
operating.add_to(app)
passwords.add_to(app)
for _module in commands():
    _module.add_to(app)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trivium {version()}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """MQTT 5, AMQP 1.0 and HTTP into Apache Kafka and back."""


Listen = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0: any free port.")]


@app.command()
def up(
    config: ConfigFile = None,
    mqtt: Listen = None,
    mqtt_websocket: Listen = None,
    amqp: Listen = None,
    amqp_websocket: Listen = None,
    http: Listen = None,
    management: Listen = None,
    bootstrap_servers: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT,...", help="Kafka's brokers; without them an embedded broker is started."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Directory for the embedded broker's data.")] = None,
    kafka_port: Annotated[int | None, typer.Option(help="The embedded broker's port; 0: any free port.")] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="File to write once every listener accepts (JSON: addresses, process ids).")
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Listen beyond loopback without authentication.")
    ] = None,
) -> None:
    """Run the gateway until Ctrl-C, or SIGTERM, which first disconnects the clients gradually (see `trivium drain`)."""
    from gateway.observe.collector import set_gc_thresholds  # noqa: PLC0415 - other commands use Python's own thresholds

    set_gc_thresholds()
    flags: dict[str, Any] = {
        "data_dir": data_dir,
        "mqtt": {"address": mqtt, "websocket_address": mqtt_websocket},
        "amqp": {"address": amqp, "websocket_address": amqp_websocket},
        "http": {"address": http},
        "management": {"address": management},
        "kafka": {"bootstrap_servers": bootstrap_servers},
        "embedded": {"port": kafka_port},
        "security": {"insecure": insecure},
    }
    settings = read_config(config, flags)
    try:
        check_libraries()
    except LibraryError as error:
        raise fail(str(error), NOT_STARTED) from error
    from gateway.process.app import FatalError, StartError, run  # noqa: PLC0415 - `config check` needs neither Kafka nor proton

    try:
        run(settings, ready_file)
    except (StartError, FatalError) as error:
        code = FAILED if isinstance(error, FatalError) else NOT_STARTED
        raise fail(without_secrets(str(error), settings), code) from error


@config_app.command("check")
def config_check(
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: whether it is valid, and its errors.")] = False,
) -> None:
    """Check the configuration and print its errors."""
    from gateway.process.app import StartError, check  # noqa: PLC0415
    from gateway.settings.config import ConfigError, load  # noqa: PLC0415

    errors = ""
    try:
        settings = load(config)
        check(settings)
    except ConfigError as error:
        errors = str(error)
    except StartError as error:
        errors = without_secrets(str(error), settings)
    if as_json:
        typer.echo(json.dumps({"valid": not errors, "errors": errors.splitlines()}))
        if errors:
            raise typer.Exit(NOT_STARTED)
    elif errors:
        raise fail(errors)
    else:
        typer.echo("The configuration is valid.")


@config_app.command("show")
def config_show(config: ConfigFile = None) -> None:
    """Print the effective configuration as JSON; secrets are blanked."""
    typer.echo(json.dumps(read_config(config).model_dump(mode="json"), indent=2))


def main() -> None:
    """Run the console script."""
    app()
