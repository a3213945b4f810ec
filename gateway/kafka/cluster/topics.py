"""What is known about Kafka's topics: looked up once, kept fresh, created where the policy allows.

One client, two kinds of requests: a look-up of one unknown name (concurrent ones of a name share it), and a
refresh of everything, which also finds the topics that appeared or disappeared, for those who watch wildcards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, Final

import msgspec

from gateway.config import KafkaConfig
from gateway.failures import failures
from gateway.kafka.cluster.missing_topics import MissingTopics
from gateway.kafka.cluster.topic_creation import Creation, PartitionCapacity, Wanted, any_capacity
from gateway.kafka.cluster.topic_info import InternalTopic, TopicInfo, copies_of, info_of, led_now
from gateway.kafka.cluster.topic_queries import SharedQuestion, TopicQueries
from gateway.kafka.cluster.topic_safety import LEAST, TopicSafety, why_unsafe
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.outage import outage
from gateway.spawn import Spawn
from mapping.outcomes import Outcome
from mapping.record import INTERNAL_TOPIC_PREFIX, is_topic_name

log = logging.getLogger(__name__)

WATCHED_REFRESH_S: Final = 5.0
"""Refresh period while somebody watches for new topics: a wildcard subscriber sees a new topic within it."""
RECONNECT_S: Final = 1.0
HEARTBEAT_S: Final = 5.0
"""How often Kafka is asked something at least."""
REACHABLE_S: Final = 15.0
"""Kafka counts as reachable for this long after its last answer: two heartbeats and a slow answer."""

Changed = Callable[[frozenset[str], frozenset[str]], None]
"""Told the client-visible topics that appeared and that disappeared."""
Updated = Callable[[TopicInfo], None]
"""Told a looked-up topic's new state: partitions, leaders or configuration changed."""
Gone = Callable[[str, Outcome], None]
"""Told a looked-up topic that is gone or forbidden, and what its records get."""


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
        capacity: PartitionCapacity = any_capacity,
        may_make: Callable[[str], bool] = is_topic_name,
    ) -> None:
        """Nothing is sent yet; `clock` gives monotonic seconds.

        `create`: an unknown topic is created at its first use, where `capacity` says that the broker can take its
        partitions, and `may_make` that its name is the one to be made of those that Kafka takes for the same.
        """
        self.queries = TopicQueries(config, spawn, clock)  # what Kafka is asked
        # makes topics, within the limits
        self.creation = Creation(
            config, self.queries, lambda: self.names, self.refresh, spawn=spawn, clock=clock, capacity=capacity
        )
        self.safety = TopicSafety(required=config.require_safe_topics)  # judges those that are written to
        self._config = config
        self._create = create
        self._may_make = may_make
        self._spawn = spawn
        self._clock = clock
        self._known: dict[str, TopicInfo] = {}
        self._internal: dict[str, InternalTopic] = {}
        self._hidden: set[str] = set()  # of these, what clients cannot read
        self._missing = MissingTopics(clock)
        self._lookups: dict[str, asyncio.Task[TopicInfo | Refused]] = {}
        self._making: dict[str, tuple[str | None, asyncio.Task[TopicInfo | Refused]]] = {}
        self.names: frozenset[str] = frozenset()  # the topics that clients may see, as of the last refresh
        self._learned: dict[str, float] = {}  # when, since the last refresh
        self._watchers: list[Changed] = []
        self.updated: list[Updated] = []  # called with each looked-up topic that has changed
        self.gone: list[Gone] = []  # called when one is gone or forbidden
        self._wake = asyncio.Event()
        self._refreshing = SharedQuestion(self._refresh)
        self._configs_read = float("-inf")

    # Life

    async def start(self) -> bool:
        """Connect and read the list of topics; False (logged) when Kafka does not answer, `run` tries on."""
        try:
            await self.refresh()
        except Refused as refused:
            outage.notice("topics", f"{self._config.bootstrap_servers}: {refused.reason}")
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
        """Whether Kafka has answered a request of ours within `REACHABLE_S`."""
        return self.queries.patience.silent_s < REACHABLE_S

    # Looking up

    def declare(self, topic: InternalTopic) -> None:
        """Make one of our own topics known to those who ask with `internal`; it is always created when missing."""
        if not (topic.readable or topic.name.startswith(INTERNAL_TOPIC_PREFIX)):
            raise ValueError(f"{topic.name} is a name that clients may use")
        self._internal[topic.name] = topic
        if not topic.readable:
            self._hidden.add(topic.name)

    def is_own(self, name: str) -> bool:
        """Whether no client may write a topic: it is internal by its name, or one of ours that clients can read."""
        return name.startswith(INTERNAL_TOPIC_PREFIX) or name in self._internal

    def known(self, name: str, *, internal: bool = False) -> TopicInfo | None:
        """What is known of `name`, without asking; see `get`."""
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
        """What is known of `name`, after asking, and making the topic where need be, `create` and the policy allow.

        `internal`: it is one of our own topics, which was declared. Without this word an internal name is refused, so
        that no client reaches such a topic, whatever we ourselves know of it. What is made is counted for `principal`.
        `bounded`: a silent Kafka is BUSY after `SILENT_S`; else when its connection is given up.

        Raises:
            Refused: UNKNOWN_TOPIC (no such topic and none may be made, or no legal name), DENIED (an internal
                name, or Kafka's authorization), FULL (it would be one too many), BUSY (Kafka does not answer; ask
                again).
        """
        if internal:
            if name not in self._internal:
                raise ValueError(f"{name} was not declared")
        elif (refused := _no_topic(name)) is not None:
            raise refused
        info = self._known.get(name)
        if info is not None:
            return info
        may_make = internal or (create and self._create)
        missing = self._missing.find(name)
        if missing is None:
            lookup = self._lookups.get(name)
            if lookup is None:
                lookup = self._lookups[name] = self._spawn(self._look_up(name))
            found = await self.queries.wait_for(asyncio.shield(lookup), bounded=bounded)
            if isinstance(found, TopicInfo):
                return found
            missing = self._missing.find(name)
            if missing is None:
                raise Refused(found.outcome, found.reason)
        if not missing.absent or not may_make:
            raise Refused(missing.refused.outcome, missing.refused.reason)
        if not internal and not self._may_make(name):
            raise Refused(Outcome.UNKNOWN_TOPIC, f"{missing.refused.reason}, and {_not_chosen(name)}")
        return await self._made(name, principal, bounded=bounded)

    async def _made(self, name: str, principal: str | None, *, bounded: bool) -> TopicInfo:
        """A topic that was missing. Whoever asks for it meanwhile shares the answer, and not the limit of the first."""
        while True:
            making = self._making.get(name)
            if making is None:
                making = self._making[name] = (principal, self._spawn(self._make(name, principal)))
            maker, task = making
            found = await self.queries.wait_for(asyncio.shield(task), bounded=bounded)
            if isinstance(found, TopicInfo):
                return found
            if found.outcome is not Outcome.FULL or maker == principal:
                raise Refused(found.outcome, found.reason)

    async def find(self, names: Collection[str]) -> dict[str, Refused]:
        """Look for topics by one question; those that are there are in `names` when this returns. None is made.

        Returns:
            Why each of the others cannot be used.

        Raises:
            Refused: BUSY, Kafka does not answer.
        """
        refused = {name: why for name in names if (why := _no_topic(name)) is not None}
        asked = set(names) - self.names - refused.keys()
        if asked:
            described = await self.queries.search(asked)
            refused |= {name: found for name, found in described.items() if isinstance(found, Refused)}
            there = asked - refused.keys() - self.names
            self._learned |= dict.fromkeys(there, self._clock())
            if there:
                self._set_names(self.names | there)
        return refused

    def refuse(self, name: str, outcome: Outcome, reason: str) -> None:
        """Writing to `name` was refused for good: nobody asks again for some seconds."""
        self._missing.add(name, Refused(outcome, reason))
        self._lost(name, outcome)

    async def confirm(self, name: str) -> None:
        """Writing to `name` failed: find out whether it is still as it was. Kafka's silence proves nothing."""
        try:
            found = await self.queries.find(name)
            known = self._known.get(name)
            if known is None or found.partitions >= known.partitions:
                return
            found = (await self.queries.configured([found]))[0]  # made anew with fewer: nothing need be as it was
        except Refused as refused:
            if refused.outcome is not Outcome.BUSY:
                self._lost(name, refused.outcome)
            return
        self._changed([found])

    def _lost(self, name: str, outcome: Outcome) -> None:
        self._known.pop(name, None)
        self.safety.forget(name)
        for callback in tuple(self.gone):
            failures.guard("topics", callback, name, outcome)

    async def _look_up(self, name: str) -> TopicInfo | Refused:
        """The answer for everybody who asks for `name` now."""
        try:
            return await self._settled(name, self.queries.find(name), Outcome.UNKNOWN_TOPIC, "looked up")
        finally:
            del self._lookups[name]

    async def _settled(
        self, name: str, asked: Coroutine[Any, Any, TopicInfo], absent: Outcome, verb: str
    ) -> TopicInfo | Refused:
        """What `asked` came to, as a value: learnt with its configuration, or why not, which is remembered.

        `absent`: the refusal after which the topic may still be made. `verb`: for the reason when our own bug is one.
        """
        try:
            info = (await self.queries.configured([await asked]))[0]
        except Refused as refused:
            if refused.outcome is not Outcome.BUSY:
                self._missing.add(name, refused, absent=refused.outcome is absent)
            return refused
        except Exception as error:  # contained: they may ask again
            failures.tell("topic", error, name)
            return Refused(Outcome.BUSY, f"topic {name} could not be {verb}")
        self._learn(info)
        return info

    def _learn(self, info: TopicInfo) -> None:
        name = info.name
        self._missing.remove(name)
        self._known[name] = info
        self._learned[name] = self._clock()
        if name not in self.names and name not in self._hidden:
            self._set_names(self.names | {name})

    async def _make(self, name: str, principal: str | None) -> TopicInfo | Refused:
        """A missing topic; a value, as of `_look_up`."""
        try:
            # Where only a limit stands in the way it is tried again at once: that costs Kafka nothing.
            return await self._settled(name, self._create_missing(name, principal), Outcome.FULL, "made")
        finally:
            del self._making[name]

    async def _create_missing(self, name: str, principal: str | None) -> TopicInfo:
        own = self._internal.get(name)
        if own is not None:
            made = await self.creation.make_own(Wanted(name, own.partitions, configs=own.configs))
        else:
            made = await self.creation.make(Wanted(name), principal)
        return info_of(name, made.partitions)

    async def create(
        self, name: str, partitions: int | None = None, replication: int | None = None, principal: str | None = None
    ) -> bool:
        """Create a topic because an administrator asks for it, whether or not unknown ones are created, dots or not.

        None: as many partitions and copies as `kafka.topic_partitions` and `kafka.topic_replication` say; without the
        latter, as many copies as the broker's default.

        Returns:
            False when it exists already. A new topic has leaders when this returns.

        Raises:
            Refused: UNFIT (no legal name, or numbers that Kafka does not take), DENIED (an internal name, or Kafka's
                authorization), FULL (one too many), BUSY.
        """
        try:
            if (illegal := _no_topic(name)) is not None:
                raise illegal
            made = await self.creation.make(Wanted(name, partitions, replication), principal)
        except Refused as refused:
            if refused.outcome is Outcome.UNKNOWN_TOPIC:
                raise Refused(Outcome.UNFIT, refused.reason) from refused
            raise
        if not made.new:
            return False
        self._missing.remove(name)
        self._learned[name] = self._clock()
        self._set_names(self.names | {name})
        return True

    # Keeping fresh

    def watch(self, callback: Changed) -> None:
        """Call `callback(appeared, disappeared)` whenever `names` has changed."""
        self._watchers.append(callback)
        self._wake.set()

    def unwatch(self, callback: Changed) -> None:
        """Stop calling `callback`."""
        self._watchers.remove(callback)

    async def refresh(self) -> None:
        """Ask for everything now; all who ask while an answer is on its way share the next one.

        Raises:
            Refused: BUSY, Kafka does not answer.
        """
        await self.queries.wait_for(self._refreshing.answered())

    async def _refresh(self) -> None:
        begun = self._clock()
        metadata = await self.queries.everything()
        seen = {
            name: topic
            for name, topic in metadata.topics.items()
            if not topic.error and (name in self._internal or (not topic.internal and is_topic_name(name)))
        }
        self._learned = {name: when for name, when in self._learned.items() if when >= begun}
        in_between = self._learned.keys() - seen.keys()  # the answer was made before they were
        fewer = any(len(seen[name].leaders) < info.partitions for name, info in self._known.items() if name in seen)
        fresh = [
            msgspec.structs.replace(info, partitions=len(seen[name].leaders), available=led_now(seen[name]))
            for name, info in self._known.items()
            if name in seen
        ]
        # One with fewer partitions was made anew: nothing need be as it was.
        if fresh and (fewer or self._clock() - self._configs_read >= self._config.metadata_max_age_s):
            self._configs_read = self._clock()
            fresh = await self._copied(await self.queries.configured(fresh))
        expected = self.names | self._internal.keys()
        absent = [name for name in self._known if name not in seen and name in expected and name not in in_between]
        found = await self.queries.search(absent) if absent else {}  # whoever was asked may be behind the others
        for name, there in found.items():
            if not isinstance(there, Refused):
                in_between.add(name)
            elif there.outcome is not Outcome.BUSY:
                self._lost(name, there.outcome)
        self.safety.brokers = max(self.safety.brokers, len(metadata.brokers))
        self._changed(fresh)
        self.creation.count(metadata, begun)
        self._set_names(frozenset((seen.keys() | in_between) - self._hidden))

    async def _copied(self, infos: list[TopicInfo]) -> list[TopicInfo]:
        """The same topics; of those that are not safe it is asked again how many copies they have."""
        unsafe = [info.name for info in infos if why_unsafe(info) is not None]
        if not unsafe or self.safety.brokers < LEAST:
            return infos
        found = await self.queries.describe(unsafe)
        return [
            msgspec.structs.replace(info, copies=copies_of(partitions))
            if isinstance(partitions := found.get(info.name), list)
            else info
            for info in infos
        ]

    def _changed(self, infos: Iterable[TopicInfo]) -> None:
        """What is known of topics is new, if anything was known of them."""
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
        f"{name} is not made: Kafka takes names that differ in . and _ for one, and mapping.dotted_topics does not"
        " choose this one"
    )


def _no_topic(name: str) -> Refused | None:
    """Why no client's topic can have a name."""
    if name.startswith(INTERNAL_TOPIC_PREFIX):
        return Refused(Outcome.DENIED, "topics that begin with __ are internal")
    return None if is_topic_name(name) else Refused(Outcome.UNKNOWN_TOPIC, "not a legal topic name")
