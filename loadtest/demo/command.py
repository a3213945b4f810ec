"""The main job: readings from three kinds of client into Kafka, through Spark, and back to three kinds of client.

Starts the gateway with its embedded broker, the Spark job and a small fleet; shows what happens until Ctrl-C, or for
`--duration` seconds and then judges: exit code 0 only if every reading was acknowledged and every window of Spark's
results holds exactly the readings that were sent into it.
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
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.demo", description=__doc__)
    parser.add_argument("--duration", type=float, help="seconds of sending; then judge and stop (default: Ctrl-C)")
    parser.add_argument("--data-dir", type=Path, default=Path(".trivium"), help="Kafka's data, checkpoint and logs")
    parser.add_argument("--trigger", choices=("micro-batch", REAL_TIME), default=REAL_TIME, help="Spark's")
    return parser.parse_args(argv)


def main() -> int:
    """The command."""
    started = time.perf_counter()
    given = arguments()
    console = Console(highlight=False)
    try:
        directory = Directory(given.data_dir)
    except (InUseError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    # Libraries tell of every retry while Kafka starts: not for the screen.
    logging.basicConfig(filename=directory.path / "demo.log", filemode="w", level=logging.WARNING,
                        format="%(asctime)s %(levelname)s %(name)s %(message)s")  # fmt: skip
    try:
        return uvloop.run(Demo(Options(given.duration, given.trigger), directory, console, started).run())
    finally:
        directory.close()
