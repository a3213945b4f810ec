"""Started by spark-submit in a container: runs the Trivium job that the arguments name."""

import sys

from spark_sinks.run.runner import main

sys.exit(main(sys.argv[1:]))
