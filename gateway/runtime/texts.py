"""Texts from outside, where they are shown."""

from __future__ import annotations


def cut(text: str, most: int) -> str:
    """Shorten a text to `most` characters and an ellipsis."""
    return text if len(text) <= most else f"{text[:most]}…"
