"""An MQTT session: subscriptions, deliveries in flight, inbound QoS 2 state (section 4.1), connected or not.

A kept session (its expiry is not 0) has records in Kafka (see `gateway.mqtt.state.records`); while its client is away
only these records exist. The log is its message queue: see `inflight`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import structlog

from flowcontrol.budget import ConnectionBudget
from gateway.kafka.contracts import Owner, Refused, Subscriber
from gateway.kafka.read.live_reader import LiveReader
from gateway.mqtt.counters import Counters
from gateway.mqtt.routing.router import Match, Router, Since
from gateway.mqtt.session.client_port import ClientPort
from gateway.mqtt.session.deliveries import Deliveries, DeliveryParts
from gateway.mqtt.session.inflight import NO_TOPIC, InflightMessages
from gateway.mqtt.session.journal import Journal
from gateway.mqtt.session.lifecycle import SessionState
from gateway.mqtt.session.qos2 import InboundQos2, Qos2Parts
from gateway.mqtt.session.self_delivery import OwnCopies
from gateway.mqtt.session.shared import ShareParts, Shares, is_refused
from gateway.mqtt.session.subscriptions import Subscriptions
from gateway.mqtt.state.records import (
    Backlog,
    InflightRecord,
    Offsets,
    PendingWill,
    SessionRecord,
    SessionSubscription,
)
from gateway.mqtt.state.store import SessionStore
from gateway.security.rights.authorization import Grant
from gateway.views.clients import SUBSCRIPTIONS, SubscriptionView
from gateway.views.pauses import RECEIVE_MAXIMUM
from mapping.record import Received
from protocols.mqtt.reasons import ReasonCode
from protocols.mqtt.topics import is_shared

log = structlog.get_logger(__name__)


class Outbox(Subscriber):
    """The subscriber for QoS 1 and 2, whose messages must not be dropped; a record's context is its `Match`."""

    __slots__ = ("_deliveries",)

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries

    @property
    def demand(self) -> int:
        """Number of records that can be accepted now."""
        return self._deliveries.capacity

    def pause_reason(self) -> tuple[str, str] | None:
        """Return why there is no demand, and the connection's name (`gateway.kafka.contracts.Subscriber`)."""
        client = self._deliveries.client
        return (RECEIVE_MAXIMUM, client.subject) if client is not None and client.takes_more else None

    def offer_nowait(self, record: Received, context: Match | None = None) -> bool:
        """Send the record, or return False without capacity. A record without context is from the catch-up reader."""
        deliveries = self._deliveries
        if not deliveries.capacity:
            return False
        if context is not None:
            deliveries.deliver(record, context)
        else:
            deliveries.deliver_again(record)
        return True


class LossyOutbox:
    """The subscriber for QoS 0: messages without capacity are dropped."""

    __slots__ = ("_counters", "_deliveries")

    lossy = True

    def __init__(self, deliveries: Deliveries, counters: Counters) -> None:
        self._deliveries = deliveries
        self._counters = counters

    def offer_run(self, records: Sequence[Received], context: Match) -> int:
        """Send records while there is capacity; return how many were sent."""
        taken = self._deliveries.send_lossy(records, context)
        self._counters.dropped += len(records) - taken
        return taken


class SessionParts(msgspec.Struct, frozen=True):
    """Shared by the sessions of a process; `budget` creates the budget for a client's records in flight to Kafka."""

    router: Router
    live_reader: LiveReader
    counters: Counters
    budget: Callable[[], ConnectionBudget]
    store: SessionStore
    deliveries: DeliveryParts
    shares: ShareParts
    qos2: Qos2Parts


