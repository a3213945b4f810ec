"""A session's connection as the session and its parts see it.

The one implementer is `gateway.mqtt.connection.client.Client`, which imports the session: the other direction is this.
"""

from __future__ import annotations

from typing import Protocol

from gateway.security.authorization import Grant
from mapping.record import Received
from protocols.mqtt.encoding import PreparedPublish
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import NONE, Properties
from protocols.mqtt.reasons import ReasonCode


class ClientPort(Protocol):
    """The client at the other end of an open connection."""

    client_id: str  # of CONNECT, or assigned
    grant: Grant | None  # what the client may do; None before CONNACK

    # what it is

    @property
    def version(self) -> Version:
        """Of the protocol."""
        ...

    @property
    def is_v5(self) -> bool:
        """Whether the client speaks MQTT 5.0."""
        ...

    @property
    def reports_failures(self) -> bool:
        """Whether PUBREC can say that a message was not stored: not in 3.1.1."""
        ...

    @property
    def takes_packets(self) -> bool:
        """Whether a PUBLISH at QoS 0 has the same bytes for this client as for others of its version."""
        ...

    def may_receive(self, topic: str, record: Received) -> bool:
        """Whether the client may read a record, which has this MQTT topic."""
        ...

    def may_receive_retained(self, topic: str) -> bool:
        """Whether the client may read the retained message of an MQTT topic."""
        ...

    # what can be sent now

    @property
    def is_open(self) -> bool:
        """Whether something can be sent."""
        ...

    @property
    def subject(self) -> str:
        """What the connection is called where pauses are told."""
        ...

    @property
    def takes_more(self) -> bool:
        """Whether something can be sent, and the socket's buffer is below its mark."""
        ...

    @property
    def window(self) -> int:
        """Free places in the client's Receive Maximum."""
        ...

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
        ...

    def send_packet(self, packet: bytes) -> None:
        """Send a PUBLISH at QoS 0 that is encoded already; see `takes_packets`."""
        ...

    def send_pubrel(self, packet_id: int) -> None:
        """Send PUBREL."""
        ...

    def release_reserved(self, packet_id: int) -> None:
        """Free an identifier that will not be sent again."""
        ...

    def hold_messages(self) -> None:
        """Send no messages for a moment: the acknowledgement of the client's own comes first."""
        ...

    def release_messages(self) -> None:
        """Send the messages that were held back."""
        ...

    # the client's own messages

    def answered(self) -> None:
        """Results of publishes are known: send the acknowledgements that are due."""
        ...

    def complete(self, packet_id: int) -> None:
        """Send PUBCOMP."""
        ...

    # writing, and the end

    def flush_soon(self) -> None:
        """Write at the end of this loop turn."""
        ...

    def flush(self) -> None:
        """Write what waits."""
        ...

    def give_up(self) -> None:
        """Our bug, which was told: say so, and end the connection."""
        ...

    def taken_over(self) -> None:
        """Close: another connection has the client id now [MQTT-3.1.4-3]."""
        ...

    def disconnect(self, code: ReasonCode, reason: str, properties: Properties = NONE) -> None:
        """Close with DISCONNECT; the will is published all the same."""
        ...
