"""`python -m loadtest run`, `compare` and `size`: load tests of a user's own gateway."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from loadtest.engine.stand import Stand, allow_files
from loadtest.gateway import GatewayProcess
from loadtest.report import Report
from loadtest.run import page, sizing
from loadtest.run.compare import compare, doubts
from loadtest.run.pool import GeneratorError
from loadtest.run.runner import FORMAT, Run
from loadtest.run.saturation import SaturatedError
from loadtest.run.scenario import Receive, Scenario, ScenarioError, Send, Target, rate, read, seconds
from loadtest.run.shapes import PROTOCOLS

BAD, WRONG, SATURATED = 1, 2, 3
"""Exit codes: a message was lost or refused; the run could not start; the generators were too slow for a result."""
CALIBRATING: Final = 500
"""Connections of the calibration that measures CPU and memory."""
READING: Final = 5


def add_options(parsers: Any) -> None:
    """Add the three commands."""

    def command(name: str, text: str, work: Callable[[argparse.Namespace], Awaitable[int]]) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = parsers.add_parser(name, help=text)
        made.add_argument("--json", type=Path, help="also write the report to this file")
        made.set_defaults(work=work)
        return made

    text = "run and verify the load test of a TOML file on your gateway; docs/loadtest.md"
    run = command("run", text, _run)
    run.add_argument("scenario_file", type=Path, metavar="SCENARIO.toml")
    run.add_argument("--html", type=Path, help="write the report to this file, as one self-contained page")
    run.add_argument("--ready-file", type=Path, help="read the target from the file of `trivium up --ready-file`")
    run.add_argument("--messages", help="override the kind of messages: minimal, typical, jms or random")
    run.add_argument("--rate", type=_positive(rate), help="messages per second")
    run.add_argument("--duration", type=_positive(seconds), help="duration of a round, such as 30s or 4h")
    run.add_argument("--rounds", type=int)
    run.add_argument("--processes", type=int, help="generator processes (default: one per processor)")
    run.add_argument(
        "--no-verify",
        action="store_false",
        dest="verify",
        default=None,
        help="do not read the messages back from Kafka",
    )
    compared = command("compare", "compare two results of `run`, and tell differences from noise", _compared)
    compared.add_argument("before", type=Path)
    compared.add_argument("after", type=Path)
    text = "estimate the gateways, partitions and MB/s that a fleet needs, from measured costs"
    sized = command("size", text, _measured)
    sized.add_argument("--directory", type=Path, help="for logs and data (default: a new one under /tmp)")
    sized.add_argument("--bootstrap", help="use this Kafka, and leave its data untouched (default: start one)")
    sized.add_argument("--devices", type=int, required=True)
    sized.add_argument("--rate", type=_positive(rate), required=True, help="messages of one device, such as 1/10s")
    sized.add_argument("--bytes", type=int, required=True, help="payload bytes")
    sized.add_argument("--protocol", choices=("mqtt", "amqp", "http"), default="mqtt")
    sized.add_argument("--qos", type=int, choices=(1, 2), default=1, help="MQTT only")
    sized.add_argument("--subscribers", type=int, default=0)
    sized.add_argument("--share", type=float, default=1.0, help="share of all messages that each subscriber receives")
    sized.add_argument("--replicas", type=int, default=3)
    sized.add_argument("--result", type=Path, help="use this result of `run`; default: start a gateway and measure it")
    sized.add_argument("--duration", type=_positive(seconds), default=10.0, help="duration of the measurement")


def _positive(parse: Callable[[Any], Any]) -> Callable[[str], float]:
    """Wrap a parser for argparse, so that its ValueError becomes the option's error."""

    def positive(value: str) -> float:
        try:
            found = float(parse(value))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if found <= 0:
            raise argparse.ArgumentTypeError(f"{value} is not greater than 0")
        return found

    return positive


