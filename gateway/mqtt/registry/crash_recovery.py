"""After a crash: which QoS 2 messages of a session are in Kafka, though no flight record says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, Protocol, TypeVar

import msgspec
from aiokafka import TopicPartition

from gateway.kafka.contracts import Refused
from gateway.mqtt.session.qos2 import Exchanges
from gateway.mqtt.state.records import FlightRecord, Places
from mapping.outcomes import Outcome

RETRY_S: Final = 0.5
LOOKING_S: Final = 7.0  # for a CONNECT
T = TypeVar("T")

Found = Mapping[str, set[tuple[int, int]]]
"""Session nonce -> packet identifier and sequence of each exchange that is stored."""
Find = Callable[[Mapping[TopicPartition, int]], Awaitable[Found]]
"""Reads partitions from an offset to their end; see `gateway.mqtt.registry.qos2_scan.find_exchanges`."""


class Partitions(Protocol):
    """Who knows a topic's partitions: `gateway.kafka.driver.kafka_consumer.Lookup`."""

    async def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """The partitions; Refused when there is no such topic."""
        ...


class Accounting:
    """Finds exchanges in the log."""

    def __init__(self, find: Find, lookup: Partitions) -> None:
        """Nothing is read yet."""
        self._find = find
        self._lookup = lookup

    async def account(self, flights: Mapping[str, FlightRecord]) -> dict[str, FlightRecord]:
        """Complete the flight records of sessions whose gateway died.

        Args:
            flights: per client id, each with `scan`.

        Returns:
            The same, with all that is stored in `open`, and nothing left to scan.
        """
        found = await self._find(await self._ranges(flight.scan for flight in flights.values()))
        return {client_id: complete(flight, found.get(flight.nonce, set())) for client_id, flight in flights.items()}

    async def confirm(self, exchanges: Exchanges) -> None:
        """Settle the doubts of a session: Kafka did not answer in time, and may have stored it after all."""
        found = await self._find(await self._ranges([exchanges.scan]))
        exchanges.confirm(found.get(exchanges.nonce, set()))

    async def _ranges(self, scans: Iterable[Places]) -> dict[TopicPartition, int]:
        """The lowest offset of each partition; one that is younger than the record is read from its beginning."""
        ranges: dict[TopicPartition, int] = {}
        for scan in scans:
            for topic, places in scan.items():
                for partition in await self._partitions(topic):
                    offset = places.get(partition.partition, 0)
                    ranges[partition] = min(offset, ranges.get(partition, offset))
        return ranges

    async def _partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """A topic's partitions, asked for until Kafka answers; none when it is gone, and what was stored in it."""
        while True:
            try:
                return await self._lookup.partitions(topic)
            except Refused as refused:
                if refused.outcome is not Outcome.BUSY:
                    return ()
            await asyncio.sleep(RETRY_S)


def complete(flight: FlightRecord, found: Iterable[tuple[int, int]]) -> FlightRecord:
    """A flight record that accounts for everything.

    Args:
        flight: as it was written last.
        found: packet identifier and sequence of every exchange of the session that is in the log.
    """
    found = set(found)
    still_open = {**flight.open, **dict(found & flight.doubts.items())}
    mark = max((flight.mark, *(sequence + 1 for sequence in flight.released)))
    released = set(flight.released)
    for packet_id, sequence in sorted(found, key=lambda pair: pair[1]):
        mark = max(mark, sequence + 1)
        if sequence >= flight.mark and sequence not in released:
            still_open[packet_id] = sequence
    return msgspec.structs.replace(flight, mark=mark, open=still_open, released=(), scan={}, doubts={})


async def in_time(looking: Awaitable[T]) -> T:
    """Look into the log while a client waits; Refused when that takes too long, so that it tries again."""
    try:
        async with asyncio.timeout(LOOKING_S):
            return await looking
    except TimeoutError:
        raise Refused(Outcome.BUSY, "Kafka does not answer") from None
