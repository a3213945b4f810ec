"""`python -m loadtest.spark SCENARIO`: load tests of Spark jobs, with a verdict.

Each starts its own Kafka (that of `trivium up`) unless one is given.
"""

from __future__ import annotations

import sys

import uvloop

from loadtest.engine.command import parser_of, until_signal
from loadtest.spark import latency, proofs, rates

MODULES = (rates, latency, proofs)


def main() -> None:
    """Run the command line; the last line is the verdict."""
    scenarios = [one for module in MODULES for one in module.SCENARIOS]
    parser, _ = parser_of("python -m loadtest.spark", __doc__, scenarios)
    options = parser.parse_args()
    code = uvloop.run(until_signal(options.work(options)))
    print("not kept" if code else "kept")
    sys.exit(code)


if __name__ == "__main__":
    main()
