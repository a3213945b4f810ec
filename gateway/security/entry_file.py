"""Files of users, one a line; `#` starts a comment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gateway.config import ConfigError


def read_entries(path: Path, key: str) -> Iterator[tuple[str, str]]:
    """The place of each line for errors, and the line; ConfigError, which names `key`, for what is no text file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {path} is not UTF-8 text") from None
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.strip()
        if entry and not entry.startswith("#"):
            yield f"{key}: {path} line {number}", entry
