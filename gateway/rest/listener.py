"""The HTTP listener: aiohttp's low-level server with our own router, so that every answer is ours."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Final

import msgspec
import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.config import HttpConfig
from gateway.kafka.publisher import Publisher
from gateway.kafka.topics import Topics
from gateway.net.listener import BACKLOG, HANDSHAKE_S, ListenError, bound_address, listen_error
from gateway.net.pump import LINGER_S, Spawn
from gateway.rest.access import Access
from gateway.rest.admission import Admission
from gateway.rest.answers import error_answer
from gateway.rest.app import RestApp
from gateway.rest.body import BodyReader
from gateway.rest.consumers import Consumers, ConsumersStatistics
from gateway.rest.produce import Produce, ProduceStatistics
from gateway.rest.subscriptions import Subscriptions
from gateway.rest.topics import TopicOperations
from gateway.security.authentication import Authenticator
from gateway.security.authorization import AccessList
from protocols.rest.errors import RestError

log = structlog.get_logger(__name__)

HEADER_BYTES: Final = 16 * 1024  # of one field; proxies send long tokens, nobody sends more
HEADER_FIELDS: Final = 100


class RestStatistics(msgspec.Struct, frozen=True):
    """Everything that is counted about HTTP."""

    connections: int
    requests_total: int
    answers_total: dict[str, dict[str, int]]  # by operation and class of status
    produce: ProduceStatistics
    consumers: ConsumersStatistics


class _Protocol(web.RequestHandler):
    """One connection. Requests that break HTTP itself never reach the application; they are answered here."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer in the dialect's error body instead of aiohttp's text or HTML, and close."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun and cannot be taken back")
        if isinstance(exc, HttpProcessingError) and exc.code:
            status, message = exc.code, f"Bad request: {(exc.message or 'malformed').partition(chr(10))[0]}"
        elif exc is not None and status >= 500:
            log.error("request failed", error=repr(exc))
        return error_answer(RestError(status, message or "Bad request", close=True))


class _Server(web.Server):
    """aiohttp's server with our kind of connection."""

    def __call__(self) -> web.RequestHandler:
        return _Protocol(self, loop=self._loop, **self._kwargs)


class RestListener:
    """The HTTP side of the gateway, from the socket to Kafka."""

    name = "http"

    def __init__(
        self,
        config: HttpConfig,
        *,
        publisher: Publisher,
        topics: Topics,
        authenticator: Authenticator,
        access_list: AccessList,
        kafka: dict[str, Any],
        spawn: Spawn,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Build everything; nothing is bound yet.

        Args:
            config: the `http` section.
            publisher: the way into Kafka.
            topics: what is known of Kafka's topics.
            authenticator: who clients are.
            access_list: what they may do.
            kafka: connection arguments of an aiokafka consumer; see `gateway.kafka.client.client_settings`.
            spawn: starts background work in the app's task group.
            clock: monotonic seconds; the loop's.
            tls: what the listener shares with the other protocols.
        """
        self._config = config
        self._tls = tls
        self._spawn = spawn
        self._admission = Admission(publisher, config.max_concurrent)
        bodies = BodyReader(self._admission, config.max_body_bytes, config.header_timeout_s)
        self._produce = Produce(publisher, self._admission, bodies, config.max_records)
        self._consumers = Consumers(config, bodies, kafka=kafka, spawn=spawn, clock=clock)
        subscriptions = Subscriptions(self._consumers, bodies, publisher)
        described = TopicOperations(topics, publisher, kafka)
        self._described = described
        self._app = RestApp(
            Access(authenticator, access_list),
            {
                "info": described.info,
                "listTopics": described.list_topics,
                "getTopic": described.get_topic,
                "listPartitions": described.list_partitions,
                "getPartition": described.get_partition,
                "getOffsets": described.get_offsets,
                "send": self._produce.send,
                "sendToPartition": self._produce.send_to_partition,
                "createConsumer": self._consumers.create,
                "deleteConsumer": self._consumers.delete,
                "poll": self._consumers.poll,
                "commit": self._consumers.commit,
                "subscribe": subscriptions.subscribe,
                "listSubscriptions": subscriptions.list_subscriptions,
                "unsubscribe": subscriptions.unsubscribe,
                "assign": subscriptions.assign,
                "seek": subscriptions.seek,
                "seekToBeginning": subscriptions.seek_to_beginning,
                "seekToEnd": subscriptions.seek_to_end,
            },
        )
        self._server: asyncio.Server | None = None
        self._http: _Server | None = None
        self._leaving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind and accept.

        Raises:
            ListenError: the address cannot be had.
        """
        address, tls = self._config.address, self._tls
        self._http = _Server(
            self._app.handle,
            handler_cancellation=True,  # a poll whose client left must not take records
            access_log=None,
            keepalive_timeout=self._config.header_timeout_s,  # also the time for a request's head
            lingering_time=LINGER_S,  # the rest of a refused body is read and dropped, so that the answer is not lost
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
            max_headers=HEADER_FIELDS,
        )
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._http,
                address.host,
                address.port,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_S if tls else None,
                backlog=BACKLOG,
            )
        except OSError as error:
            raise ListenError(listen_error(self.name, address, error)) from error
        self._consumers.start()
        log.info("listening", protocol=self.name, address=self.bound, tls=tls is not None)

    @property
    def bound(self) -> str:
        """The address really bound, as `HOST:PORT`; "" while not listening."""
        return bound_address(self._server)

    @property
    def port(self) -> int:
        """The port really bound; 0 while not listening."""
        return int(self.bound.rpartition(":")[2] or 0)

    @property
    def accepting(self) -> bool:
        """Whether new sockets are accepted."""
        return self._server is not None and self._server.is_serving()

    def stop_taking(self) -> None:
        """Close the listening socket: open connections are answered 503 from now on, running polls come back.

        Consumers begin to leave their groups; requests that wait for Kafka go on waiting.
        """
        if self._app.draining:
            return
        if self._server is not None:
            self._server.close()
        self._app.draining = True
        self._leaving = self._spawn(self._consumers.stop())

    async def stop(self, timeout: float) -> None:
        """Let running requests end, then close every consumer and connection, all within about `timeout` seconds."""
        self.stop_taking()
        http = self._http
        if http is not None:
            http.pre_shutdown()
            await http.shutdown(timeout / 2)  # waits for the handlers, then cancels them and waits once more
        if self._leaving is not None:
            await asyncio.wait([self._leaving], timeout=timeout / 2)
        await self._described.stop()

    def statistics(self) -> RestStatistics:
        """Counts so far."""
        return RestStatistics(
            connections=0 if self._http is None else len(self._http.connections),
            requests_total=0 if self._http is None else self._http.requests_count,
            answers_total=self._app.answers(),
            produce=self._produce.statistics(),
            consumers=self._consumers.statistics(),
        )
