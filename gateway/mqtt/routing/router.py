"""Routes new records to MQTT sessions: one subscription trie, and the Kafka topics that its filters need.

The router is the `Fanout` of every Kafka topic that a filter may match. Each record is mapped to its MQTT form once,
matched once, and offered to each session once, however many of its filters match.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import structlog

from gateway.kafka.cluster.topics import Topics
from gateway.kafka.contracts import Fanout, LossySubscriber, Refused, Subscriber
from gateway.kafka.read.live_reader import LiveReader
from gateway.mqtt.routing.messages import Messages
from gateway.mqtt.routing.needed_topics import needed_topics
from gateway.mqtt.state.records import Offsets, SessionSubscription
from gateway.runtime.failures import failures
from gateway.runtime.spawn import keep_running
from mapping.mqtt.outgoing import MqttDelivery
from mapping.record import Received
from mapping.rules import Rules
from protocols.mqtt.topics import SubscriptionTrie

log = structlog.get_logger(__name__)

AHEAD_S: Final = 3.0  # limit for Kafka to return the end offsets of topics that are already read
AGAIN_S: Final = 0.5  # delay before another attempt to read new topics
FILTERS_PER_TURN: Final = 500  # filters compared with new topics in one event loop iteration
WILDCARDS: Final = ("+", "#")
TOPIC_ID_BYTES: Final = 6  # enough, since ids are random; an in-flight record may have very many
PLANNED: Final = 100_000  # maximum number of topics and outboxes in cached plans, about 16 bytes each
PLANNED_TOPIC: Final = 256  # a plan for a longer topic counts once more for each such part of it

AnySubscriber = Subscriber | LossySubscriber
Since = dict[tuple[str, int], int]
"""Kafka topic and partition -> offset."""


class Match(msgspec.Struct, frozen=True, gc=False):
    """How one session gets a message: one delivery for all matching filters [MQTT-3.3.4-2, MQTT-3.3.4-3]."""

    qos: int
    retain: bool
    identifiers: tuple[int, ...]


class SubscribedSession(Protocol):
    """A session as the router sees it; it has one outbox that may drop messages and one that may not."""

    client_id: str

    def __hash__(self) -> int:
        """Hash by identity."""

    def outbox_for(self, match: Match) -> AnySubscriber:
        """Return the outbox for a match; the same one as long as the session's subscriptions do not change."""


class _Entry(msgspec.Struct):
    """A subscription in the trie; `since` has, for some partitions, the offset at which it starts."""

    subscription: SessionSubscription
    since: Since | None

    def is_early(self, record: Received) -> bool:
        """Whether the record was stored before the subscription; drops a start offset that is reached."""
        since = self.since
        if since is None:
            return False
        place = (record.topic, record.partition)
        first = since.get(place)
        if first is None:
            return False
        if record.offset < first:
            return True
        del since[place]
        if not since:
            self.since = None
        return False


class _Held(msgspec.Struct, eq=False):
    """A filter in use."""

    users: int = 0  # number of subscriptions and holds
    topics: set[str] = set()  # Kafka topics that are watched for it
    resolved: bool = False  # the existing topics are known: those that appear later are newer than the filter


_Shape = tuple[str, int, bool]
"""MQTT topic, QoS and RETAIN flag, which together determine the receivers of a message."""


class _Plan(msgspec.Struct, eq=False):
    """The receivers of messages of one shape."""

    size: int = 0  # counts towards `PLANNED`
    waiting: int = 0  # entries in `checked` with a start offset that was not reached when the plan was made

    outboxes: list[tuple[AnySubscriber, Match]] = []  # get every message
    # subscriptions that must be checked for each message: No Local, or a start offset
    checked: list[tuple[SubscribedSession, list[_Entry]]] = []


