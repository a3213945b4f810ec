"""How large a page may be: as large as its client and the configuration allow, and no larger than what is free.

A page that is not read stays in memory until it is. So its bytes come out of the budget of all receivers: while the
page is filled they are promised, and when it is written and its reader is slow, its connection is counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from flowcontrol.budget import Budget

LEAST: Final = 64 * 1024
"""Bytes of a page that everybody may have; one record is always let in."""


def page_size(outgoing: Budget, wanted: int) -> int:
    """The largest size of a page that is made at once: half of what is free, so that there is some for others.

    `wanted`: bytes that the client and the configuration allow.
    """
    return min(wanted, max(LEAST, outgoing.free // 2))


@contextlib.contextmanager
def promised_page(outgoing: Budget, wanted: int) -> Iterator[int]:
    """The `page_size` of a page that is filled in the block, and counts as if it were on the way."""
    size = page_size(outgoing, wanted)
    outgoing.promise(size)
    try:
        yield size
    finally:
        outgoing.promise(-size)
