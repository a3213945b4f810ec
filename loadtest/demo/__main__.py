"""`python -m loadtest.demo` is the main job; `make run` calls it."""

import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)  # while nothing is started, Ctrl-C just ends us, without a traceback

from loadtest.demo.command import main  # noqa: E402

sys.exit(main())
