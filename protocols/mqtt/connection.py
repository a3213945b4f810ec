"""The server's side of one MQTT connection (5.0, 3.1.1 and 3.1), sans-io: bytes in, events out, bytes out.

It enforces the state table `LEGAL` and what CONNACK announced. The events are the received packets, with topic aliases
resolved; PINGREQ is answered here. The caller answers

    CONNECT                 with `accept`, `send_disconnect`, or `send_auth` if it has an authentication method
    AUTH                    with `accept`, `send_disconnect` or `send_auth`
    PUBLISH                 with `send_puback` (QoS 1) or `send_pubrec` (QoS 2)
    PUBREL                  with `send_pubcomp`
    PUBREC                  with `send_pubrel`; from code 0x80 on the exchange has ended instead
    SUBSCRIBE, UNSUBSCRIBE  with `send_suback`, `send_unsuback`

PUBACK and PUBCOMP free the packet identifier of a delivery. DISCONNECT is the last event.

    NEW --CONNECT--> CONNECTING --accept--> OPEN --DISCONNECT and finish, an error, our DISCONNECT--> CLOSED
    NEW --CONNECT with an authentication method--> AUTHENTICATING --accept--> OPEN
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from flowcontrol.credit import Inflight
from protocols.connection import ConnectionFailed
from protocols.errors import PeerError, UsageError
from protocols.mqtt import packets
from protocols.mqtt.encoding import encode_packet
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import NONE, Properties
from protocols.mqtt.reasons import ReasonCode
from protocols.mqtt.receiving import GRACE, Receiver
from protocols.mqtt.states import LARGEST_PACKET, UNLIMITED, Awaits, PacketLimits, State, Turn, publish_flags

OPEN: Final = State.OPEN  # looked up once: Python 3.11 takes 0.2 us for a member of an enumeration
CLOSED: Final = State.CLOSED

__all__ = ["Connection", "PacketLimits", "State"]


class Connection(Receiver):
    """The server's side of one connection; see `protocols.connection.Connection` for its use.

    Nothing is parsed once `closing` is true, nor behind DISCONNECT. After DISCONNECT the caller answers the client's
    earlier requests and then calls `finish`.
    """

    __slots__ = ("_connected_at", "_eof", "_suspended")

    def __init__(self, limits: PacketLimits | None = None) -> None:
        super().__init__(limits or PacketLimits())
        self._connected_at: float | None = None
        self._suspended = False
        self._eof = False

    # called by the pump

    def receive_data(self, data: bytes) -> list[Any]:
        """Parse received bytes into events; after an error the last event is `ConnectionFailed`."""
        state = self.state
        if state is CLOSED or self._draining:
            return []
        if state is State.CONNECTING:
            return self._hold(data)
        if self._waiting:  # a large packet in many pieces is joined once, when it is complete
            self._waiting += data
            if len(self._waiting) < self._needed:
                return []
            data = self._take_waiting()
        events: list[Any] = []
        self._parse(data, events)
        return events

    def receive_eof(self) -> list[Any]:
        """Handle a close without DISCONNECT; packets sent ahead of CONNACK are still parsed after `accept`."""
        if self.state is CLOSED or self._draining:
            return []
        if self.state is State.CONNECTING:
            self._eof = True
            return []
        self._close()
        return [ConnectionFailed("closed without DISCONNECT", "")]

    def next_deadline(self) -> float | None:
        """Return the time at which `tick` must be called at the latest, or None."""
        state = self.state
        silent = None if self._grace is None or self._suspended else self._received_at + self._grace
        if state is OPEN:
            return None if self._draining else silent
        if state in (State.NEW, State.AUTHENTICATING) and self._connected_at is not None:
            deadline = self._connected_at + self._limits.connect_timeout_s
            return deadline if silent is None or self._turn is not Turn.CLIENT else min(deadline, silent)
        return None

    def tick(self, now: float) -> list[Any]:
        """Set the time; close if a client was silent for 1.5 times its keep alive [MQTT-3.1.2-22]."""
        self._now = now
        if self._connected_at is None:
            self._connected_at = self._received_at = now
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return []
        if self.state is OPEN:
            return [self._fail(PeerError(ReasonCode.KEEP_ALIVE_TIMEOUT, "no packet for 1.5 times the keep alive"))]
        if self.state is State.AUTHENTICATING:
            return [self._fail(PeerError(ReasonCode.NOT_AUTHORIZED, "authentication took too long"))]
        self._close()
        return [ConnectionFailed("no CONNECT in time", "")]

    @property
    def closing(self) -> bool:
        """Whether the connection has ended: write the queued bytes, then close the socket."""
        return self.state is CLOSED

    @property
    def is_open(self) -> bool:
        """Whether CONNACK accepted the client and neither side has closed since."""
        return self.state is OPEN

    def finish(self) -> None:
        """Close after DISCONNECT and everything before it was handled."""
        self._close()

    def suspend_keepalive(self) -> None:
        """Suspend the keep-alive timeout while the socket is not read."""
        self._suspended = True

    def resume_keepalive(self, now: float) -> None:
        """Restart the keep-alive timeout when the socket is read again."""
        self._suspended = False
        self._now = self._received_at = now

    # opening and closing

    def accept(
        self,
        session_present: bool = False,
        properties: Properties = NONE,
        *,
        received: Iterable[int] = (),
        reserved: Iterable[int] = (),
    ) -> list[Any]:
        """Answer CONNECT with success, and from now on enforce what `properties` announces.

        An absent property means the standard's default (QoS 2, retained messages, wildcards, shared subscriptions and
        subscription identifiers are available; no topic aliases; Receive Maximum 65,535), but Maximum Packet Size comes
        from the limits. A 3.1.1 client does not get the properties; they are enforced by closing, except Receive
        Maximum and Server Keep Alive.

        Args:
            session_present: whether the session existed before [MQTT-3.2.2-2], [MQTT-3.2.2-3].
            properties: CONNACK's properties.
            received: the client's packet identifiers between PUBLISH and PUBREL in the resumed session. A PUBLISH with
                one of them is passed to the session again, which recognizes it [MQTT-4.3.3-10].
            reserved: packet identifiers of the session's deliveries; no other message gets one. Each is used again by
                `send_prepared` (`packet_id=`) or `send_pubrel`, or freed by `release_reserved`.

        Returns:
            The events of packets that the client had sent ahead, in order.

        Raises:
            UsageError: there is no CONNECT to answer, or a packet identifier is not in 1..65,535.
        """
        connect = self.connect
        if connect is None or self.state not in (State.CONNECTING, State.AUTHENTICATING):
            raise UsageError(f"accept in state {self.state.name}")
        if properties.maximum_packet_size is None:
            properties = msgspec.structs.replace(properties, maximum_packet_size=self._limits.max_packet_bytes)
        if properties.authentication_method not in (None, self._method):
            raise UsageError("another authentication method than in CONNECT")  # [MQTT-4.12.0-6]
        properties = msgspec.structs.replace(properties, authentication_method=self._method)  # [MQTT-4.12.0-5]
        if connect.version is Version.V31:
            session_present = False  # reserved in 3.1's CONNACK
        data = encode_packet(packets.Connack(session_present, 0, properties), connect.version)
        if len(data) > self._max_out:  # leave out the optional properties
            properties = msgspec.structs.replace(
                properties, reason_string=None, user_properties=(), response_information=None, topic_alias_maximum=None
            )
            data = encode_packet(packets.Connack(session_present, 0, properties), connect.version)
            if len(data) > self._max_out:
                return [self._fail(PeerError(ReasonCode.PACKET_TOO_LARGE, "CONNACK is too large for the client"))]
        self._announce(connect, properties)
        self._restore(received, reserved)
        self._out += data
        self._turn = Turn.NONE
        self.state = OPEN
        self._received_at = self._now
        events: list[Any] = []
        self._parse(self._take_waiting(), events)
        if self._eof and self.is_open:
            events += self.receive_eof()
        return events

    def send_auth(self, reason_code: int, properties: Properties = NONE) -> None:
        """Answer a CONNECT with an authentication method, or an AUTH.

        0x18 asks the client to continue; 0x00 ends a re-authentication with success. The first authentication succeeds
        with `accept`. Both fail with `send_disconnect`. CONNECT's method is added [MQTT-4.12.0-5].

        Raises:
            UsageError: there is nothing to answer, or the code is not allowed now.
        """
        if self.state is CLOSED:
            return
        codes = (0x18,) if self.state is State.AUTHENTICATING else (0x00, 0x18)
        if self._turn is not Turn.SERVER or reason_code not in codes:
            raise UsageError(f"AUTH 0x{reason_code:02X} in state {self.state.name}, turn of {self._turn.value}")
        self._queue(packets.Auth(reason_code, msgspec.structs.replace(properties, authentication_method=self._method)))
        self._turn = Turn.CLIENT if reason_code else Turn.NONE
        if self.state is State.AUTHENTICATING:
            self._received_at = self._now  # until now the client waited for us

    def give_up(self) -> list[Any]:
        """Close after a bug of ours: 0x83 in DISCONNECT, or in CONNACK before `accept`."""
        if self.state is CLOSED:
            return []
        return [self._fail(PeerError(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, "internal error"))]

    # opening

    def _hold(self, data: bytes) -> list[Any]:
        """Keep bytes that the client sends ahead of CONNACK (section 3.1.4), up to a limit."""
        self._waiting += data
        if len(self._waiting) > self._limits.max_held_bytes:
            return [self._fail(PeerError(ReasonCode.QUOTA_EXCEEDED, "too much was sent ahead of CONNACK"))]
        return []

    def _announce(self, connect: packets.Connect, properties: Properties) -> None:
        """Set the limits that are enforced from CONNACK's properties."""
        self._announced = properties
        v5 = connect.version is Version.V5
        self._max_in = properties.maximum_packet_size or LARGEST_PACKET
        if v5 and self._limits.enforce_receive_maximum:
            self.inbound = Inflight(properties.receive_maximum or UNLIMITED)
        if v5 and properties.server_keep_alive is not None:  # [MQTT-3.2.2-21]
            self._grace = properties.server_keep_alive * GRACE if properties.server_keep_alive else None
        maximum_qos = 2 if properties.maximum_qos is None else properties.maximum_qos
        self._flags = publish_flags(maximum_qos, properties.retain_available != 0)

    def _restore(self, received: Iterable[int], reserved: Iterable[int]) -> None:
        """Restore the packet identifiers of a resumed session; they do not count in this connection's windows."""
        self._qos2.update(dict.fromkeys(received, False))
        self._awaited.update(dict.fromkeys(reserved, Awaits.RESERVED))
        for packet_id in (*self._qos2, *self._awaited):
            if not 1 <= packet_id <= UNLIMITED:
                raise UsageError(f"a packet identifier is 1..{UNLIMITED}, got {packet_id}")
        # A client may send one more message after each PUBCOMP, also for a PUBLISH of an earlier connection (section
        # 4.9), so it can exceed its initial quota by these.
        self.inbound.limit += len(self._qos2)
