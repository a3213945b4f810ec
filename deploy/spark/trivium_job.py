"""What spark-submit starts in a container: a job of this project, named by the arguments."""

import sys

from spark_sinks.runner import main

sys.exit(main(sys.argv[1:]))
