"""`python -m spark_sinks JOB ...`."""

import sys

from spark_sinks.start import main

sys.exit(main(sys.argv[1:]))
