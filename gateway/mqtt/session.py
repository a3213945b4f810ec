"""An MQTT session: subscriptions, deliveries on the way, open exchanges (section 4.1), with a connection or without.

A session that is kept (its expiry is not 0) has its records in Kafka, `gateway.mqtt.records`; while its client is away
it is nothing but these records. What is delivered from the log is queued in the log: see `gateway.mqtt.flights`.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Final

import structlog

from flowcontrol.budget import Budget
from gateway.kafka.contracts import Owner, Refused
from gateway.mqtt.exchanges import Exchanges
from gateway.mqtt.flights import PUBACK, PUBCOMP, PUBREC, Flights
from gateway.mqtt.journal import Journal
from gateway.mqtt.outbox import Outbox
from gateway.mqtt.records import Flight, FlightRecord, Places, SessionRecord, Testament, Wish, encode
from gateway.mqtt.router import Match, Since, combine
from gateway.mqtt.shares import AT_LEAST_ONCE, Shares
from mapping.mqtt import Delivery, for_subscriber
from mapping.outcomes import Outcome
from mapping.record import Received
from protocols.mqtt.encoding import PreparedPublish, prepare_publish
from protocols.mqtt.packets import Subscription
from protocols.mqtt.states import UNLIMITED
from protocols.mqtt.topics import SubscriptionTrie, is_shared

if TYPE_CHECKING:
    from gateway.mqtt.client import Client
    from gateway.mqtt.services import Services
    from gateway.mqtt.sharing import Share

log = structlog.get_logger(__name__)

_PLAIN: Final = Match(0, False, ())


class Session:
    """One session; the router's subscriber and the owner of its outlets."""

    __slots__ = (
        "_back",
        "_flights",
        "_gaps",
        "_held",
        "_lossless",
        "_lossy",
        "_own",
        "_places",
        "_retained",
        "_services",
        "_unsent",
        "budget",
        "client",
        "client_id",
        "epoch",
        "exchanges",
        "expiry",
        "filters",
        "gone_at",
        "journal",
        "nonce",
        "principal",
        "shares",
        "unclear_until",
        "will",
    )

    def __init__(self, client_id: str, principal: str, nonce: str, services: Services, *, kept: bool) -> None:
        """A new session of `principal`; `kept`: it may outlive its connection."""
        self.client_id = client_id
        self.principal = principal
        self.nonce = nonce
        self.epoch = 0
        self.expiry = 0
        self.gone_at: int | None = None
        self.will: Testament | None = None
        self.unclear_until = 0  # epoch ms: its last gateway died then, and may have sent what no flight record tells
        self.client: Client | None = None
        self.budget: Budget = services.publisher.connection_budget()
        self.filters: dict[str, Wish] = {}
        self.shares = Shares(self, services.sharing, services.spawn)
        self.journal = Journal(self._write_flight) if kept else None
        self.exchanges: Exchanges | None = None
        self._services = services
        self._flights = Flights() if kept else None
        self._lossy: Outbox | None = None
        self._lossless: Outbox | None = None
        self._own: SubscriptionTrie[int, Wish] | None = None
        self._back = False  # some of the log is read a second time
        self._places: Places = {}  # of a session without a connection
        # Topics whose retained message is to be sent, how, and under which identifier again (0: a new one).
        self._retained: collections.deque[tuple[str, Wish, int]] | None = None
        # Deliveries that have an identifier and wait for the journal; those of a group with where they are from.
        self._unsent: dict[int, tuple[Share, Received] | None] = {}
        self._held: list[str] = []  # names of what the router holds for this session, beside `filters` once attached
        self._gaps = 0

    @property
    def kept(self) -> bool:
        """Whether it has records in Kafka."""
        return self.journal is not None

    # records

    def describe(self, owner: str) -> SessionRecord:
        """The session's record as of now."""
        return SessionRecord(
            nonce=self.nonce,
            principal=self.principal,
            epoch=self.epoch,
            owner=owner,
            expiry=self.expiry,
            gone_at=self.gone_at,
            subscriptions=(*self.filters.values(), *self.shares.wishes.values()),
            will=self.will,
            unclean=self.unclear_until > 0,
        )

    def restore(self, record: SessionRecord, flight: FlightRecord | None) -> None:
        """Become what the records say."""
        self.epoch, self.expiry, self.gone_at, self.will = record.epoch, record.expiry, record.gone_at, record.will
        if record.unclean or record.gone_at is None:
            self.unclear_until = record.gone_at or self._services.wall_clock()
        for wish in record.subscriptions:
            topic_filter = wish.options.topic_filter
            (self.shares.wishes if is_shared(topic_filter) else self.filters)[topic_filter] = wish
        if flight is None or flight.nonce != self.nonce:
            return
        self._flights = Flights(flight.flights, flight.reached)
        self._places = flight.reached
        if flight.open or flight.mark or flight.released:
            self._make_exchanges().restore(flight)

    def flight_record(self) -> FlightRecord:
        """The flight record as of now."""
        assert self._flights is not None
        return FlightRecord(
            nonce=self.nonce,
            epoch=self.epoch,
            reached=self._reached(),
            flights=self._flights.on_the_way(),
            **(self.exchanges.describe(leaving=self.client is None) if self.exchanges is not None else {}),
        )

    def _write_flight(self, owner: Owner) -> None:
        self._services.sessions.write_flight(self.client_id, encode(self.flight_record()), owner)

    def _reached(self) -> Places:
        """How far the log was offered to this session."""
        if self.client is None or self._lossless is None:
            return self._places
        assert self._flights is not None
        filters = {name for name, wish in self.filters.items() if wish.options.qos}
        return self._flights.places(self._services.router.places(filters.union(self._held), self._lossless))

    def _make_exchanges(self) -> Exchanges:
        services = self._services
        self.exchanges = Exchanges(
            self.nonce,
            services.publisher,
            services.retained,
            services.floors,
            self.budget,
            self.journal,
            services.spawn,
            lambda: self.client,
        )
        return self.exchanges

    def receiving(self) -> Exchanges:
        """The exchanges of the client's QoS 2 messages; made when the first comes."""
        return self.exchanges if self.exchanges is not None else self._make_exchanges()

    @property
    def reserved_ids(self) -> list[int]:
        """Packet identifiers of deliveries on the way."""
        return [flight.packet_id for flight in self._flights.on_the_way()] if self._flights is not None else []

    # with a connection

    async def prepare(self) -> None:
        """Watch what the subscriptions and the deliveries on the way need; Refused when Kafka does not answer."""
        router = self._services.router
        try:
            for topic_filter in self.filters:
                await self._hold(topic_filter, None)
            flights = self._flights.on_the_way() if self._flights is not None else ()
            for topic in dict.fromkeys(flight.topic for flight in flights if not flight.name):
                await self._hold(f"\0{self.client_id}\0{topic}", (topic,))
            if self._flights is not None:
                reached = self._flights.reached
                self._flights.fit(await router.ends(self._held, self._make_outlets(), reached))
        except BaseException:
            self._drop()
            raise

    async def _hold(self, name: str, topics: tuple[str, ...] | None) -> None:
        """Have the router hold a filter, or the topics under a name; nothing of what cannot be read any more."""
        router = self._services.router
        try:
            await router.hold(name, topics)
        except Refused as refused:
            if refused.outcome is Outcome.BUSY:
                raise
            log.warning("a topic of a session cannot be read", client=self.client_id, reason=refused.reason)
            await router.hold(name, ())
        self._held.append(name)

    def _drop(self) -> None:
        """Give up what is held."""
        held, self._held = self._held, []
        for name in held:
            self._services.router.drop(name)

    def attach(self, client: Client) -> None:
        """The session has a connection, and CONNACK was said; `prepare` came before."""
        self.client = client
        self.gone_at = None
        router, tail = self._services.router, self._services.tail
        self._held = [name for name in self._held if name not in self.filters]  # the router's entries have them now
        for wish in self.filters.values():
            router.add(self, wish)
        self.shares.resume()
        if self._flights is None or not (self.filters or len(self._flights)):
            return
        outlet = self._make_outlets()
        wanted = router.places({name for name, wish in self.filters.items() if wish.options.qos}, outlet)
        starts, at_once, lost = self._flights.rewind(self.unclear_until, wanted, router.places(self._held, outlet))
        self._back = self._flights.is_back
        self.unclear_until = 0
        for flight in at_once:
            self._send_at_once(flight)
        for flight in lost:
            self._abandon(flight)
        for (topic, number), offset in starts.items():
            tail.catch_up(topic, router, outlet, number, offset, self._lost)

    def _send_at_once(self, flight: Flight) -> None:
        """A delivery of which the client has the message already, or whose message is a retained one."""
        assert self.client is not None
        assert self._flights is not None
        if flight.stage == PUBCOMP:
            self.client.send_pubrel(flight.packet_id)
            return
        self._queue_retained(flight.name, Wish(Subscription(flight.name, flight.stage)), flight.packet_id)

    def _abandon(self, flight: Flight) -> None:
        """A delivery on the way cannot be sent again: its message is gone, or too large for the client.

        At QoS 2 the client may have the message: PUBREL completes that, so that the identifier can be used again.
        """
        client, flights = self.client, self._flights
        assert client is not None
        assert flights is not None
        if flight.stage == PUBREC:
            self._release_when_stored(client, flight)
        else:
            client.release_reserved(flight.packet_id)
            self._end(flight.packet_id)

    def detach(self) -> None:
        """The connection is gone: leave the tail, remember how far the log was offered."""
        services = self._services
        if self.kept:
            self._places = self._reached()
            if self._flights is not None:
                self._flights.reached = self._places
        self.client = None
        for packet_id, given in self._unsent.items():
            if given is not None and self._flights is not None:
                self._flights.end(packet_id)  # it was not sent: another member of the group gets it
        self._unsent.clear()
        for topic_filter in self.filters:
            services.router.unsubscribe(self, topic_filter)
        self._drop()
        for outlet in (self._lossy, self._lossless):
            if outlet is not None:
                services.tail.forget(outlet)
        self._lossy = self._lossless = self._own = None
        self._retained = None
        self.shares.leave()

    def _lost(self, count: int) -> None:
        """Retention was faster than the client."""
        self._services.counters.gaps += count
        if not self._gaps:
            log.warning("messages of a session are gone by retention", client=self.client_id, messages=count)
        self._gaps += count

    # subscriptions

    def subscribed(self, wish: Wish, since: Since) -> bool:
        """Put a subscription in whose filter is held by the router, which said `since`; whether it is new."""
        self._make_outlets()
        self._own = None
        if wish.options.topic_filter in self.filters:
            since = {}  # it goes on: nothing is lost by replacing a subscription [MQTT-3.8.4-4]
        self.filters[wish.options.topic_filter] = wish
        return self._services.router.add(self, wish, since)

    def unsubscribed(self, topic_filter: str) -> bool:
        """Take a subscription out; what is on the way is still completed [MQTT-3.10.4-3]. Whether there was one."""
        self._own = None
        found = self.filters.pop(topic_filter, None) is not None
        return self._services.router.unsubscribe(self, topic_filter) if found else False

    def send_retained(self, wish: Wish) -> None:
        """Queue the retained messages that a new subscription gets (section 3.3.1.3)."""
        for topic in self._services.retained.matching(wish.options.topic_filter):
            self._queue_retained(topic, wish)

    def _queue_retained(self, topic: str, wish: Wish, packet_id: int = 0) -> None:
        if self._retained is None:
            self._retained = collections.deque()
        self._retained.append((topic, wish, packet_id))

    def _make_outlets(self) -> Outbox:
        if self._lossless is None:
            counters = self._services.counters
            self._lossless = Outbox(self, counters, lossy=False)
            self._lossy = Outbox(self, counters, lossy=True)
        return self._lossless

    def outlet_for(self, match: Match) -> Outbox:
        """The outlet of this delivery's QoS (contract: `gateway.mqtt.router.Subscriber`)."""
        outlet = self._lossless if match.qos else self._lossy
        assert outlet is not None
        return outlet

    # room

    @property
    def takes_more(self) -> bool:
        """Whether the socket's buffer is below its mark."""
        return self.client is not None and self.client.takes_more

    @property
    def room(self) -> int:
        """Free places in the client's window [MQTT-3.3.4-9], 0 while the socket is full."""
        client = self.client
        if client is None or not client.takes_more:
            return 0
        room = client.window - len(self._unsent)
        return max(0, room if self._flights is None else min(room, UNLIMITED - len(self._flights)))

    def feed(self) -> None:
        """The window or the socket has room again."""
        if self._retained:
            self._feed_retained()
        if self._lossless is not None:
            self._services.tail.room(self._lossless)
        self.shares.wake()

    def feed_lossy(self) -> None:
        """The socket has room again."""
        if self._lossy is not None:
            self._services.tail.room(self._lossy)

    def _feed_retained(self) -> None:
        """Send what is queued as it is now: a message that was replaced meanwhile is not sent in its old form."""
        retained, queue = self._services.retained, self._retained
        while queue:  # None: there is nothing
            topic, wish, packet_id = queue[0]
            kept = retained.get(topic)
            flight = self._flights.find(packet_id) if self._flights is not None else None
            version = (kept.partition, kept.offset) if kept is not None else None
            if flight is not None and version != (flight.partition, flight.offset):
                self._abandon(flight)
                queue[0] = (topic, wish, 0)
                continue
            if kept is None:
                queue.popleft()
                continue
            qos = min(wish.options.qos, kept.delivery.qos)
            if not (self.room if qos else self.takes_more):
                return
            queue.popleft()
            if flight is not None:
                self._send_again(flight, self._message(kept.delivery, ()), retain=True)
                continue
            identifiers = (wish.identifier,) if wish.identifier else ()
            place = Received(retained.name, topic.encode(), None, (), 0, kept.partition, kept.offset)
            self._deliver(place, kept.delivery, Match(qos, True, identifiers), name=topic)

    # deliveries

    def send_lossy(self, record: Received, match: Match) -> bool:
        """Send one message of the log at QoS 0, if there is room (contract: `gateway.mqtt.outbox.Sender`)."""
        client = self.client
        if client is None or not client.takes_more:
            return False
        packet = None
        if client.takes_packets and not match.identifiers:
            packet = self._services.router.packet(record, client.is_v5, match.retain)
        if packet is None:
            self.deliver(record, match)
        elif client.may_receive(record):
            client.send_packet(packet)
        return True

    def deliver(self, record: Received, match: Match) -> None:
        """Send one message of the log (contract: `gateway.mqtt.outbox.Sender`)."""
        if self._back and match.qos:
            self.deliver_again(record, match)
            return
        delivery = self._services.router.delivery(record)
        if delivery is not None:
            self._deliver(record, delivery, match)

    def deliver_again(self, record: Received, match: Match | None = None) -> None:
        """A record that is caught up on: new, or on the way already, or finished, or for somebody else."""
        flight, dup = None, False
        if self._flights is not None and self._back:
            verdict = self._flights.judge(record)
            self._back = self._flights.is_back
            flight, dup = verdict.flight, verdict.unclear
            for lost in verdict.lost:
                self._abandon(lost)
            if verdict.finished:
                return
        delivery = self._services.router.delivery(record)
        if delivery is None:
            if flight is not None:
                self._abandon(flight)
            return
        if match is None:
            match = self._match(delivery)
        if flight is not None:
            match = match or _PLAIN
            message = self._message(delivery, match.identifiers)  # it was sent: it does not expire [MQTT-4.3.3-7]
            self._send_again(flight, message, retain=match.retain)
            return
        if match is not None and match.qos:  # what goes out at QoS 0 is not for those who were away
            self._deliver(record, delivery, match, dup=dup)

    def _send_again(self, flight: Flight, message: PreparedPublish, *, retain: bool) -> None:
        """Send a delivery on the way under its old identifier [MQTT-4.4.0-1]."""
        client, packet_id = self.client, flight.packet_id
        assert client is not None
        if client.send(message, flight.stage, retain=retain, dup=True, packet_id=packet_id) is None:
            self._abandon(flight)

    def _match(self, delivery: Delivery) -> Match | None:
        """How the session's own filters match."""
        own = self._own
        if own is None:
            own = self._own = SubscriptionTrie()
            for topic_filter, wish in self.filters.items():
                own.add(topic_filter, 0, wish)
        return combine(delivery, self.client_id, (wish for _, wish in own.match(delivery.topic)))

    def take_shared(self, record: Received, match: Match, share: Share) -> None:
        """Send one message of a group (contract: `gateway.mqtt.sharing.SharedSubscriber`)."""
        client, delivery = self.client, self._services.router.delivery(record)
        if client is None or not client.is_open or delivery is None:
            share.again(record, failed=False)
        elif not client.may_receive(record):
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
        self, record: Received, delivery: Delivery, match: Match, *, dup: bool = False, name: str = ""
    ) -> None:
        """Send one message; one that is expired, too large for the client or not allowed counts as delivered."""
        client = self.client
        if client is None or not client.is_open or not client.may_receive(record, name):
            return
        message = self._prepare(record, delivery, match) if not name else self._message(delivery, match.identifiers)
        if message is not None:
            self._dispatch(client, message, record, match, dup=dup, name=name)

    def _dispatch(
        self,
        client: Client,
        message: PreparedPublish,
        record: Received,
        match: Match,
        *,
        dup: bool = False,
        name: str = "",
        share: Share | None = None,
    ) -> int | None:
        """Send one message that may be sent.

        Returns:
            Its packet identifier, 0 at QoS 0; None: it is larger than the client takes.
        """
        flights, qos = self._flights, match.qos
        if flights is None or not qos:
            packet_id = client.send(message, qos, retain=match.retain)
        elif qos == AT_LEAST_ONCE and (share is not None or not self._unsent):
            # What a group gave is not sent again to this session: it goes to another member.
            packet_id = flights.begin(record if share is None else None, PUBACK, name)
            if client.send(message, qos, retain=match.retain, dup=dup, packet_id=packet_id) is None:
                flights.end(packet_id)
                packet_id = None
        else:
            # The identifier is stored before the message leaves: after a crash it goes out under the same one. A QoS 1
            # message stays behind those that wait for it: sending again has the log's order [MQTT311-4.6.0-1].
            packet_id = flights.begin(record, PUBACK if qos == AT_LEAST_ONCE else PUBREC, name)
            self._unsent[packet_id] = None if share is None else (share, record)
            assert self.journal is not None
            again = dup and qos == AT_LEAST_ONCE
            self.journal.save((self._send_stored, (client, packet_id, message, qos, match.retain, again)))
            return packet_id
        if not packet_id:
            return packet_id
        if share is not None:
            self.shares.gave(packet_id, share, record, qos)
        elif flights is not None:
            self._services.sessions.touch(self)
        return packet_id

    def _prepare(self, record: Received, delivery: Delivery, match: Match) -> PreparedPublish | None:
        """The message's bytes; None when its time has run out [MQTT-3.3.2-5]."""
        services = self._services
        assert self.client is not None
        if delivery.expires is None and not match.identifiers:
            return services.router.prepared(record, delivery, self.client.version)
        if delivery.expires is not None and delivery.expires <= services.wall_clock():
            services.counters.expired += 1
            return None
        return self._message(delivery, match.identifiers)

    def _message(self, delivery: Delivery, identifiers: tuple[int, ...]) -> PreparedPublish:
        assert self.client is not None
        now_ms = self._services.wall_clock() if delivery.expires is not None else 0
        properties = for_subscriber(delivery, identifiers, now_ms)
        return prepare_publish(delivery.topic, delivery.payload, properties, self.client.version)

    def _send_stored(self, argument: tuple[Client, int, PreparedPublish, int, bool, bool]) -> None:
        client, packet_id, message, qos, retain, dup = argument
        if client is not self.client:
            return  # it is sent when the session comes back
        given = self._unsent.pop(packet_id)
        if given is not None:
            share, record = given
            share.done(record)  # it is this session's from now on [MQTT-4.8.2-4]
        if client.is_open and client.send(message, qos, retain=retain, dup=dup, packet_id=packet_id) is None:
            self._end(packet_id)
            self.feed()  # the room that was kept for it

    # the client's answers to them

    def acknowledged(self, packet_id: int) -> None:
        """PUBACK, PUBCOMP, or a PUBREC with an error came: the delivery is over."""
        self.shares.settle(packet_id)
        if self._flights is not None:
            self._end(packet_id)

    def _end(self, packet_id: int) -> None:
        assert self._flights is not None
        self._flights.end(packet_id)
        self._services.sessions.touch(self)

    def received(self, packet_id: int) -> bool:
        """PUBREC came: PUBREL follows, from a kept session when that is stored.

        Returns:
            False when the identifier is not in use.
        """
        client = self.client
        assert client is not None
        if self._flights is None or packet_id in self.shares:
            client.send_pubrel(packet_id)
            return True
        flight = self._flights.find(packet_id)
        if flight is None or packet_id in self._unsent:
            return False
        self._release_when_stored(client, flight)
        return True

    def _release_when_stored(self, client: Client, flight: Flight) -> None:
        flight.stage = PUBCOMP
        assert self.journal is not None
        self.journal.save((self._release, (client, flight.packet_id)))

    def _release(self, argument: tuple[Client, int]) -> None:
        client, packet_id = argument
        if client is self.client and self._flights is not None and packet_id in self._flights:
            client.send_pubrel(packet_id)
            client.flush_soon()
