"""What Kafka is asked about topics: their partitions and their configuration. Any broker can answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

from aiokafka import errors
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.protocol.admin import DescribeConfigsRequest
from aiokafka.protocol.metadata import MetadataRequest

from gateway.config import KafkaConfig
from gateway.kafka.cluster.patience import Patience
from gateway.kafka.cluster.topic_info import CONFIG_NAMES, TopicInfo, configured, info_of
from gateway.kafka.contracts import Refused
from gateway.kafka.driver import wire
from gateway.kafka.driver.any_broker import AnyBroker
from gateway.spawn import Spawn
from mapping.outcomes import Outcome

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
        self._kafka = AnyBroker(config, "topics", spawn, self.patience.heard)

    async def request(self, request: Any) -> Any:
        """Send a request of aiokafka's."""
        return await self._kafka.request(request)

    async def heartbeat(self) -> None:
        """Ask for nothing: whether Kafka answers."""
        await self.request(MetadataRequest([], allow_auto_topic_creation=False))

    async def everything(self) -> wire.Metadata:
        """All topics and their partitions."""
        metadata: wire.Metadata = await self.request(wire.metadata_of(None))
        return metadata

    async def describe(self, names: Iterable[str]) -> dict[str, Partitions | Refused]:
        """The partitions of topics, or why there are none."""
        asked = list(names)
        answers: dict[str, Partitions | Refused] = {
            name: Refused(Outcome.UNKNOWN_TOPIC, f"Topic {name} not found") for name in asked
        }
        response = await self.request(MetadataRequest(asked, allow_auto_topic_creation=False))
        for code, name, _, partitions in response.topics:
            if name in answers and code != errors.UnknownTopicOrPartitionError.errno:
                answers[name] = refused_by(code, f"topic {name}") if code else list(partitions)
        return answers

    async def find(self, name: str) -> TopicInfo:
        """One topic, with Kafka's default limits; raises why there is none."""
        found = (await self.describe([name]))[name]
        if isinstance(found, Refused):
            raise Refused(found.outcome, found.reason)
        return info_of(name, found)

    async def configured(self, infos: list[TopicInfo]) -> list[TopicInfo]:
        """The same topics, with the limits that their configurations set."""
        resources = [(ConfigResourceType.TOPIC, info.name, CONFIG_NAMES) for info in infos]
        response = await self.request(DescribeConfigsRequest(resources))
        configs = {
            name: {entry[0]: entry[1] for entry in entries}
            for code, _, _, name, entries in response.resources
            if code == 0  # without the right to read it, the defaults stand
        }
        return [configured(info, configs.get(info.name, {})) for info in infos]

    async def wait_for(self, answer: Awaitable[T], *, bounded: bool = True) -> T:
        """Wait for what comes of questions; `bounded`: while Kafka is silent no longer than `SILENT_S`."""
        try:
            async with self.patience.bound() if bounded else contextlib.nullcontext():
                return await answer
        except TimeoutError:
            raise Refused(Outcome.BUSY, "Kafka does not answer") from None

    async def stop(self) -> None:
        """Close the connection."""
        await self._kafka.stop()


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
