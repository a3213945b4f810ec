"""Build the wheel with each interpreter found, install it as a user does, and send a message each way.

`python -m tools.wheel_check [VERSION ...]`, such as 3.12; without versions all that the project supports. It takes some
minutes for each: the sdist and from it the wheel by `python -m build`, `uv tool install` with the extra `spark` into an
empty directory outside the repository, `trivium up` with its Kafka, and one message from MQTT to HTTP and one back.
Absent interpreters are named; a failure ends it with exit code 1.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from tools.interpreters import ROOT, find, supported

UV: Final = Path(sys.executable).with_name("uv")
LOCK: Final = ROOT / "requirements" / "release.txt"
START_S: Final = 300.0  # the jars may have to be fetched first
ANSWER_S: Final = 30.0
STOP_S: Final = 60.0
ANY: Final = "127.0.0.1:0"
V2: Final = "application/vnd.kafka.v2+json"
TEXT: Final = "application/vnd.kafka.text.v2+json"


class CheckError(Exception):
    """The wheel does not do what it must; the text says what."""


def check(python: Path, directory: Path) -> str:
    """Build, install and use the wheel in an empty directory; return what `trivium --version` prints.

    Raises:
        CheckError: it does not start, or a message does not arrive.
        subprocess.CalledProcessError: it cannot be built or installed.
    """
    own = {"UV_TOOL_DIR": str(directory / "tools"), "UV_TOOL_BIN_DIR": str(directory / "bin")}
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}} | own

    def run(*command: str | Path) -> str:
        return subprocess.run(  # noqa: S603 - what is built is the project itself
            command, cwd=directory, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    build = (
        "run",
        "--quiet",
        "--no-project",
        "--isolated",
        "--python",
        python,
        "--with-requirements",
        LOCK,
        "python",
        "-m",
        "build",
    )
    run(UV, *build, "--outdir", directory / "dist", ROOT)
    (wheel,) = (directory / "dist").glob("*.whl")
    run(UV, "tool", "install", "--quiet", "--python", python, f"{wheel}[spark]")
    trivium, ready = directory / "bin" / "trivium", directory / "ready.json"
    version = run(trivium, "--version").strip()
    addresses = [part for name in ("mqtt", "amqp", "http", "management") for part in (f"--{name}", ANY)]
    gateway = subprocess.Popen(  # noqa: S603
        [trivium, "up", *addresses, "--kafka-port", "0", "--data-dir", directory / "data", "--ready-file", ready],
        cwd=directory,
        env=environment,
    )
    try:
        _wait_until_ready(gateway, ready)
        _each_way(json.loads(ready.read_text(encoding="utf-8")))
    finally:
        gateway.terminate()
        try:
            code = gateway.wait(STOP_S)
        except subprocess.TimeoutExpired:
            gateway.kill()
            raise
    if code:
        raise CheckError(f"trivium up ended with {code}")
    return version


def _wait_until_ready(gateway: subprocess.Popen[bytes], ready: Path) -> None:
    end = time.monotonic() + START_S
    while not ready.exists():
        if gateway.poll() is not None:
            raise CheckError(f"trivium up ended with {gateway.returncode} before it was ready")
        if time.monotonic() > end:
            raise CheckError(f"trivium up is not ready after {START_S:g} s")
        time.sleep(0.1)


def _each_way(bound: dict[str, Any]) -> None:
    """Send one message from MQTT to HTTP and one back; `bound` is the content of the file of `--ready-file`."""
    base = f"http://{bound['http']}"
    host, _, port = bound["mqtt"].rpartition(":")
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    subscribed: queue.SimpleQueue[bool] = queue.SimpleQueue()
    client = paho.Client(CallbackAPIVersion.VERSION2, "wheel-check", protocol=MQTTProtocolVersion.MQTTv5)
    client.on_message = lambda _client, _data, message: got.put(bytes(message.payload))
    client.on_subscribe = lambda *_: subscribed.put(True)
    client.connect(host, int(port))
    client.loop_start()
    try:
        client.publish("wheel/one", b"from MQTT", qos=1).wait_for_publish(ANSWER_S)
        consumers = f"{base}/consumers/wheel-check"
        _post(consumers, {"name": "reader", "format": "text", "auto.offset.reset": "earliest"})
        _post(f"{consumers}/instances/reader/subscription", {"topics": ["wheel"]})
        _poll(f"{consumers}/instances/reader/records?timeout=1000", "from MQTT")
        client.subscribe("wheel/#", qos=1)
        subscribed.get(timeout=ANSWER_S)
        _post(f"{base}/topics/wheel", {"records": [{"key": "two", "value": "from HTTP"}]}, TEXT)
        if (payload := got.get(timeout=ANSWER_S)) != b"from HTTP":
            raise CheckError(f"MQTT got {payload!r}")
    except queue.Empty:
        raise CheckError(f"MQTT got nothing within {ANSWER_S:g} s") from None
    finally:
        client.disconnect()
        client.loop_stop()


def _post(url: str, body: dict[str, Any], kind: str = V2) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": kind})  # noqa: S310 - http
    with urllib.request.urlopen(request, timeout=ANSWER_S):  # noqa: S310
        pass


def _poll(url: str, value: str) -> None:
    """Read until a record has this value."""
    end = time.monotonic() + ANSWER_S
    while time.monotonic() < end:
        request = urllib.request.Request(url, headers={"Accept": TEXT})  # noqa: S310 - http
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310
            if value in [record["value"] for record in json.load(answer)]:
                return
    raise CheckError(f"HTTP did not get {value!r} within {ANSWER_S:g} s")


def main(versions: list[str]) -> int:
    """Check each version and print a line for it; return the exit code."""
    failed = False
    for version in versions or supported():
        python = find(version)
        if python is None:
            sys.stdout.write(f"{version}: absent on this machine\n")
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="trivium-wheel-") as directory:
            try:
                said = f"{check(python, Path(directory))} runs"
            except (CheckError, OSError, subprocess.SubprocessError) as error:
                said, failed = f"FAILED: {error}", True
        sys.stdout.write(f"{version}: {said} ({time.monotonic() - started:.0f} s, {python})\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
