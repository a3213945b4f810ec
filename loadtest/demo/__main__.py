"""Entry point of the demo: `python -m loadtest.demo`, called by `make run`."""

import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)  # during imports, Ctrl-C ends the process without a traceback

from loadtest.demo.command import main  # noqa: E402

sys.exit(main())
