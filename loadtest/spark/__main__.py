"""`python -m loadtest.spark SCENARIO`: load tests of Spark jobs, with a verdict.

Each starts its own Kafka (that of `trivium up`) unless one is given.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import uvloop

from loadtest.engine.command import Scenario, parser_of, until_signal
from loadtest.engine.stand import Stand
from loadtest.spark import backlog, cluster, large, latency, proofs, rates, state
from loadtest.spark.poison import every_kind


class Rates(NamedTuple):
    """Parameters.

    Attributes:
        readings: of each step; ten million take 2 GB of disk.
        rounds: of each step; the median counts.
        step_limit: seconds after which a step is stopped.
        step: only this step; repeatable.
        least: STEP=RATE, the records per CPU second that a step must reach; repeatable.
    """

    readings: int = 400_000
    rounds: int = 3
    step_limit: float = 600.0
    step: tuple[str, ...] = ()
    least: tuple[str, ...] = ()


async def run_rates(stand: Stand, plan: Rates) -> None:
    """Measure records per CPU second of a job in steps."""
    least = tuple((step, float(rate)) for step, _, rate in (one.rpartition("=") for one in plan.least))
    asked = rates.Plan(plan.readings, plan.rounds, plan.step_limit, least, plan.step)
    stand.check(await rates.run(await stand.kafka(), asked) == 0, "a step was too slow, or did not read everything")


RATES = Scenario("rates", "measure records per CPU second: bare source, decoding, windows, archive", Rates(), run_rates)
MODULES = (backlog, cluster, large, latency, every_kind, proofs, state)


def main() -> None:
    """Run the command line; the last line is the verdict."""
    scenarios = [RATES, *(one for module in MODULES for one in module.SCENARIOS)]
    parser, _ = parser_of("python -m loadtest.spark", __doc__, scenarios)
    options = parser.parse_args()
    code = uvloop.run(until_signal(options.work(options)))
    print("not kept" if code else "kept")
    sys.exit(code)


if __name__ == "__main__":
    main()
