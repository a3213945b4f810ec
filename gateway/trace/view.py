"""`trivium trace`: prints the lines of `POST /trace` in a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

from gateway.observe.flow_view import clock, plain, print_json
from gateway.observe.management_client import NoAnswer

ARROWS = {"in": "->", "out": "<-", "": "--"}  # from and to the client
KINDS = ("packet", "frame", "request", "answer", "message", "event", "body", "close", "connection", "end")
HEAD = frozenset({"at", "client", "address", "dir"})


def print_trace(lines: Iterable[bytes], *, as_json: bool) -> None:
    """Print lines as they arrive; raises NoAnswer for a line that is no JSON."""
    console = Console(soft_wrap=True, highlight=False)
    for line in lines:
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise NoAnswer("not a gateway of this version") from error
        if as_json:
            print_json(fields)
        else:
            console.print(_text(fields))


def _text(fields: dict[str, Any]) -> Text:
    at = clock(fields["at"], "%H:%M:%S.%f")[:-3]
    client = fields.get("client") or fields.get("address", "")
    kind = next((name for name in KINDS if name in fields), "")
    what = str(fields[kind]) if kind in {"packet", "frame", "connection"} else f"{kind} {fields.get(kind, '')}".strip()
    rest = " ".join(f"{name}={_value(value)}" for name, value in fields.items() if name not in HEAD and name != kind)
    return plain(f"{at}  {client}  {ARROWS[fields.get('dir', '')]}  {what} {rest}".rstrip())


def _value(value: Any) -> str:
    return value if isinstance(value, str) and value and " " not in value else json.dumps(value, ensure_ascii=False)
