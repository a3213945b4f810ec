"""What is known about Kafka's topics: looked up once, kept fresh, created where the policy allows.

One client, two kinds of requests: a look-up of one unknown name (concurrent ones of a name share it), and a
refresh of everything, which also finds the topics that appeared or disappeared, for those who watch wildcards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
from aiokafka import errors
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest
from aiokafka.protocol.metadata import MetadataRequest

from gateway.config import KafkaConfig
from gateway.failures import failures
from gateway.kafka.client import client_settings, start_client
from gateway.kafka.contracts import Refused
from gateway.spawn import Spawn
from mapping.outcomes import Outcome
from mapping.record import INTERNAL_TOPIC_PREFIX, is_topic_name

log = logging.getLogger(__name__)

DEFAULT_MAX_MESSAGE_BYTES: Final = 1_048_588
"""Kafka's own default of `max.message.bytes`; assumed where we may not read a topic's configuration."""
UNKNOWN_FOR_S: Final = 5.0
"""How long an unknown name stays unknown without asking again: a flood of bad names costs one request per name."""
UNKNOWN_KEPT: Final = 10_000
"""How many unknown names are remembered; forgotten together when full."""
WATCHED_REFRESH_S: Final = 5.0
"""Refresh period while somebody watches for new topics: a wildcard subscriber sees a new topic within it."""
RECONNECT_S: Final = 1.0
HEARTBEAT_S: Final = 5.0
"""How often Kafka is asked something at least."""
REACHABLE_S: Final = 15.0
"""Kafka counts as reachable for this long after its last answer: two heartbeats and a slow answer."""
CREATION_S: Final = 15.0
"""How long a new topic may take until all its partitions have leaders."""
CREATION_POLL_S: Final = 0.05

_CONFIG_NAMES: Final = [
    "max.message.bytes",
    "cleanup.policy",
    "message.timestamp.type",
    "message.timestamp.before.max.ms",
    "message.timestamp.after.max.ms",
]
_FOREVER: Final = 2**63 - 1


class TopicInfo(msgspec.Struct, frozen=True, gc=False):
    """What must be known of a topic before a record is handed over.

    Attributes:
        name: the topic.
        partitions: how many it has; they are numbered from 0.
        max_message_bytes: largest record batch that its broker takes.
        available: the partitions that have a leader now.
        needs_key: compacted: a record without a key would be refused, and the batch around it.
        cleanup: its `cleanup.policy`; None when we may not read it.
        before_ms: how far in the past a record's own timestamp may be.
        after_ms: how far in the future it may be.
    """

    name: str
    partitions: int
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    available: tuple[int, ...] = ()
    needs_key: bool = False
    cleanup: str | None = None
    before_ms: int = _FOREVER
    after_ms: int = _FOREVER


class InternalTopic(msgspec.Struct, frozen=True):
    """One of our own topics, which no client can see, read or write, and how it is created when it is missing.

    Attributes:
        name: begins with `INTERNAL_TOPIC_PREFIX`.
        partitions: how many it is created with.
        configs: Kafka's names and values.
    """

    name: str
    partitions: int
    configs: tuple[tuple[str, str], ...] = ()


Changed = Callable[[frozenset[str], frozenset[str]], None]
"""Told the client-visible topics that appeared and that disappeared."""
Updated = Callable[[TopicInfo], None]
"""Told a looked-up topic's new state: partitions, leaders or configuration changed."""
Gone = Callable[[str, Outcome], None]
"""Told a looked-up topic that is gone or forbidden, and what its records get."""

_LOOKUP_ERRORS: Final[dict[type[Exception], Outcome]] = {
    errors.TopicAuthorizationFailedError: Outcome.DENIED,
    errors.ClusterAuthorizationFailedError: Outcome.DENIED,
    errors.InvalidTopicError: Outcome.UNKNOWN_TOPIC,
    errors.UnknownTopicOrPartitionError: Outcome.UNKNOWN_TOPIC,
    errors.PolicyViolationError: Outcome.UNKNOWN_TOPIC,
    errors.InvalidReplicationFactorError: Outcome.UNKNOWN_TOPIC,
    errors.InvalidPartitionsError: Outcome.UNKNOWN_TOPIC,
}
"""What a broker's answer about a topic means for a client; everything else is transient: BUSY."""


