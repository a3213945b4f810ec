"""Requests to devices: an HTTP client asks, an MQTT or AMQP client answers, Kafka has both records."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import msgspec
from aiohttp import web

from gateway.kafka.contracts import Refused
from gateway.net.http_server import SERVER
from gateway.rest.produce.tickets import Ticket, raise_common_failure
from gateway.rest.requests.replies import Replies
from gateway.rest.server.body import BodyReader
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.overload import OverloadGuard
from gateway.rest.server.request_login import forbidden
from gateway.rest.services import RestServices
from gateway.statistics import counter, gauge
from mapping.amqp.addresses import AddressError, parse_target, path_of
from mapping.outcomes import Outcome
from mapping.record import MQTT_TOPIC, Header, Received, Record
from mapping.rest_requests import answer_fields, question_headers
from protocols.mqtt.topics import is_valid_name
from protocols.rest.errors import RestError, busy, unprocessable

_ANSWER: Final = (  # a device's answer is no page of ours
    ("Server", SERVER),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Content-Security-Policy", "sandbox"),
)


class RequestsStatistics(msgspec.Struct):
    """What requests to devices came to, since the start."""

    requests_total: Annotated[int, counter("requests to devices")] = 0
    answered_total: Annotated[int, counter("requests to devices that were answered")] = 0
    unanswered_total: Annotated[int, counter("requests to devices that were not answered in time")] = 0
    late_answers_total: Annotated[int, counter("answers that came too late")] = 0
    waiting: Annotated[int, gauge("requests that wait for a device")] = 0


class DeviceRequests(OperationSet):
    """The operation on an address, and this process's reply address."""

    def __init__(self, services: RestServices, overload: OverloadGuard, bodies: BodyReader) -> None:
        config = services.config
        self._config = config
        self._rules = services.rules
        self._publisher = services.publisher
        self._wall_clock = services.wall_clock
        self._overload = overload
        self._bodies = bodies
        self._replies = Replies(services.live_reader, services.publisher, config.reply_topic, services.random_id)
        replies = services.rules.destination(self._replies.address)
        self._mqtt_answers = f"{replies.topic}/{(replies.key or b'').decode()}" == self._replies.address
        self._counts = RequestsStatistics()
        self.operations = {"request": self.request}

    async def request(self, call: Call, address: str) -> web.StreamResponse:
        """`POST /requests/{address}`."""
        destination = self._destination(address)
        if not call.grant.publish(destination.topic, destination.key):
            raise forbidden(f"publish to {address}")
        timeout_ms = min(call.query["timeout"], round(self._config.max_request_wait_s * 1000))
        if len(self._replies) >= self._config.max_requests:
            raise busy("Too many requests wait for devices; try again")
        self._counts.requests_total += 1
        with self._replies.ask() as question:
            with self._overload.enter(destination.topic, call.request):
                body = await self._bodies.read(call.request)
                principal = call.grant.identity.name
                record = self._question(call, destination, body, question.correlation_id, timeout_ms)
                deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
                try:
                    async with asyncio.timeout_at(deadline):
                        # 404 goes before what the gateway lacks.
                        await self._publisher.topic(destination.topic, principal=principal)
                        await self._listen()
                        await self._publish(record, principal)
                        if call.span is not None:
                            call.span.published()
                except TimeoutError as error:
                    raise self._silence(timeout_ms) from error
            try:
                async with asyncio.timeout_at(deadline):
                    answer = await question.answer
            except TimeoutError as error:
                raise self._silence(timeout_ms) from error
        self._counts.answered_total += 1
        return _shown(answer)

    def _silence(self, timeout_ms: int) -> RestError:
        self._counts.unanswered_total += 1
        return RestError(504, f"No answer within {timeout_ms} ms")

    def _question(self, call: Call, destination: Record, body: bytes, correlation_id: str, timeout_ms: int) -> Record:
        fields = call.request.headers
        headers = question_headers(
            fields.items(),
            principal=call.grant.identity.name,
            reply_to=self._replies.address,
            correlation_id=correlation_id,
            expires_ms=self._wall_clock() + timeout_ms,
            trace=call.begin_publish(destination.topic),
        )
        return msgspec.structs.replace(destination, value=body, headers=destination.headers + headers)

    def _destination(self, address: str) -> Record:
        """The topic and key of a request, as a record without a value.

        Raises:
            RestError: 404 for what can be no address, 403 for an internal topic, 422 where answers could not come.
        """
        try:
            if path_of(address) != address:  # spelled as AMQP's: a Kafka topic, and perhaps a key
                target = parse_target(address)
                return Record(target.topic, target.key, None, (), None, target.partition)
        except AddressError as error:
            raise unprocessable(str(error)) from error
        if not is_valid_name(address):
            raise unprocessable("The address is no name of an MQTT topic")
        if not self._mqtt_answers:
            raise unprocessable(f"A mapping rule leads {self._replies.topic}/# away from where answers are awaited")
        topic, key = self._rules.destination(address)
        name: Header = (MQTT_TOPIC, address.encode())
        return Record(topic, key, None, (name,))

    async def _listen(self) -> None:
        try:
            await self._replies.listen()
        except Refused as refused:
            if refused.outcome is Outcome.BUSY:
                raise
            reason = f"Answers cannot come in by the topic {self._replies.topic}: {refused.reason}"
            raise RestError(500, reason) from refused

    async def _publish(self, record: Record, principal: str) -> None:
        """Store the question; RestError when it is not stored."""
        ticket = Ticket(1, principal)
        self._publisher.submit(record, ticket, 0)
        await ticket.done
        raise_common_failure(ticket)

    async def stop(self) -> None:
        """Watch the reply topic no more."""
        self._replies.close()

    def statistics(self) -> RequestsStatistics:
        """Counts so far."""
        return msgspec.structs.replace(
            self._counts,
            late_answers_total=self._replies.late,
            waiting=len(self._replies),
        )


def _shown(record: Received) -> web.Response:
    answer = web.Response(body=record.value or b"")
    for name, value in (*_ANSWER, *answer_fields(record)):
        if name == "Content-Type":
            answer.headers[name] = value
        else:
            answer.headers.add(name, value)
    return answer
