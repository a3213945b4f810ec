"""The command `trace` of the optional part."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from gateway.process.commands.common import ConfigFile, Url, User, fail, management


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("trace")(trace)


def trace(
    client: Annotated[str, typer.Option(metavar="ID", help="The client with this id, also if it connects later.")] = "",
    topic: Annotated[str, typer.Option(help="All traffic about this topic.")] = "",
    address: Annotated[str, typer.Option(metavar="HOST[:PORT]", help="All connections from this address.")] = "",
    config: ConfigFile = None,
    url: Url = None,
    user: User = None,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Duration in seconds.")] = 30.0,
    lines: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of lines.")] = 10_000,
    payload: Annotated[int, typer.Option(min=0, max=1024, help="Bytes of each payload to show.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines (docs/operations.md).")] = False,
) -> None:
    """Show the traffic between clients and the gateway: packets, frames, requests. Ctrl-C ends it."""
    from gateway.trace.view import print_trace  # noqa: PLC0415

    chosen = {name: text for name, text in (("client", client), ("topic", topic), ("address", address)) if text}
    if len(chosen) != 1:
        raise fail("exactly one of --client, --topic and --address is needed")
    wanted = {**chosen, "seconds": seconds, "lines": lines, "payload": payload}
    with management(config, url, user) as gateway, suppress(KeyboardInterrupt):
        print_trace(gateway.stream("/trace", wanted, seconds), as_json=as_json)
