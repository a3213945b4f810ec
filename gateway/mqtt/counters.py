"""What the MQTT sessions of a process count."""

from __future__ import annotations

import msgspec


class Counters(msgspec.Struct):
    """What the sessions of this process did; read by the metrics."""

    published: int = 0
    acknowledged: int = 0
    refused: int = 0
    lost_at_qos_0: int = 0
    delivered: int = 0
    delivered_acknowledged: int = 0
    expired: int = 0
    too_large: int = 0
    dropped: int = 0
    gaps: int = 0  # messages for kept sessions that retention had deleted
    failed_connections: int = 0
    refused_connections: int = 0


class SessionStatistics(msgspec.Struct, frozen=True):
    """A snapshot of the sessions.

    Attributes:
        connected: sessions with a connection here.
        stored: kept sessions that are known, of all gateways.
        takeovers_total: connections that lost their client id to a newer one.
        expired_total: sessions that this gateway ended because their time had run out.
        wills_total: wills that this gateway published.
        invalid_total: records in their topic that are none of ours, or say what cannot be; they are ignored.
    """

    connected: int
    stored: int
    takeovers_total: int
    expired_total: int
    wills_total: int
    invalid_total: int
