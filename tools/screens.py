"""Write the pictures of README: the screen of `make run` as SVG, and the console as PNG.

Called as `make screens`; needs Chromium. It runs the demo in a terminal of its own, reads the console's address from
its screen, and takes both pictures when results have come for a while.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COLUMNS, LINES = 100, 30
SHOWN_S = 20.0  # after the first result
LIMIT_S = 180.0
MANAGEMENT = re.compile(r"metrics (http://[^/\s]+)/metrics")


class Terminal:
    """The demo on a terminal that is read."""

    def __init__(self) -> None:
        self._screen = pyte.HistoryScreen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)
        self.text = ""  # all that was printed
        self.process, self._descriptor = pty.fork()
        if self.process == 0:
            environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
            os.execve(sys.executable, [sys.executable, "-m", "loadtest.demo"], environment)  # noqa: S606 - as make run does
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))

    def read_for(self, seconds: float) -> None:
        """Read what the demo prints."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._descriptor], [], [], left)[0]:
                data = os.read(self._descriptor, 65536)
                self._stream.feed(data)
                self.text += data.decode("utf-8", "replace")

    def svg(self) -> str:
        """Return the screen."""
        console = Console(record=True, width=COLUMNS, file=io.StringIO())
        for number in range(self._screen.cursor.y + 1):
            cells = [self._screen.buffer[number][column] for column in range(COLUMNS)]
            line = Text()
            for bold, run in groupby(cells, key=lambda cell: cell.bold):
                line.append("".join(cell.data for cell in run), style="bold" if bold else "")
            line.rstrip()
            console.print(line)
        return console.export_svg(title="make run")

    def stop(self) -> None:
        """Stop the demo like Ctrl-C."""
        os.kill(self.process, signal.SIGINT)
        try:
            while os.read(self._descriptor, 65536):
                pass
        except OSError:  # the demo has ended
            os.waitpid(self.process, 0)


def main() -> None:
    """Run the demo and write both pictures."""
    terminal = Terminal()
    try:
        deadline = time.monotonic() + LIMIT_S
        while "First result" not in terminal.text:
            if time.monotonic() > deadline:
                raise SystemExit(f"no result within {LIMIT_S:g} s:\n{terminal.text}")
            terminal.read_for(0.5)
        terminal.read_for(SHOWN_S)
        (DOCS / "run.svg").write_text(terminal.svg())
        match = MANAGEMENT.search(terminal.text)
        assert match is not None
        chromium = shutil.which("chromium")
        if chromium is None:
            raise SystemExit("chromium is not installed (Debian: apt-get install chromium)")
        subprocess.run(  # noqa: S603 - the address is the gateway's own
            [chromium, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1400,800",
             "--timeout=8000", f"--screenshot={DOCS / 'console.png'}", f"{match[1]}/console"],
            check=True, capture_output=True,
        )  # fmt: skip
    finally:
        terminal.stop()


if __name__ == "__main__":
    main()