class Session:
    """One session: what the router delivers to, through its outboxes."""

    __slots__ = (
        "_gaps", "_held", "_inflight", "_lossless", "_lossy", "_parts", "budget", "client", "client_id",
        "deliveries", "epoch", "expiry", "gone_at", "inbound_qos2", "journal", "principal", "session_id", "shares",
        "state", "subscriptions", "unclear_until", "will",
    )  # fmt: skip

    def __init__(self, client_id: str, principal: str, session_id: str, parts: SessionParts, *, kept: bool) -> None:
        """Create a session of `principal`; a `kept` one may outlive its connection."""
        self.client_id = client_id
        self.principal = principal
        self.session_id = session_id
        self.state = SessionState.OPENING  # changed only by `gateway.mqtt.registry.session_registry`
        self.epoch = 0
        self.expiry = 0
        self.gone_at: int | None = None
        self.will: PendingWill | None = None
        # epoch milliseconds until which a gateway that died may have sent messages that are in no in-flight record
        self.unclear_until = 0
        self.client: ClientPort | None = None
        self.budget = parts.budget()
        self.subscriptions = Subscriptions()
        self.journal = Journal(self._write_inflight, self._too_large) if kept else None
        self.inbound_qos2: InboundQos2 | None = None
        self._inflight = InflightMessages() if kept else None
        self.deliveries = Deliveries(
            client_id, self._inflight, self.journal, self.subscriptions, self.feed, parts.deliveries
        )
        self.shares = Shares(self.deliveries, parts.shares)
        self._parts = parts
        self._lossy: LossyOutbox | None = None
        self._lossless: Outbox | None = None
        # names that the router holds for this session; once attached, those beside `subscriptions`
        self._held: list[str] = []
        self._gaps = 0

    @property
    def kept(self) -> bool:
        """Whether the session has records in Kafka."""
        return self.journal is not None

    def subscription_views(self) -> tuple[list[SubscriptionView], int]:
        """Return the first `SUBSCRIPTIONS` subscriptions for the clients view, and the total number."""
        own, shared = self.subscriptions.by_filter, self.shares.subscriptions
        first = itertools.islice(itertools.chain(own.values(), shared.values()), SUBSCRIPTIONS)
        views = [SubscriptionView(each.options.topic_filter, qos=each.options.qos) for each in first]
        return views, len(own) + len(shared)

    # records

    def describe(self) -> SessionRecord:
        """Return the current session record, owned by this process."""
        return SessionRecord(
            session_id=self.session_id,
            principal=self.principal,
            epoch=self.epoch,
            owner=self._parts.store.owner,
            expiry=self.expiry,
            gone_at=self.gone_at,
            subscriptions=(*self.subscriptions.by_filter.values(), *self.shares.subscriptions.values()),
            will=self.will,
            unclean=self.unclear_until > 0,
        )

    def restore(self, record: SessionRecord, inflight: InflightRecord | None) -> None:
        """Restore the session from its records."""
        self.epoch, self.expiry, self.gone_at, self.will = record.epoch, record.expiry, record.gone_at, record.will
        if record.unclean or record.gone_at is None:
            self.unclear_until = record.gone_at or self._parts.deliveries.wall_clock()
        for subscription in record.subscriptions:
            topic_filter = subscription.options.topic_filter
            if is_shared(topic_filter):
                self.shares.subscriptions[topic_filter] = subscription
            else:
                self.subscriptions.put(subscription)
        if inflight is None or inflight.session_id != self.session_id:
            return
        self._inflight = self.deliveries.inflight = InflightMessages(
            inflight.messages, inflight.reached, inflight.topic_ids
        )
        self.deliveries.restore_retained(inflight.pending_retained)
        if inflight.open or inflight.low_water_mark or inflight.released:
            self.inbound().restore(inflight)

    def inflight_record(self) -> InflightRecord:
        """Return the current in-flight record."""
        assert self._inflight is not None
        store, inbound_qos2 = self._parts.store, self.inbound_qos2
        released = store.leaving and self.state is SessionState.SAVING and not self._sends
        return InflightRecord(
            session_id=self.session_id,
            epoch=self.epoch,
            reached=self._reached(),
            messages=self._inflight.entries(),
            pending_retained=self.deliveries.pending_retained,
            topic_ids=self._topic_ids(),
            released_by=store.owner if released else "",
            **(inbound_qos2.describe(leaving=self.client is None) if inbound_qos2 is not None else {}),
        )

    @property
    def _sends(self) -> bool:
        """Whether a QoS 2 message of the client is in flight to Kafka."""
        return self.inbound_qos2 is not None and self.inbound_qos2.busy

    @property
    def is_stored(self) -> bool:
        """Whether Kafka has answered for the in-flight record and all QoS 2 messages."""
        return self.journal is not None and self.journal.idle and not self._sends

    def _write_inflight(self, owner: Owner) -> None:
        self._parts.store.write_inflight(self.client_id, self.inflight_record(), owner)

    def _too_large(self) -> None:
        """Disconnect the client, because the in-flight record is too large for Kafka; a later one may be smaller."""
        if self.client is not None:
            log.error("a session's in-flight record is too large for Kafka", client=self.client_id)
            self.client.disconnect(ReasonCode.QUOTA_EXCEEDED, "the session's state is too large")

    def _reached(self) -> Offsets:
        """Return the offsets up to which the log was offered to this session."""
        assert self._inflight is not None
        if self.client is None or self._lossless is None:
            return self._inflight.reached
        filters = self.subscriptions.lossless.union(self._held)
        return self._inflight.offered(self._parts.router.offered(filters, self._lossless))

    def _topic_ids(self) -> Mapping[str, str]:
        """Return the ids of the topics in `_reached`."""
        assert self._inflight is not None
        if self.client is None or self._lossless is None:
            return self._inflight.topic_ids
        return self._parts.router.topic_ids(self.subscriptions.lossless.union(self._held))

    def inbound(self) -> InboundQos2:
        """Return the state of inbound QoS 2 messages, created at the first one."""
        if self.inbound_qos2 is None:
            parts, deliveries = self._parts.qos2, self.deliveries
            if parts.self_delivery is not None:
                deliveries.copies = OwnCopies(self.client_id)
            self.inbound_qos2 = InboundQos2(
                self.session_id,
                self.principal,
                parts,
                budget=self.budget,
                journal=self.journal,
                connection=lambda: deliveries.client,
                copies=deliveries.copies,
            )
        return self.inbound_qos2

    @property
    def reserved_ids(self) -> list[int]:
        """Packet identifiers of deliveries in flight."""
        return [message.packet_id for message in self._inflight.entries()] if self._inflight is not None else []

    # attaching and detaching a connection

    async def prepare(self) -> None:
        """Have the router read the topics of subscriptions and deliveries in flight; Refused if Kafka is silent."""
        router = self._parts.router
        wanted: dict[str, tuple[str, ...] | None] = dict.fromkeys(self.subscriptions.by_filter)
        messages = self._inflight.entries() if self._inflight is not None else ()
        for topic in {message.topic for message in messages if not message.name} - {NO_TOPIC}:
            wanted[f"\0{self.client_id}\0{topic}"] = (topic,)
        for name, refusal in (await router.hold(wanted)).items():
            if isinstance(refusal, Refused):
                log.warning("a topic of a session cannot be read", client=self.client_id, reason=refusal.reason)
                await router.hold({name: ()})
        self._held = [*wanted]
        try:
            if self._inflight is not None:
                self._inflight.forget_recreated(router.topic_ids(self._held))
                reached = self._inflight.reached
                self._inflight.reset_truncated(await router.ends(self._held, self._make_outboxes(), reached))
                self.subscriptions.trim_backlogs(reached)
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        """Release the names that the router holds."""
        held, self._held = self._held, []
        for name in held:
            self._parts.router.drop(name)

    def attach(self, client: ClientPort) -> None:
        """Start delivering to a connection, after `prepare` and CONNACK."""
        self.client = self.deliveries.client = client
        self.gone_at = None
        router, live_reader = self._parts.router, self._parts.live_reader
        # from here on the router counts the subscriptions themselves
        self._held = [name for name in self._held if name not in self.subscriptions.by_filter]
        for subscription in self.subscriptions.by_filter.values():
            router.add(self, subscription)
        self.shares.resume()
        if self._inflight is None or not (self.subscriptions.by_filter or len(self._inflight)):
            return
        outbox = self._make_outboxes()
        wanted = router.offered(self.subscriptions.lossless, outbox)
        starts, at_once, lost = self._inflight.rewind(self.unclear_until, wanted, router.offered(self._held, outbox))
        self.unclear_until = 0
        self.deliveries.resume(at_once, lost)
        for (topic, number), offset in starts.items():
            live_reader.catch_up(topic, router, outbox, number, offset, self._lost)

    def detach(self) -> None:
        """Leave the live reader after the connection has ended, and remember the offered offsets."""
        parts = self._parts
        if self._inflight is not None:
            self._inflight.topic_ids, self._inflight.reached = self._topic_ids(), self._reached()
            self.subscriptions.trim_backlogs(self._inflight.reached)
        self.client = self.deliveries.client = None
        self.shares.leave_all()
        self.deliveries.stop()
        for topic_filter in self.subscriptions.by_filter:
            parts.router.unsubscribe(self, topic_filter)
        self._drop()
        if self._lossless is not None:
            parts.live_reader.forget(self._lossless)
        self._lossy = self._lossless = None
        self.subscriptions.forget_matches()

    def unload(self) -> None:
        """Break reference cycles of a session that is no longer used, so that it is freed without the collector."""
        self.deliveries.unload()
        if self.journal is not None:
            self.journal.stop()

    def forget_topic(self, topic: str) -> None:
        """Drop the state of a deleted Kafka topic; a new topic of that name is offered from its beginning."""
        self.deliveries.forget_topic(topic)
        self.subscriptions.forget_topic(topic)
        if self.inbound_qos2 is not None:
            self.inbound_qos2.forget_topic(topic)

    def _lost(self, count: int) -> None:
        """Count records that retention deleted before the client got them."""
        self._parts.counters.gaps += count
        if not self._gaps:
            log.warning("retention has deleted messages of a session", client=self.client_id, messages=count)
        self._gaps += count

    # subscriptions

    def subscribed(self, subscription: SessionSubscription, since: Since) -> bool:
        """Add a subscription whose filter the router holds since `since`; return whether it is new."""
        self._make_outboxes()
        former = self.subscriptions.by_filter.get(subscription.options.topic_filter)
        if former is not None:  # replacing a subscription must lose no messages [MQTT-3.8.4-4]
            since = {}
            if not subscription.options.qos:
                subscription = msgspec.structs.replace(subscription, backlog=self._backlog(former))
        self.subscriptions.put(subscription)
        return self._parts.router.add(self, subscription, since)

    def _backlog(self, former: SessionSubscription) -> Backlog | None:
        """Return what a subscription that is replaced by one at QoS 0 has not delivered yet."""
        if not former.options.qos:
            return former.backlog
        until = self._parts.router.behind(former.options.topic_filter, self._make_outboxes())
        return Backlog(former.options.qos, until) if until else None

    def unsubscribed(self, topic_filter: str) -> bool:
        """Remove a subscription and return whether it existed; deliveries in flight complete [MQTT-3.10.4-3]."""
        self.deliveries.forget_retained(topic_filter)
        removed = self.subscriptions.remove(topic_filter)
        return self._parts.router.unsubscribe(self, topic_filter) if removed else False

    def refused_by(self, grant: Grant) -> str | None:
        """Return a subscribed filter that the grant does not allow, or None."""
        filters = (*self.subscriptions.by_filter, *self.shares.subscriptions)
        return next((topic_filter for topic_filter in filters if is_refused(grant, topic_filter)), None)

    def _make_outboxes(self) -> Outbox:
        if self._lossless is None:
            self._lossless = Outbox(self.deliveries)
            self._lossy = LossyOutbox(self.deliveries, self._parts.counters)
        return self._lossless

    def outbox_for(self, match: Match) -> Outbox | LossyOutbox:
        """Return the outbox for the match's QoS (contract: `gateway.mqtt.routing.router.SubscribedSession`)."""
        outbox = self._lossless if match.qos else self._lossy
        assert outbox is not None
        return outbox

    def feed(self) -> None:
        """Go on sending: the window or the socket has capacity again."""
        self.deliveries.feed_retained()
        if self._lossless is not None:
            self._parts.live_reader.resume(self._lossless)
        self.shares.wake()


def forget_topics(live: Mapping[str, Session], parts: SessionParts, topics: Iterable[str]) -> None:
    """Forget what sessions know of Kafka topics that were deleted, and possibly created again."""
    for topic in topics:
        parts.qos2.start_offsets.forget(topic)
        for session in live.values():
            session.forget_topic(topic)
