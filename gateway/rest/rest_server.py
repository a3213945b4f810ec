"""The HTTP server: aiohttp's low-level server with our own router, so that every answer is ours."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping
from typing import Annotated, cast

import msgspec

from gateway.net.http.http_server import HttpConnection, HttpServer
from gateway.net.http.upgrade import WebSocketEndpoint
from gateway.rest.admin.operations import Administration
from gateway.rest.admin.topics import TopicOperations
from gateway.rest.confluent.v2 import ConfluentV2
from gateway.rest.confluent.v3 import ConfluentV3
from gateway.rest.consume.instances import Consumers, ConsumersStatistics
from gateway.rest.consume.record_pages import RecordPages, RecordPagesStatistics
from gateway.rest.consume.subscriptions import ConsumerSubscriptions
from gateway.rest.produce.idempotency import KeyedStatistics
from gateway.rest.produce.line_uploads import Uploads, UploadsStatistics
from gateway.rest.produce.requests import CloudEvents, Produce, ProduceStatistics, Storing
from gateway.rest.requests.device_requests import DeviceRequests, RequestsStatistics
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
from gateway.rest.streams.live_websockets import Live, LiveWebSocketStatistics
from gateway.rest.streams.server_sent_events import EventStreams, StreamsStatistics
from gateway.views.clients import Connected
from gateway.views.drain import Departing
from gateway.views.flow import Flowing
from protocols.rest.confluent import Dialect
from protocols.rest.errors import RestError
from telemetry.statistics import counter, gauge


class RestStatistics(msgspec.Struct, frozen=True):
    """All counts of HTTP."""

    connections: Annotated[int, gauge("connections now")]
    known_heads_bytes: Annotated[int, gauge("bytes of request heads that connections remember")]
    requests_total: Annotated[int, counter("requests")]
    answers_total: Annotated[dict[str, dict[str, int]], counter("answers", "operation", "status")]
    produce: ProduceStatistics
    uploads: UploadsStatistics
    keyed: KeyedStatistics
    consumers: ConsumersStatistics
    reads: RecordPagesStatistics
    streams: StreamsStatistics
    devices: RequestsStatistics
    load: ConcurrencyStatistics
    live: LiveWebSocketStatistics


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
        self._uploads = Uploads(services.publisher, overload, config)
        cloud_events = CloudEvents(self._storing, overload, config.max_records)
        self._consumers = Consumers(services, limits)
        self._reads = RecordPages(services, limits)
        self._feeds = Feeds(services.live_reader)
        self._events = EventStreams(services, self._feeds)
        self._devices = DeviceRequests(services, overload)
        self._live = Live(services, self._feeds)
        subscriptions = ConsumerSubscriptions(self._consumers, services)
        topics = TopicOperations(services)
        self._operations: tuple[OperationSet, ...] = (
            Documents(contract),
            topics,
            self._produce,
            self._uploads,
            cloud_events,
            self._consumers,
            subscriptions,
            ConfluentV2(services, overload, self._consumers, subscriptions, topics),
            ConfluentV3(services, overload, self._uploads, topics),
            self._reads,
            self._events,
            self._devices,
            Administration(services),
            self._live,
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
        return [*connections, *self._events.departing(), *self._live.departing()]

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
        return [*self._live.flowing(), *self._events.flowing(), *self._overload.flowing()]

    def clients(self) -> Iterable[Connected]:
        """Return HTTP connections, event streams, WebSockets and consumers."""
        connections = listed(tuple(self.connections))
        return itertools.chain(connections, self._events.departing(), self._live.departing(), self._consumers.listed())

    def statistics(self) -> RestStatistics:
        """Return the counts so far."""
        return RestStatistics(
            connections=len(self.connections),
            known_heads_bytes=self.known_heads.bytes,
            requests_total=self.requests_count,
            answers_total=self._dispatcher.answers(),
            produce=self._produce.statistics(),
            uploads=self._uploads.statistics(),
            keyed=self._storing.keyed.statistics(),
            consumers=self._consumers.statistics(),
            reads=self._reads.statistics(),
            streams=self._events.statistics(),
            devices=self._devices.statistics(),
            load=self._concurrency.statistics(),
            live=self._live.statistics(),
        )
