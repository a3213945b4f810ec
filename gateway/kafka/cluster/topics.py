"""The cache of Kafka's topics: looked up once, refreshed, created where the configuration allows.

There are two kinds of requests: a lookup of one unknown name, shared by concurrent callers, and a refresh of all
topics, which also finds new and deleted topics for wildcard subscriptions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, Final, NamedTuple

from gateway.kafka.cluster.topic_creation import Creation, PartitionCapacity, WantedTopic, any_capacity
from gateway.kafka.cluster.topic_info import InternalTopic, TopicInfo, info_of
from gateway.kafka.cluster.topic_queries import SharedRequest, TopicQueries
from gateway.kafka.cluster.topic_safety import TopicSafety
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.outage import outage
from gateway.runtime.failures import failures
from gateway.runtime.recent import Recent
from gateway.runtime.spawn import Spawn
from gateway.settings.config import KafkaConfig
from mapping.outcomes import Outcome
from mapping.record import INTERNAL_TOPIC_PREFIX, is_topic_name

WATCHED_REFRESH_S: Final = 5.0
"""Refresh period while there are watchers: a wildcard subscriber sees a new topic within it."""
RECONNECT_S: Final = 1.0
HEARTBEAT_S: Final = 5.0
"""Longest interval between two requests to Kafka."""
REACHABLE_S: Final = 15.0
"""Kafka counts as reachable for this long after its last answer: two heartbeats and a slow answer."""
UNKNOWN_FOR_S: Final = 5.0
"""How long a lookup of a name that cannot be used is answered from memory: a flood of one name costs one request."""
ASK_S: Final = 1.0
"""How long a topic's number of partitions is believed when a client names one beyond it."""
UNKNOWN_KEPT: Final = 10_000
"""How many such names are kept."""

Changed = Callable[[frozenset[str], frozenset[str]], None]
"""Called with the client-visible topics that appeared and those that disappeared."""
Updated = Callable[[TopicInfo], None]
"""Called with a looked-up topic whose partitions, leaders or configuration have changed."""
Gone = Callable[[str, Outcome], None]
"""Called with a looked-up topic that was deleted or is forbidden, and the outcome of its records."""


class _Missing(NamedTuple):
    """Why a name cannot be used, and until when that is kept. `absent`: no such topic; it may be created."""

    until: float
    refused: Refused
    absent: bool


