"""SASLprep (RFC 4013): normalizes names and passwords that look the same to one spelling."""

from __future__ import annotations

import stringprep
from typing import Final
from unicodedata import ucd_3_2_0 as unicode_3_2

_PROHIBITED: Final = (
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
)  # RFC 4013 part 2.3


def saslprep(text: str, *, stored: bool = False) -> str:
    """Normalize a name or a password; raises ValueError, which names the kind of prohibited content, not the character.

    With `stored`, code points that Unicode 3.2 had not assigned are refused (part 2.5).
    """
    if text.isascii() and text.isprintable():
        return text
    mapped = "".join(
        " " if stringprep.in_table_c12(char) else char for char in text if not stringprep.in_table_b1(char)
    )
    prepared = unicode_3_2.normalize("NFKC", mapped)
    for char in prepared:
        if any(prohibited(char) for prohibited in _PROHIBITED):
            raise ValueError("a prohibited character")
        if stored and stringprep.in_table_a1(char):
            raise ValueError("a character that is not in Unicode 3.2")
    _check_directions(prepared)
    return prepared


def _check_directions(text: str) -> None:
    """Require that right-to-left text has no left-to-right characters (RFC 3454 part 6)."""
    if not any(map(stringprep.in_table_d1, text)):
        return
    if any(map(stringprep.in_table_d2, text)):
        raise ValueError("text in both directions")
    if not (stringprep.in_table_d1(text[0]) and stringprep.in_table_d1(text[-1])):
        raise ValueError("right-to-left text that starts or ends with other characters")
