"""What Kafka is asked about topics: their partitions and their configuration. Any broker can answer."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

from aiokafka import errors
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.admin import DescribeConfigsRequest
from aiokafka.protocol.metadata import MetadataRequest

from gateway.config import KafkaConfig
from gateway.kafka.cluster.topic_info import CONFIG_NAMES, TopicInfo, configured, info_of
from gateway.kafka.contracts import Refused
from gateway.kafka.driver import wire
from gateway.kafka.driver.client_settings import client_settings
from gateway.kafka.driver.lifecycle import OnDemand
from gateway.spawn import Spawn
from mapping.outcomes import Outcome

BEHIND_S: Final = 2.0
"""How long one broker may take to answer for a topic that another one does not know."""
SILENT_S: Final = 8.0
"""After this time without any answer of Kafka's, whoever waits is told. Most clients give up after ten seconds or more;
a living Kafka answers the heartbeat of `Topics` every five."""


class Patience:
    """Who waits for Kafka waits as long as it answers anything: it may be slow, or wait for a group's members."""

    def __init__(self, clock: Callable[[], float], silence_s: float = SILENT_S) -> None:
        """`clock` gives monotonic seconds; after `silence_s` without an answer Kafka is silent."""
        self._clock = clock
        self._silence_s = silence_s
        self._heard = -math.inf

    def heard(self) -> None:
        """Kafka has answered something."""
        self._heard = self._clock()

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer; infinite before the first one."""
        return self._clock() - self._heard

    @contextlib.asynccontextmanager
    async def bound(self, limit_s: float = math.inf) -> AsyncIterator[None]:
        """Bound a wait, by `limit_s` seconds at most, though Kafka answers.

        Raises:
            TimeoutError: nothing was heard for `silence_s`, or the limit is reached.
        """
        async with asyncio.timeout(None) as scope:
            wait = _Wait(self._left, self._clock() + limit_s, self._clock(), scope)
            wait.look()
            try:
                yield
            finally:
                wait.end()

    def _left(self, begun: float, end: float) -> float:
        """Seconds until a wait that has begun then is over, unless Kafka answers before; at `end` in any case."""
        return min(max(begun, self._heard) + self._silence_s, end) - self._clock()


class _Wait:
    """Ends a scope when its time is over, which answers put off; no cycle is left when it ends itself."""

    __slots__ = ("_begun", "_end", "_left", "_scope", "_timer")

    def __init__(self, left: Callable[[float, float], float], end: float, begun: float, scope: asyncio.Timeout) -> None:
        self._left = left
        self._end = end
        self._begun = begun
        self._scope: asyncio.Timeout | None = scope
        self._timer: asyncio.TimerHandle | None = None

    def look(self) -> None:
        if self._scope is None:
            return
        loop = asyncio.get_running_loop()
        left = self._left(self._begun, self._end)
        if left > 0:
            self._timer = loop.call_later(left, self.look)
        else:
            self._scope.reschedule(loop.time())

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._scope = None


T = TypeVar("T")

Partitions = list[tuple[Any, ...]]
"""A topic's partitions as Kafka's metadata has them."""

_ERRORS: Final[dict[type[Exception], Outcome]] = {
    errors.TopicAuthorizationFailedError: Outcome.DENIED,
    errors.ClusterAuthorizationFailedError: Outcome.DENIED,
    errors.InvalidTopicError: Outcome.UNKNOWN_TOPIC,
    errors.UnknownTopicOrPartitionError: Outcome.UNKNOWN_TOPIC,
    errors.PolicyViolationError: Outcome.UNKNOWN_TOPIC,
    errors.InvalidReplicationFactorError: Outcome.UNKNOWN_TOPIC,
    errors.InvalidPartitionsError: Outcome.UNKNOWN_TOPIC,
}
"""What a broker's answer about a topic means for a client; everything else is transient: BUSY."""


def refused_by(code: int, subject: str) -> Refused:
    """What the broker's error code means for a client."""
    error = errors.for_code(code)
    return Refused(_ERRORS.get(error, Outcome.BUSY), f"{subject}: {error.message}")