class Topics:
    """The topics of one Kafka cluster.

    `run` must be running for the refreshes; look-ups work without it once `start` has been called.
    """

    def __init__(
        self,
        config: KafkaConfig,
        *,
        create: bool,
        spawn: Spawn,
        clock: Callable[[], float],
    ) -> None:
        """Nothing is sent yet.

        Args:
            config: with `bootstrap_servers` set.
            create: whether an unknown topic is created at its first use.
            spawn: starts background work in the app's task group.
            clock: monotonic seconds.
        """
        self._config = config
        self._create = create
        self._spawn = spawn
        self._clock = clock
        self._client: Any = None  # AIOKafkaClient; aiokafka carries no types
        self._connecting = asyncio.Lock()
        self._known: dict[str, TopicInfo] = {}
        self._internal: dict[str, InternalTopic] = {}
        self._unknown: dict[str, tuple[float, Refused]] = {}
        self._lookups: dict[str, asyncio.Task[TopicInfo | Refused]] = {}
        self._names: frozenset[str] = frozenset()
        self._watchers: list[Changed] = []
        self._updated: list[Updated] = []
        self._gone: list[Gone] = []
        self._wake = asyncio.Event()
        self._refreshed = float("-inf")
        self._refreshing = asyncio.Lock()
        self._next_refresh: asyncio.Task[Refused | None] | None = None  # not begun yet
        self._configs_read = float("-inf")
        self._answered = float("-inf")
        self._stopped = False

    # Life

    async def start(self) -> bool:
        """Connect and read the list of topics; False (logged) when Kafka does not answer, `run` tries on."""
        try:
            await self.refresh()
        except Refused as refused:
            log.warning("Kafka at %s does not answer yet: %s", self._config.bootstrap_servers, refused.reason)
            return False
        return True

    async def run(self) -> None:
        """Refresh until cancelled; for the app's task group."""
        while True:
            self._wake.clear()
            try:
                async with asyncio.timeout(HEARTBEAT_S if self.reachable else RECONNECT_S):
                    await self._wake.wait()
            except TimeoutError:
                pass  # the usual end of the wait
            age = WATCHED_REFRESH_S if self._watchers else self._config.metadata_max_age_s
            try:
                if not self.reachable or self._clock() - self._refreshed >= age:
                    await self.refresh()
                else:
                    await self._request(MetadataRequest([], allow_auto_topic_creation=False))
            except Refused as refused:
                log.info("topics could not be refreshed: %s", refused.reason)

    async def stop(self) -> None:
        """Close the connection."""
        self._stopped = True
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @property
    def reachable(self) -> bool:
        """Whether Kafka has answered a request of ours within `REACHABLE_S`."""
        return self._clock() - self._answered < REACHABLE_S

    # Looking up

    def declare(self, topic: InternalTopic) -> None:
        """Make one of our own topics known to those who ask with `internal`; it is always created when missing."""
        if not topic.name.startswith(INTERNAL_TOPIC_PREFIX):
            raise ValueError(f"{topic.name} is a name that clients may use")
        self._internal[topic.name] = topic

    def known(self, name: str, *, internal: bool = False) -> TopicInfo | None:
        """What is known of `name`, without asking; see `get`."""
        return self._known.get(name) if internal or not name.startswith(INTERNAL_TOPIC_PREFIX) else None

    async def get(self, name: str, *, internal: bool = False) -> TopicInfo:
        """What is known of `name`, after asking, and creating the topic, where need be.

        Args:
            name: the topic.
            internal: it is one of our own topics, which was declared. Without this word an internal name is
                refused, so that no client's wish reaches such a topic, whatever we ourselves know of it.

        Raises:
            Refused: UNKNOWN_TOPIC (no such topic and none may be created, or no legal name), DENIED (an internal
                name, or Kafka's authorization), BUSY (Kafka does not answer; ask again).
        """
        if internal:
            if name not in self._internal:
                raise ValueError(f"{name} was not declared")
        elif name.startswith(INTERNAL_TOPIC_PREFIX):
            raise Refused(Outcome.DENIED, "topics that begin with __ are internal")
        info = self._known.get(name)
        if info is not None:
            return info
        if not internal and not is_topic_name(name):
            raise Refused(Outcome.UNKNOWN_TOPIC, "not a legal topic name")
        remembered = self._unknown.get(name)
        if remembered is not None:
            until, refused = remembered
            if self._clock() < until:
                raise Refused(refused.outcome, refused.reason)
            del self._unknown[name]
        lookup = self._lookups.get(name)
        if lookup is None:
            lookup = self._spawn(self._look_up(name))
            self._lookups[name] = lookup
        found = await asyncio.shield(lookup)
        if isinstance(found, Refused):
            raise Refused(found.outcome, found.reason)
        return found

    def refuse(self, name: str, outcome: Outcome, reason: str) -> None:
        """Writing to `name` was refused for good: nobody asks again for `UNKNOWN_FOR_S`."""
        self._remember_unknown(name, Refused(outcome, reason))
        self._lost(name, outcome)

    async def confirm(self, name: str) -> None:
        """Writing to `name` failed: find out whether it is still there. Kafka's silence proves nothing."""
        try:
            partitions = await self._partitions(name)
        except Refused as refused:
            if refused.outcome is not Outcome.BUSY:
                self._lost(name, refused.outcome)
            return
        info = self._known.get(name)
        if info is not None and len(partitions) < info.partitions:
            self._lost(name, Outcome.BUSY)  # deleted and made anew: what waits for it must be placed again

    def _lost(self, name: str, outcome: Outcome) -> None:
        self._known.pop(name, None)
        for callback in tuple(self._gone):
            _call(callback, name, outcome)

    def _remember_unknown(self, name: str, refused: Refused) -> None:
        if len(self._unknown) >= UNKNOWN_KEPT:
            self._unknown.clear()
        self._unknown[name] = (self._clock() + UNKNOWN_FOR_S, refused)

    async def _look_up(self, name: str) -> TopicInfo | Refused:
        """The answer for everybody who asks for `name` now."""
        try:
            info = await self._describe(name)
        except Refused as refused:
            if refused.outcome is not Outcome.BUSY:
                self._remember_unknown(name, refused)
            return refused
        except Exception as error:  # contained: they may ask again
            failures.tell("topic", error, name)
            return Refused(Outcome.BUSY, f"topic {name} could not be looked up")
        else:
            self._known[name] = info
            if name not in self._names and name not in self._internal:
                self._set_names(self._names | {name})
            return info
        finally:
            del self._lookups[name]

    async def _describe(self, name: str) -> TopicInfo:
        try:
            partitions = await self._partitions(name)
        except Refused as refused:
            if refused.outcome is not Outcome.UNKNOWN_TOPIC or not (self._create or name in self._internal):
                raise
            partitions = await self._create_topic(name)
        return (await self._with_configs([_info(name, partitions)]))[0]

    async def _partitions(self, name: str) -> list[tuple[Any, ...]]:
        response = await self._request(MetadataRequest([name], allow_auto_topic_creation=False))
        for code, topic, _, partitions in response.topics:
            if topic == name and code != errors.UnknownTopicOrPartitionError.errno:
                _check(code, f"topic {name}")
                return list(partitions)
        raise Refused(Outcome.UNKNOWN_TOPIC, f"Topic {name} not found")

    async def create(self, name: str, partitions: int | None = None, replication: int | None = None) -> bool:
        """Create a topic because somebody asks for it by name, whether or not unknown ones are created.

        Args:
            name: the topic.
            partitions: how many; None: `kafka.topic_partitions`.
            replication: how many copies; None: `kafka.topic_replication`.

        Returns:
            False when it exists already. A new topic has leaders when this returns.

        Raises:
            Refused: UNFIT (no legal name, or numbers that Kafka does not take), DENIED (an internal name, or Kafka's
                authorization), BUSY.
        """
        if name.startswith(INTERNAL_TOPIC_PREFIX):
            raise Refused(Outcome.DENIED, "topics that begin with __ are internal")
        if not is_topic_name(name):
            raise Refused(Outcome.UNFIT, "not a legal topic name")
        try:
            if not await self._ask_for(name, partitions, replication):
                return False
            await self._led(name)
        except Refused as refused:
            if refused.outcome is Outcome.UNKNOWN_TOPIC:
                raise Refused(Outcome.UNFIT, refused.reason) from refused
            raise
        self._unknown.pop(name, None)
        self._set_names(self._names | {name})
        return True

    async def _create_topic(self, name: str) -> list[tuple[Any, ...]]:
        own = self._internal.get(name)
        if own is None:
            await self._ask_for(name)
        else:
            await self._ask_for(name, own.partitions, configs=own.configs)
        return await self._led(name)

    async def _ask_for(
        self,
        name: str,
        partitions: int | None = None,
        replication: int | None = None,
        configs: tuple[tuple[str, str], ...] = (),
    ) -> bool:
        """Have a topic created; False when it is there already."""
        config = self._config
        partitions = config.topic_partitions if partitions is None else partitions
        replication = config.topic_replication if replication is None else replication
        request = CreateTopicsRequest(
            create_topic_requests=[(name, partitions, replication, [], list(configs))],
            timeout=round(config.request_timeout_s * 1000),
            validate_only=False,
        )
        response = await self._request(request)
        for _, code, *message in response.topic_errors:
            if errors.for_code(code) is errors.TopicAlreadyExistsError:
                return False
            _check(code, f"topic {name} could not be created{': ' + message[0] if message and message[0] else ''}")
        log.info("created topic %s with %d partitions", name, partitions)
        return True

    async def _led(self, name: str) -> list[tuple[Any, ...]]:
        """A new topic's partitions when all have leaders."""
        deadline = self._clock() + CREATION_S
        while True:
            try:
                found = await self._partitions(name)
            except Refused as refused:
                # The broker that we ask may not have heard of the new topic.
                if refused.outcome is not Outcome.UNKNOWN_TOPIC or self._clock() > deadline:
                    raise
            else:
                if all(leader >= 0 for _, _, leader, *_ in found):
                    return found
                if self._clock() > deadline:
                    raise Refused(Outcome.BUSY, f"topic {name} was created and has no leaders yet")
            await asyncio.sleep(CREATION_POLL_S)

    # Keeping fresh

    @property
    def names(self) -> frozenset[str]:
        """The topics that clients may see; as of the last refresh."""
        return self._names

    def watch(self, callback: Changed) -> None:
        """Call `callback(appeared, disappeared)` whenever `names` has changed."""
        self._watchers.append(callback)
        self._wake.set()

    def unwatch(self, callback: Changed) -> None:
        """Stop calling `callback`."""
        self._watchers.remove(callback)

    def on_update(self, callback: Updated) -> None:
        """Call `callback(info)` whenever a looked-up topic has changed."""
        self._updated.append(callback)

    def on_gone(self, callback: Gone) -> None:
        """Call `callback(name, outcome)` whenever a looked-up topic is gone or forbidden."""
        self._gone.append(callback)

    async def refresh(self) -> None:
        """Ask for everything now; all who ask while an answer is on its way share the next one.

        Raises:
            Refused: BUSY, Kafka does not answer.
        """
        if self._next_refresh is None:
            self._next_refresh = self._spawn(self._refresh_next())
        refused = await asyncio.shield(self._next_refresh)
        if refused is not None:
            raise Refused(refused.outcome, refused.reason)

    async def _refresh_next(self) -> Refused | None:
        async with self._refreshing:
            self._next_refresh = None
            try:
                await self._refresh()
            except Refused as refused:
                return refused
            return None

    async def _refresh(self) -> None:
        response = await self._request(MetadataRequest(None, allow_auto_topic_creation=False))
        seen: dict[str, list[tuple[Any, ...]]] = {}
        for code, name, internal, partitions in response.topics:
            if code == 0 and (name in self._internal or (not internal and is_topic_name(name))):
                seen[name] = list(partitions)
        for info in tuple(self._known.values()):
            if info.name in seen and len(seen[info.name]) < info.partitions:
                self._lost(info.name, Outcome.BUSY)  # deleted and made anew: what waits for it must be placed again
        fresh = [
            msgspec.structs.replace(info, partitions=len(seen[name]), available=_available(seen[name]))
            for name, info in self._known.items()
            if name in seen
        ]
        if fresh and self._clock() - self._configs_read >= self._config.metadata_max_age_s:
            self._configs_read = self._clock()
            fresh = await self._with_configs(fresh)
        expected = self._names | self._internal.keys()
        for name in [name for name in self._known if name not in seen and name in expected]:
            self._lost(name, Outcome.UNKNOWN_TOPIC)
        for info in fresh:
            if self._known.get(info.name) not in (info, None):
                self._known[info.name] = info
                for callback in tuple(self._updated):
                    _call(callback, info)
        self._refreshed = self._clock()
        self._set_names(frozenset(seen.keys() - self._internal.keys()))

    def _set_names(self, names: frozenset[str]) -> None:
        appeared, disappeared = names - self._names, self._names - names
        self._names = names
        if appeared or disappeared:
            for callback in tuple(self._watchers):
                _call(callback, appeared, disappeared)

    async def _with_configs(self, infos: list[TopicInfo]) -> list[TopicInfo]:
        resources = [(ConfigResourceType.TOPIC, info.name, _CONFIG_NAMES) for info in infos]
        response = await self._request(DescribeConfigsRequest(resources))
        configs = {
            name: {entry[0]: entry[1] for entry in entries}
            for code, _, _, name, entries in response.resources
            if code == 0  # without the right to read it, the defaults stand
        }
        return [_configured(info, configs.get(info.name, {})) for info in infos]

    # Requests

    async def _request(self, request: Any) -> Any:
        """Send to any broker.

        Raises:
            Refused: BUSY, none answers.
        """
        client: Any = None
        try:
            client = await self._connected()
            response = await client.send(client.get_random_node(), request)
        except (errors.KafkaError, OSError) as error:
            await self._drop(client)
            raise Refused(Outcome.BUSY, f"Kafka does not answer ({type(error).__name__})") from error
        self._answered = self._clock()
        return response

    async def _drop(self, client: Any) -> None:
        """Begin again with the bootstrap servers at the next request: the brokers that we know may all have moved."""
        if client is None or client is not self._client:
            return
        self._client = None
        await client.close()

    async def _connected(self) -> AIOKafkaClient:
        async with self._connecting:
            if self._client is None:
                if self._stopped:
                    raise errors.ProducerClosed("stopped")
                client = AIOKafkaClient(**client_settings(self._config, "topics"))
                await start_client(client.bootstrap, client.close, self._spawn)
                self._client = client
            return self._client


