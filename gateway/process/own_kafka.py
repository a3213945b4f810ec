"""The Kafka that a gateway runs itself, if it is configured without one: the optional part `embedded kafka`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from gateway.settings.config import Config
from gateway.settings.installed import need


class Capacity(Protocol):
    """Whether more partitions fit; a `gateway.kafka.cluster.topic_creation.PartitionCapacity`."""

    def __call__(self, partitions: int, more: int) -> str | None:
        """Return why `more` partitions do not fit in addition to the existing ones; None when they do."""

    def statistics(self) -> msgspec.Struct:
        """Return the counts for the metrics."""
        ...


class OwnKafka(Protocol):
    """The broker's life within the gateway's. What fails raises `gateway.runtime.parts.PartError`."""

    capacity: Capacity

    @property
    def address(self) -> str:
        """The address for Kafka clients, while it runs."""
        ...

    @property
    def pid(self) -> int:
        """The broker's process id, while it runs."""
        ...

    async def start(self) -> None:
        """Start the broker."""

    async def keep(self, restarted: Callable[[], None]) -> None:
        """Restart the broker whenever it ends, and call `restarted`; returns after `stop`."""

    async def stop(self, left_s: float) -> None:
        """Stop the broker within about `left_s` seconds."""


def prepare(config: Config) -> OwnKafka | None:
    """Prepare the embedded Kafka; None if the gateway has another one. It may take long: jars are downloaded.

    Raises:
        ConfigError: it is needed and not installed.
        PartError: this machine lacks something that it needs.
    """
    if config.kafka.bootstrap_servers is not None:
        return None
    kafka: OwnKafka = need("embedded kafka", "kafka.bootstrap_servers is not set").prepare(config)
    return kafka
