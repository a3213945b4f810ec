"""Requests to devices: an HTTP client sends a request, an MQTT or AMQP client answers; both messages pass Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Final

import msgspec
from aiohttp import web

from flowcontrol.admission import Admission, Refusal, client_share
from gateway.kafka.contracts import Fanout, Refused
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.read.lingering import LingeringWatch
from gateway.kafka.read.live_reader import LiveReader
from gateway.net.http.http_server import SERVER
from gateway.rest.parts import RestParts
from gateway.rest.produce.tickets import Ticket, raise_common_failure
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.request_login import forbidden
from gateway.security.rights.authorization import Grant
from mapping.amqp.addresses import AddressError, parse_target, path_of
from mapping.outcomes import Outcome
from mapping.record import MQTT_TOPIC, Header, Received, Record
from mapping.rest_requests import answer_fields, correlation_of, request_headers
from mapping.tenants import Names
from protocols.mqtt.topics import is_valid_name
from protocols.rest.errors import RestError, busy, too_many, unprocessable
from telemetry.statistics import counter, gauge

LINGER_S: Final = 30.0  # how long the reply topic is read after the last request, to count late answers


class Replies(Fanout):
    """The open requests of the process, or of a tenant; the `Fanout` of the reply topic.

    It reads the reply topic at its end and accepts records with one key. The reply address is
    `<http.reply_topic>/<an unguessable name>`. Any client that may publish there can answer, over any protocol and
    through any gateway. The correlation id, which is unguessable too, says which request an answer is for.
    """

    def __init__(
        self, live_reader: LiveReader, publisher: Publisher, topic: str, own: str, random_id: Callable[[], str]
    ) -> None:
        """Read the reply `topic` from the first request on; `own` is its name without the tenant's prefix.

        `random_id` returns a new unguessable id that is legal in an MQTT topic.
        """
        self.topic = topic
        name = f"http-{random_id()}"
        self.address = f"{own}/{name}"  # the reply address
        self.late = 0  # answers to requests that are no longer open
        self._key = name.encode()
        self._publisher = publisher
        self._random_id = random_id
        self._open: dict[str, asyncio.Future[Received]] = {}  # the answers by correlation id
        self._users = 0
        self._watch = LingeringWatch(live_reader, topic, self, lambda: self._users, LINGER_S)

    def __len__(self) -> int:
        """Return the number of open requests."""
        return len(self._open)

    def select(self, records: Sequence[Received], at: int) -> tuple[tuple[()], int]:
        """Hand an answer to its request. Returns no subscribers (`contracts.Fanout`)."""
        record = records[at]
        if record.key == self._key:
            answer = self._open.pop(correlation_of(record) or "", None)
            if answer is None:
                self.late += 1
            elif not answer.done():
                answer.set_result(record)
        return (), 1

    @contextmanager
    def expect_answer(self) -> Iterator[tuple[str, asyncio.Future[Received]]]:
        """Open a request during the block: its correlation id, which the answer must have too, and its answer.

        Await `listen` before sending it, or its answer may be missed.
        """
        name = self._random_id()
        answer = self._open[name] = asyncio.get_running_loop().create_future()
        self._users += 1
        try:
            yield name, answer
        finally:
            self._open.pop(name, None)
            answer.cancel()
            self._users -= 1
            if not self._users:
                self._watch.release()

    async def listen(self) -> None:
        """Make sure that the reply topic is being read: all records stored from now on will be seen.

        Raises:
            Refused: The reply topic does not exist and may not be created, or Kafka does not answer.
        """
        if not self._watch.held:
            await self._publisher.topic(self.topic)
            await self._watch.hold()

    def close(self) -> None:
        """Stop reading the reply topic."""
        self._watch.close()


_ANSWER: Final = (  # a browser must not treat a device's answer as a page of the gateway
    ("Server", SERVER),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Content-Security-Policy", "sandbox"),
)


class RequestsStatistics(msgspec.Struct):
    """Counts of requests to devices, since the start."""

    requests_total: Annotated[int, counter("requests to devices")] = 0
    answered_total: Annotated[int, counter("requests to devices that were answered")] = 0
    unanswered_total: Annotated[int, counter("requests to devices that were not answered in time")] = 0
    late_answers_total: Annotated[int, counter("answers that came too late")] = 0
    waiting: Annotated[int, gauge("requests that wait for a device")] = 0


class DeviceRequests(OperationSet):
    """The operation that sends a request to an address and waits for the answer."""

    name = "devices"

    def __init__(self, rest: RestParts) -> None:
        services = rest.services
        config = services.config
        self._config = config
        self._rules = services.rules
        self._publisher = services.publisher
        self._wall_clock = services.wall_clock
        self._overload = rest.overload
        self._live_reader = services.live_reader
        self._random_id = services.random_id
        self._replies: dict[str, Replies] = {}  # by the tenant's prefix
        answer = services.rules.destination(f"{config.reply_topic}/x")
        self._mqtt_answers = (answer.topic, answer.key) == (config.reply_topic, b"x")
        self._counts = RequestsStatistics()
        self._places = Admission(config.max_requests, client_share(config.max_requests, config.max_requests_per_client))
        self.operations = {"request": self.request}

    async def request(self, call: Call, address: str) -> web.StreamResponse:
        """`POST /requests/{address}`."""
        names = call.grant.names
        destination = self._destination(address, names)
        _check_right(call.grant, destination, address)
        timeout_ms = min(call.query["timeout"], round(self._config.max_request_wait_s * 1000))
        replies = self._replies_for(names)
        with self._place(call.connection.share), replies.expect_answer() as (correlation_id, answered):
            self._counts.requests_total += 1
            principal = call.grant.identity.name
            with call.enter(self._overload, destination.topic) as slot:
                body = await call.unchecked_body()
                slot.count_records(1, len(body))
                reply = replies.address, correlation_id
                record = self._request_record(call, destination, body, reply, timeout_ms)
                deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
                try:
                    async with asyncio.timeout_at(deadline):
                        # A missing destination (404) is reported before a missing reply topic (500).
                        await self._publisher.topic(destination.topic, principal=principal)
                        await self._listen(replies)
                        _check_right(call.grant, destination, address)  # it may have changed while the body came
                        await self._publish(record, principal)
                        if call.span is not None:
                            call.span.published()
                except TimeoutError as error:
                    raise self._timed_out(timeout_ms) from error
            try:
                async with asyncio.timeout_at(deadline):
                    answer = await answered
            except TimeoutError as error:
                raise self._timed_out(timeout_ms) from error
        self._counts.answered_total += 1
        return _shown(answer)

    @contextmanager
    def _place(self, client: str) -> Iterator[None]:
        """Count a request until the end of the block; RestError 503 or 429 if there is no place."""
        refusal = self._places.enter(client)
        if refusal is Refusal.FULL:
            raise busy("Too many requests wait for devices; try again")
        if refusal is not None:
            raise too_many(f"You have {self._places.limit_per_client} requests that wait for devices; try again")
        try:
            yield
        finally:
            self._places.leave(client)

    def _replies_for(self, names: Names) -> Replies:
        """Return the replies of a tenant."""
        replies = self._replies.get(names.prefix)
        if replies is None:
            own = self._config.reply_topic
            replies = Replies(self._live_reader, self._publisher, names.topic(own), own, self._random_id)
            self._replies[names.prefix] = replies
        return replies

    @property
    def _waiting(self) -> int:
        return sum(map(len, self._replies.values()))

    def _timed_out(self, timeout_ms: int) -> RestError:
        self._counts.unanswered_total += 1
        return RestError(504, f"No answer within {timeout_ms} ms")

    def _request_record(
        self, call: Call, destination: Record, body: bytes, reply: tuple[str, str], timeout_ms: int
    ) -> Record:
        reply_to, correlation_id = reply
        fields = call.request.headers
        headers = request_headers(
            fields.items(),
            principal=call.grant.identity.name,
            reply_to=reply_to,
            correlation_id=correlation_id,
            expires_ms=self._wall_clock() + timeout_ms,
            trace=call.begin_publish(destination.topic),
        )
        return msgspec.structs.replace(destination, value=body, headers=destination.headers + headers)

    def _destination(self, address: str, names: Names) -> Record:
        """Return the topic and key for an address, as a record without a value.

        Raises:
            RestError: 422 if the address is not valid, or if a mapping rule leads answers away from the reply topic.
        """
        try:
            if path_of(address) != address:  # an AMQP address: a Kafka topic, perhaps with a key
                target = parse_target(address)
                return Record(names.topic(target.topic), target.key, None, (), None, target.partition)
        except AddressError as error:
            raise unprocessable(str(error)) from error
        if not is_valid_name(address):
            raise unprocessable("The address is not a valid MQTT topic name")
        if not self._mqtt_answers:
            away = self._config.reply_topic
            raise unprocessable(f"A mapping rule leads {away}/# to another topic, where answers would not be read")
        topic, key = self._rules.destination(names.mqtt(address))
        name: Header = (MQTT_TOPIC, address.encode())
        return Record(topic, key, None, (name,))

    @staticmethod
    async def _listen(replies: Replies) -> None:
        try:
            await replies.listen()
        except Refused as refused:
            if refused.outcome is Outcome.BUSY:
                raise
            reason = f"Answers cannot be received through the topic {replies.topic}: {refused.reason}"
            raise RestError(500, reason) from refused

    async def _publish(self, record: Record, principal: str) -> None:
        """Store the request; RestError if it is not stored."""
        ticket = Ticket(1, principal)
        self._publisher.submit(record, ticket, 0)
        await ticket.done
        raise_common_failure(ticket)

    async def stop(self) -> None:
        """Stop reading the reply topics."""
        for replies in self._replies.values():
            replies.close()

    def statistics(self) -> RequestsStatistics:
        """Return the counts so far."""
        late = sum(replies.late for replies in self._replies.values())
        return msgspec.structs.replace(self._counts, late_answers_total=late, waiting=self._waiting)


def _check_right(grant: Grant, destination: Record, address: str) -> None:
    if not grant.publish(destination.topic, destination.key):
        raise forbidden(f"publish to {address}")


def _shown(record: Received) -> web.Response:
    answer = web.Response(body=record.value or b"")
    for name, value in (*_ANSWER, *answer_fields(record)):
        if name == "Content-Type":
            answer.headers[name] = value
        else:
            answer.headers.add(name, value)
    return answer


OPERATIONS = (DeviceRequests,)
