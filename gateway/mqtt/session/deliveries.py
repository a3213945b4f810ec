"""Delivery of messages to a session's client: new, resent after a reconnect, retained, and shared.

A kept session notes each delivery at QoS 1 and 2 in its `InflightMessages`; at QoS 2 the note is stored in Kafka before
the message is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

import msgspec

from gateway.mqtt.counters import Counters
from gateway.mqtt.routing.messages import Messages
from gateway.mqtt.routing.retained import Retained
from gateway.mqtt.routing.router import Match
from gateway.mqtt.routing.shared_groups import ShareMember
from gateway.mqtt.session.client_port import ClientPort
from gateway.mqtt.session.inflight import InflightMessages
from gateway.mqtt.session.journal import Journal
from gateway.mqtt.session.pending_retained import Pending, RetainedQueue
from gateway.mqtt.session.self_delivery import OwnCopies
from gateway.mqtt.session.subscriptions import Subscriptions
from gateway.mqtt.state.records import PUBACK, PUBCOMP, PUBREC, InflightMessage, PendingRetained, SessionSubscription
from gateway.runtime.turns import in_turns
from mapping.mqtt.outgoing import MqttDelivery, for_subscriber
from mapping.record import Received
from protocols.mqtt.encoding import PreparedPublish
from protocols.mqtt.packets import Subscription
from protocols.mqtt.states import UNLIMITED

AT_LEAST_ONCE: Final = 1
_PLAIN: Final = Match(0, False, ())
_NOTHING: Final = SessionSubscription(Subscription("", 0))


class DeliveryParts(msgspec.Struct, frozen=True):
    """Shared by the deliveries of all sessions."""

    messages: Messages  # MQTT forms of the offered records
    retained: Retained  # for new subscriptions
    counters: Counters
    wall_clock: Callable[[], int]  # epoch milliseconds
    touched: set[Journal]  # of sessions whose deliveries in flight have changed; written soon


class Deliveries:
    """Sends for the session's two outboxes, and is the subscriber of its shared subscriptions."""

    __slots__ = (
        "_feed", "_given", "_journal", "_parts", "_rereading", "_retained", "_subscriptions", "_unsent", "client",
        "client_id", "copies", "inflight",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917 - the session's parts
        self,
        client_id: str,
        inflight: InflightMessages | None,  # None: the session is not kept
        journal: Journal | None,  # writes the in-flight record; None: the session is not kept
        subscriptions: Subscriptions,
        feed: Callable[[], None],  # called when capacity was freed
        parts: DeliveryParts,
    ) -> None:
        self.client: ClientPort | None = None  # the session's connection
        self.client_id = client_id
        self.copies: OwnCopies | None = None  # finds the client's own messages that come too early, if configured
        self.inflight = inflight
        # those from consumer groups, sent but not settled, by packet identifier and with their QoS
        self._given: dict[int, tuple[ShareMember, Received, int]] = {}
        self._journal = journal
        self._subscriptions = subscriptions
        self._feed = feed
        self._parts = parts
        self._rereading = False  # some of the log is read again after a reconnect
        self._retained: RetainedQueue | None = None
        # Deliveries that have a packet identifier and wait for the journal; with their origin if from a group.
        self._unsent: dict[int, tuple[ShareMember, Received] | None] = {}

    # attaching and detaching a connection

    def resume(self, at_once: list[InflightMessage], lost: list[InflightMessage]) -> None:
        """After a reconnect, send what needs no reading of the log (see `InflightMessages.rewind`)."""
        assert self.inflight is not None
        self._rereading = self.inflight.is_rereading
        for entry in at_once:
            self._send_at_once(entry)
        for entry in lost:
            self._abandon(entry)
        if self._retained is not None:
            subscriptions = self._subscriptions.by_filter
            self.send_retained(
                [(subscriptions.get(progress.topic_filter, _NOTHING), progress) for progress in self._retained.progress]
            )
        self.feed_retained()

    def forget_topic(self, topic: str) -> None:
        """Give up deliveries in flight whose Kafka topic was deleted."""
        if self.inflight is not None:
            for entry in self.inflight.forget(topic):
                if self.client is not None:
                    self._abandon(entry)
            self._rereading = self.inflight.is_rereading

    def give_up(self, share: ShareMember) -> None:
        """Give deliveries in flight back to a group, except what was sent at QoS 2 [MQTT-4.8.2-5]."""
        for packet_id, (other, record, qos) in list(self._given.items()):
            if other is share:
                del self._given[packet_id]
                if qos > AT_LEAST_ONCE:
                    share.done(record)
        for packet_id, given in list(self._unsent.items()):
            if given is not None and given[0] is share:
                del self._unsent[packet_id]
                self._end(packet_id)  # not sent: another member of the group gets it

    def stop(self) -> None:
        """Drop unsent deliveries after the connection has ended and the session has left its groups."""
        self._unsent.clear()
        if self._retained is not None:
            self._retained.clear()

    def unload(self) -> None:
        """Break the reference cycle with the session, which is unloaded."""
        del self._feed

    def _send_at_once(self, entry: InflightMessage) -> None:
        """Resend PUBREL for a message that the client has received, or queue a retained message again."""
        assert self.client is not None
        if entry.stage == PUBCOMP:
            self.client.send_pubrel(entry.packet_id)
            return
        subscription = SessionSubscription(Subscription(entry.name, entry.stage))
        self._retained_queue().add_again(entry.name, subscription, entry.packet_id)

    def _abandon(self, entry: InflightMessage) -> None:
        """End a delivery that cannot be sent again: its message is deleted, too large for the client, or not allowed.

        At QoS 2 the client may have the message: PUBREL completes the exchange and frees the packet identifier.
        """
        client = self.client
        assert client is not None
        if entry.stage == PUBREC:
            self._release_when_stored(client, entry)
        else:
            client.release_reserved(entry.packet_id)
            self._end(entry.packet_id)

    # capacity

    @property
    def takes_more(self) -> bool:
        """Whether messages can be sent now; see `ClientPort.takes_more`."""
        return self.client is not None and self.client.takes_more

    @property
    def capacity(self) -> int:
        """Number of messages that the client's window allows [MQTT-3.3.4-9], 0 while the socket is full."""
        client = self.client
        if client is None or not client.takes_more:
            return 0
        capacity = client.window - len(self._unsent)
        return max(0, capacity if self.inflight is None else min(capacity, UNLIMITED - len(self.inflight)))

    # retained messages

    @property
    def pending_retained(self) -> tuple[PendingRetained, ...]:
        """Subscriptions of a kept session for which retained messages are still to be sent."""
        return self._retained.progress if self._retained is not None and self.inflight is not None else ()

    def restore_retained(self, progress: tuple[PendingRetained, ...]) -> None:
        """Restore the progress from the in-flight record."""
        self._retained = RetainedQueue(progress) if progress else None

    def _retained_queue(self) -> RetainedQueue:
        if self._retained is None:
            self._retained = RetainedQueue()
        return self._retained

    def expect_retained(self, subscription: SessionSubscription) -> PendingRetained | None:
        """Note that a new subscription gets retained messages, so that a kept session gets them after SUBACK.

        Returns:
            The note for `send_retained`; None if none is needed: at QoS 0, or if no message can match.
        """
        topic_filter = subscription.options.topic_filter
        if self.inflight is None or not subscription.options.qos or not self._parts.retained.may_match(topic_filter):
            return None
        return self._retained_queue().expect(topic_filter)

    def send_retained(self, subscriptions: Collection[tuple[SessionSubscription, PendingRetained | None]]) -> None:
        """Queue the retained messages of subscriptions (section 3.3.1.3); they are sent as capacity allows."""
        queue = self._retained_queue()
        queue.supersede({subscription.options.topic_filter for subscription, _ in subscriptions})
        pending = [queue.add(subscription, progress) for subscription, progress in subscriptions]
        in_turns(itertools.chain.from_iterable(map(self._search, pending)))

    def _search(self, pending: Pending) -> Iterator[None]:
        """Find retained messages in steps, then send them in the order of their offsets, as `progress` requires."""
        queue, progress = self._retained_queue(), pending.progress
        after = (-1, -1) if progress is None else (progress.partition, progress.offset)
        unacknowledged: dict[int, list[tuple[int, str]]] = {}  # by partition
        for piece in self._parts.retained.search(pending.subscription.options.topic_filter, after):
            if pending.is_dropped:
                return
            for topic, (partition, offset) in piece:
                unacknowledged.setdefault(partition, []).append((offset, topic))
            yield
        for partition, messages in sorted(unacknowledged.items()):
            messages.sort()
            pending.found.extend((topic, (partition, offset)) for offset, topic in messages)
            yield
        if not pending.is_dropped:
            queue.send(pending)
            self.feed_retained()
            if not queue:
                self._retained = None

    def forget_retained(self, topic_filter: str) -> None:
        """Drop queued retained messages of a filter that the client has unsubscribed from."""
        if self._retained is not None:
            self._retained.forget(topic_filter)

    def feed_retained(self) -> None:
        """Send queued retained messages in their current version, as capacity allows."""
        retained, queue, client = self._parts.retained, self._retained, self.client
        while queue is not None and client is not None and (first := queue.first) is not None:
            topic, subscription = first.found[0][0], first.subscription
            kept = retained.get(topic)
            entry = self.inflight.find(first.packet_id) if self.inflight is not None else None
            version = (kept.partition, kept.offset) if kept is not None else None
            if entry is not None and (
                version != (entry.partition, entry.offset) or not client.may_receive_retained(topic)
            ):
                self._abandon(entry)
                first.packet_id = 0
                continue
            if kept is None:
                queue.pop()
                continue
            qos = min(subscription.options.qos, kept.delivery.qos)
            if not (self.capacity if qos else self.takes_more):
                return
            queue.pop()
            if entry is not None:
                self._send_again(entry, self._message(kept.delivery, ()), retain=True)
                continue
            identifiers = (subscription.identifier,) if subscription.identifier else ()
            received = Received(retained.name, topic.encode(), None, (), 0, kept.partition, kept.offset)
            self._deliver(received, kept.delivery, Match(qos, True, identifiers), name=topic)

    # deliveries

    def send_lossy(self, run: Sequence[Received], match: Match) -> int:
        """Send messages of the log at QoS 0 that share one match; return how many were taken."""
        client = self.client
        if client is None or not client.takes_more:
            return 0
        if self.copies is None and client.takes_packets and not match.identifiers:
            packets = self._parts.messages.packets(run, client.is_v5, match.retain)
            if packets is not None and client.send_packets(packets, run):
                return len(run)
        for sent, record in enumerate(run):
            if not client.takes_more:
                return sent
            self.deliver(record, match)
        return len(run)

    def deliver(self, record: Received, match: Match) -> None:
        """Send one message of the log at QoS 1 or 2."""
        if self._rereading and match.qos:
            self.deliver_again(record, match)
            return
        delivery = self._parts.messages.delivery(record)
        if delivery is not None:
            if self.copies is not None and self.client is not None and self.copies.is_early(record, delivery):
                self.client.hold_messages()  # it is the client's own, and its PUBREC was not sent yet
            self._deliver(record, delivery, match)

    def deliver_again(self, record: Received, match: Match | None = None) -> None:
        """Deliver a record from the catch-up reader: new, in flight, finished, or not for this session."""
        entry, dup = None, False
        if self.inflight is not None and self._rereading:
            verdict = self.inflight.classify(record)
            self._rereading = self.inflight.is_rereading
            entry, dup = verdict.entry, verdict.unclear
            for lost in verdict.lost:
                self._abandon(lost)
            if verdict.finished:
                return
        client, delivery = self.client, self._parts.messages.delivery(record)
        assert client is not None
        if entry is not None and (delivery is None or not client.may_receive(delivery.topic, record)):
            self._abandon(entry)  # the rights may have changed since it was sent
            return
        if delivery is None:
            return
        if match is None:
            match = self._subscriptions.match(record, delivery, self.client_id)
        if entry is not None:
            match = match or _PLAIN
            message = self._message(delivery, match.identifiers)  # already sent, so it does not expire [MQTT-4.3.3-7]
            self._send_again(entry, message, retain=match.retain)
            return
        if match is not None and match.qos:  # messages at QoS 0 are not kept for absent clients
            self._deliver(record, delivery, match, dup=dup)

    def _send_again(self, entry: InflightMessage, message: PreparedPublish, *, retain: bool) -> None:
        """Resend a delivery in flight under its old packet identifier [MQTT-4.4.0-1]."""
        client, packet_id = self.client, entry.packet_id
        assert client is not None
        if client.send(message, entry.stage, retain=retain, dup=True, packet_id=packet_id) is None:
            self._abandon(entry)

    def send_shared(self, record: Received, match: Match, share: ShareMember) -> None:
        """Send one message of a group (contract: `gateway.mqtt.routing.shared_groups.SharedSubscriber`)."""
        client, delivery = self.client, self._parts.messages.delivery(record)
        if client is None or not client.is_open or delivery is None:
            share.requeue(record)
        elif not client.may_receive(delivery.topic, record):
            share.decline(record)
        else:
            message = self._prepare(record, delivery, match)
            if message is None:
                share.done(record)
                return
            sent = self._dispatch(client, message, record, match, share=share)
            if sent is None:
                share.decline(record)
            elif not sent:
                share.done(record)

    def _deliver(
        self, record: Received, delivery: MqttDelivery, match: Match, *, dup: bool = False, name: str = ""
    ) -> None:
        """Send one message; one that is expired, too large or not allowed is skipped and counts as delivered."""
        client = self.client
        if client is None or not client.is_open:
            return
        if not (client.may_receive_retained(name) if name else client.may_receive(delivery.topic, record)):
            return
        message = self._prepare(record, delivery, match) if not name else self._message(delivery, match.identifiers)
        if message is not None:
            self._dispatch(client, message, record, match, dup=dup, name=name)

    def _dispatch(
        self,
        client: ClientPort,
        message: PreparedPublish,
        record: Received,
        match: Match,
        *,
        dup: bool = False,
        name: str = "",
        share: ShareMember | None = None,
    ) -> int | None:
        """Send one message after all checks.

        Returns:
            Its packet identifier, 0 at QoS 0, or None if it exceeds the client's Maximum Packet Size.
        """
        inflight, qos = self.inflight, match.qos
        if inflight is None or not qos:
            packet_id = client.send(message, qos, retain=match.retain)
        elif qos == AT_LEAST_ONCE and (share is not None or not self._unsent):
            # A group's message is not resent to this session: it goes to another member.
            packet_id = inflight.begin(record if share is None else None, PUBACK, name)
            if client.send(message, qos, retain=match.retain, dup=dup, packet_id=packet_id) is None:
                inflight.end(packet_id)
                packet_id = None
        else:
            # The identifier is stored before the message is sent, for a resend under the same one after a crash. A QoS
            # 1 message queues behind those that wait, since messages are resent in log order [MQTT311-4.6.0-1].
            packet_id = inflight.begin(record, PUBACK if qos == AT_LEAST_ONCE else PUBREC, name)
            self._unsent[packet_id] = None if share is None else (share, record)
            assert self._journal is not None
            again = dup and qos == AT_LEAST_ONCE
            self._journal.save((self._send_stored, (client, packet_id, message, qos, match.retain, again)))
            return packet_id
        if not packet_id:
            return packet_id
        if share is not None:
            self._given[packet_id] = (share, record, qos)
        elif inflight is not None:
            assert self._journal is not None
            self._parts.touched.add(self._journal)
        return packet_id

    def _prepare(self, record: Received, delivery: MqttDelivery, match: Match) -> PreparedPublish | None:
        """Return the encoded message, or None if it has expired [MQTT-3.3.2-5]."""
        parts = self._parts
        assert self.client is not None
        if delivery.expires is None and not match.identifiers:
            return parts.messages.prepared(record, delivery, self.client.version)
        if delivery.expires is not None and delivery.expires <= parts.wall_clock():
            parts.counters.expired += 1
            return None
        return self._message(delivery, match.identifiers)

    def _message(self, delivery: MqttDelivery, identifiers: tuple[int, ...]) -> PreparedPublish:
        assert self.client is not None
        now_ms = self._parts.wall_clock() if delivery.expires is not None else 0
        properties = for_subscriber(delivery, identifiers, now_ms)
        return self._parts.messages.prepare(delivery, properties, self.client.version)

    def _send_stored(self, argument: tuple[ClientPort, int, PreparedPublish, int, bool, bool]) -> None:
        client, packet_id, message, qos, retain, dup = argument
        if client is not self.client or packet_id not in self._unsent:
            return  # it is sent after the reconnect, or by another member of its group
        given = self._unsent.pop(packet_id)
        if given is not None:
            share, record = given
            share.done(record)  # from now on this session is responsible for it [MQTT-4.8.2-4]
        if client.is_open and client.send(message, qos, retain=retain, dup=dup, packet_id=packet_id) is None:
            self._end(packet_id)
            self._feed()  # its reserved capacity is free

    # the client's acknowledgements

    def acknowledged(self, packet_id: int) -> None:
        """End a delivery on PUBACK, PUBCOMP, or a PUBREC with an error."""
        given = self._given.pop(packet_id, None)
        if given is not None:
            share, record, _ = given
            share.done(record)
        if self.inflight is not None:
            self._end(packet_id)

    def _end(self, packet_id: int) -> None:
        assert self.inflight is not None
        assert self._journal is not None
        self.inflight.end(packet_id)
        self._parts.touched.add(self._journal)

    def received(self, packet_id: int) -> bool:
        """Answer PUBREC with PUBREL; a kept session stores the new stage first.

        Returns:
            False if the packet identifier is not in use.
        """
        client = self.client
        assert client is not None
        if self.inflight is None or packet_id in self._given:
            client.send_pubrel(packet_id)
            return True
        entry = self.inflight.find(packet_id)
        if entry is None or packet_id in self._unsent:
            return False
        self._release_when_stored(client, entry)
        return True

    def _release_when_stored(self, client: ClientPort, entry: InflightMessage) -> None:
        entry.stage = PUBCOMP
        assert self._journal is not None
        self._journal.save((self._release, (client, entry.packet_id)))

    def _release(self, argument: tuple[ClientPort, int]) -> None:
        client, packet_id = argument
        if client is self.client and self.inflight is not None and packet_id in self.inflight:
            client.send_pubrel(packet_id)
