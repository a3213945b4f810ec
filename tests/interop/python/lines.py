"""The drivers' side of the line protocol, shared by the Python clients."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

_writing = threading.Lock()


def say(**fields: Any) -> None:
    """Write one line; called from any thread."""
    with _writing:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


def decode(line: str | bytes) -> dict[str, Any]:
    """Read one line."""
    return json.loads(line)
