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
from mapping.mqtt import Delivery, for_subscriber
from mapping.record import Received
from protocols.mqtt.encoding import PreparedPublish, prepare_publish
from protocols.mqtt.packets import Subscription
from protocols.mqtt.topics import SubscriptionTrie, is_shared, parse_share

if TYPE_CHECKING:
    from gateway.mqtt.client import Client
    from gateway.mqtt.services import Services
    from gateway.mqtt.sharing import Share

log = structlog.get_logger(__name__)

AT_LEAST_ONCE: Final = 1
_PLAIN: Final = Match(0, False, ())


class Session:
    """One session; the router's subscriber and the owner of its outlets."""

    __slots__ = (
        "_back",
        "_flights",
        "_gaps",
        "_held_topics",
        "_lossless",
        "_lossy",
        "_own",
        "_places",
        "_retained",
        "_services",
        "_shared",
        "_unsent",
        "budget",
        "client",
        "client_id",
        "epoch",
        "exchanges",
        "expiry",
        "filters",
        "gone_at",
        "joined",
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
        self.joined: dict[str, Wish] = {}  # shared subscriptions
        self.shares: dict[str, Share] = {}  # those of them that have their place in the group
        self.journal = Journal(self._write_flight) if kept else None
        self.exchanges: Exchanges | None = None
        self._services = services
        self._flights = Flights() if kept else None
        self._lossy: Outbox | None = None
        self._lossless: Outbox | None = None
        self._own: SubscriptionTrie[int, Wish] | None = None
        self._back = False  # some of the log is read a second time
        self._places: Places = {}  # of a session without a connection
        self._retained: collections.deque[tuple[str, Wish]] | None = None
        self._shared: dict[int, tuple[Share, Received, int]] = {}
        self._unsent = 0  # deliveries that have an identifier and wait for the journal
        self._held_topics = ""
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
            subscriptions=(*self.filters.values(), *self.joined.values()),
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
            (self.joined if is_shared(topic_filter) else self.filters)[topic_filter] = wish
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
        if self._held_topics:
            filters.add(self._held_topics)
        return self._flights.places(self._services.router.places(filters, self._lossless))

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
        held: list[str] = []
        try:
            for topic_filter in self.filters:
                await router.hold(topic_filter)
                held.append(topic_filter)
            flights = self._flights.on_the_way() if self._flights is not None else ()
            topics = {flight.topic for flight in flights if not flight.name}
            if topics:
                name = f"\0{self.client_id}"
                await router.hold(name, topics)
                self._held_topics = name
        except BaseException:
            for topic_filter in held:
                router.drop(topic_filter)
            raise

    def attach(self, client: Client) -> None:
        """The session has a connection, and CONNACK was said; `prepare` came before."""
        self.client = client
        self.gone_at = None
        router, tail = self._services.router, self._services.tail
        for wish in self.filters.values():
            router.add(self, wish)
        for wish in self.joined.values():
            self._services.spawn(self._rejoin(client, wish))
        if self._flights is None or not (self.filters or len(self._flights)):
            return
        outlet = self._make_outlets()
        filters = {name for name, wish in self.filters.items() if wish.options.qos}
        starts, at_once = self._flights.rewind(self.unclear_until)
        self._back = self._flights.is_back
        self.unclear_until = 0
        for flight in at_once:
            self._send_at_once(flight)
        for topic, partitions in router.places(filters, outlet).items():
            # A partition that is not in the record appeared while the client was away: all of it is wanted.
            for number in partitions:
                starts.setdefault((topic, number), 0)
        for (topic, number), offset in starts.items():
            tail.catch_up(topic, router, outlet, number, offset, self._lost)

    async def _rejoin(self, client: Client, wish: Wish) -> None:
        """Take the place in a group again; what the group does not give is logged, since nobody asked."""
        try:
            await self.join(client, wish)
        except Refused as refused:
            log.warning("a shared subscription is not resumed", client=self.client_id, reason=refused.reason)

    async def join(self, client: Client, wish: Wish) -> bool:
        """Join the group of a shared subscription; whether it is new.

        Raises:
            Refused: the group cannot be joined.
        """
        topic_filter = wish.options.topic_filter
        shared = parse_share(topic_filter)
        assert shared is not None
        share = await self._services.sharing.join(self, shared, wish)
        if client is not self.client:
            await share.leave()
            return False
        self.shares[topic_filter] = share
        new = topic_filter not in self.joined
        self.joined[topic_filter] = wish
        return new

    async def part(self, topic_filter: str) -> bool:
        """Leave the group of a shared subscription; whether there was one."""
        share = self.shares.pop(topic_filter, None)
        if share is not None:
            self._give_up(share)
            await share.leave()
        return self.joined.pop(topic_filter, None) is not None

    def _give_up(self, share: Share) -> None:
        """What is on the way from a group; at QoS 2 nobody else gets it [MQTT-4.8.2-5]."""
        for packet_id, (other, record, qos) in list(self._shared.items()):
            if other is share:
                del self._shared[packet_id]
                if qos > AT_LEAST_ONCE:
                    share.done(record)

    def _send_at_once(self, flight: Flight) -> None:
        """A delivery of which the client has the message already, or whose message is a retained one."""
        assert self.client is not None
        assert self._flights is not None
        if flight.stage == PUBCOMP:
            self.client.send_pubrel(flight.packet_id)
            return
        kept = self._services.retained.get(flight.name)
        if kept is None or (kept.partition, kept.offset) != (flight.partition, flight.offset) or not self.room:
            self._flights.end(flight.packet_id)  # replaced since, or sent anew when there is room
            if kept is not None:
                self._queue_retained(flight.name, Wish(Subscription(flight.name, flight.stage)))
            return
        message = self._message(kept.delivery, ())
        self.client.send(message, flight.stage, retain=True, dup=True, packet_id=flight.packet_id)

    def detach(self) -> None:
        """The connection is gone: leave the tail, remember how far the log was offered."""
        services = self._services
        if self.kept:
            self._places = self._reached()
            if self._flights is not None:
                self._flights.reached = self._places
        self.client = None
        self._unsent = 0
        for topic_filter in self.filters:
            services.router.unsubscribe(self, topic_filter)
        if self._held_topics:
            services.router.drop(self._held_topics)
            self._held_topics = ""
        for outlet in (self._lossy, self._lossless):
            if outlet is not None:
                services.tail.forget(outlet)
        self._lossy = self._lossless = self._own = None
        self._retained = None
        shares, self.shares = self.shares, {}
        for share in shares.values():
            self._give_up(share)
            services.spawn(share.leave())

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

    def _queue_retained(self, topic: str, wish: Wish) -> None:
        if self._retained is None:
            self._retained = collections.deque()
        self._retained.append((topic, wish))

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
        return max(0, client.window - self._unsent) if client is not None and client.takes_more else 0

    def feed(self) -> None:
        """The window or the socket has room again."""
        if self._retained:
            self._feed_retained()
        if self._lossless is not None:
            self._services.tail.room(self._lossless)
        for share in self.shares.values():
            share.wake()

    def feed_lossy(self) -> None:
        """The socket has room again."""
        if self._lossy is not None:
            self._services.tail.room(self._lossy)

    def _feed_retained(self) -> None:
        """Send what is queued as it is now: a message that was replaced meanwhile is not sent in its old form."""
        retained, queue = self._services.retained, self._retained
        while queue:  # None: there is nothing
            topic, wish = queue[0]
            kept = retained.get(topic)
            if kept is None:
                queue.popleft()
                continue
            qos = min(wish.options.qos, kept.delivery.qos)
            if not (self.room if qos else self.takes_more):
                return
            queue.popleft()
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
            if verdict.finished:
                return
        delivery = self._services.router.delivery(record)
        if delivery is None:
            return
        if match is None:
            match = self._match(delivery)
        if flight is not None:
            match = match or _PLAIN
            message = self._message(delivery, match.identifiers)  # it was sent: it does not expire [MQTT-4.3.3-7]
            assert self.client is not None
            packet_id = flight.packet_id
            if self.client.send(message, flight.stage, retain=match.retain, dup=True, packet_id=packet_id) is None:
                self._end(packet_id)
            return
        if match is not None and match.qos:  # what goes out at QoS 0 is not for those who were away
            self._deliver(record, delivery, match, dup=dup)

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
            self._unsent += 1
            assert self.journal is not None
            again = dup and qos == AT_LEAST_ONCE
            self.journal.save((self._send_stored, (client, packet_id, message, qos, match.retain, again)))
            if share is not None:
                self.journal.save((share.done, record))  # it is this session's from then on [MQTT-4.8.2-4]
            return packet_id
        if not packet_id:
            return packet_id
        if share is not None:
            self._shared[packet_id] = (share, record, qos)
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
        self._unsent -= 1
        if client.is_open and client.send(message, qos, retain=retain, dup=dup, packet_id=packet_id) is None:
            self._end(packet_id)

    # the client's answers to them

    def acknowledged(self, packet_id: int) -> None:
        """PUBACK, PUBCOMP, or a PUBREC with an error came: the delivery is over."""
        shared = self._shared.pop(packet_id, None)
        if shared is not None:
            share, record, _ = shared
            share.done(record)
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
        if self._flights is None or packet_id in self._shared:
            client.send_pubrel(packet_id)
            return True
        flight = self._flights.find(packet_id)
        if flight is None:
            return False
        flight.stage = PUBCOMP
        assert self.journal is not None
        self.journal.save((self._release, (client, packet_id)))
        return True

    def _release(self, argument: tuple[Client, int]) -> None:
        client, packet_id = argument
        if client is self.client:
            client.send_pubrel(packet_id)
            client.flush_soon()
