"""Every program in `examples/` does what its first lines say: it sends three readings and receives the same three."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.toolchains import ToolchainError, classpath, find_jdk, go_program, node_packages, tool
from tests.support.gateway import GatewayProcess

EXAMPLES = Path(__file__).parents[2] / "examples"
INTEROP = Path(__file__).parent
LONGEST = 60  # lines
RUN_S = 110.0
PROGRAMS = {".py", ".js", ".java", ".go", ".sh"}


def node(packages: Path) -> Callable[[Path], list[str]]:
    """Make the command of a Node program; NODE_PATH replaces a `node_modules` beside it."""
    return lambda program: ["env", f"NODE_PATH={packages / 'node_modules'}", node_packages(packages), str(program)]


def python(program: Path) -> list[str]:
    return [sys.executable, "-W", "error", str(program)]


def java(program: Path) -> list[str]:
    return [str(find_jdk()), "-XX:+UseSerialGC", "-Xmx256m", "-cp", classpath("qpid-jms"), str(program)]


def go(program: Path) -> list[str]:
    return [str(go_program(INTEROP / "amqp" / "go", program))]


def curl(program: Path) -> list[str]:
    tool("curl", "curl")
    return ["sh", str(program)]


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "mqtt_paho.py": python,
    "mqtt_mqttjs.js": node(INTEROP / "mqtt" / "node"),
    "amqp_proton.py": python,
    "amqp_rhea.js": node(INTEROP / "amqp" / "node"),
    "amqp_jms.java": java,
    "amqp_go.go": go,
    "http_curl.sh": curl,
    "http_events.sh": curl,
    "http_websocket.js": node(INTEROP / "http" / "node"),
}
"""The command of each program, before its arguments; raises ToolchainError if its tools are missing."""


def test_every_example_is_tested_documented_and_short() -> None:
    there = {path.name for path in EXAMPLES.iterdir() if path.suffix in PROGRAMS}
    assert there == COMMANDS.keys()
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert {name for name in there if f"({name})" not in page} == set()
    lengths = {name: len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) for name in there}
    assert {name: length for name, length in lengths.items() if length >= LONGEST} == {}


@pytest.mark.parametrize("name", COMMANDS)
async def test_example(name: str, gateway: GatewayProcess) -> None:
    host, port = gateway.address(name.partition("_")[0])
    topic = f"example-{uuid.uuid4().hex[:12]}"
    try:
        command = await asyncio.to_thread(COMMANDS[name], EXAMPLES / name)
    except ToolchainError as error:
        pytest.skip(f"{name}: {error}")
    process = await asyncio.create_subprocess_exec(
        *command,
        f"{host}:{port}",
        topic,
        cwd=EXAMPLES,
        env={**os.environ, "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RUN_S):
            printed, complained = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, complained.decode()
    lines = [line for line in printed.decode().splitlines() if line]
    assert lines == ["kitchen/temp 21.5", "kitchen/temp 21.7", "kitchen/temp 21.6"]
