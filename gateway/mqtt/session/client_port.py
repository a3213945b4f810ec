"""The sending side of a connection, as the session and its parts use it.

`gateway.mqtt.connection.client.Client`, which imports the session, extends it by login, publishes, subscriptions and
the end of the connection.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Final

from gateway.limits.limits import Limits
from gateway.limits.rate_pauses import ReadingPause
from gateway.mqtt.counters import Counters
from gateway.mqtt.routing.messages import Packets
from gateway.mqtt.session.self_delivery import SelfDelivery
from gateway.net.connected_client import ConnectedClient
from gateway.runtime.audited import audit, where_of
from gateway.security.rights.authorization import Grant
from mapping.record import Received
from protocols.mqtt.connection import Connection
from protocols.mqtt.encoding import PreparedPublish
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import NONE, Properties
from protocols.mqtt.reasons import ReasonCode

V5: Final = Version.V5  # looked up once: Python 3.11 takes 0.2 us for a member of an enumeration
WRITE_AT: Final = 65_536  # bytes of queued deliveries; above that they are written immediately


class ClientPort(ConnectedClient):
    """The client at the other end of a connection."""

    __slots__ = (
        "_connection", "_counters", "_disconnected_for", "_ended", "_holding", "_self_delivery", "grant",
    )  # fmt: skip

    protocol = "mqtt"

    def __init__(self, connection: Connection, counters: Counters, self_delivery: SelfDelivery | None) -> None:
        super().__init__()
        self.grant: Grant | None = None  # what the client may do; None before CONNACK
        self._connection = connection
        self._counters = counters
        self._self_delivery = self_delivery
        self._disconnected_for = ""
        # reason code that ended the connection (None: the socket was lost), and reason text ("": the client's code)
        self._ended: tuple[int | None, str] = (None, "")
        self._holding: object | None = None  # identifies the current hold of messages

    # properties of the client

    @property
    def version(self) -> Version:
        """The protocol version; CONNECT must have been received."""
        version = self._connection.version
        assert version is not None
        return version

    @property
    def is_v5(self) -> bool:
        """Whether the client speaks MQTT 5.0."""
        return self._connection.version is V5

    @property
    def reports_failures(self) -> bool:
        """Whether PUBREC can report that a message was not stored; 3.1.1 has no codes for it."""
        return self._connection.is_open and self.is_v5

    @property
    def takes_packets(self) -> bool:
        """Whether a PUBLISH at QoS 0 has the same bytes for this client as for others of its version."""
        return not self._connection.gives_aliases

    @abc.abstractmethod
    def rights_changed(self) -> None:
        """Apply the changed rights of `grant`."""

    def may_receive(self, topic: str, record: Received) -> bool:
        """Whether the client may read a record that has this MQTT topic."""
        return self.grant is not None and self.grant.mqtt_subscribe(topic, record.topic, record.key)

    def may_receive_retained(self, topic: str) -> bool:
        """Whether the client may read the retained message of an MQTT topic."""
        return self.grant is not None and self.grant.mqtt_subscribe.of_topic(topic)

    def audit_denied(self, what: str, on: str) -> None:
        """Write an audit line: the client was denied an operation."""
        if audit.enabled and self.grant is not None:
            audit.denied(where_of("mqtt", self.pump, self.client_id), self.grant.identity.name, what, on)

    # capacity

    @property
    def is_open(self) -> bool:
        """Whether packets can be sent."""
        return self._connection.is_open

    @property
    def takes_more(self) -> bool:
        """Whether messages can be sent now: the write buffer is below its mark and no rate limit is exceeded."""
        if self._holding is not None and self._connection.unsent > WRITE_AT:
            return False
        return self._connection.is_open and self.can_send

    @property
    def window(self) -> int:
        """Number of further messages that the client's Receive Maximum allows."""
        return self._connection.outbound.free

    def apply_limits(
        self, limits: Limits, pause: Callable[[str], None], resume: Callable[[str], None]
    ) -> ReadingPause | None:
        """Apply the rate limits to deliveries; return the one for publishes, which pauses and resumes reading."""
        own = self.limits
        self.limit_sending()

        def send_away() -> None:
            limits.disconnected += 1
            self.disconnect(ReasonCode.MESSAGE_RATE_TOO_HIGH, "the publish rate exceeds the limit")

        return None if own is None or own.incoming is None else ReadingPause(own.incoming, pause, resume, send_away)

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
        """Send a PUBLISH; return its packet identifier (0 at QoS 0), or None if it is too large for the client."""
        sent = self._connection.send_prepared(message, qos, retain=retain, dup=dup, packet_id=packet_id)
        if sent is None:
            self._counters.too_large += 1
            return None
        self._counters.delivered += 1
        if self.sending is not None:
            self.sending.spend(1, len(message.rest))
        if self._connection.unsent > WRITE_AT:
            self.flush()
        else:
            self.flush_soon()
        return sent

    def send_packets(self, packets: Packets, run: Sequence[Received]) -> bool:
        """Send a run that is already encoded (see `takes_packets`), unless the client may not read its topic.

        Returns:
            False if a packet exceeds the client's Maximum Packet Size; then nothing is sent.
        """
        connection = self._connection
        if not self.may_receive(packets.topic, run[0]):  # the run has one topic and one key
            return True
        if not connection.send_encoded(packets.data, packets.largest):
            return False
        self._counters.delivered += len(run)
        if self.sending is not None:
            self.sending.spend(len(run), sum(len(record.value or b"") for record in run))
        if connection.unsent > WRITE_AT:
            self.flush()
        else:
            self.pump.flush_soon()
        return True

    def send_pubrel(self, packet_id: int) -> None:
        """Send PUBREL."""
        self._connection.send_pubrel(packet_id)
        self.flush_soon()

    def release_reserved(self, packet_id: int) -> None:
        """Free a reserved packet identifier whose message will not be sent again."""
        self._connection.release_reserved(packet_id)

    def hold_messages(self) -> None:
        """Hold messages back until the client's own message is acknowledged, for a limited time."""
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

    # the client's own messages

    @abc.abstractmethod
    def answered(self) -> None:
        """Send the acknowledgements that are due immediately."""

    def complete(self, packet_id: int) -> None:
        """Send PUBCOMP."""
        self._connection.send_pubcomp(packet_id)
        self.flush_soon()

    # writing and closing

    def flush_soon(self) -> None:
        """Write queued packets at the end of this event loop iteration."""
        self.pump.flush_soon()

    def flush(self) -> None:
        """Write queued packets."""
        self.pump.flush()

    def give_up(self) -> None:
        """End the connection after a bug of ours, which was already reported."""
        self.pump.give_up()

    def disconnect(
        self, code: ReasonCode, reason: str, properties: Properties = NONE, *, with_will: bool = True
    ) -> None:
        """Close with DISCONNECT, or before CONNACK with its error; `with_will`: the will is published."""
        self._disconnected_for = reason
        self._ended = (code, reason)
        self._leave(with_will=with_will)
        self._connection.send_disconnect(code, reason, properties)
        self.flush()

    @abc.abstractmethod
    def _leave(self, *, with_will: bool) -> None:
        """Detach the session from this connection; later calls do nothing."""

    @abc.abstractmethod
    def taken_over(self) -> None:
        """Disconnect, because another connection uses the client id now [MQTT-3.1.4-3]."""
