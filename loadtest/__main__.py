"""`python -m loadtest SCENARIO`: load tests of a gateway, verified by the records in Kafka.

`run` tests your own gateway, `compare` compares its results; all other scenarios start their own gateway.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import uvloop

from loadtest import scenarios
from loadtest.engine.command import Scenario, parser_of, until_signal
from loadtest.faults import run as faults
from loadtest.run import commands


def declared() -> list[Scenario]:
    """Return the scenarios of all modules in `loadtest.scenarios`, and `faults`."""
    names = (f"{scenarios.__name__}.{module.name}" for module in pkgutil.iter_modules(scenarios.__path__))
    return [*faults.SCENARIOS, *(one for name in names for one in importlib.import_module(name).SCENARIOS)]


def main() -> None:
    """Run the command line."""
    parser, parsers = parser_of("python -m loadtest", __doc__, declared())
    commands.add_options(parsers)
    options = parser.parse_args()
    sys.exit(uvloop.run(until_signal(options.work(options))))


if __name__ == "__main__":
    main()