class TopicQueries:
    """One connection to any broker. Every question raises Refused (BUSY) when none answers."""

    def __init__(self, config: KafkaConfig, spawn: Spawn, clock: Callable[[], float]) -> None:
        """Connect with the first question. `clock` gives monotonic seconds."""
        self.patience = Patience(clock)  # hears of every answer
        self._client: OnDemand[Any] = OnDemand(
            lambda: AIOKafkaClient(**client_settings(config, "topics")), lambda client: client.bootstrap(), spawn
        )

    async def request(self, request: Any, node: int | None = None) -> Any:
        """Send a request of aiokafka's to one broker, or to any; with the bootstrap servers again when that breaks."""
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
        self.patience.heard()
        return response

    async def heartbeat(self) -> None:
        """Ask for nothing: whether Kafka answers."""
        await self.request(MetadataRequest([], allow_auto_topic_creation=False))

    async def everything(self) -> wire.Metadata:
        """All topics and their partitions."""
        metadata: wire.Metadata = await self.request(wire.metadata_of(None))
        return metadata

    async def describe(self, names: Iterable[str], node: int | None = None) -> dict[str, Partitions | Refused]:
        """The partitions of topics, or why there are none, as one broker knows them: `node`, or any."""
        asked = list(names)
        answers: dict[str, Partitions | Refused] = {
            name: Refused(Outcome.UNKNOWN_TOPIC, f"Topic {name} not found") for name in asked
        }
        response = await self.request(MetadataRequest(asked, allow_auto_topic_creation=False), node)
        for code, name, _, partitions in response.topics:
            if name in answers and code != errors.UnknownTopicOrPartitionError.errno:
                answers[name] = refused_by(code, f"topic {name}") if code else list(partitions)
        return answers

    async def search(self, names: Iterable[str]) -> dict[str, Partitions | Refused]:
        """As `describe`; unknown is only what no broker knows: one may not have heard yet of what others serve."""
        answers = await self.describe(names)
        for node in await self._nodes():
            unknown = [name for name, found in answers.items() if _is_unknown(found)]
            if not unknown:
                break
            with contextlib.suppress(Refused, TimeoutError):
                async with asyncio.timeout(BEHIND_S):
                    answers |= await self.describe(unknown, node)
        return answers

    async def _nodes(self) -> list[int]:
        """The brokers by their numbers, when there are several to ask."""
        try:
            brokers = (await self._client.get()).cluster.brokers()
        except (errors.KafkaError, OSError):
            return []
        return [broker.nodeId for broker in brokers] if len(brokers) > 1 else []

    async def find(self, name: str) -> TopicInfo:
        """One topic, with Kafka's default limits; raises why there is none."""
        found = (await self.search([name]))[name]
        if isinstance(found, Refused):
            raise Refused(found.outcome, found.reason)
        return info_of(name, found)

    async def configured(self, infos: list[TopicInfo]) -> list[TopicInfo]:
        """The same topics, with the limits that their configurations set; as `search`, of what broker knows them."""
        configs = await self._configs([info.name for info in infos])
        for node in await self._nodes():
            lacking = [info.name for info in infos if info.name not in configs]
            if not lacking:
                break
            with contextlib.suppress(Refused, TimeoutError):
                async with asyncio.timeout(BEHIND_S):
                    configs |= await self._configs(lacking, node)
        return [configured(info, configs.get(info.name, {})) for info in infos]

    async def _configs(self, names: list[str], node: int | None = None) -> dict[str, dict[str, str]]:
        """The configurations of the topics that a broker knows; of those that we have no right to read, none."""
        resources = [(ConfigResourceType.TOPIC, name, CONFIG_NAMES) for name in names]
        response = await self.request(DescribeConfigsRequest(resources), node)
        return {
            name: {} if code else {entry[0]: entry[1] for entry in entries}
            for code, _, _, name, entries in response.resources
            if code != errors.UnknownTopicOrPartitionError.errno
        }

    async def wait_for(self, answer: Awaitable[T], *, bounded: bool = True) -> T:
        """Wait for what comes of questions; `bounded`: while Kafka is silent no longer than `SILENT_S`."""
        try:
            async with self.patience.bound() if bounded else contextlib.nullcontext():
                return await answer
        except TimeoutError:
            raise Refused(Outcome.BUSY, "Kafka does not answer") from None

    async def stop(self) -> None:
        """Close the connection."""
        await self._client.stop()


def _is_unknown(found: Partitions | Refused) -> bool:
    return isinstance(found, Refused) and found.outcome is Outcome.UNKNOWN_TOPIC


class SharedQuestion:
    """A question that many ask: all who ask while an answer is on its way share the next one."""

    def __init__(self, ask: Callable[[], Awaitable[None]]) -> None:
        """`ask` may raise Refused, which all who share it are told."""
        self._ask = ask
        self._asking = asyncio.Lock()
        self._begun = 0
        self._refused: Refused | None = None  # what the last one came to

    async def answered(self) -> None:
        """Return when an answer has come that was asked for after this call."""
        arrived = self._begun
        async with self._asking:
            if self._begun > arrived:  # one has begun since, and is over
                if self._refused is not None:
                    raise Refused(self._refused.outcome, self._refused.reason)
                return
            self._begun, self._refused = self._begun + 1, None
            try:
                await self._ask()
            except BaseException as error:
                if isinstance(error, Refused):
                    self._refused = error
                else:
                    self._begun -= 1  # cancelled with whoever asked: the next one asks anew
                raise
