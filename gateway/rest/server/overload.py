"""Who may come in now: judged before a body is read, so that an overload costs us nothing but an answer."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

from gateway.kafka.publish.publisher import Publisher
from protocols.rest.errors import busy

UPLOAD_LIMIT: Final = 64 * 1024 * 1024
"""Bytes of bodies being received at once. Behind it stands the publisher's budget; together they bound the memory."""


class Admission:
    """The limits that all produce requests share."""

    def __init__(self, publisher: Publisher, max_concurrent: int) -> None:
        """Let in at most `max_concurrent` requests at once, and none while the publisher's gate is shut."""
        self.active = 0
        self.uploading = 0
        self.refused = 0
        self._publisher = publisher
        self._max_concurrent = max_concurrent

    def enter(self, topic: str) -> Entry:
        """Count a request in; it is counted out at the end of the `with` block.

        Raises:
            RestError: 503 with Retry-After.
        """
        publisher = self._publisher
        if not publisher.gate.is_open:
            raise self._refuse("Kafka is slower than its senders; try again")
        if publisher.known_topic(topic) is not None and not publisher.topic_gate(topic).is_open:
            raise self._refuse(f"Topic {topic} is slower than its senders; try again")
        if self.active >= self._max_concurrent:
            raise self._refuse("Too many requests wait for Kafka; try again")
        return Entry(self)

    def upload(self, size: int) -> None:
        """Count bytes of a body that is being received; the caller gives them back by `uploaded`.

        Raises:
            RestError: 503; nothing was counted.
        """
        if self.uploading + size > UPLOAD_LIMIT:
            raise self._refuse("Too much is being uploaded; try again")
        self.uploading += size

    def uploaded(self, size: int) -> None:
        """Give back bytes counted by `upload`."""
        assert size <= self.uploading
        self.uploading -= size

    def _refuse(self, message: str) -> Exception:
        self.refused += 1
        return busy(message, close=True)


class Entry:
    """One admitted request."""

    __slots__ = ("_admission",)

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def __enter__(self) -> Self:
        self._admission.active += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.active -= 1
