"""The HTTP listener: aiohttp's low-level server with our own router, so that every answer is ours."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.config import HttpConfig
from gateway.kafka.publisher import Publisher
from gateway.kafka.topics import Topics
from gateway.net.http_server import HttpServer
from gateway.net.pump import Spawn
from gateway.net.upgrade import WebSocketEndpoint
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


class RestStatistics(msgspec.Struct, frozen=True):
    """Everything that is counted about HTTP."""

    connections: int
    requests_total: int
    answers_total: dict[str, dict[str, int]]  # by operation and class of status
    produce: ProduceStatistics
    consumers: ConsumersStatistics


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
        websockets: Mapping[str, WebSocketEndpoint] | None = None,
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
            websockets: by path, what WebSockets can be opened on this port.
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
            websockets or {},
        )
        self._http: HttpServer | None = None
        self._leaving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind and accept.

        Raises:
            ListenError: the address cannot be had.
        """
        self._http = HttpServer(
            self.name,
            self._app.handle,
            lambda status, reason: error_answer(RestError(status, reason, close=True)),
            head_timeout_s=self._config.header_timeout_s,
            handler_cancellation=True,  # a poll whose client left must not take records
        )
        await self._http.listen("http.address", self._config.address, self._tls)
        self._consumers.start()

    @property
    def bound(self) -> str:
        """The address really bound, as `HOST:PORT`; "" while not listening."""
        return "" if self._http is None else self._http.bound

    @property
    def port(self) -> int:
        """The port really bound; 0 while not listening."""
        return int(self.bound.rpartition(":")[2] or 0)

    @property
    def accepting(self) -> bool:
        """Whether new sockets are accepted."""
        return self._http is not None and self._http.accepting

    def stop_taking(self) -> None:
        """Close the listening socket: open connections are answered 503 from now on, running polls come back.

        Consumers begin to leave their groups; requests that wait for Kafka go on waiting.
        """
        if self._app.draining:
            return
        if self._http is not None:
            self._http.stop_accepting()
        self._app.draining = True
        self._leaving = self._spawn(self._consumers.stop())

    async def stop(self, timeout: float) -> None:
        """Let running requests end, then close every consumer and connection, all within about `timeout` seconds."""
        self.stop_taking()
        if self._http is not None:
            await self._http.stop(timeout / 2)
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
