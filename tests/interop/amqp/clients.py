"""The foreign AMQP clients by library and transport."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.interop.toolchains import cargo_program, go_program, java_command, node_packages

HERE = Path(__file__).parent
RUST = HERE / "rust"


class Kind(NamedTuple):
    """A library, and its transport to the gateway."""

    library: str
    transport: str = "tcp"

    def __str__(self) -> str:
        return self.library if self.transport == "tcp" else f"{self.library}-{self.transport}"


BLOCKING, REACTIVE = Kind("proton-blocking"), Kind("proton-reactive")
RHEA, RHEA_WS = Kind("rhea"), Kind("rhea", "ws")
GO = Kind("go-amqp")
FE2O3 = Kind("fe2o3-amqp")
EVERY = [BLOCKING, REACTIVE, RHEA, GO, FE2O3]
QPID_JMS = "qpid-jms"

# The command of each driver; raises ToolchainError if its tools are missing.
DRIVERS: dict[str, Callable[[], list[str]]] = {
    "proton-blocking": lambda: [sys.executable, "-m", "tests.interop.amqp.python.blocking_driver"],
    "proton-reactive": lambda: [sys.executable, "-m", "tests.interop.amqp.python.reactive_driver"],
    "rhea": lambda: [node_packages(HERE / "node"), str(HERE / "node" / "driver.mjs")],
    "go-amqp": lambda: [str(go_program(HERE / "go"))],
    "fe2o3-amqp": lambda: [str(cargo_program(RUST))],
    QPID_JMS: lambda: java_command(HERE / "java", "qpid-jms", "qpid-jms-client"),
}


def each(kinds: Sequence[Kind]) -> dict[str, Any]:
    """`parametrize("kind", **each(kinds))`."""
    return {"argvalues": kinds, "ids": [str(kind) for kind in kinds]}
