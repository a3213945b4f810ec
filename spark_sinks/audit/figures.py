"""What a gateway's metrics say of what it has stored."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from spark_sinks.audit.balance import Acknowledged
from spark_sinks.replay.items import Place

STORED: Final = "trivium_publisher_stored_total"
FIRST: Final = "trivium_publisher_first_offset"
NEXT: Final = "trivium_publisher_next_offset"
OTHER: Final = "other"  # the label of what is summed, where there are too many topics or partitions
STARTED: Final = "process_start_time_seconds"
ANSWER_S: Final = 10.0


class FiguresError(RuntimeError):
    """A gateway does not answer, or not as one does; the text says so."""


async def fetch(address: str) -> str:
    """The text of a gateway's `/metrics`; FiguresError."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWER_S)) as session,
            session.get(f"{address.rstrip('/')}/metrics") as answer,
        ):
            if answer.status != 200:
                raise FiguresError(f"{address}: /metrics answers {answer.status}")
            return await answer.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise FiguresError(f"{address} does not answer: {str(error) or type(error).__name__}") from error


def told(address: str, text: str, topics: Collection[str]) -> dict[Place, Acknowledged]:
    """What it says of these topics; FiguresError when it is no gateway, or an older one."""
    found: dict[str, dict[Place, int]] = {STORED: {}, FIRST: {}, NEXT: {}}
    started: float | None = None
    hidden = False
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == STARTED:
                    started = sample.value
                elif sample.name == STORED and OTHER in sample.labels.values():
                    hidden = True
                elif sample.name in found and sample.labels["topic"] in topics and sample.labels["partition"] != OTHER:
                    place = Place(sample.labels["topic"], int(sample.labels["partition"]))
                    found[sample.name][place] = int(sample.value)
    except (ValueError, KeyError) as error:
        raise FiguresError(f"{address}: /metrics cannot be read: {error}") from error
    if started is None or "trivium_publisher_" not in text:
        raise FiguresError(f"{address}: /metrics is not a gateway's")
    if hidden:
        there = {place.topic for place in found[STORED]}
        if untold := [topic for topic in topics if topic not in there]:
            raise FiguresError(
                f"{address} tells no figures of {', '.join(untold)}: its metrics have no room for so many topics"
            )
    counts, firsts, nexts = found.values()
    return {
        place: Acknowledged(started, count, firsts[place], nexts[place])
        for place, count in counts.items()
        if place in firsts and place in nexts
    }
