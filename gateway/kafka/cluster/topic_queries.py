"""Requests about topics' partitions and configuration, which any broker can answer."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, Final, TypeVar

from aiokafka import errors
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.admin import DescribeConfigsRequest

from gateway.kafka.cluster.topic_info import CONFIG_NAMES, TopicInfo, configured, info_of
from gateway.kafka.contracts import Refused
from gateway.kafka.driver import wire
from gateway.kafka.driver.client_settings import client_settings
from gateway.kafka.driver.lifecycle import OnDemand
from gateway.runtime.spawn import Spawn
from gateway.settings.config import KafkaConfig
from mapping.outcomes import Outcome

BEHIND_S: Final = 2.0
"""How long one broker may take to answer for a topic that another broker does not know."""
SILENT_S: Final = 8.0
"""After this time without any answer from Kafka, waits end. Most clients time out after ten seconds or more; a healthy
Kafka answers the heartbeat of `Topics` every five."""


class SilenceLimit:
    """Limits waits for Kafka: they end after `silence_s` without any answer, not while Kafka is merely slow.

    An answer may be slow by itself, such as one that waits for a group's members.
    """

    def __init__(self, clock: Callable[[], float], silence_s: float = SILENT_S) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._silence_s = silence_s
        self._last_answer = -math.inf

    def answered(self) -> None:
        """Note that Kafka has answered a request."""
        self._last_answer = self._clock()

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer; infinite before the first one."""
        return self._clock() - self._last_answer

    @contextlib.asynccontextmanager
    async def bound(self, limit_s: float = math.inf) -> AsyncIterator[None]:
        """End a wait when Kafka is silent, and after `limit_s` seconds in any case.

        Raises:
            TimeoutError: no answer for `silence_s`, or `limit_s` have passed.
        """
        async with asyncio.timeout(None) as scope:
            timers: list[asyncio.TimerHandle] = []
            started = self._clock()
            self._look(scope, started, started + limit_s, timers)
            try:
                yield
            finally:
                for timer in timers:
                    timer.cancel()  # leaves no reference cycle

    def _look(self, scope: asyncio.Timeout, started: float, end: float, timers: list[asyncio.TimerHandle]) -> None:
        """End a wait when its time is over, which answers extend, but not beyond `end`; else look again later."""
        left = min(max(started, self._last_answer) + self._silence_s, end) - self._clock()
        loop = asyncio.get_running_loop()
        if left > 0:
            timers[:] = [loop.call_later(left, self._look, scope, started, end, timers)]
        else:
            scope.reschedule(loop.time())


T = TypeVar("T")

_ERRORS: Final[dict[type[Exception], Outcome]] = {
    errors.TopicAuthorizationFailedError: Outcome.DENIED,
    errors.ClusterAuthorizationFailedError: Outcome.DENIED,
    errors.InvalidTopicError: Outcome.UNKNOWN_TOPIC,
    errors.UnknownTopicOrPartitionError: Outcome.UNKNOWN_TOPIC,
    errors.PolicyViolationError: Outcome.UNKNOWN_TOPIC,
    errors.InvalidReplicationFactorError: Outcome.UNKNOWN_TOPIC,
    errors.InvalidPartitionsError: Outcome.UNKNOWN_TOPIC,
}
"""The outcome of a broker's error about a topic; all other errors are transient: BUSY."""


def refused_by(code: int, subject: str) -> Refused:
    """Return the refusal for a broker's error code."""
    error = errors.for_code(code)
    return Refused(_ERRORS.get(error, Outcome.BUSY), f"{subject}: {error.message}")


