"""Shared subscriptions (section 4.8.2): `$share/{group}/{filter}` is the Kafka consumer group `{group}`.

    share = await sharing.join(session, Shared("workers", "jobs/#"), subscription)
    share.done(record)        # the client has acknowledged it, or it is settled otherwise
    await share.leave()       # unacknowledged records go to other members immediately

Each pair of share name and filter is a separate shared subscription: a message goes to one subscriber of each that it
matches. All filters of one share name use one member of the Kafka group in this process, taking turns with the group's
AMQP receivers. docs/adr/0032-consumer-groups.md has the distribution rules and reasons.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Final, Protocol

import msgspec

from gateway.kafka.cluster.topics import Topics
from gateway.kafka.contracts import Refused, Subscriber
from gateway.kafka.groups.delivery.assignment import SubscriptionFilter
from gateway.kafka.groups.membership import Groups, Membership
from gateway.mqtt.routing.needed_topics import needed_topics
from gateway.mqtt.routing.router import Match, combine
from gateway.mqtt.routing.share_starts import ShareStarts, Start
from gateway.mqtt.state.records import SessionSubscription
from gateway.runtime import turns
from mapping.mqtt.outgoing import MqttDelivery
from mapping.record import Received
from mapping.rules import Rules
from protocols.mqtt.topics import Shared, SubscriptionTrie

BATCH: Final = 100  # demand of a member at QoS 0, which only the socket limits


class SharedSubscriber(Protocol):
    """A session as its shared subscriptions see it."""

    client_id: str

    def __hash__(self) -> int:
        """Hash by identity."""

    @property
    def capacity(self) -> int:
        """Number of messages that the client's window allows (QoS 1 and 2); 0 while the socket is full."""

    @property
    def takes_more(self) -> bool:
        """Whether messages can be sent now (QoS 0)."""

    def send_shared(self, record: Received, match: Match, share: ShareMember) -> None:
        """Send the record, for which there is capacity, and later call exactly one of these.

        `share.done`: acknowledged (QoS 0: sent), refused by the client [MQTT-4.8.2-6], or expired.
        `share.decline`: too large for this client, or not allowed; another member may get it.
        `share.requeue`: not sent.
        """


class ShareMember(Subscriber):
    """A session's membership in a shared subscription, as a `gateway.kafka.contracts.Subscriber` of the group."""

    __slots__ = (
        "_delivery", "_entering", "_left", "_membership", "_sharing", "_subscriber", "group", "subscription",
        "topic_filter",
    )  # fmt: skip

    def __init__(
        self,
        sharing: Sharing,
        subscriber: SharedSubscriber,
        shared: Shared,
        subscription: SessionSubscription,
        delivery: Callable[[Received], MqttDelivery | None],
    ) -> None:
        self.group = shared.group  # the share name
        self.topic_filter = shared.topic_filter  # without `$share/` and the share name
        self.subscription = subscription  # options of the last SUBSCRIBE
        self._sharing = sharing
        self._subscriber = subscriber
        self._delivery = delivery
        self._membership: Membership | None = None
        self._entering = asyncio.Lock()
        self._left = False

    # Called by the session.

    def done(self, record: Received) -> None:
        """Settle the record: no other member gets it. It must be the same object that `send_shared` got."""
        if self._membership is not None:
            self._membership.done(record)

    def requeue(self, record: Received) -> None:
        """Give a record back that was not sent: it is offered again to any member."""
        if self._membership is not None:
            self._membership.requeue(record, failed=False, at_once=True)

    def decline(self, record: Received) -> None:
        """Decline the record for this client: it is offered to the other members, and settled if all decline."""
        if self._membership is not None:
            self._membership.decline(record)

    def wake(self) -> None:
        """Have the group offer records again: there is capacity."""
        if self._membership is not None and self.demand > 0:
            self._membership.wake()

    async def enter(self, join: Callable[[], Awaitable[Membership]]) -> bool:
        """Become a member by `join`, unless it is one already; called by `Sharing.join`.

        Returns:
            False if `leave` was called meanwhile.
        """
        async with self._entering:
            if self._membership is None and not self._left:
                try:
                    self._membership = await join()
                except BaseException:
                    await self.leave()
                    raise
                if self._left:
                    await self._membership.leave()
            return not self._left

    async def leave(self) -> None:
        """Leave the group after the subscription or connection has ended; unsettled records go to other members.

        Settle QoS 2 deliveries first: no other member may get them [MQTT-4.8.2-4, MQTT-4.8.2-5].
        """
        if not self._left:
            self._left = True
            self._sharing.forget(self._subscriber, self)
            await self._sharing.leaving.rest()
            if self._membership is not None:
                await self._membership.leave()

    # Called by the group.

    @property
    def demand(self) -> int:
        """Number of records that the session can accept now."""
        if self._membership is None or self._left:
            return 0
        if self.subscription.options.qos:
            return self._subscriber.capacity
        return BATCH if self._subscriber.takes_more else 0

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """Have the session send the record, at the lower QoS of record and subscription [MQTT-4.8.2-3]."""
        if self.demand <= 0:
            return False
        delivery = self._delivery(record)
        match = combine(delivery, self._subscriber.client_id, (self.subscription,)) if delivery is not None else None
        if match is None:
            self.decline(record)  # it has no MQTT topic
        else:
            self._subscriber.send_shared(record, match, self)
        return True


