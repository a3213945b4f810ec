"""Create topics within limits, several in one request, and fairly among principals.

A created topic stays, and each of its partitions permanently costs the cluster file descriptors and memory. Clients
create topics just by naming them, so there is a limit per principal and one in total
(docs/adr/0109-names-with-dots.md). The total is counted from Kafka's metadata, so it survives a restart; the
counts per principal start at zero with the process.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Annotated, Final

import msgspec
import structlog
from aiokafka import errors

from gateway.kafka.cluster.topic_queries import TopicQueries, refused_by
from gateway.kafka.contracts import Refused
from gateway.kafka.driver import wire
from gateway.kafka.driver.topic_requests import BROKERS_DEFAULT, create_topics_request
from gateway.runtime.failures import Repeats, failures
from gateway.runtime.spawn import Spawn
from gateway.settings.config import KafkaConfig
from mapping.outcomes import Outcome
from mapping.record import INTERNAL_TOPIC_PREFIX
from telemetry.statistics import counter, gauge

log = structlog.get_logger(__name__)

ROUND: Final = 20
"""Topics in one request; the next request waits until all of them have leaders."""
COUNTED_FOR_S: Final = 5.0
"""Largest age of the count that a creation is checked against: others create and delete topics too."""
CREATION_S: Final = 15.0
"""How long a new topic may take until all its partitions have leaders."""
SETTLED_S: Final = 60.0
"""A topic that is missing this long after it was requested or created has been deleted."""
CREATION_POLL_S: Final = 0.05

PartitionCapacity = Callable[[int, int], str | None]
"""Called with a number of existing and of additional partitions: why the broker cannot take the latter, or None."""


class WantedTopic(msgspec.Struct, frozen=True):
    """A topic to create."""

    name: str  # legal
    partitions: int | None = None  # None means `kafka.topic_partitions`
    replication: int | None = None  # None means `kafka.topic_replication`, or else the broker's default
    configs: tuple[tuple[str, str], ...] = ()  # topic configuration


class Made(msgspec.Struct, frozen=True):
    """A topic that exists now; `new` if this request has created it."""

    topic: wire.Topic
    new: bool


class TopicCreationStatistics(msgspec.Struct):
    """Existing topics, and those created here since the start."""

    topics: Annotated[int, gauge("topics in Kafka at the last count, without internal ones")] = 0
    partitions: Annotated[int, gauge("partitions of all topics, internal ones included")] = 0
    topics_made_total: Annotated[int, counter("topics created by this gateway")] = 0
    topics_refused_total: Annotated[int, counter("topics not created because of a limit")] = 0
    topics_waiting: Annotated[int, gauge("topics waiting to be created")] = 0


class _Order(msgspec.Struct, frozen=True):
    wanted: WantedTopic
    principal: str | None
    counted: bool  # the topic counted for the principal before
    made: asyncio.Future[Made | Refused]


class Creation:
    """Creates topics, and counts the existing ones."""

    def __init__(
        self,
        config: KafkaConfig,
        queries: TopicQueries,
        names: Callable[[], frozenset[str]],  # the topics that clients may see
        refresh: Callable[[], Awaitable[None]],  # requests all metadata and calls `count`; may raise Refused (BUSY)
        *,
        spawn: Spawn,
        clock: Callable[[], float],  # monotonic seconds
        capacity: PartitionCapacity,
    ) -> None:
        self.counted = float("-inf")  # time of the last count
        self._config = config
        self._queries = queries
        self._names = names
        self._refresh = refresh
        self._spawn = spawn
        self._clock = clock
        self._capacity = capacity
        self._waiting: dict[str | None, deque[_Order]] = {}  # by principal; the first principal is next
        self._working = False
        self._makers: dict[str | None, dict[str, float]] = {}  # by principal: topics created or requested, and when
        self._created: set[str] = set()  # topics created in this round, also those that have no leaders yet
        self._partitions = 0  # by the last count
        self._uncounted: dict[str, tuple[int, float]] = {}  # topics created since: number of partitions, and when
        self._counts = TopicCreationStatistics()
        self._warned = Repeats(math.inf, config.max_topics)  # once each

    def count(self, metadata: wire.Metadata, asked: float) -> None:
        """Count the topics in the answer to a request that was sent at the time `asked`."""
        self.counted = self._clock()
        self._partitions = sum(len(topic.leaders) for topic in metadata.topics.values())
        self._uncounted = {  # not yet in the metadata of the broker that answered
            name: (partitions, when)
            for name, (partitions, when) in self._uncounted.items()
            if name not in metadata.topics and asked - when < CREATION_S
        }

    @property
    def topics_in_all(self) -> int:
        """Number of topics that clients may see, including those created since the last count."""
        names = self._names()
        return len(names) + sum(
            name not in names and not name.startswith(INTERNAL_TOPIC_PREFIX) for name in self._uncounted
        )

    @property
    def partitions_in_all(self) -> int:
        """Number of partitions of all topics, internal ones included, and of those created since the last count."""
        return self._partitions + sum(partitions for partitions, _ in self._uncounted.values())

    async def make(self, wanted: WantedTopic, principal: str | None) -> Made:
        """Create a topic for a client unless it exists. None counts as one principal.

        Raises:
            Refused: FULL beyond a limit; Kafka's refusal of the name or the numbers; BUSY.
        """
        limit = self._config.max_topics_per_principal
        mine = self._makers.setdefault(principal, {})
        if len(mine) >= limit and wanted.name not in mine and wanted.name not in self._names():
            self._forget_gone(mine)
            if len(mine) >= limit:
                self._counts.topics_refused_total += 1
                raise self._full(f"principal {principal}", f"{limit} were already created for {principal or 'others'}",
                                 "kafka.max_topics_per_principal")  # fmt: skip
        order = _Order(wanted, principal, wanted.name in mine, asyncio.get_running_loop().create_future())
        mine[wanted.name] = self._clock()
        self._waiting.setdefault(principal, deque()).append(order)
        if not self._working:
            self._working = True
            self._spawn(self._work())
        made = await order.made
        if isinstance(made, Refused):
            raise made.bare()
        return made

    async def make_own(self, wanted: WantedTopic) -> Made:
        """Create one of the gateway's own topics, without limits and without queueing. Raises Refused."""
        made = (await self._request([wanted]))[wanted.name]
        if isinstance(made, Refused):
            raise made.bare()
        return made

    def _forget_gone(self, mine: dict[str, float]) -> None:
        """Remove deleted topics from a principal's count."""
        names = self._names()
        before = self._clock() - SETTLED_S
        for name in [name for name, since in mine.items() if since < before and name not in names]:
            del mine[name]

    async def _work(self) -> None:
        """Serve the waiting orders, round by round, until none is left."""
        try:
            while self._waiting:
                batch = self._next_round()
                self._created.clear()
                try:
                    answers = await self._serve(batch)
                except Refused as refused:
                    answers = {order.wanted.name: refused for order in batch}
                except Exception as error:  # a bug fails this round only
                    failures.report("topic", error)
                    answers = {}
                for order in batch:
                    name = order.wanted.name
                    answer = answers.get(name, Refused(Outcome.BROKEN, f"topic {name} could not be created"))
                    self._count_for(order)
                    if not order.made.done():
                        order.made.set_result(answer)
                    if isinstance(answer, Made):
                        answers[name] = Made(answer.topic, new=False)  # for other orders of this topic
        finally:
            self._working = False

    def _count_for(self, order: _Order) -> None:
        """Count the topic for the principal whose order has created it, even if the answer is a refusal."""
        mine = self._makers.setdefault(order.principal, {})
        if order.wanted.name in self._created:
            self._created.remove(order.wanted.name)
            mine[order.wanted.name] = self._clock()
        elif not order.counted:
            mine.pop(order.wanted.name, None)
        if not mine:
            del self._makers[order.principal]

    def _next_round(self) -> list[_Order]:
        """Take the oldest order of each principal in turn, until the round is full."""
        batch: list[_Order] = []
        while self._waiting and len(batch) < ROUND:
            principal = next(iter(self._waiting))
            queue = self._waiting.pop(principal)
            batch.append(queue.popleft())
            if queue:
                self._waiting[principal] = queue  # after the others
        return batch

    async def _serve(self, batch: list[_Order]) -> dict[str, Made | Refused]:
        config = self._config
        if self._clock() - self.counted >= COUNTED_FOR_S:
            await self._refresh()
        names, topics, partitions = self._names(), self.topics_in_all, self.partitions_in_all
        planned = 0
        answers: dict[str, Made | Refused] = {}
        wanted: dict[str, WantedTopic] = {}  # Kafka refuses a request that names a topic twice
        there: set[str] = set()
        for order in batch:
            if order.wanted.name in names:
                there.add(order.wanted.name)
                continue
            if order.wanted.name in wanted:
                continue
            more = order.wanted.partitions or config.topic_partitions
            refused = self._refusal(topics + len(wanted), partitions + planned, more)
            if refused is not None:
                self._counts.topics_refused_total += 1
                answers[order.wanted.name] = refused
                continue
            planned += more
            wanted[order.wanted.name] = order.wanted
        if wanted:
            answers |= await self._request(list(wanted.values()))
        for name, info in (await self._wait_for_leaders(there)).items():
            answers[name] = info if isinstance(info, Refused) else Made(info, new=False)
        return answers

    def _refusal(self, topics: int, partitions: int, more: int) -> Refused | None:
        """Return why no topic with `more` partitions may be added to the existing topics and partitions, or None."""
        config = self._config
        if topics >= config.max_topics:
            return self._full("topics", f"Kafka has {topics} topics already", "kafka.max_topics")
        if partitions + more > config.max_partitions:
            return self._full("partitions", f"Kafka would have {partitions + more} partitions", "kafka.max_partitions")
        why = self._capacity(partitions, more)
        return None if why is None else self._full("capacity", why, "the broker's limit of open files")

    def _full(self, what: str, why: str, key: str) -> Refused:
        text = "no more topics are created; a mapping rule can map many MQTT topics to one"
        self._warn_once(what, text, reason=why, setting=key)
        return Refused(Outcome.FULL, f"no further topic: {why}")

    async def _request(self, wanted: list[WantedTopic]) -> dict[str, Made | Refused]:
        """Send the CreateTopics request, and wait until all partitions have leaders."""
        config = self._config
        default = BROKERS_DEFAULT if config.topic_replication is None else config.topic_replication
        request = create_topics_request(
            [
                (
                    order.name,
                    config.topic_partitions if order.partitions is None else order.partitions,
                    default if order.replication is None else order.replication,
                    list(order.configs),
                )
                for order in wanted
            ],
            timeout_ms=round(config.request_timeout_s * 1000),
        )
        response = await self._queries.request(request)
        answers: dict[str, Made | Refused] = {}
        partitions = {order.name: order.partitions or config.topic_partitions for order in wanted}
        new: dict[str, bool] = {}
        for name, code, *message in response.topic_errors:
            error = errors.for_code(code)
            if error is errors.NoError or error is errors.TopicAlreadyExistsError:
                new[name] = error is errors.NoError
                if new[name]:
                    self._uncounted[name] = (partitions[name], self._clock())  # counts even before it has leaders
                    self._created.add(name)
                continue
            if error is errors.InvalidTopicError:
                self._warn_collision(name, message[0] if message else None)
            detail = f": {message[0]}" if message and message[0] else ""
            answers[name] = refused_by(code, f"topic {name} could not be created{detail}")
            if error is errors.InvalidReplicationFactorError and "fenced" in detail:
                answers[name] = Refused(Outcome.BUSY, f"topic {name} could not be created now{detail}")
        made = sum(new.values())
        if made:
            self._counts.topics_made_total += made
            log.info("topics were created", count=made, topics=", ".join(name for name in new if new[name]))
        for name, info in (await self._wait_for_leaders(set(new))).items():
            answers[name] = info if isinstance(info, Refused) else Made(info, new=new[name])
        return answers

    def _warn_collision(self, name: str, why: str | None) -> None:
        """Log once how to avoid names that Kafka refuses since they differ from another only in `.` and `_`."""
        if why is not None and "collide" in why:
            text = "a topic is not created; mapping.dotted_topics or a mapping rule can map MQTT to another one"
            self._warn_once(name, text, topic=name, reason=why)

    def _warn_once(self, what: str, text: str, **facts: str) -> None:
        if self._warned.suppressed(what) is not None:
            log.warning(text, **facts)

    async def _wait_for_leaders(self, names: set[str]) -> dict[str, wire.Topic | Refused]:
        """Wait until all partitions of these topics have leaders, and return the topics."""
        done: dict[str, wire.Topic | Refused] = {}
        deadline = self._clock() + CREATION_S
        while names:
            for name, info in (await self._queries.describe(sorted(names))).items():
                if isinstance(info, Refused):
                    # The new topic may not yet be in the metadata of the broker that was asked.
                    waits = info.outcome is Outcome.UNKNOWN_TOPIC
                else:
                    waits = wire.NO_LEADER in info.leaders
                if not waits:
                    done[name] = info
                elif self._clock() > deadline:
                    done[name] = Refused(Outcome.BUSY, f"topic {name} was created and has no leaders yet")
            names = names - done.keys()
            if names:
                await asyncio.sleep(CREATION_POLL_S)
        return done

    def statistics(self) -> TopicCreationStatistics:
        """Return the current statistics."""
        return msgspec.structs.replace(
            self._counts,
            topics=self.topics_in_all,
            partitions=self.partitions_in_all,
            topics_waiting=sum(map(len, self._waiting.values())),
        )


def any_capacity(_partitions: int, _more: int) -> str | None:
    """The `PartitionCapacity` of a broker that the gateway does not manage."""
    return None
