"""Refuses produce requests while Kafka is slower than its senders, before their bodies are read: 503."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

from gateway.kafka.publish.publisher import Publisher
from protocols.rest.errors import busy

BODIES_LIMIT: Final = 64 * 1024 * 1024
"""Bytes of request bodies that are being received at once. With the publisher's budget it bounds the memory."""


class OverloadGuard:
    """The limits that all produce requests share: Kafka's speed, requests that wait for Kafka, bytes of bodies."""

    def __init__(self, publisher: Publisher, max_concurrent: int) -> None:
        """Refuse requests beyond `max_concurrent` at once, and all while the publisher's gate is shut."""
        self.active = 0
        self.receiving = 0
        self.refused = 0
        self._publisher = publisher
        self._max_concurrent = max_concurrent

    def enter(self, topic: str) -> ProduceSlot:
        """Count a request in; it is counted out at the end of the `with` block.

        Raises:
            RestError: 503 with Retry-After.
        """
        publisher = self._publisher
        if not publisher.gate.is_open:
            raise self._refuse("Kafka is slower than its senders; try again")
        if publisher.known_topic(topic) is not None and not publisher.budgets.topic(topic).gate.is_open:
            raise self._refuse(f"Topic {topic} is slower than its senders; try again")
        if self.active >= self._max_concurrent:
            raise self._refuse("Too many requests wait for Kafka; try again")
        return ProduceSlot(self)

    def receive_body(self, size: int) -> None:
        """Count bytes of a body that is being received; the caller gives them back with `release_body`.

        Raises:
            RestError: 503; nothing was counted.
        """
        if self.receiving + size > BODIES_LIMIT:
            raise self._refuse("Too much is being uploaded; try again")
        self.receiving += size

    def release_body(self, size: int) -> None:
        """Give back bytes counted by `receive_body`."""
        assert size <= self.receiving
        self.receiving -= size

    def _refuse(self, message: str) -> Exception:
        self.refused += 1
        return busy(message, close=True)


class ProduceSlot:
    """Counts one produce request as active inside its `with` block."""

    __slots__ = ("_overload",)

    def __init__(self, overload: OverloadGuard) -> None:
        self._overload = overload

    def __enter__(self) -> Self:
        self._overload.active += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._overload.active -= 1
