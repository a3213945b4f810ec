"""How large a page may be, and what stands on it.

It is as large as its client and the configuration allow, and no larger than what is free.

A page that is not read stays in memory until it is. So its bytes come out of the budget of all receivers: while the
page is filled they are promised, and when it is written and its reader is slow, its connection is counted.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Final

from aiokafka import TopicPartition

from flowcontrol.budget import Budget
from gateway.kafka.groups.polled_member import Member
from gateway.kafka.groups.progress import Chunk
from mapping.record import Received
from mapping.rest.outgoing import UndecodableError
from mapping.tenants import Names
from protocols.rest.media import Format
from protocols.rest.responses import Page, RecordItem

LEAST: Final = 64 * 1024
"""Bytes of a page that everybody may have; one record is always let in."""

Shown = Callable[[Received, Format], RecordItem]
"""How a stored record stands in an answer; UndecodableError when it cannot be said in the format."""


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


def fill_page(  # noqa: PLR0917 - whose records, and how they are shown
    member: Member,
    embedded: Format,
    max_bytes: int,
    stuck: dict[TopicPartition, UndecodableError],
    shown: Shown,
    names: Names,
    *,
    most: int,
) -> tuple[Page, list[Chunk]]:
    """A page of held records, `most` at most.

    One that cannot be shown ends its partition's part; it is noted when it is first.
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
                    break  # more does not fit on the page
        except UndecodableError as error:
            if not items:
                stuck[partition] = error
        count = page.extend(items)
        if count:
            chunks.append(Chunk(partition, records[0], count))
        if count < len(items) or page.count >= most:
            break
    return page, chunks
