"""A session's connection: what the session and its parts ask of it, and how they send through it.

`gateway.mqtt.connection.client.Client`, which imports the session, is one and has the rest: login, what the client
publishes and subscribes to, and the end.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Final

from gateway.audit.trail import audit, where_of
from gateway.flow import subject
from gateway.limits.brakes import ReadingPause, SendingPause
from gateway.limits.limits import ClientLimits, Limits
from gateway.mqtt.counters import Counters
from gateway.mqtt.routing.messages import Packets
from gateway.mqtt.session.self_delivery import SelfDelivery
from gateway.net.pump import Pump
from gateway.security.authorization import Grant
from gateway.security.identity import Identity
from gateway.security.throttle import address_of
from mapping.record import Received
from protocols.mqtt.connection import Connection
from protocols.mqtt.encoding import PreparedPublish
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import NONE, Properties
from protocols.mqtt.reasons import ReasonCode

V5: Final = Version.V5  # looked up once: Python 3.11 takes 0.2 us for a member of an enumeration
WRITE_AT: Final = 65_536  # bytes of deliveries that wait for their turn to be written; more are written at once


class ClientPort(abc.ABC):
    """The client at the other end of a connection."""

    __slots__ = (
        "_connection", "_counters", "_disconnected_for", "_ended", "_holding", "_pump", "_self_delivery", "_sending",
        "client_id", "grant", "limits",
    )  # fmt: skip

    def __init__(self, connection: Connection, counters: Counters, self_delivery: SelfDelivery | None) -> None:
        self.client_id = ""  # of CONNECT, or assigned
        self.grant: Grant | None = None  # what the client may do; None before CONNACK
        self._connection = connection
        self._counters = counters
        self._self_delivery = self_delivery
        self._pump: Pump | None = None
        self._disconnected_for = ""
        # the reason code that ends it, None: its socket went; and our words, "" where it is the client's code
        self._ended: tuple[int | None, str] = (None, "")
        self._holding: object | None = None  # messages are held back, since then
        self.limits: ClientLimits | None = None  # None: not logged in, or there are none
        self._sending: SendingPause | None = None  # None: it may be sent as much as there is

    # what it is

    @property
    def subject(self) -> str:
        """What the connection is called where pauses are told."""
        return subject("mqtt", self.client_id, "" if self._pump is None else self._pump.peer)

    @property
    def version(self) -> Version:
        """Of the protocol; CONNECT has come."""
        version = self._connection.version
        assert version is not None
        return version

    @property
    def is_v5(self) -> bool:
        """Whether the client speaks MQTT 5.0."""
        return self._connection.version is V5

    @property
    def reports_failures(self) -> bool:
        """Whether PUBREC can say that a message was not stored: not in 3.1.1."""
        return self._connection.is_open and self.is_v5

    @property
    def takes_packets(self) -> bool:
        """Whether a PUBLISH at QoS 0 has the same bytes for this client as for others of its version."""
        return not self._connection.gives_aliases

    def may_receive(self, topic: str, record: Received) -> bool:
        """Whether the client may read a record, which has this MQTT topic."""
        return self.grant is not None and self.grant.mqtt_subscribe(topic, record.topic, record.key)

    def may_receive_retained(self, topic: str) -> bool:
        """Whether the client may read the retained message of an MQTT topic."""
        return self.grant is not None and self.grant.mqtt_subscribe.of_topic(topic)

    def audit_denied(self, what: str, on: str) -> None:
        """The client may not do something that it wanted to."""
        if audit.enabled and self._pump is not None and self.grant is not None:
            audit.denied(where_of("mqtt", self._pump, self.client_id), self.grant.identity.name, what, on)

    # what can be sent now

    @property
    def is_open(self) -> bool:
        """Whether something can be sent."""
        return self._connection.is_open

    @property
    def takes_more(self) -> bool:
        """Whether something can be sent: the socket's buffer is below its mark, and nothing is owed to a limit."""
        if self._holding is not None and self._connection.unsent > WRITE_AT:
            return False
        if self._sending is not None and not self._sending.is_open:
            return False
        return self._connection.is_open and self._pump is not None and self._pump.writable

    @property
    def window(self) -> int:
        """Free places in the client's Receive Maximum."""
        return self._connection.outbound.free

    def enter_limits(self, limits: Limits, identity: Identity, former: ClientPort | None) -> None:
        """Count it as connected; `former`: the connection that it takes the place of. See `Limits.enter`."""
        assert self._pump is not None
        peer, listener = address_of(self._pump.peer), self._pump.entrance.name
        self.limits = limits.enter(identity, peer, listener, None if former is None else former.limits)

    def hold_to_limits(
        self, limits: Limits, pause: Callable[[str], None], resume: Callable[[str], None]
    ) -> ReadingPause | None:
        """Begin to count what it is sent; what counts what it publishes, and has its reading paused and resumed."""
        own = self.limits
        if own is not None and own.outgoing is not None:
            self._sending = SendingPause(own.outgoing, self.subject, self.writable)

        def send_away() -> None:
            limits.disconnected += 1
            self.disconnect(ReasonCode.MESSAGE_RATE_TOO_HIGH, "more is published than the limit allows")

        return None if own is None or own.incoming is None else ReadingPause(own.incoming, pause, resume, send_away)

    def leave_limits(self) -> None:
        """It is over."""
        if self._sending is not None:
            self._sending.end()
            self._sending = None
        if self.limits is not None:
            self.limits.leave()

    # deliveries

    def send(
        self,
        message: PreparedPublish,
        qos: int,
        *,
        retain: bool = False,
        dup: bool = False,
        packet_id: int | None = None,
    ) -> int | None:
        """Send a PUBLISH; its packet identifier, 0 at QoS 0, or None when it is larger than the client takes."""
        sent = self._connection.send_prepared(message, qos, retain=retain, dup=dup, packet_id=packet_id)
        if sent is None:
            self._counters.too_large += 1
            return None
        self._counters.delivered += 1
        if self._sending is not None:
            self._sending.spend(1, len(message.rest))
        if self._connection.unsent > WRITE_AT:
            self.flush()
        else:
            self.flush_soon()
        return sent

    def send_packets(self, packets: Packets, run: Sequence[Received]) -> bool:
        """Send a run that is encoded already (see `takes_packets`), as far as the client may read it.

        Returns:
            False when it has something that is too large for the client: nothing is sent.
        """
        connection = self._connection
        if not self.may_receive(packets.topic, run[0]):  # they have one topic and one key
            return True
        if not connection.send_encoded(packets.data, packets.largest):
            return False
        self._counters.delivered += len(run)
        if self._sending is not None:
            self._sending.spend(len(run), sum(len(record.value or b"") for record in run))
        if connection.unsent > WRITE_AT:
            self.flush()
        elif self._pump is not None:
            self._pump.flush_soon()
        return True

    def send_pubrel(self, packet_id: int) -> None:
        """Send PUBREL."""
        self._connection.send_pubrel(packet_id)
        self.flush_soon()

    def release_reserved(self, packet_id: int) -> None:
        """Free an identifier that will not be sent again."""
        self._connection.release_reserved(packet_id)

    def hold_messages(self) -> None:
        """Send no messages for a moment: the acknowledgement of the client's own comes first."""
        if self._holding is None and self._self_delivery is not None:
            self._holding = object()
            self._connection.hold_messages()
            self._self_delivery.later((self._held_long_enough, self._holding))

    def _held_long_enough(self, since: object) -> None:
        if self._holding is since:
            self.release_messages()

    def release_messages(self) -> None:
        """Send the messages that were held back."""
        if self._holding is not None:
            self._holding = None
            self._connection.release_messages()
            self.flush()
            self.writable()

    @abc.abstractmethod
    def writable(self) -> None:
        """Go on sending: the socket has capacity again."""

    # the client's own messages

    @abc.abstractmethod
    def answered(self) -> None:
        """Results of publishes are known: send the acknowledgements that are due."""

    def complete(self, packet_id: int) -> None:
        """Send PUBCOMP."""
        self._connection.send_pubcomp(packet_id)
        self.flush_soon()

    # writing, and the end

    def flush_soon(self) -> None:
        """Write at the end of this loop turn."""
        if self._pump is not None:
            self._pump.flush_soon()

    def flush(self) -> None:
        """Write what waits."""
        if self._pump is not None:
            self._pump.flush()

    def give_up(self) -> None:
        """Our bug, which was told: say so, and end the connection."""
        if self._pump is not None:
            self._pump.give_up()

    def disconnect(self, code: ReasonCode, reason: str, properties: Properties = NONE) -> None:
        """Close with DISCONNECT; the will is published all the same."""
        self._disconnected_for = reason
        self._ended = (code, reason)
        self._leave(with_will=True)
        self._connection.send_disconnect(code, reason, properties)
        self.flush()

    @abc.abstractmethod
    def _leave(self, *, with_will: bool) -> None:
        """Give the session up; without effect after the first time."""

    @abc.abstractmethod
    def taken_over(self) -> None:
        """Close: another connection has the client id now [MQTT-3.1.4-3]."""
