"""Formats values for trace lines: short, valid in JSON, and without secrets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from gateway.runtime.secret import BLANK, is_foreign_secret_name
from gateway.runtime.texts import cut

TEXT: Final = 256  # characters shown of a text
ITEMS: Final = 20  # items shown of a list or a map
DEPTH: Final = 4

METHODS: Final = frozenset(
    {
        "ANONYMOUS", "EXTERNAL", "GSSAPI", "OAUTHBEARER", "PLAIN", "SCRAM-SHA-1", "SCRAM-SHA-256", "SCRAM-SHA-512",
        "XOAUTH2",
    }
)  # fmt: skip
"""Mechanisms that are shown by name; any other value in this field may be a secret."""

Line = dict[str, Any]
"""The fields of one trace line."""


def shown_method(name: object) -> str:
    """Return the name of a SASL mechanism or MQTT authentication method, blanked if unknown."""
    return str(name) if str(name) in METHODS else BLANK


def shown_bytes(data: bytes, most: int) -> str:
    """Return the first bytes as text if they are printable UTF-8, else in hexadecimal."""
    part = bytes(data[:most])
    more = "…" if len(data) > most else ""
    try:
        text = part.decode()
    except UnicodeDecodeError as error:
        if not more or error.start < len(part) - 3:  # otherwise only the last character is cut off
            return f"0x{part.hex()}{more}"
        text = part[: error.start].decode()
    return f"{text}{more}" if text.isprintable() else f"0x{part.hex()}{more}"


def shown(value: Any, depth: int = DEPTH) -> Any:
    """Convert any protocol value to a JSON value."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return cut(str(value), TEXT)
    if isinstance(value, bytes | bytearray | memoryview):
        return shown_bytes(bytes(value[: TEXT + 1]), TEXT // 2)
    if depth and isinstance(value, list | tuple):
        return [shown(item, depth - 1) for item in value[:ITEMS]] + (["…"] if len(value) > ITEMS else [])
    return cut(str(value), TEXT)


def shown_pairs(pairs: Iterable[tuple[Any, Any]]) -> Line:
    """Convert names and values; values under the name of a secret are blanked."""
    line: Line = {}
    for number, (name, value) in enumerate(pairs):
        if number >= ITEMS:
            line["…"] = "…"
            break
        text = cut(str(name), TEXT)
        line[text] = BLANK if is_foreign_secret_name(text) else shown(value, DEPTH - 1)
    return line
