"""Find Java on this machine, and check that it is new enough for Kafka 4 and Spark 4.

Uses only the standard library: `make setup` runs this file before anything is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

OLDEST_JAVA = 17  # Kafka 4 brokers and Spark 4 are compiled for it
ANSWER_LIMIT_S = 30.0  # `java -version` takes 0.1 s; a cold disk takes longer

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_BUILD = re.compile(r"\(build ([^,)]+)")


class SetupError(Exception):
    """This machine lacks something, or something is in the way; the text is one line that says what to do."""


class JavaError(SetupError):
    """No Java, or one that is too old."""


class Java(NamedTuple):
    """A Java that is new enough."""

    path: Path  # the `java` command
    version: int  # the feature release, such as 17
    build: str  # such as 17.0.15+6-Debian-1deb12u1


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """Find Java by `JAVA_HOME`, or else on `PATH`, and read its version.

    Raises:
        JavaError: there is none, it does not run, or it is older than `OLDEST_JAVA`.
    """
    home = environment.get("JAVA_HOME")
    if home:
        path = Path(home, "bin", "java")
        if not os.access(path, os.X_OK):
            raise JavaError(f"JAVA_HOME is {home}, but there is no bin/java in it: correct it or unset it")
    else:
        java = shutil.which("java", path=environment.get("PATH"))
        if java is None:
            raise JavaError(f"Java is missing: install Java {OLDEST_JAVA} or newer, or set JAVA_HOME")
        path = Path(java)
    try:
        answer = subprocess.run(  # noqa: S603 - the user's own Java
            [path, "-version"], capture_output=True, text=True, timeout=ANSWER_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"{path} does not run: {error}") from error
    output = answer.stderr + answer.stdout
    version = _VERSION.search(output)
    if version is None:
        lines = output.strip().splitlines() or ["it printed nothing"]
        raise JavaError(f"{path} did not print its version: {lines[0]}")
    if int(version[1]) < OLDEST_JAVA:
        raise JavaError(
            f"{path} is Java {version[1]}, which is too old: install Java {OLDEST_JAVA} or newer, or set JAVA_HOME"
        )
    build = _BUILD.search(output)
    return Java(path, int(version[1]), build[1] if build else version[0])


if __name__ == "__main__":
    try:
        find_java()
    except JavaError as error:
        sys.exit(str(error))
