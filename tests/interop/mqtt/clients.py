"""The foreign clients by library, version and transport."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.interop.toolchains import java_command, node_packages

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


class Kind(NamedTuple):
    """A library, a protocol version (the level in CONNECT), and its transport to the gateway."""

    library: str
    version: int
    transport: str = "tcp"

    def __str__(self) -> str:
        return "-".join([self.library, "v5" if self.version == 5 else "v311", *(["ws"] * (self.transport == "ws"))])


PAHO, PAHO_311 = Kind("paho", 5), Kind("paho", 4)
AMQTT = Kind("amqtt", 4)
MQTTJS, MQTTJS_311 = Kind("mqttjs", 5), Kind("mqttjs", 4)
HIVEMQ = Kind("hivemq", 5)
WEBSOCKET = [kind._replace(transport="ws") for kind in (PAHO, PAHO_311, AMQTT, MQTTJS, MQTTJS_311)]
VERSION_5 = [PAHO, MQTTJS, HIVEMQ]
VERSION_311 = [PAHO_311, AMQTT, MQTTJS_311]
EVERY = VERSION_5 + VERSION_311

# The command of each driver; raises ToolchainError if its tools are missing.
DRIVERS: dict[str, Callable[[], list[str]]] = {
    "paho": lambda: [sys.executable, "-m", "tests.interop.mqtt.python.paho_driver"],
    "amqtt": lambda: [sys.executable, "-m", "tests.interop.mqtt.python.amqtt_driver"],
    "mqttjs": lambda: [node_packages(HERE / "node"), str(HERE / "node" / "driver.mjs")],
    "hivemq": lambda: java_command(HERE / "java", "hivemq", "hivemq-mqtt-client"),
}


def each(kinds: Sequence[Kind]) -> dict[str, Any]:
    """`parametrize("kind", **each(kinds))`."""
    return {"argvalues": kinds, "ids": [str(kind) for kind in kinds]}
