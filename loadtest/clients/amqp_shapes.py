"""Messages recorded from real AMQP clients, listed in `amqp_shapes.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

CAPTURED: Final = 1_795_000_000_000
"""A time (epoch ms) at which no message has expired."""


def shapes() -> dict[str, list[bytes]]:
    """Return the messages by client and kind."""
    text = Path(__file__).with_suffix(".json").read_text("utf-8")
    return {name: [bytes.fromhex(one) for one in found] for name, found in json.loads(text)["shapes"].items()}