class Router(Fanout):
    """The subscriptions of all sessions of this process, except shared ones."""

    def __init__(
        self,
        rules: Rules,
        topics: Topics,
        live_reader: LiveReader,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`topics` reports new Kafka topics; `live_reader` reads them."""
        self._rules = rules
        self._topics = topics
        self._live_reader = live_reader
        self._spawn = spawn
        self._trie: SubscriptionTrie[SubscribedSession, _Entry] = SubscriptionTrie()
        self._held: dict[str, _Held] = {}  # by filter
        self._wildcards: set[str] = set()  # those with a wildcard as first level, once `resolved`
        self._watched: dict[str, set[str]] = {}  # Kafka topic -> filters that need it
        self._watching = asyncio.Lock()
        self._new: dict[str, asyncio.Event] = {}  # new topics that are not watched yet
        self.messages = Messages(rules)
        self._plans: dict[_Shape, _Plan] = {}
        self._planned = 0
        self._listeners: list[Callable[[str], None]] = []
        self.unmapped = 0  # records without an MQTT topic name
        topics.watch(self._topics_changed)

    def __len__(self) -> int:
        """Return the number of subscriptions."""
        return len(self._trie)

    def listen(self, callback: Callable[[str], None]) -> None:
        """Call `callback(topic)` when a watched Kafka topic was deleted and created again."""
        self._listeners.append(callback)

    def topic_recreated(self, topic: str) -> None:
        """Drop the topic's offsets, which are void."""
        for _, _, entry in self._trie:
            if entry.since is not None:
                entry.since = {place: first for place, first in entry.since.items() if place[0] != topic} or None
        for callback in self._listeners:
            failures.guard("session", callback, topic)

    def unsubscribe(self, subscriber: SubscribedSession, topic_filter: str) -> bool:
        """Remove a subscription; return False if there was none."""
        removed = self._trie.remove(topic_filter, subscriber)
        if removed:
            self._forget_plans()
            self.drop(topic_filter)
        return removed

    async def hold(self, wanted: Mapping[str, Collection[str] | None]) -> dict[str, Since | Refused]:
        """Watch the Kafka topics of all given filters, until `drop`, or `add` and `unsubscribe`.

        A missing topic is watched from its beginning when it appears. `wanted` maps filters to None, or any other name
        to the Kafka topics that it needs.

        Returns:
            By filter: the offsets from which on a new subscription gets records, for partitions where older records are
            still to be fanned out; or Refused if the filter is not held because clients must not read its topic.

        Raises:
            Refused: Kafka does not answer; no filter is held.
        """
        for name in wanted:
            self._held.setdefault(name, _Held()).users += 1
        try:
            needs = await self._needs(wanted)
            topics = set[str]().union(*(needed for needed in needs.values() if not isinstance(needed, Refused)))
            while started := {self._new[topic] for topic in topics & self._new.keys()}:
                for entry in started:
                    await entry.wait()
            running = topics & self._watched.keys()
            if running != topics:
                async with self._watching:  # another call may have started some of them meanwhile
                    started_here = await self._watch(topics - self._watched.keys())
                    running = (topics & self._watched.keys()) - started_here  # without those deleted meanwhile
                    topics = running | started_here
            for name, needed in needs.items():
                if not isinstance(needed, Refused):
                    self._note_need(name, needed & topics)
            ahead: dict[str, Since] = {}
            for place, end in (await self._ahead(running)).items():
                ahead.setdefault(place[0], {})[place] = end
        except BaseException:
            for name in wanted:
                self.drop(name)
            raise
        starts: dict[str, Since | Refused] = {}
        for name, needed in needs.items():
            if isinstance(needed, Refused):
                self.drop(name)
                starts[name] = needed
            else:
                starts[name] = {place: end for topic in needed & ahead.keys() for place, end in ahead[topic].items()}
        return starts

    async def _needs(self, wanted: Mapping[str, Collection[str] | None]) -> dict[str, set[str] | Refused]:
        """Return the topics that each filter needs; topics that appear from now on are newer than the filters."""
        needs: dict[str, set[str] | Refused] = {
            name: set(topics) for name, topics in wanted.items() if topics is not None
        }
        filters = [name for name, topics in wanted.items() if topics is None]
        if filters:
            # With a wildcard subscription every new topic is already read from its beginning.
            needs |= await needed_topics(filters, self._rules, self._topics, following=bool(self._wildcards))
            for name in filters:
                self._held[name].resolved = True
                if name[0] in WILDCARDS:
                    self._wildcards.add(name)
        return needs

    async def _watch(self, topics: set[str]) -> set[str]:
        """Watch topics from their ends; return those that exist. A missing one is watched when it appears again."""
        try:
            starts = await self._live_reader.watch_all(topics, self)
            if topics - starts:
                await self._topics.refresh()  # notice the deletion, so that the return is noticed too
        except BaseException:
            for topic in topics - self._watched.keys():
                self._live_reader.unwatch(topic, self)
            raise
        return starts & self._topics.names

    async def _ahead(self, topics: Collection[str]) -> Since:
        """Return the end offsets of watched topics where records older than this call are still to be read.

        If Kafka does not answer, the offsets come from the last fetch and from this process's own writes. Then no later
        record is missed, but older records of other writers may be delivered too.
        """
        try:
            async with asyncio.timeout(AHEAD_S):
                return await self._live_reader.ahead(topics)
        except (TimeoutError, Refused):
            return self._live_reader.known_ahead(topics)

    def _note_need(self, name: str, topics: Set[str]) -> None:
        held = self._held[name]
        new = topics - held.topics
        for topic in new:
            self._watched.setdefault(topic, set()).add(name)
        held.topics |= new

    def hold_again(self, topic_filter: str) -> None:
        """Hold an already held filter once more."""
        self._held[topic_filter].users += 1

    def add(self, subscriber: SubscribedSession, subscription: SessionSubscription, since: Since | None = None) -> bool:
        """Add or replace a subscription whose filter is held; it gets no records below `since`, from `hold`.

        Returns:
            Whether the subscription is new; if not, the hold is dropped.
        """
        topic_filter = subscription.options.topic_filter
        self._forget_plans()
        new = self._trie.add(topic_filter, subscriber, _Entry(subscription, since or None))
        if not new:
            self.drop(topic_filter)
        return new

    def drop(self, topic_filter: str) -> None:
        """Release a hold, and stop watching topics that no filter needs any more."""
        held = self._held[topic_filter]
        held.users -= 1
        if held.users:
            return
        del self._held[topic_filter]
        self._wildcards.discard(topic_filter)
        for topic in held.topics:
            users = self._watched[topic]
            users.discard(topic_filter)
            if not users:
                del self._watched[topic]
                self._live_reader.unwatch(topic, self)

    def offered(self, filters: Collection[str], outbox: Subscriber) -> Offsets:
        """Return the offsets up to which the filters' topics were offered; 0 in a partition without a leader."""
        live = self._live_reader
        return {
            topic: dict.fromkeys(live.leaderless(topic), 0) | live.positions(topic, outbox)
            for topic in self._topics_of(filters)
        }

    def behind(self, topic_filter: str, outbox: Subscriber) -> Offsets:
        """Return the live reader's positions in those of a filter's partitions where an outbox has not reached them."""
        offsets: Offsets = {}
        for topic in self._topics_of((topic_filter,)):
            for partition, position in self._live_reader.positions(topic, outbox).items():
                live = self._live_reader.position(topic, partition)
                if live is not None and position < live:
                    offsets.setdefault(topic, {})[partition] = live
        return offsets

    def _topics_of(self, filters: Collection[str]) -> set[str]:
        return {topic for name in filters if name in self._held for topic in self._held[name].topics}

    def topic_ids(self, filters: Collection[str]) -> dict[str, str]:
        """Return the first 48 bits of the topic ids, in base64, to recognize topics that were recreated."""
        ids = {topic: self._live_reader.identity(topic)[:TOPIC_ID_BYTES] for topic in self._topics_of(filters)}
        return {topic: b64encode(identity).decode() for topic, identity in ids.items() if identity}

    async def ends(self, filters: Collection[str], outbox: Subscriber, offered: Offsets) -> Offsets:
        """Return the log's end offsets for topics where more was offered before, or elsewhere, than is read here.

        Raises:
            Refused: Kafka does not answer.
        """
        live = self._live_reader
        behind = [
            topic
            for topic in self._topics_of(filters)
            if any(
                here < offered.get(topic, {}).get(number, 0) for number, here in live.positions(topic, outbox).items()
            )
        ]
        ahead = await live.ahead(behind) if behind else {}
        return {
            topic: {number: ahead.get((topic, number), here) for number, here in live.positions(topic, outbox).items()}
            for topic in self._topics_of(filters) & set(behind)  # the topics may have changed meanwhile
        }

    def has_subscribers(self, topic: str) -> bool:
        """Whether a subscription of a connected session matches an MQTT topic."""
        return bool(self._trie.match(topic))

    def select(self, records: Sequence[Received], at: int) -> tuple[Collection[tuple[AnySubscriber, Match]], int]:
        """Return the outboxes of the sessions whose filters match the record at `at`, with their matches.

        They hold for the records from there on that share topic, QoS, RETAIN and key.
        """
        record, messages = records[at], self.messages
        messages.begin_run(record)
        delivery = messages.peek(record)
        if delivery is None:
            self.unmapped += 1
            return (), 1
        shape = (delivery.topic, delivery.qos, delivery.retain)
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plan(shape)
        if plan.checked:
            return self._select_checked(plan, shape, record, delivery), 1
        behind = at + 1
        while behind < len(records):
            other = records[behind]
            like = messages.peek(other)
            if like is None or (like.topic, like.qos, like.retain) != shape or other.key != record.key:
                break
            behind += 1
        return plan.outboxes, behind - at

    def _select_checked(
        self, plan: _Plan, shape: _Shape, record: Received, delivery: MqttDelivery
    ) -> Collection[tuple[AnySubscriber, Match]]:
        """Return a plan's outboxes, after checking the subscriptions that may not get the message."""
        outboxes = list(plan.outboxes)
        waiting = 0
        for subscriber, entries in plan.checked:
            subscriptions = [entry.subscription for entry in entries if not entry.is_early(record)]
            waiting += sum(entry.since is not None for entry in entries)
            combined = combine(delivery, subscriber.client_id, subscriptions)
            if combined is not None:
                outboxes.append((subscriber.outbox_for(combined), combined))
        if plan.waiting and waiting <= plan.waiting // 2:  # many get every message now: make a new plan
            self._planned -= plan.size
            del self._plans[shape]
        return outboxes

    def _plan(self, shape: _Shape) -> _Plan:
        """Plan the receivers for one topic, QoS and RETAIN flag; valid until a subscription changes."""
        topic, qos, retain = shape
        entries: dict[SubscribedSession, list[_Entry]] = {}
        for subscriber, entry in self._trie.match(topic):
            entries.setdefault(subscriber, []).append(entry)
        if self._planned >= PLANNED:
            self._forget_plans()
        plan = self._plans[shape] = _Plan(size=1 + len(entries) + len(topic) // PLANNED_TOPIC)
        self._planned += plan.size
        matches: dict[Match, Match] = {}  # equal matches share one object
        for subscriber, matching in entries.items():
            if any(entry.since is not None or entry.subscription.options.no_local for entry in matching):
                plan.checked.append((subscriber, matching))
                plan.waiting += sum(entry.since is not None for entry in matching)
                continue
            match = merge(qos, retain, [entry.subscription for entry in matching])
            match = matches.setdefault(match, match)
            plan.outboxes.append((subscriber.outbox_for(match), match))
        return plan

    def _forget_plans(self) -> None:
        self._plans.clear()
        self._planned = 0

    def _topics_changed(self, appeared: Collection[str], disappeared: Collection[str]) -> None:
        for topic in disappeared:
            for name in self._watched.pop(topic, ()):
                self._held[name].topics.discard(topic)
            self._live_reader.unwatch(topic, self)
        resolved = [name for name, held in self._held.items() if held.resolved]
        new = set(appeared) - self._watched.keys() - self._new.keys()
        if resolved and new:
            started = asyncio.Event()
            self._new.update(dict.fromkeys(new, started))
            self._spawn(self._follow(new, resolved, started))

    async def _follow(self, new: set[str], filters: list[str], started: asyncio.Event) -> None:
        """Watch new topics from the beginning, since all their records are newer than these filters."""
        try:
            await keep_running(partial(self._watch_new, new, filters), "topic", ", ".join(sorted(new)[:3]))
        finally:
            for topic in new:
                del self._new[topic]
            started.set()

    async def _watch_new(self, new: set[str], filters: list[str]) -> None:
        needs: dict[str, list[str]] = {}
        for number, name in enumerate(filters, 1):
            for topic in self._rules.kafka_topics(name, new):
                needs.setdefault(topic, []).append(name)
            if number % FILTERS_PER_TURN == 0:
                await asyncio.sleep(0)
        while wanted := needs.keys() & self._topics.names:
            try:
                starts = await self._live_reader.watch_all(wanted, self, beginning=True)
            except Refused as refused:
                log.warning("new topics cannot be read yet", topics=len(wanted), reason=refused.reason)
                starts = set()
            for topic in starts:
                for name in needs.pop(topic) if topic in self._topics.names else ():  # else it was deleted meanwhile
                    if name in self._held:
                        self._note_need(name, {topic})
                if topic not in self._watched:
                    self._live_reader.unwatch(topic, self)
            if wanted - starts:
                await asyncio.sleep(AGAIN_S)


def combine(delivery: MqttDelivery, client_id: str, subscriptions: Iterable[SessionSubscription]) -> Match | None:
    """Combine all matching subscriptions of a session into one delivery.

    Returns None if all of them have No Local and the session published the message itself [MQTT-3.8.3-3].
    """
    if delivery.client is not None and delivery.client == client_id:
        subscriptions = [subscription for subscription in subscriptions if not subscription.options.no_local]
    subscriptions = list(subscriptions)
    return merge(delivery.qos, delivery.retain, subscriptions) if subscriptions else None


def merge(qos: int, retain: bool, subscriptions: Collection[SessionSubscription]) -> Match:
    """Merge subscriptions into one delivery: the highest QoS, and every Subscription Identifier."""
    wanted = max(subscription.options.qos for subscription in subscriptions)
    kept = retain and any(subscription.options.retain_as_published for subscription in subscriptions)
    return Match(
        min(wanted, qos),
        kept,
        tuple(subscription.identifier for subscription in subscriptions if subscription.identifier),
    )