def _call(callback: Callable[..., None], *facts: Any) -> None:
    """Tell one of those that want to know; when it fails, the others still learn of it."""
    try:
        callback(*facts)
    except Exception as error:  # our bug, in one listener
        failures.tell("topics", error)


def _check(code: int, subject: str) -> None:
    """Raise what the broker's error code means for a client; nothing when there is none."""
    error = errors.for_code(code)
    if error is errors.NoError:
        return
    raise Refused(_LOOKUP_ERRORS.get(error, Outcome.BUSY), f"{subject}: {error.message}")


def _available(partitions: Iterable[tuple[Any, ...]]) -> tuple[int, ...]:
    return tuple(sorted(number for _, number, leader, *_ in partitions if leader >= 0))


def _info(name: str, partitions: list[tuple[Any, ...]]) -> TopicInfo:
    return TopicInfo(name=name, partitions=len(partitions), available=_available(partitions))


def _configured(info: TopicInfo, configs: dict[str, str]) -> TopicInfo:
    own_time = configs.get("message.timestamp.type") != "LogAppendTime"
    return msgspec.structs.replace(
        info,
        max_message_bytes=int(configs.get("max.message.bytes", DEFAULT_MAX_MESSAGE_BYTES)),
        needs_key="compact" in configs.get("cleanup.policy", ""),
        cleanup=configs.get("cleanup.policy"),
        before_ms=int(configs.get("message.timestamp.before.max.ms", _FOREVER)) if own_time else _FOREVER,
        after_ms=int(configs.get("message.timestamp.after.max.ms", _FOREVER)) if own_time else _FOREVER,
    )
