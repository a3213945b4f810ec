"""Sizes a page of records and fills it.

A page is as large as its client and the configuration allow, and no larger than what is free in the budget.

A page stays in memory until the client has read it. So its bytes count in the budget of all receivers: they are
reserved while the page is filled, and once it is written its connection is counted if the client reads slowly.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Final

from aiokafka import TopicPartition

from flowcontrol.budget import Budget
from gateway.kafka.groups.polled_member import PolledMember
from gateway.kafka.groups.progress import Chunk
from mapping.record import Received
from mapping.rest.outgoing import UndecodableError
from mapping.tenants import Names
from protocols.rest.media import Format
from protocols.rest.responses import Page, RecordItem

MIN_PAGE_BYTES: Final = 64 * 1024
"""Bytes of a page that are always allowed; one record is always added."""

Shown = Callable[[Received, Format], RecordItem]
"""Makes the answer's form of a stored record; UndecodableError if the format cannot represent it."""


def page_size(outgoing: Budget, wanted: int) -> int:
    """Return the largest size of the next page: at most half of what is free, so that others get some.

    `wanted` is the number of bytes that the client and the configuration allow.
    """
    return min(wanted, max(MIN_PAGE_BYTES, outgoing.free // 2))


@contextlib.contextmanager
def reserved_page(outgoing: Budget, wanted: int) -> Iterator[int]:
    """Reserve the `page_size` of a page in the budget while the block fills the page."""
    size = page_size(outgoing, wanted)
    outgoing.promise(size)
    try:
        yield size
    finally:
        outgoing.promise(-size)


def fill_page(  # noqa: PLR0917 - the records, and how they are shown
    member: PolledMember,
    embedded: Format,
    max_bytes: int,
    stuck: dict[TopicPartition, str],
    shown: Shown,
    names: Names,
    *,
    most: int,
) -> tuple[Page, list[Chunk]]:
    """Return a page of at most `most` of the member's fetched records, and the chunks they are from.

    A record that cannot be shown ends its partition's part. If it is the partition's first, `stuck` gets the reason.
    """
    page = Page(max_bytes)
    chunks: list[Chunk] = []
    for partition, records in member.progress.held.items():
        items: list[RecordItem] = []
        size = 0
        try:
            chosen = itertools.islice(records, most - page.count)
            for record in map(names.shown, chosen) if names.prefix else chosen:
                items.append(shown(record, embedded))
                size += len(record.value) if record.value else 0
                if size > max_bytes:
                    break  # no more fits on the page
        except UndecodableError as error:
            if not items:
                stuck[partition] = str(error)
        count = page.extend(items)
        if count:
            chunks.append(Chunk(partition, records[0], count))
        if count < len(items) or page.count >= most:
            break
    return page, chunks
