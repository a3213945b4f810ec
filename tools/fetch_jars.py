"""Fetch the jars of Kafka and of Spark's Kafka source into the cache: `python -m tools.fetch_jars [SET...]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gateway.embedded.jars import console_report, ensure_jars
from gateway.embedded.java import SetupError

SETS = ("kafka", "spark")


def main(arguments: Sequence[str]) -> int:
    """Fetch the given sets, or all. Returns the exit code; an error is one line on standard error."""
    unknown = [name for name in arguments if name not in SETS]
    if unknown:
        sys.stderr.write(f"no such set of jars: {unknown[0]} (there are {', '.join(SETS)})\n")
        return 2
    try:
        with console_report() as report:
            for name in arguments or SETS:
                ensure_jars(name, report=report)
    except SetupError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