class Topics:
    """The topics of one Kafka cluster.

    `run` does the refreshes; lookups work without it.
    """

    def __init__(
        self,
        config: KafkaConfig,
        *,
        create: bool,
        spawn: Spawn,
        clock: Callable[[], float],
        capacity: PartitionCapacity = any_capacity,
        may_create: Callable[[str], bool] = is_topic_name,
    ) -> None:
        """Nothing is sent yet. `clock` returns monotonic seconds.

        With `create` an unknown topic is created on first use, if `capacity` says that the broker can take its
        partitions, and `may_create` that of the names that collide in Kafka (`.` and `_`) this is the one to create.
        """
        self.queries = TopicQueries(config, spawn, clock)
        self.creation = Creation(
            config, self.queries, lambda: self.names, self.refresh, spawn=spawn, clock=clock, capacity=capacity
        )
        self.safety = TopicSafety(required=config.require_safe_topics)  # checks topics that are written to
        self._config = config
        self._create = create
        self._may_make = may_create
        self._spawn = spawn
        self._clock = clock
        self._known: dict[str, TopicInfo] = {}
        self._internal: dict[str, InternalTopic] = {}
        self._hidden: set[str] = set()  # internal topics that clients cannot read
        self._missing: Recent[str, _Missing] = Recent(UNKNOWN_KEPT)
        self._asked: Recent[str, float] = Recent(UNKNOWN_KEPT)  # when Kafka was last asked for more partitions
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._lookups: dict[str, asyncio.Task[TopicInfo | Refused]] = {}
        self._making: dict[str, tuple[str | None, asyncio.Task[TopicInfo | Refused]]] = {}
        self.names: frozenset[str] = frozenset()  # the topics that clients may see, by the last refresh
        self._found_at: dict[str, float] = {}  # topics found since the last refresh, with the time
        self._watchers: list[Changed] = []
        self.updated: list[Updated] = []
        self.gone: list[Gone] = []
        self._wake = asyncio.Event()
        self._refreshing = SharedRequest(self._refresh)
        self._configs_read = float("-inf")

    # Lifecycle

    async def start(self) -> bool:
        """Connect and read the list of topics. False (logged) when Kafka does not answer; `run` retries."""
        try:
            await self.refresh()
        except Refused as refused:
            outage.notice("topics", f"{self._config.bootstrap_servers}: {refused.reason}")
            return False
        return True

    async def run(self) -> None:
        """Refresh until cancelled; runs in the app's task group."""
        while True:
            self._wake.clear()
            try:
                async with asyncio.timeout(HEARTBEAT_S if self.reachable else RECONNECT_S):
                    await self._wake.wait()
            except TimeoutError:
                pass  # time for a heartbeat
            age = WATCHED_REFRESH_S if self._watchers else self._config.metadata_max_age_s
            try:
                if not self.reachable or self._clock() - self.creation.counted >= age:
                    await self._refreshing.answered()
                else:
                    await self.queries.heartbeat()
            except Refused as refused:
                outage.notice("topics", refused.reason)
            else:
                outage.end()

    async def stop(self) -> None:
        """Close the connection."""
        await self.queries.stop()

    @property
    def reachable(self) -> bool:
        """Whether Kafka has answered within the last `REACHABLE_S`."""
        return self.queries.silence_limit.silent_s < REACHABLE_S

    # Lookups

    def declare(self, topic: InternalTopic) -> None:
        """Declare one of the gateway's own topics, for `get` with `internal`; it is always created when missing."""
        if not (topic.readable or topic.name.startswith(INTERNAL_TOPIC_PREFIX)):
            raise ValueError(f"{topic.name} is a name that clients may use")
        self._internal[topic.name] = topic
        if not topic.readable:
            self._hidden.add(topic.name)

    def is_own(self, name: str) -> bool:
        """Whether clients must not write the topic: its name is internal, or it is a readable topic of the gateway."""
        return name.startswith(INTERNAL_TOPIC_PREFIX) or name in self._internal

    def known(self, name: str, *, internal: bool = False) -> TopicInfo | None:
        """Return the cached `TopicInfo`, or None. `internal` is as in `get`."""
        return self._known.get(name) if internal or not name.startswith(INTERNAL_TOPIC_PREFIX) else None

    async def get(
        self,
        name: str,
        *,
        internal: bool = False,
        create: bool = True,
        principal: str | None = None,
        bounded: bool = True,
    ) -> TopicInfo:
        """Return the topic's `TopicInfo`; look it up, and create it if `create` and the configuration allow.

        `internal` is for the gateway's own, declared topics; without it an internal name is always refused, so that no
        client reaches such a topic. A created topic counts for `principal`. If `bounded`, a silent Kafka means BUSY
        after `SILENT_S`, else only when the connection fails.

        Raises:
            Refused: UNKNOWN_TOPIC (no such topic and it may not be created, or an illegal name), DENIED (an internal
                name, or Kafka's authorization), FULL (a limit is reached), BUSY (Kafka does not answer; try again).
        """
        if internal:
            if name not in self._internal:
                raise ValueError(f"{name} was not declared")
        elif (refused := _why_illegal(name)) is not None:
            raise refused.bare()
        info = self._known.get(name)
        if info is not None:
            return info
        may_create = internal or (create and self._create)
        missing = self._find_missing(name)
        if missing is None:
            lookup = self._lookups.get(name)
            if lookup is None:
                lookup = self._lookups[name] = self._spawn(self._look_up(name))
            answer = await self.queries.wait_for(asyncio.shield(lookup), bounded=bounded)
            if isinstance(answer, TopicInfo):
                return answer
            missing = self._find_missing(name)
            if missing is None:
                raise Refused(answer.outcome, answer.reason)
        if not missing.absent or not may_create:
            raise missing.refused.bare()
        if not internal and not self._may_make(name):
            raise Refused(Outcome.UNKNOWN_TOPIC, f"{missing.refused.reason}, and {_not_chosen(name)}")
        return await self._create_shared(name, principal, bounded=bounded)

    def _find_missing(self, name: str) -> _Missing | None:
        missing = self._missing.get(name)
        if missing is not None and self._clock() >= missing.until:
            del self._missing[name]
            return None
        return missing

    def _add_missing(self, name: str, refused: Refused, *, absent: bool = False) -> None:
        self._missing[name] = _Missing(self._clock() + UNKNOWN_FOR_S, refused, absent)

    async def _create_shared(self, name: str, principal: str | None, *, bounded: bool) -> TopicInfo:
        """Create a missing topic. Callers share the result, except for a refusal by another principal's limit."""
        while True:
            making = self._making.get(name)
            if making is None:
                making = self._making[name] = (principal, self._spawn(self._make(name, principal)))
            maker, task = making
            info = await self.queries.wait_for(asyncio.shield(task), bounded=bounded)
            if isinstance(info, TopicInfo):
                return info
            if info.outcome is not Outcome.FULL or maker == principal:
                raise Refused(info.outcome, info.reason)

    async def find(self, names: Collection[str]) -> dict[str, Refused]:
        """Look up several topics together, without creating any. Those that exist are in `self.names` afterwards.

        Returns:
            Why each of the other topics cannot be used.

        Raises:
            Refused: BUSY, Kafka does not answer.
        """
        refused = {name: why for name in names if (why := _why_illegal(name)) is not None}
        asked = set(names) - self.names - refused.keys()
        if asked:
            described = await self.queries.search(asked)
            refused |= {name: reason for name, reason in described.items() if isinstance(reason, Refused)}
            there = asked - refused.keys() - self.names
            self._found_at |= dict.fromkeys(there, self._clock())
            if there:
                self._set_names(self.names | there)
        return refused

    def refuse(self, name: str, outcome: Outcome, reason: str) -> None:
        """Note that Kafka has refused writes to `name` for good; lookups are refused for some seconds."""
        self._add_missing(name, Refused(outcome, reason))
        self._forget(name, outcome)

    def may_have_grown(self, name: str) -> bool:
        """Whether `with_partition` would ask Kafka, or is asking."""
        return name in self._asking or self._clock() - self._asked.get(name, float("-inf")) >= ASK_S

    async def with_partition(self, info: TopicInfo, partition: int) -> TopicInfo:
        """Return a topic's `TopicInfo`, after asking Kafka if it lacks the partition, at most once in `ASK_S`.

        Raises:
            Refused: BUSY, Kafka does not answer.
        """
        name = info.name
        if partition < info.partitions or not self.may_have_grown(name):
            return info
        asking = self._asking.get(name)
        if asking is None:
            asking = self._asking[name] = self._spawn(self._ask(name))
        await self.queries.wait_for(asyncio.shield(asking))
        return self._known.get(name, info)

    async def _ask(self, name: str) -> None:
        try:
            await self.confirm(name)
        finally:
            self._asked[name] = self._clock()
            del self._asking[name]

    async def confirm(self, name: str) -> None:
        """Check whether the topic still exists unchanged. Kafka's silence changes nothing."""
        try:
            info = await self.queries.find(name)
            known = self._known.get(name)
            if known is None or info.partitions == known.partitions:
                return
            info = (await self.queries.configured([info]))[0]  # perhaps re-created: read it all again
        except Refused as refused:
            if refused.outcome is not Outcome.BUSY:
                self._forget(name, refused.outcome)
            return
        self._changed([info])

    def _forget(self, name: str, outcome: Outcome) -> None:
        self._known.pop(name, None)
        self.safety.forget(name)
        for callback in tuple(self.gone):
            failures.guard("topics", callback, name, outcome)

    async def _look_up(self, name: str) -> TopicInfo | Refused:
        """Look up `name` for all concurrent callers."""
        try:
            return await self._remember_result(name, self.queries.find(name), Outcome.UNKNOWN_TOPIC, "looked up")
        finally:
            del self._lookups[name]

    async def _remember_result(
        self, name: str, asked: Coroutine[Any, Any, TopicInfo], absent: Outcome, verb: str
    ) -> TopicInfo | Refused:
        """Await `asked` and cache its result: the topic with its configuration, or the refusal, which is returned.

        After the refusal `absent` the topic may still be created. `verb` is for the reason after an unexpected error.
        """
        try:
            info = (await self.queries.configured([await asked]))[0]
        except Refused as error:
            refused = error.bare()
            if refused.outcome is not Outcome.BUSY:
                self._add_missing(name, refused, absent=refused.outcome is absent)
            return refused
        except Exception as error:  # contained: callers may try again
            failures.report("topic", error, name)
            return Refused(Outcome.BUSY, f"topic {name} could not be {verb}")
        self._known[name] = info
        self._exists(name)
        return info

    def _exists(self, name: str) -> None:
        """Note that a topic was found or created."""
        self._missing.pop(name, None)
        self._found_at[name] = self._clock()
        if name not in self.names and name not in self._hidden:
            self._set_names(self.names | {name})

    async def _make(self, name: str, principal: str | None) -> TopicInfo | Refused:
        """Create a missing topic; a refusal is returned, as by `_look_up`."""
        try:
            # After FULL, a refusal that costs Kafka nothing, the next call may try again immediately.
            return await self._remember_result(name, self._create_missing(name, principal), Outcome.FULL, "created")
        finally:
            del self._making[name]

    async def _create_missing(self, name: str, principal: str | None) -> TopicInfo:
        own = self._internal.get(name)
        if own is not None:
            made = await self.creation.make_own(WantedTopic(name, own.partitions, configs=own.configs))
        else:
            made = await self.creation.make(WantedTopic(name), principal)
        return info_of(name, made.topic)

    async def create(
        self, name: str, partitions: int | None = None, replication: int | None = None, principal: str | None = None
    ) -> bool:
        """Create a topic for an administrator, regardless of the settings about unknown topics and dotted names.

        `partitions` and `replication` default to `kafka.topic_partitions` and `kafka.topic_replication`, the latter to
        the broker's default.

        Returns:
            False when the topic exists already. A new topic has leaders when this returns.

        Raises:
            Refused: UNFIT (an illegal name, or numbers that Kafka rejects), DENIED (an internal name, or Kafka's
                authorization), FULL (a limit is reached), BUSY.
        """
        try:
            if (illegal := _why_illegal(name)) is not None:
                raise illegal.bare()
            made = await self.creation.make(WantedTopic(name, partitions, replication), principal)
        except Refused as refused:
            if refused.outcome is Outcome.UNKNOWN_TOPIC:
                raise Refused(Outcome.UNFIT, refused.reason) from refused
            raise
        if made.new:
            self._exists(name)
        return made.new

    # Refreshing

    def watch(self, callback: Changed) -> None:
        """Call `callback(appeared, disappeared)` whenever `names` has changed."""
        self._watchers.append(callback)
        self._wake.set()

    def unwatch(self, callback: Changed) -> None:
        """Stop calling `callback`, if it is called."""
        if callback in self._watchers:
            self._watchers.remove(callback)

    async def refresh(self) -> None:
        """Refresh all topics now. Callers that arrive during a refresh share the next one.

        Raises:
            Refused: BUSY, Kafka does not answer.
        """
        await self.queries.wait_for(self._refreshing.answered())

    async def _refresh(self) -> None:
        started = self._clock()
        metadata = await self.queries.all_topics()
        seen = {
            name: topic
            for name, topic in metadata.topics.items()
            if not topic.error and (name in self._internal or (not topic.internal and is_topic_name(name)))
        }
        self._found_at = {name: when for name, when in self._found_at.items() if when >= started}
        in_between = self._found_at.keys() - seen.keys()  # found after the request was sent
        fewer = any(len(seen[name].leaders) < info.partitions for name, info in self._known.items() if name in seen)
        fresh = [info_of(name, seen[name], info) for name, info in self._known.items() if name in seen]
        # A topic with fewer partitions was re-created: its configuration may have changed too.
        if fresh and (fewer or self._clock() - self._configs_read >= self._config.metadata_max_age_s):
            self._configs_read = self._clock()
            fresh = await self.queries.configured(fresh)
        expected = self.names | self._internal.keys()
        absent = [name for name in self._known if name not in seen and name in expected and name not in in_between]
        infos = await self.queries.search(absent) if absent else {}  # the broker's metadata may be behind the others'
        for name, there in infos.items():
            if isinstance(there, Refused) and there.outcome is not Outcome.BUSY:
                self._forget(name, there.outcome)
            else:  # it is there, or the next refresh asks again
                in_between.add(name)
        self.safety.brokers = max(self.safety.brokers, len(metadata.brokers))
        self._changed(fresh)
        self.creation.count(metadata, started)
        self._set_names(frozenset((seen.keys() | in_between) - self._hidden))

    def _changed(self, infos: Iterable[TopicInfo]) -> None:
        """Update cached topics and call `updated` for those that have changed."""
        for info in infos:
            if self._known.get(info.name) not in (info, None):
                self._known[info.name] = info
                for callback in tuple(self.updated):
                    failures.guard("topics", callback, info)

    def _set_names(self, names: frozenset[str]) -> None:
        appeared, disappeared = names - self.names, self.names - names
        self.names = names
        if appeared or disappeared:
            for callback in tuple(self._watchers):
                failures.guard("topics", callback, appeared, disappeared)


def _not_chosen(name: str) -> str:
    return (
        f"{name} is not created: Kafka treats names that differ only in . and _ as equal, and mapping.dotted_topics"
        " does not choose this one"
    )


def _why_illegal(name: str) -> Refused | None:
    """Return why a client's topic cannot have this name, or None."""
    if name.startswith(INTERNAL_TOPIC_PREFIX):
        return Refused(Outcome.DENIED, "topics that begin with __ are internal")
    return None if is_topic_name(name) else Refused(Outcome.UNKNOWN_TOPIC, "not a legal topic name")
