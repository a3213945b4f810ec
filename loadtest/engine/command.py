"""Scenarios as declarations, and the command line made of them: a field of a plan is an option."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import re
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

from loadtest.engine.stand import Stand, allow_files
from loadtest.report import Report

SHOWN: Final = 20
"""Problems that are printed."""


class Scenario(NamedTuple):
    """A load test.

    Attributes:
        name: its command.
        text: its help.
        plan: a named tuple of its parameters with their defaults. The class's docstring has their meanings.
        run: runs it on a stand; adds rows and problems there.
        only: what `--only` selects by a part of its name; None without parts.
        pins: whether the gateway has a processor of its own, unless `--unpinned` is given.
        own_kafka: whether it always starts its own Kafka.
        lines: whether a row of its report is a line; otherwise a column.
    """

    name: str
    text: str
    plan: Any
    run: Callable[[Stand, Any], Awaitable[None]]
    only: str | None = None
    pins: bool = False
    own_kafka: bool = False
    lines: bool = True

    def add_to(self, parsers: Any) -> None:
        """Add its command with its options."""
        made = parsers.add_parser(
            self.name, help=self.text, description=inspect.getdoc(sys.modules[self.run.__module__]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        made.add_argument("--json", type=Path, help="also write the report to this file")
        made.add_argument("--directory", type=Path, help="for logs and data (default: a new one under /tmp)")
        if not self.own_kafka:
            made.add_argument("--bootstrap", help="use this Kafka, and leave its data untouched (default: start one)")
        meanings, hints = _meanings(self.plan), get_type_hints(type(self.plan))
        for field in self.plan._fields:
            default = getattr(self.plan, field)
            help_ = f"{meanings.get(field, '')} ({'none' if default in (None, ()) else default})".strip()
            given = list(default) if isinstance(default, tuple) else default
            made.add_argument(f"--{field.replace('_', '-')}", default=given, help=help_, **_kind(hints[field]))
        if self.only is not None:
            made.add_argument("--only", default="", help=f"only {self.only}")
        if self.pins:
            made.add_argument("--unpinned", action="store_true", help="do not pin processes to processors")
        made.set_defaults(work=self.start)

    async def start(self, options: argparse.Namespace) -> int:
        """Run it as its options say, print and write its report; 0 if there is no problem."""
        allow_files()
        values = {name: getattr(options, name) for name in self.plan._fields}
        plan = type(self.plan)(**{name: tuple(one) if isinstance(one, list) else one for name, one in values.items()})
        directory = options.directory or Path(tempfile.mkdtemp(prefix=f"trivium-{self.name}-"))
        bootstrap = None if self.own_kafka else options.bootstrap
        pinned = self.pins and not options.unpinned
        async with Stand(directory, bootstrap, only=getattr(options, "only", ""), pinned=pinned) as stand:
            await self.run(stand, plan)
        stand.say(f"logs: {directory}")
        report = Report(self.name, lines=self.lines)
        for row in stand.rows:
            report.add(**row)
        report.print()
        for problem in stand.problems[:SHOWN]:
            print(problem, file=sys.stderr)
        if options.json:
            options.json.write_text(report.to_json())
        return 1 if stand.problems else 0


def _kind(hint: Any) -> dict[str, Any]:
    """Return how argparse reads a field of this type."""
    kinds = [one for one in get_args(hint) if one is not NoneType]
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is tuple:
        return {"action": "append", **_kind(kinds[0])}
    if hint is bool:
        return {"action": "store_true"}
    return _kind(kinds[0]) if kinds else {"type": hint}


def _meanings(plan: object) -> dict[str, str]:
    """Return what the docstring of a plan's class says about its attributes."""
    _, _, attributes = inspect.cleandoc(type(plan).__doc__ or "").partition("Attributes:\n")
    found = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".").replace("%", "%%") for name, text in found}


def parser_of(program: str, description: str | None, scenarios: Iterable[Scenario]) -> tuple[Any, Any]:
    """Return a parser of these scenarios, and what further commands are added to."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parsers = parser.add_subparsers(dest="scenario", required=True)
    for scenario in scenarios:
        scenario.add_to(parsers)
    return parser, parsers


async def until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Run `work`; SIGTERM and SIGINT cancel it, so that its processes are stopped. Then exit as a shell would."""
    loop, task, signals = asyncio.get_running_loop(), asyncio.current_task(), list[int]()
    assert task is not None

    def stop(number: int) -> None:
        signals.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not signals:
            raise
        return 128 + signals[0]
