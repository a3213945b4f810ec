"""Counters of the MQTT sessions of a process."""

from __future__ import annotations

from typing import Annotated

import msgspec

from telemetry.statistics import counter, gauge


class Counters(msgspec.Struct):
    """Event counts of all sessions of this process, exported as metrics."""

    published: Annotated[int, counter("messages that clients have published")] = 0
    acknowledged: Annotated[int, counter("messages answered by PUBACK or PUBCOMP with success")] = 0
    refused: Annotated[int, counter("messages refused, with a reason code where the protocol has one")] = 0
    dead_letters: Annotated[
        int, counter("refused messages that clients sent again, stored in `__trivium_refused` and acknowledged")
    ] = 0
    lost_at_qos_0: Annotated[int, counter("messages at QoS 0 that were not stored")] = 0
    delivered: Annotated[int, counter("messages sent to clients")] = 0
    delivered_acknowledged: Annotated[int, counter("messages that clients have acknowledged")] = 0
    expired: Annotated[int, counter("messages not sent because their expiry had passed")] = 0
    too_large: Annotated[int, counter("messages above a client's Maximum Packet Size, not sent")] = 0
    dropped: Annotated[int, counter("messages at QoS 0 dropped because the client was too slow")] = 0
    gaps: Annotated[int, counter("messages for kept sessions that retention deleted before delivery")] = 0
    failed_connections: Annotated[int, counter("connections closed because of a protocol error")] = 0
    refused_connections: Annotated[int, counter("connections refused in CONNACK")] = 0


class SessionStatistics(msgspec.Struct, frozen=True):
    """A snapshot of the session registry, for the metrics."""

    connected: Annotated[int, gauge("sessions with a connection here")]
    stored: Annotated[int, gauge("known kept sessions of all gateways")]
    stored_bytes: Annotated[int, gauge("bytes that they are counted for: `mqtt.max_session_bytes`")]
    refused_total: Annotated[int, counter("CONNECTs and SUBSCRIBEs refused because too much of sessions is stored")]
    takeovers_total: Annotated[int, counter("connections that lost their client id to a newer one")]
    expired_total: Annotated[int, counter("sessions that expired at this gateway")]
    wills_total: Annotated[int, counter("wills that this gateway published")]
    invalid_total: Annotated[int, counter("ignored records in the sessions topic: foreign or invalid")]
