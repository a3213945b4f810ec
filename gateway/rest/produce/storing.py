"""Records of one request into Kafka, and its answer: one owner and one future a request, never one a record."""

from __future__ import annotations

from aiohttp import web

from gateway.kafka.contracts import Refused
from gateway.kafka.publish.publisher import Publisher
from gateway.rest.produce.idempotency import KeyedRequests
from gateway.rest.produce.tickets import Ticket, raise_common_failure, submit_allowed
from gateway.rest.server.answers import control_answer
from gateway.rest.server.call import Call
from mapping.outcomes import Outcome
from mapping.record import Record
from protocols.rest.responses import encode_results


class Storing:
    """Stores the records of produce requests."""

    def __init__(self, publisher: Publisher, keyed: KeyedRequests) -> None:
        """Store through `publisher`; `keyed` stores requests with an `Idempotency-Key`."""
        self.failed = 0
        self._publisher = publisher
        self.keyed = keyed

    async def store(self, call: Call, records: list[Record], body: bytes, key: str | None) -> web.Response:
        """Store the records, of one topic, and answer when the last one's fate is known.

        `body` is as received, decompressed: what a repeated request must have too. `key`: see
        `idempotency.request_key`.

        Raises:
            RestError: what became of all of them; or 409 and 422 for the request's key.
            Refused: Kafka is silent, and nothing was given to it.
        """
        if key is not None:
            return await self.keyed.store(call, records, body, key)
        topic = records[0].topic
        if self._publisher.known_topic(topic) is None:
            await self._look_up(topic, call.grant.identity.name)
        ticket = Ticket(len(records), call.grant.identity.name)
        submit_allowed(self._publisher, call.grant, records, ticket)
        del records, body  # as in the caller
        await ticket.done
        if ticket.failed:
            self.failed += ticket.failed
            raise_common_failure(ticket)
        return control_answer(encode_results(ticket.results))

    async def _look_up(self, topic: str, principal: str) -> None:
        """Tell a client in time that Kafka is silent. Whatever else forbids the topic, each record is told."""
        try:
            await self._publisher.topic(topic, principal=principal)
        except Refused as refused:
            if refused.outcome is Outcome.BUSY:
                raise
