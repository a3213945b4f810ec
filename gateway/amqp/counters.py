"""Counters and gauges of the AMQP side, for the metrics."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import field

from mapping.outcomes import Outcome
from telemetry.statistics import counter, gauge


class Counts(msgspec.Struct):
    """The counters of all connections and links."""

    incoming: Annotated[dict[Outcome, int], counter("messages received from peers, by outcome", "outcome")] = field(
        default_factory=lambda: dict.fromkeys(Outcome, 0)
    )
    sent: Annotated[int, counter("messages sent to peers")] = 0
    expired: Annotated[int, counter("records not sent because they had expired")] = 0
    too_large_for_peer: Annotated[int, counter("records above a receiver's max-message-size, left to others")] = 0
    rejected_by_peer: Annotated[int, counter("messages that peers have rejected")] = 0
    returned_by_peer: Annotated[int, counter("messages that peers have released or modified")] = 0
    aborted: Annotated[int, counter("deliveries that peers aborted")] = 0
    dead_letters: Annotated[int, counter("records for which a dead letter was stored")] = 0
    dead_letters_failed: Annotated[int, counter("dead letters that could not be stored")] = 0
    transactions_committed: Annotated[int, counter("transactions discharged and committed")] = 0
    transactions_rolled_back: Annotated[int, counter("transactions rolled back, by the peer or by the gateway")] = 0
    transactions_timed_out: Annotated[int, counter("transactions rolled back, not discharged in time")] = 0
    connections: Annotated[int, counter("connections accepted")] = 0
    refused_logins: Annotated[int, counter("logins refused")] = 0
    refused_links: Annotated[int, counter("attaches refused")] = 0
    broken: Annotated[int, counter("connections that failed (protocol error, idle time-out) or were lost")] = 0


class AmqpStatistics(Counts, kw_only=True):
    """A snapshot of `Counts` and of the current values."""

    open_connections: Annotated[int, gauge("open connections")]
    senders: Annotated[int, gauge("links on which peers send")]
    receivers: Annotated[int, gauge("links on which peers receive")]
    credit: Annotated[int, gauge("unused credit of senders")]
    unanswered: Annotated[int, gauge("messages from peers that are not settled yet")]
    unsettled: Annotated[int, gauge("messages to peers that are not settled yet")]
    window: Annotated[int, gauge("unsettled messages that the windows of all sending links allow")]
    waiting_links: Annotated[int, gauge("links without credit because a budget is used up")]
    nodes: Annotated[int, gauge("temporary queues and topics")]
    transactions: Annotated[int, gauge("open transactions")]
    transaction_producers: Annotated[int, gauge("Kafka producers for transactions")]