class _Filter(msgspec.Struct, eq=False):
    """A shared subscription: a filter of a group, its members, and the Kafka topics that it needs."""

    subscription_filter: SubscriptionFilter
    shares: dict[SharedSubscriber, ShareMember] = {}
    start: Start | None = None  # where it began; None before the first member joins
    beginning: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)  # held while this is found
    topics: frozenset[str] = msgspec.field(default_factory=frozenset)

    def is_newer(self, record: Received) -> bool:
        """Whether the subscription is newer than a record."""
        return self.start is not None and self.start.is_after(record)


class _Group:
    """The shared subscriptions of one share name; the group's selector of those that a record matches."""

    __slots__ = ("_emptied", "_rules", "_trie", "filters")

    def __init__(self, rules: Rules, emptied: Callable[[], object]) -> None:
        self._rules = rules
        self._emptied = emptied
        self._trie: SubscriptionTrie[str, None] = SubscriptionTrie()
        self.filters: dict[str, _Filter] = {}

    def filter(self, text: str) -> _Filter:
        """Return the shared subscription of a filter; create it if it is new."""
        shared = self.filters.get(text)
        if shared is None:
            shared = self.filters[text] = _Filter(SubscriptionFilter(self, text))
            self._trie.add(text, text, None)
        return shared

    def forget(self, name: Hashable) -> None:
        """Delete a shared subscription for which the group holds no records any more, if it has no members."""
        text = str(name)
        entry = self.filters.get(text)
        if entry is not None and not entry.shares:
            del self.filters[text]
            self._trie.remove(text, text)
            if not self.filters:
                self._emptied()

    def select(self, record: Received) -> Sequence[str]:
        """Return the filters that match the record and are not newer; none if it has no MQTT topic."""
        topic = self._rules.mqtt_topic(record.topic, record.key, record.headers)
        if topic is None:
            return ()
        return [text for text, _ in self._trie.match(topic) if not self.filters[text].is_newer(record)]


class Sharing:
    """The shared subscriptions of all connected sessions of this process."""

    def __init__(
        self,
        groups: Groups,
        rules: Rules,
        topics: Topics,
        delivery: Callable[[Received], MqttDelivery | None],
        starts: ShareStarts,
    ) -> None:
        """`delivery` maps a record to its MQTT form (`Messages.delivery`)."""
        self._groups = groups
        self._rules = rules
        self._topics = topics
        self._delivery = delivery
        self._names: dict[str, _Group] = {}
        self._starts = starts
        # limits the memberships ended per event loop iteration: a connection may end with thousands
        self.leaving = turns.TurnShare()
        topics.watch(self._topics_changed)

    async def join(
        self, subscriber: SharedSubscriber, shared: Shared, subscription: SessionSubscription, client: str = ""
    ) -> ShareMember:
        """Make a session a member of a shared subscription; if it is one already, replace its options.

        `client` is counted for a group without members (`Groups.join`).

        Returns when Kafka has assigned this process its partitions. Records stored from then on are delivered to the
        group, and so are those that a subscription that exists already has not delivered yet.

        Raises:
            Refused: the group's name is invalid, group or topic are not allowed, or Kafka does not answer.
        """
        while True:
            group = self._names.get(shared.group)
            if group is None:
                emptied = functools.partial(self._names.pop, shared.group)
                group = self._names[shared.group] = _Group(self._rules, emptied)
            entry = group.filter(shared.topic_filter)
            share = entry.shares.get(subscriber)
            if share is None:
                share = entry.shares[subscriber] = ShareMember(self, subscriber, shared, subscription, self._delivery)
            share.subscription = subscription
            if await share.enter(functools.partial(self._enter, share, entry, client)):
                share.wake()
                return share

    async def _enter(self, share: ShareMember, entry: _Filter, client: str) -> Membership:
        topics = (await needed_topics((share.topic_filter,), self._rules, self._topics))[share.topic_filter]
        if isinstance(topics, Refused):
            raise topics.bare()
        entry.topics |= topics
        async with entry.beginning:
            if entry.start is None:
                entry.start = await self._starts.find(share.group, share.topic_filter, entry.topics)
        return await self._groups.join(
            share.group,
            entry.topics,
            share,
            offset_reset="earliest" if entry.start.is_old else "latest",
            starts=entry.start.offsets,
            subscription_filter=entry.subscription_filter,
            client=client,
        )

    def reads_only(self, topic_filter: str, topic: str) -> bool:
        """Whether a filter matches messages of one Kafka topic only, apart from where MQTT stored them before."""
        topics = self._rules.kafka_filter(topic_filter)
        return topics is not None and topics[0] == topic

    def forget(self, subscriber: SharedSubscriber, share: ShareMember) -> None:
        """Remove a member; called by `ShareMember.leave`."""
        group = self._names[share.group]
        entry = group.filters[share.topic_filter]
        del entry.shares[subscriber]
        if not self._groups.knows(share.group, entry.subscription_filter):
            group.forget(share.topic_filter)  # the group was never joined

    def _topics_changed(self, appeared: Iterable[str], disappeared: Iterable[str]) -> None:
        appeared, gone = frozenset(appeared), frozenset(disappeared)
        for name, group in self._names.items():
            for text, entry in group.filters.items():
                topics = (entry.topics | self._rules.kafka_topics(text, appeared)) - gone
                if topics != entry.topics:
                    entry.topics = topics
                    self._groups.change_topics(name, entry.subscription_filter, topics)
