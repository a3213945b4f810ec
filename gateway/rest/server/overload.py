"""Refuses produce requests that ask for more than their share of a slow Kafka, before their bodies are read: 503."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self, cast

from aiohttp import web

from gateway.kafka.publish.publisher import Publisher
from gateway.net.http_server import HttpConnection
from protocols.rest.errors import busy

BODIES_LIMIT: Final = 64 * 1024 * 1024
"""Bytes of request bodies that are being received at once. With the publisher's budget it bounds the memory."""

SMALL: Final = 64 * 1024
"""A body of so many bytes is let in while a budget is not used up to its very end: that is what its reserve is for."""


class OverloadGuard:
    """The limits that all produce requests share: Kafka's speed, requests that wait for Kafka, bytes of bodies."""

    def __init__(self, publisher: Publisher, max_concurrent: int) -> None:
        """Refuse requests beyond `max_concurrent` at once, and who has more than a share of the publisher's budgets."""
        self.active = 0
        self.receiving = 0
        self.refused = 0
        self._publisher = publisher
        self._max_concurrent = max_concurrent

    def enter(self, topic: str, request: web.BaseRequest) -> ProduceSlot:
        """Count a request in; it is counted out at the end of the `with` block; RestError: 503 with Retry-After."""
        publisher = self._publisher
        if not publisher.gate.is_open:
            raise self._refuse("Kafka is slower than its senders; try again")
        budget = publisher.budget
        if publisher.known_topic(topic) is not None:
            budget = publisher.budgets.topic(topic)
            if not budget.gate.is_open:
                raise self._refuse(f"Topic {topic} is slower than its senders; try again")
        size = request.content_length or 0
        # What is larger than the whole budget would never fit: it is too large for a request (413), or goes alone.
        if SMALL < size <= budget.bytes_limit and not budget.fits(size):
            raise self._refuse(f"Topic {topic} is slower than its senders, and {size} bytes are too many; try again")
        unacknowledged = cast("HttpConnection", request.protocol).unacknowledged
        if unacknowledged is not None and not unacknowledged.gate.is_open:
            raise self._refuse("Kafka is slower than you; try again")
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