class TopicQueries:
    """Sends requests to any broker. Every request raises Refused (BUSY) when none answers."""

    def __init__(self, config: KafkaConfig, spawn: Spawn, clock: Callable[[], float]) -> None:
        """Connect with the first request. `clock` returns monotonic seconds."""
        self.silence_limit = SilenceLimit(clock)  # notes every answer
        self._client: OnDemand[Any] = OnDemand(
            lambda: AIOKafkaClient(**client_settings(config, "topics")), lambda client: client.bootstrap(), spawn
        )

    async def request(self, request: Any, node: int | None = None) -> Any:
        """Send an aiokafka request to broker `node`, or to any broker, reconnecting next time when that fails."""
        client: Any = None
        try:
            client = await self._client.get()
            response = await client.send(client.get_random_node() if node is None else node, request)
        except errors.IncompatibleBrokerVersion as error:
            raise Refused(Outcome.BROKEN, f"this Kafka is too old: {error}") from error
        except (errors.KafkaError, OSError) as error:
            if node is None:
                await self._client.drop(client)
            raise Refused(Outcome.BUSY, f"Kafka does not answer ({type(error).__name__})") from error
        self.silence_limit.answered()
        return response

    async def heartbeat(self) -> None:
        """Send an empty metadata request to see whether Kafka answers."""
        await self.request(wire.metadata_request(()))

    async def all_topics(self) -> wire.Metadata:
        """Return the metadata of all topics."""
        metadata: wire.Metadata = await self.request(wire.metadata_request(None))
        return metadata

    async def describe(self, names: Collection[str], node: int | None = None) -> dict[str, wire.Topic | Refused]:
        """Return the topics, or why there are none, by the metadata of broker `node`, or of any broker."""
        answers: dict[str, wire.Topic | Refused] = {
            name: Refused(Outcome.UNKNOWN_TOPIC, f"Topic {name} not found") for name in names
        }
        metadata: wire.Metadata = await self.request(wire.metadata_request(names), node)
        for name, topic in metadata.topics.items():
            if name in answers and topic.error != errors.UnknownTopicOrPartitionError.errno:
                answers[name] = refused_by(topic.error, f"topic {name}") if topic.error else topic
        return answers

    async def search(self, names: Collection[str]) -> dict[str, wire.Topic | Refused]:
        """Like `describe`, but a topic is unknown only if no broker knows it: metadata of some may be behind."""
        return await self._ask_all(self.describe, names)

    async def _ask_all(
        self, ask: Callable[[Collection[str], int | None], Awaitable[dict[str, T]]], names: Collection[str]
    ) -> dict[str, T]:
        """Ask any broker, and then, if there are several, each one for the topics that are still unknown."""
        answers = await ask(names, None)
        try:
            brokers = (await self._client.get()).cluster.brokers()
        except (errors.KafkaError, OSError):
            brokers = ()
        for broker in brokers if len(brokers) > 1 else ():
            unknown = [name for name in names if _is_unknown(answers.get(name))]
            if not unknown:
                break
            with contextlib.suppress(Refused, TimeoutError):
                async with asyncio.timeout(BEHIND_S):
                    answers |= await ask(unknown, broker.nodeId)
        return answers

    async def find(self, name: str) -> TopicInfo:
        """Return a topic, with Kafka's default limits. Raises Refused when it does not exist."""
        answer = (await self.search([name]))[name]
        if isinstance(answer, Refused):
            raise Refused(answer.outcome, answer.reason)
        return info_of(name, answer)

    async def configured(self, infos: list[TopicInfo]) -> list[TopicInfo]:
        """Return the topics with their configured limits, from any broker that knows them, like `search`."""
        configs = await self._ask_all(self._configs, [info.name for info in infos])
        return [configured(info, configs.get(info.name, {})) for info in infos]

    async def _configs(self, names: Collection[str], node: int | None) -> dict[str, dict[str, str]]:
        """Return the configurations of topics that the broker knows; empty for those we may not read."""
        resources = [(ConfigResourceType.TOPIC, name, CONFIG_NAMES) for name in names]
        response = await self.request(DescribeConfigsRequest(resources), node)
        return {
            name: {} if code else {entry[0]: entry[1] for entry in entries}
            for code, _, _, name, entries in response.resources
            if code != errors.UnknownTopicOrPartitionError.errno
        }

    async def wait_for(self, answer: Awaitable[T], *, bounded: bool = True) -> T:
        """Await `answer`; if `bounded`, raise Refused (BUSY) once Kafka is silent for `SILENT_S`."""
        try:
            async with self.silence_limit.bound() if bounded else contextlib.nullcontext():
                return await answer
        except TimeoutError:
            raise Refused(Outcome.BUSY, "Kafka does not answer") from None

    async def stop(self) -> None:
        """Close the connection."""
        await self._client.stop()


def _is_unknown(answer: object) -> bool:
    return answer is None or (isinstance(answer, Refused) and answer.outcome is Outcome.UNKNOWN_TOPIC)


class SharedRequest:
    """A request with many callers: those that arrive while it is in flight share the next one."""

    def __init__(self, ask: Callable[[], Awaitable[None]]) -> None:
        """`ask` may raise Refused, in all callers that share it."""
        self._ask = ask
        self._asking = asyncio.Lock()
        self._started = 0
        self._refused: Refused | None = None  # by the last request

    async def answered(self) -> None:
        """Return when a request that started after this call has been answered."""
        arrived = self._started
        async with self._asking:
            if self._started > arrived:  # a request has started since, and ended
                if self._refused is not None:
                    raise self._refused.bare()
                return
            self._started, self._refused = self._started + 1, None
            try:
                await self._ask()
            except BaseException as error:
                if isinstance(error, Refused):
                    self._refused = error.bare()
                else:
                    self._started -= 1  # cancelled with its caller: the next caller sends its own
                raise
