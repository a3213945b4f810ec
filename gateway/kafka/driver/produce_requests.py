"""aiokafka's produce requests, with a look at the clock right before the socket: nothing leaves after a freeze.

aiokafka's sender takes batches from their queues, and sends them in a later turn of the loop, or when it has a
connection. A process that was stopped between the two would send them first of all when it goes on. So the look comes
last of all: when the request's bytes are made. Behind it is only the writing itself.
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
"""After these a batch is in no log. Of the others some are told also after it was written: a leader that has lost its
place while it waited for the replicas says NotLeaderForPartition."""


class FencedRequest(ProduceRequest):  # type: ignore[misc]  # aiokafka carries no types
    """A produce request that may be held back until its bytes are made."""

    may_leave: Callable[[], bool] = staticmethod(lambda: True)

    def build(self, request_struct_class: Any) -> Any:
        """Called by aiokafka's connection, which then asks for the bytes and writes them."""
        struct = super().build(_fenced(request_struct_class))
        struct.may_leave = self.may_leave
        return struct


class _Fenced:
    """Before a structure of aiokafka in a class's bases."""

    may_leave: Callable[[], bool]

    def encode(self) -> bytes:
        """The bytes. NodeNotReadyError: they may not leave; to aiokafka it is as if there were no connection."""
        made: bytes = super().encode()  # type: ignore[misc]  # of the request's structure
        if not self.may_leave():
            raise errors.NodeNotReadyError("this process was stopped for seconds")
        return made


@cache
def _fenced(struct: type[Any]) -> type[Any]:
    return type(struct.__name__, (_Fenced, struct), {})


class ProduceRequestHandler(SendProduceReqHandler):  # type: ignore[misc]  # aiokafka carries no types
    """Batches on their way to one broker, until they are answered or back in their queues."""

    _batches: dict[Any, Any]

    def create_request(self) -> Any:
        """Called by aiokafka to send them; what the fence holds back is sent later, under its number."""
        request = super().create_request()
        if self._sender._message_accumulator.fence is not None:
            request.may_leave = self._may_leave
        return request

    def _may_leave(self) -> bool:
        fence = self._sender._message_accumulator.fence
        fence.now()
        return all(fence.passes(place.topic) for place in self._batches)

    def _can_retry(self, error: errors.KafkaError, batch: Any) -> bool:
        """Called by aiokafka for each batch of which a try has failed."""
        written = batch._builder
        if isinstance(written, WrittenBatch):
            written.has_failed(may_be_stored=not isinstance(error, NOT_STORED))
        return bool(super()._can_retry(error, batch))


def use_produce_requests() -> None:
    """Have each producer of aiokafka in this process send so; it has no parameter for it."""
    aiokafka.producer.sender.ProduceRequest = FencedRequest
    aiokafka.producer.sender.SendProduceReqHandler = ProduceRequestHandler
