"""How long brokers hold the empty fetches of a group: its idle cost against the delay of a changed assignment."""

from __future__ import annotations

from typing import Final

from aiokafka import AIOKafkaConsumer

from gateway.kafka.driver.kafka_consumer import FETCH_WAIT_MOST_MS, FETCH_WAIT_MS, set_fetch_wait

IDLE_POLLS: Final = 5
"""After so many polls without a record a group counts as idle. Its brokers answer an empty fetch after a second, so a
changed assignment may wait so long; a record is still sent at once."""


class FetchPace:
    """The pace of one group reader's fetches."""

    def __init__(self) -> None:
        self._empty = 0  # polls since the last record

    def note(self, consumer: AIOKafkaConsumer, *, empty: bool) -> None:
        """Note a poll, and change the time if the group has become idle or busy."""
        if empty and self._empty == IDLE_POLLS:
            set_fetch_wait(consumer, FETCH_WAIT_MOST_MS)
        elif not empty and self._empty > IDLE_POLLS:
            set_fetch_wait(consumer, FETCH_WAIT_MS)
        self._empty = self._empty + 1 if empty else 0
