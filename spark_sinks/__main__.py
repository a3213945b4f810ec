"""`python -m spark_sinks JOB ...` starts a job file or a named job: with Spark, or in Python only (replays, audits)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from spark_sinks.run.job_file import JobFileError, is_job_file, read
from spark_sinks.spec.jobs import JobSpec


def main(argv: Sequence[str]) -> int:
    """Run a job in this process and return its exit code; 2 means that the job file is wrong."""
    if argv and is_job_file(argv[0]):
        try:
            file = read(Path(argv[0]))
        except JobFileError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        if not isinstance(file.spec, JobSpec):
            from spark_sinks.run import python_job  # noqa: PLC0415 - without pyspark

            return python_job.main(file, argv[1:])
    from spark_sinks.run import runner  # noqa: PLC0415 - pyspark takes a second

    return runner.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
