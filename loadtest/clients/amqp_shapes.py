"""Messages as real AMQP clients send them; `amqp_shapes.json` says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

CAPTURED: Final = 1_795_000_000_000
"""A wall clock (epoch ms) at which no message has expired and none is too old for its creation-time to count."""


def shapes() -> dict[str, list[bytes]]:
    """Some messages of each kind, by client and kind."""
    text = Path(__file__).with_suffix(".json").read_text("utf-8")
    return {name: [bytes.fromhex(one) for one in found] for name, found in json.loads(text)["shapes"].items()}
