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
