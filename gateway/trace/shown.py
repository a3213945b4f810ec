"""How things stand in the lines of a trace: short, printable as JSON, and without secrets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from gateway.secret import BLANK, is_secret_name

TEXT: Final = 256  # characters of a text that are shown
ITEMS: Final = 20  # of a list or a map
DEPTH: Final = 4

METHODS: Final = frozenset(
    {
        "ANONYMOUS", "EXTERNAL", "GSSAPI", "OAUTHBEARER", "PLAIN", "SCRAM-SHA-1", "SCRAM-SHA-256", "SCRAM-SHA-512",
        "XOAUTH2",
    }
)  # fmt: skip
"""Ways to log in that are shown by their names; what else stands in their place may be a secret."""

Line = dict[str, Any]
"""What is told of one packet, frame or request."""


def shown_method(name: object) -> str:
    """A SASL mechanism, or an authentication method of MQTT."""
    return str(name) if str(name) in METHODS else BLANK


def cut(text: str, most: int = TEXT) -> str:
    """A text, as far as it is shown."""
    return text if len(text) <= most else f"{text[:most]}…"


def shown_bytes(data: bytes, most: int) -> str:
    """The first bytes of something: as text where they are some, else in hexadecimal."""
    part = bytes(data[:most])
    more = "…" if len(data) > most else ""
    try:
        text = part.decode()
    except UnicodeDecodeError as error:
        if not more or error.start < len(part) - 3:  # else only the last character was cut through
            return f"0x{part.hex()}{more}"
        text = part[: error.start].decode()
    return f"{text}{more}" if text.isprintable() else f"0x{part.hex()}{more}"


def shown(value: Any, depth: int = DEPTH) -> Any:
    """Any value of a protocol, as JSON has it."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return cut(str(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return shown_bytes(bytes(value[: TEXT + 1]), TEXT // 2)
    if depth and isinstance(value, list | tuple):
        return [shown(one, depth - 1) for one in value[:ITEMS]] + (["…"] if len(value) > ITEMS else [])
    return cut(str(value))


def shown_pairs(pairs: Iterable[tuple[Any, Any]], depth: int = DEPTH) -> Line:
    """Names and values; what stands under a telling name is blanked."""
    found: Line = {}
    for number, (name, value) in enumerate(pairs):
        if number >= ITEMS:
            found["…"] = "…"
            break
        text = cut(str(name))
        found[text] = BLANK if is_secret_name(text) else shown(value, depth - 1)
    return found
