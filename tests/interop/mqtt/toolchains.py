"""What the foreign clients that are not Python's need: MQTT.js by npm, HiveMQ's client by Ivy, both from locks.

`python -m tests.interop.mqtt.toolchains` fetches both (`make clients`); a test run fetches what it misses itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from gateway.kafka.jars import ensure_jars, locked_jars
from gateway.kafka.java import SetupError, find_java

HERE = Path(__file__).parent
NODE = HERE / "node"
JARS_LOCK = HERE / "java" / "jars.lock"
OLDEST_NODE = 18


class ToolchainError(Exception):
    """A tool is not installed or does not fetch; the text says which and what it said."""


def node_command() -> list[str]:
    """The MQTT.js driver, its packages installed as the lock says."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise ToolchainError("node or npm is not installed (Debian, Ubuntu: apt-get install nodejs npm)")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.lstrip("v").partition(".")[0]) < OLDEST_NODE:
        raise ToolchainError(f"node is {version}, MQTT.js needs {OLDEST_NODE} or newer")
    installed = NODE / "node_modules" / ".installed"
    wanted = hashlib.sha256((NODE / "package-lock.json").read_bytes()).hexdigest()
    with (NODE / ".lock").open("w") as lock:  # of two test runs one installs
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not installed.exists() or installed.read_text() != wanted:
            done = subprocess.run([npm, "ci"], cwd=NODE, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise ToolchainError(f"npm ci failed: {done.stderr.strip()[-500:]}")
            installed.write_text(wanted)
    return [node, "driver.mjs"]


def java_command() -> list[str]:
    """The driver of HiveMQ's client, compiled by the JDK when it starts."""
    try:
        java = find_java().path
        if not java.resolve().with_name("javac").exists():
            raise ToolchainError(f"{java} is no JDK (Debian, Ubuntu: apt-get install default-jdk-headless)")
        jars = ensure_jars("hivemq", lock=JARS_LOCK)
    except SetupError as error:
        raise ToolchainError(str(error)) from error
    version = next(jar.version for jar in locked_jars("hivemq", JARS_LOCK) if jar.artifact == "hivemq-mqtt-client")
    # What runs for seconds is started sooner without the second compiler.
    flags = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
    return [str(java), *flags, "-cp", os.pathsep.join(map(str, jars)), "Driver.java", version]


def main() -> int:
    """Fetch both; 1 when that fails."""
    try:
        node_command()
        java_command()
    except ToolchainError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