def say(text: str) -> None:
    """Print progress to the standard error."""
    print(text, file=sys.stderr, flush=True)


async def _run(options: argparse.Namespace) -> int:
    """Run a load test; 0 if it has no problems."""
    names = ("messages", "rate", "duration", "rounds", "processes", "verify")
    changes = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.ready_file is not None:
        changes["target"] = {"ready_file": options.ready_file}
    try:
        result = await Run(read(options.scenario_file, changes), say).run()
    except (ScenarioError, GeneratorError) as error:
        print(error, file=sys.stderr)
        return WRONG
    except SaturatedError as error:
        print(error, file=sys.stderr)
        return SATURATED
    page.report(result).print()
    for name, text in page.facts(result):
        print(f"{name}: {text}")
    for problem in result["problems"]:
        print(problem, file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.html:
        options.html.write_text(page.page(result))
    return BAD if result["problems"] else 0


def load(path: Path) -> dict[str, Any]:
    """Read a result of `run`.

    Raises:
        ScenarioError: the file is not one.
    """
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        known = result["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ScenarioError(f"{path} is not a result of `run`: {error!r}") from None
    if not known:
        raise ScenarioError(f"{path} has format {result['format']}, not {FORMAT}: run the test again")
    return result


async def _compared(options: argparse.Namespace) -> int:
    """Compare two results; 0 whatever the differences."""
    try:
        before, after = load(options.before), load(options.after)
    except ScenarioError as error:
        print(error, file=sys.stderr)
        return WRONG
    report = Report(f"{options.before} and {options.after}", lines=True)
    for row in compare(before, after):
        report.add(**row)
    report.print()
    for doubt in doubts(before, after):
        print(doubt, file=sys.stderr)
    if options.json:
        options.json.write_text(report.to_json())
    return 0


def calibration(options: argparse.Namespace, target: Target, readers: int) -> Scenario:
    """Return the scenario measured for `size`: many connections with one message in flight each, like devices."""
    send = Send(
        protocol=options.protocol, connections=CALIBRATING, in_flight=1, size=max(48, options.bytes), qos=options.qos
    )
    return Scenario(
        name="calibration", target=target, duration=options.duration, rounds=1, send=[send],
        receive=[Receive(protocol=options.protocol, connections=readers)] if readers else [],
    )  # fmt: skip


async def _measured(options: argparse.Namespace) -> int:
    """Estimate what a fleet needs, from a result or from a gateway that is measured now."""
    if options.result is not None:
        return await _sized(options)
    allow_files()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="trivium-size-"))
    async with Stand(directory, options.bootstrap) as stand, stand.gateway() as gateway:
        return await _sized(options, gateway)


async def _sized(options: argparse.Namespace, gateway: GatewayProcess | None = None) -> int:
    """Estimate what a fleet needs; 0 if successful. `gateway` is measured unless the options name a result."""
    fleet = sizing.Fleet(
        options.devices, options.rate, options.bytes, options.subscribers, options.share, options.replicas
    )
    try:
        if gateway is None:
            cost = sizing.cost_of(load(options.result))
        else:
            target = Target.model_validate({name: gateway.addresses[name] for name in (*PROTOCOLS, "kafka", "pid")})
            sending = await Run(calibration(options, target, 0), say).run()
            with_readers = None
            if options.subscribers:
                with_readers = await Run(calibration(options, target, READING), say).run()
            cost = sizing.cost_of(sending, with_readers)
    except SaturatedError as error:
        print(error, file=sys.stderr)
        return SATURATED
    except (ScenarioError, GeneratorError, ValueError) as error:
        print(error, file=sys.stderr)
        return WRONG
    report = Report(f"{fleet.devices:,} devices")
    report.add(**sizing.size(fleet, cost).row())
    report.print()
    for assumption in sizing.assumptions(fleet, cost):
        print(f"- {assumption}")
    if options.json:
        options.json.write_text(report.to_json())
    return 0
