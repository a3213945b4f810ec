"""Commands for a running gateway: `drain`, `flow`, `clients`, `kick`."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import Annotated
from urllib.parse import quote, urlencode

import typer

from gateway.process.commands.common import FAILED, ConfigFile, Url, User, fail, management


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for name, command in (("drain", drain), ("flow", flow), ("clients", clients), ("kick", kick)):
        app.command(name)(command)


def drain(
    config: ConfigFile = None,
    url: Url = None,
    user: User = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the gateway has stopped.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait; then the exit code is 1.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: whether it drains, and has stopped.")] = False,
) -> None:
    """Disconnect a gateway's clients at a limited rate, then stop it (section `drain` of its configuration)."""
    with management(config, url, user) as gateway:
        gateway.ask("/drain", "POST")
    stopped = wait and gateway.wait_gone(timeout)
    if as_json:
        typer.echo(json.dumps({"draining": True, "stopped": stopped}))
    if wait and not stopped:
        raise fail(f"the gateway still answers after {timeout:g} s", FAILED)


def flow(
    config: ConfigFile = None,
    url: Url = None,
    user: User = None,
    client: Annotated[str, typer.Option(help="Only clients whose name or address contains this text.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of clients.")] = 100,
    once: Annotated[bool, typer.Option("--once", help="Print it once, for scripts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it once, as JSON (docs/flow.md).")] = False,
) -> None:
    """Show live what is in flight, which clients are paused, and why. Ctrl-C ends it."""
    from gateway.observe.flow_view import print_once, watch  # noqa: PLC0415

    path = f"/flow?{urlencode({'limit': limit, 'client': client})}"
    with management(config, url, user) as gateway, suppress(KeyboardInterrupt):
        if once or as_json:
            print_once(gateway.ask(path), as_json=as_json)
        else:
            watch(partial(gateway.ask, path))


def clients(
    client: Annotated[
        str | None, typer.Argument(metavar="ID", help="One client in detail, by its id or AMQP container id.")
    ] = None,
    config: ConfigFile = None,
    url: Url = None,
    user: User = None,
    protocol: Annotated[str, typer.Option(metavar="mqtt|amqp|http", help="Only clients of a protocol.")] = "",
    principal: Annotated[str, typer.Option(help="Only clients with this login name.")] = "",
    prefix: Annotated[str, typer.Option(help="Only clients whose names have this prefix.")] = "",
    after: Annotated[str, typer.Option(metavar="ID", help="Only clients after this id.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of clients.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/operations.md).")] = False,
) -> None:
    """Show the clients of all protocols, or one of them in detail."""
    from gateway.observe.client_view import print_clients  # noqa: PLC0415

    if client is not None:
        path = _path(client)
    else:
        asked = {"protocol": protocol, "principal": principal, "prefix": prefix, "after": after, "limit": limit}
        path = f"/clients?{urlencode(asked)}"
    with management(config, url, user) as gateway:
        print_clients(gateway.ask(path), whole=client is not None, as_json=as_json)


def kick(
    client: Annotated[str, typer.Argument(metavar="ID", help="The id, as `trivium clients` shows it.")],
    config: ConfigFile = None,
    url: Url = None,
    user: User = None,
) -> None:
    """Close a client's connections, or delete an HTTP consumer; the client may reconnect."""
    from gateway.observe.client_view import closed_in  # noqa: PLC0415

    with management(config, url, user) as gateway:
        typer.echo(f"{closed_in(gateway.ask(_path(client), 'DELETE'))} closed")


def _path(client: str) -> str:
    return f"/clients/{quote(client, safe='/@:')}"
