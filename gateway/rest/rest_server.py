"""The HTTP server: aiohttp's low-level server with our own router, so that every answer is ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Annotated, cast

import msgspec

from gateway.net.http.http_server import HttpConnection, HttpServer
from gateway.net.http.upgrade import WebSocketEndpoint
from gateway.net.listener import MetricSource
from gateway.rest.admin.operations import Administration
from gateway.rest.admin.topics import TopicOperations
from gateway.rest.consume.instances import Consumers
from gateway.rest.consume.record_pages import RecordPages
from gateway.rest.consume.subscriptions import ConsumerSubscriptions
from gateway.rest.parts import RestParts, installed
from gateway.rest.produce.idempotency import KeyedStatistics
from gateway.rest.produce.line_uploads import Uploads
from gateway.rest.produce.requests import Produce, ProduceStatistics, Storing
from gateway.rest.server.answers import error_answer
from gateway.rest.server.body import BodyReader
from gateway.rest.server.client_limits import RequestLimits
from gateway.rest.server.concurrency import ConcurrencyLimit, ConcurrencyStatistics
from gateway.rest.server.cors import Cors
from gateway.rest.server.listed import listed
from gateway.rest.server.openapi_pages import Documents, load_contract
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.overload import OverloadGuard
from gateway.rest.server.request_dispatcher import RequestDispatcher
from gateway.rest.server.request_login import RequestLogin
from gateway.rest.services import RestServices
from gateway.rest.streams.feeds import Feeds
from gateway.rest.streams.server_sent_events import EventStreams
from gateway.views.clients import Connected
from gateway.views.drain import Departing
from gateway.views.flow import Flowing
from protocols.rest.errors import RestError
from protocols.rest.routes import Dialect
from telemetry.statistics import counter, gauge


class RestStatistics(msgspec.Struct, frozen=True):
    """The counts of HTTP that are not those of a set of operations."""

    connections: Annotated[int, gauge("connections now")]
    known_heads_bytes: Annotated[int, gauge("bytes of request heads that connections remember")]
    requests_total: Annotated[int, counter("requests")]
    answers_total: Annotated[dict[str, dict[str, int]], counter("answers", "operation", "status")]
    produce: ProduceStatistics
    keyed: KeyedStatistics
    load: ConcurrencyStatistics


class RestServer(HttpServer):
    """HTTP of one process, from the socket to Kafka."""

    def __init__(self, services: RestServices, *, websockets: Mapping[str, WebSocketEndpoint] | None = None) -> None:
        """Make the operations and their dispatcher; `websockets` are other protocols' endpoints, by path."""
        config = services.config
        self._spawn = services.spawn
        limits = RequestLimits(services.limits)
        self._overload = overload = OverloadGuard(
            services.publisher, limits, config.max_concurrent, config.max_concurrent_per_client
        )
        bodies = BodyReader(overload, config.max_body_bytes, config.header_timeout_s, config.min_upload_rate)
        contract = load_contract()
        self._storing = Storing(services.publisher, services.keyed)
        self._produce = Produce(services.publisher, self._storing, overload, config)
        self._feeds = Feeds(services.live_reader)
        rest = RestParts(
            services,
            overload,
            self._storing,
            uploads=Uploads(services.publisher, overload, config),
            consumers=(consumers := Consumers(services, limits)),
            subscriptions=ConsumerSubscriptions(consumers, services),
            topics=TopicOperations(services),
            feeds=self._feeds,
        )
        self._operations: tuple[OperationSet, ...] = (
            Documents(contract),
            rest.topics,
            self._produce,
            rest.uploads,
            rest.consumers,
            rest.subscriptions,
            RecordPages(services, limits),
            EventStreams(services, self._feeds),
            Administration(services),
            *installed(rest),
        )
        login = RequestLogin(services.access_list, services.origins)
        self._concurrency = ConcurrencyLimit(config.max_active, config.max_active_per_client)
        self._dispatcher = RequestDispatcher(
            contract,
            self._operations,
            login,
            bodies,
            websockets or {},
            concurrency=self._concurrency,
            limits=limits,
            cors=Cors(config.cors_origins),
            tracing=services.tracing,
            dialect=Dialect(config.dialect),
            compress_from=config.compress_from_bytes,
        )
        super().__init__(
            "http",
            self._dispatcher.handle,
            lambda status, reason: error_answer(RestError(status, reason, close=True)),
            services.security,
            head_timeout_s=config.header_timeout_s,
            handler_cancellation=True,  # a poll whose client has disconnected must not consume records
            max_bytes=config.max_header_bytes,
            max_fields=config.max_headers,
            max_head_bytes=config.max_head_bytes,
            strangers=services.strangers,
            outgoing=services.publisher.budgets.outgoing,
        )
        self._leaving: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listen; raise ListenError when an address cannot be bound."""
        await super().start()
        for operations in self._operations:
            operations.start()

    def departing(self) -> Iterable[Departing]:
        """Return HTTP connections, event streams and WebSockets."""
        connections = (cast("HttpConnection", connection) for connection in self.connections)
        return [*connections, *chain.from_iterable(each.departing() for each in self._operations)]

    def stop_receiving(self) -> None:
        """Close the listening sockets, answer new requests with 503, and end long operations such as polls.

        Requests that wait for Kafka continue to wait.
        """
        if self._dispatcher.draining:
            return
        self.stop_accepting()
        self._dispatcher.draining = True
        self._leaving = [self._spawn(operations.drain()) for operations in self._operations]

    async def stop(self, timeout: float) -> None:
        """Let running requests finish, then close all consumers and connections, within about `timeout` seconds."""
        self.stop_receiving()
        await super().stop(timeout)
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=timeout / 2)
        for operations in self._operations:
            await operations.stop()
        self._feeds.stop()

    def flowing(self) -> list[Flowing]:
        """Return WebSockets, event streams, and requests and uploads that produce, for /flow."""
        return [*chain.from_iterable(each.flowing() for each in self._operations), *self._overload.flowing()]

    def clients(self) -> Iterable[Connected]:
        """Return HTTP connections, event streams, WebSockets and consumers."""
        return chain(listed(tuple(self.connections)), *(each.clients() for each in self._operations))

    def statistics(self) -> RestStatistics:
        """Return the counts so far."""
        return RestStatistics(
            connections=len(self.connections),
            known_heads_bytes=self.known_heads.bytes,
            requests_total=self.requests_count,
            answers_total=self._dispatcher.answers(),
            produce=self._produce.statistics(),
            keyed=self._storing.keyed.statistics(),
            load=self._concurrency.statistics(),
        )

    def sources(self) -> Iterable[MetricSource]:
        """Return its own counts and those of its operations."""
        yield from super().sources()
        for operations in self._operations:
            if operations.name:
                yield f"{self.name}_{operations.name}", operations.statistics
