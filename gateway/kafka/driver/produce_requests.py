"""aiokafka's produce requests, with a look at the clock right before the socket: nothing leaves after a freeze.

aiokafka's sender takes batches from their queues, and sends them in a later turn of the loop, or when it has a
connection. A process that was stopped between the two would send them first of all when it goes on.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import aiokafka.producer.sender
from aiokafka import errors
from aiokafka.producer.sender import SendProduceReqHandler

from gateway.kafka.driver.batch_builder import WrittenBatch

NOT_STORED: Final = (errors.NotEnoughReplicasError, errors.NodeNotReadyError)
"""After these a batch is in no log. Of the others some are told also after it was written: a leader that has lost its
place while it waited for the replicas says NotLeaderForPartition."""


class ProduceRequest(SendProduceReqHandler):  # type: ignore[misc]  # aiokafka carries no types
    """Batches on their way to one broker, until they are answered or back in their queues."""

    _batches: dict[Any, Any]
    _to_reenqueue: list[Any]

    async def do(self, node_id: int) -> None:
        """Send what may pass the fence, if there is one; the rest goes back, to be sent again under its number."""
        fence = self._sender._message_accumulator.fence
        if fence is not None:
            ready = await self._client.ready(node_id)  # so that nothing is waited for between the look and the socket
            fence.now()
            going = {place: batch for place, batch in self._batches.items() if ready and fence.passes(place.topic)}
            self._to_reenqueue = [batch for place, batch in self._batches.items() if place not in going]
            self._batches = going
        if self._batches:
            await super().do(node_id)
            return
        await asyncio.sleep(self._default_backoff)
        for batch in self._to_reenqueue:
            self._sender._message_accumulator.reenqueue(batch)
        await self._client._maybe_wait_metadata()

    def _can_retry(self, error: errors.KafkaError, batch: Any) -> bool:
        """Called by aiokafka for each batch of which a try has failed."""
        written = batch._builder
        if isinstance(written, WrittenBatch):
            written.has_failed(may_be_stored=not isinstance(error, NOT_STORED))
        return bool(super()._can_retry(error, batch))


def use_produce_requests() -> None:
    """Have each producer of aiokafka in this process send so; it has no parameter for it."""
    aiokafka.producer.sender.SendProduceReqHandler = ProduceRequest
