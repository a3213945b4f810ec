"""`python -m spark_sinks JOB ...`."""

import sys

from spark_sinks.runner import main

sys.exit(main(sys.argv[1:]))
