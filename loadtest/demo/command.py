"""Demo: MQTT, AMQP and HTTP clients send readings to Kafka, Spark aggregates them, and clients receive the results.

Starts the gateway with its embedded broker, the Spark job and a few clients, and shows the traffic until Ctrl-C. With
`--duration` it stops after that many seconds and checks the run: the exit code is 0 only if every reading was
acknowledged and every window in Spark's results covers exactly the readings sent.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

import uvloop
from rich.console import Console

from loadtest.demo.directory import Directory, InUseError
from loadtest.demo.run import REAL_TIME, Demo, Options


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.demo", description=__doc__)
    parser.add_argument("--duration", type=float, help="seconds to send, then check and stop (default: until Ctrl-C)")
    parser.add_argument(
        "--data-dir", type=Path, default=Path(".trivium"), help="directory of Kafka's data, Spark's checkpoint and logs"
    )
    parser.add_argument("--trigger", choices=("micro-batch", REAL_TIME), default=REAL_TIME, help="Spark's trigger")
    return parser.parse_args(argv)


def main() -> int:
    """Run the command and return its exit code."""
    started = time.perf_counter()
    given = arguments()
    console = Console(highlight=False)
    try:
        directory = Directory(given.data_dir)
    except (InUseError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    # Libraries log every retry while Kafka starts; keep that off the screen.
    logging.basicConfig(filename=directory.path / "demo.log", filemode="w", level=logging.WARNING,
                        format="%(asctime)s %(levelname)s %(name)s %(message)s")  # fmt: skip
    try:
        return uvloop.run(Demo(Options(given.duration, given.trigger), directory, console, started).run())
    finally:
        directory.close()
