"""aiokafka's produce requests with a last check of the clock before the socket: nothing is sent after a freeze.

aiokafka's sender takes batches from their queues and sends them in a later turn of the event loop, or when it has a
connection. A process that was stopped between the two would send them first when it continues. So the check comes as
late as possible, when the request is encoded; only the write itself follows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import aiokafka.producer.sender
from aiokafka import errors
from aiokafka.producer.sender import ProduceRequest, SendProduceReqHandler

from gateway.kafka.driver.batch_builder import WrittenBatch

NOT_STORED: Final = (errors.NotEnoughReplicasError, errors.NodeNotReadyError)
"""Errors after which a batch is in no log. After others it may be: a leader that has lost its leadership while it
waited for the replicas answers NotLeaderForPartition."""


class FencedRequest(ProduceRequest):  # type: ignore[misc]  # aiokafka carries no types
    """A produce request that can still be held back when it is encoded."""

    may_leave: Callable[[], bool] = staticmethod(lambda: True)

    def build(self, request_struct_class: Any) -> Any:
        """Called by aiokafka's connection, which then encodes the result and writes it."""
        struct = super().build(_fenced(request_struct_class))
        struct.may_leave = self.may_leave
        return struct


class _Fenced:
    """A mixin in front of aiokafka's request structure."""

    may_leave: Callable[[], bool]

    def encode(self) -> bytes:
        """Encode the request. Raises NodeNotReadyError, for aiokafka a missing connection, if it must not be sent."""
        made: bytes = super().encode()  # type: ignore[misc]  # the request structure's
        if not self.may_leave():
            raise errors.NodeNotReadyError("this process was stopped for seconds")
        return made


@cache
def _fenced(struct: type[Any]) -> type[Any]:
    return type(struct.__name__, (_Fenced, struct), {})


class ProduceRequestHandler(SendProduceReqHandler):  # type: ignore[misc]  # aiokafka carries no types
    """The batches in flight to one broker, until they are answered or back in their queues."""

    _batches: dict[Any, Any]

    def create_request(self) -> Any:
        """Called by aiokafka to send the batches. Those that the fence holds back keep their sequence number."""
        request = super().create_request()
        if self._sender._message_accumulator.fence is not None:
            request.may_leave = self._may_leave
        return request

    def _may_leave(self) -> bool:
        fence = self._sender._message_accumulator.fence
        fence.now()
        return all(fence.allows(place.topic) for place in self._batches)

    def _can_retry(self, error: errors.KafkaError, batch: Any) -> bool:
        """Called by aiokafka for each batch after a failed attempt."""
        written = batch._builder
        if isinstance(written, WrittenBatch):
            written.attempt_failed(may_be_stored=not isinstance(error, NOT_STORED))
        return bool(super()._can_retry(error, batch))


def use_produce_requests() -> None:
    """Make all aiokafka producers of this process use these classes; aiokafka has no parameter for it."""
    aiokafka.producer.sender.ProduceRequest = FencedRequest
    aiokafka.producer.sender.SendProduceReqHandler = ProduceRequestHandler
