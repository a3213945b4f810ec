"""Reads the counts of acknowledged records from a gateway's metrics."""

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
OTHER: Final = "other"  # label of the sum over surplus topics and partitions
STARTED: Final = "process_start_time_seconds"
ANSWER_S: Final = 10.0


class FiguresError(RuntimeError):
    """A gateway does not answer, or its answer is not valid; the message says why."""


async def fetch(address: str) -> str:
    """Return the text of a gateway's `/metrics`; FiguresError if it cannot be read."""
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


def parse_figures(address: str, text: str, topics: Collection[str]) -> dict[Place, Acknowledged]:
    """Return a gateway's numbers for these topics; FiguresError if it is not a gateway, or too old."""
    by_name: dict[str, dict[Place, int]] = {STORED: {}, FIRST: {}, NEXT: {}}
    started: float | None = None
    hidden = False
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == STARTED:
                    started = sample.value
                elif sample.name == STORED and OTHER in sample.labels.values():
                    hidden = True
                elif (
                    sample.name in by_name and sample.labels["topic"] in topics and sample.labels["partition"] != OTHER
                ):
                    place = Place(sample.labels["topic"], int(sample.labels["partition"]))
                    by_name[sample.name][place] = int(sample.value)
    except (ValueError, KeyError) as error:
        raise FiguresError(f"{address}: /metrics cannot be read: {error}") from error
    if started is None or "trivium_publisher_" not in text:
        raise FiguresError(f"{address}: /metrics is not a gateway's")
    if hidden:
        there = {place.topic for place in by_name[STORED]}
        if without := [topic for topic in topics if topic not in there]:
            raise FiguresError(
                f"{address} has no metrics for {', '.join(without)}: it has reached its limit of topics with metrics"
            )
    counts, firsts, nexts = by_name.values()
    return {
        place: Acknowledged(started, count, firsts[place], nexts[place])
        for place, count in counts.items()
        if place in firsts and place in nexts
    }
