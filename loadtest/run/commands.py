"""`python -m loadtest run`, `compare` and `size`: for whoever wants to know what a gateway does for him."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

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
"""Exit codes: a promise was not kept; the run could not begin; there is no result."""
CALIBRATING: Final = 500
"""Connections whose cost and memory are measured."""
READING: Final = 5

Say = Callable[[str], None]


def add_options(scenario: Callable[..., argparse.ArgumentParser]) -> None:
    """The three commands; `scenario` makes one."""
    run = scenario("run", "the load of a TOML file on a gateway of yours, judged; docs/loadtest.md", starts=())
    run.add_argument("scenario_file", type=Path, metavar="SCENARIO.toml")
    run.add_argument("--html", type=Path, help="write the report here, one page that needs nothing else")
    run.add_argument(
        "--ready-file", type=Path, help="instead of the file's target: what `trivium up --ready-file` wrote"
    )
    run.add_argument("--messages", help="instead of the file's: minimal, typical, jms or random")
    run.add_argument("--rate", type=_told(rate), help="messages a second")
    run.add_argument("--duration", type=_told(seconds), help="of a round, such as 30s or 4h")
    run.add_argument("--rounds", type=int)
    run.add_argument("--processes", type=int, help="generators; default: as many as there are processors")
    run.add_argument("--no-verify", action="store_false", dest="verify", default=None, help="do not read Kafka")
    compared = scenario("compare", "two results of `run`: what differs, and whether that is noise", starts=())
    compared.add_argument("before", type=Path)
    compared.add_argument("after", type=Path)
    sized = scenario("size", "how many gateways, partitions and MB/s a fleet needs, from what a message costs")
    sized.add_argument("--devices", type=int, required=True)
    sized.add_argument("--rate", type=_told(rate), required=True, help="of one device, such as 1/10s")
    sized.add_argument("--bytes", type=int, required=True, help="of a payload")
    sized.add_argument("--protocol", choices=("mqtt", "amqp", "http"), default="mqtt")
    sized.add_argument("--qos", type=int, choices=(1, 2), default=1, help="MQTT only")
    sized.add_argument("--subscribers", type=int, default=0)
    sized.add_argument("--share", type=float, default=1.0, help="of all messages that each subscriber gets")
    sized.add_argument("--replicas", type=int, default=3)
    sized.add_argument(
        "--result", type=Path, help="a result of `run` to calculate with; default: a gateway is started and measured"
    )
    sized.add_argument("--duration", type=_told(seconds), default=10.0, help="of that measurement")


def _told(parse: Callable[[Any], Any]) -> Callable[[str], float]:
    """Of an option: what is wrong with it is the parser's to say."""

    def told(value: str) -> float:
        try:
            found = float(parse(value))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if found <= 0:
            raise argparse.ArgumentTypeError(f"{value} is not above 0")
        return found

    return told


async def run(options: argparse.Namespace, say: Say) -> int:
    """`run`: 0 when everything that was promised was kept."""
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
    """A result of `run`.

    Raises:
        ScenarioError: it is none.
    """
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        known = result["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ScenarioError(f"{path} is no result of `run`: {error!r}") from None
    if not known:
        raise ScenarioError(f"{path} is of format {result['format']}, not {FORMAT}: run it again")
    return result


async def compared(options: argparse.Namespace, _say: Say) -> int:
    """`compare`: 0, whatever differs."""
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
    """What is measured for `size`: many connections, each with one message in flight, as devices have it."""
    send = Send(
        protocol=options.protocol, connections=CALIBRATING, in_flight=1, size=max(48, options.bytes), qos=options.qos
    )
    return Scenario(
        name="calibration", target=target, duration=options.duration, rounds=1, send=[send],
        receive=[Receive(protocol=options.protocol, connections=readers)] if readers else [],
    )  # fmt: skip


async def sized(options: argparse.Namespace, say: Say, gateway: GatewayProcess | None = None) -> int:
    """`size`: 0 when there is an answer. `gateway`: to measure, unless there is a result to calculate with."""
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
