"""Counters and gauges of the AMQP side, for the metrics."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import field

from gateway.statistics import counter, gauge
from mapping.outcomes import Outcome


class Counts(msgspec.Struct):
    """The counters of all connections and links."""

    incoming: Annotated[dict[Outcome, int], counter("messages from peers by what became of them", "outcome")] = field(
        default_factory=lambda: dict.fromkeys(Outcome, 0)
    )
    sent: Annotated[int, counter("messages sent to peers")] = 0
    expired: Annotated[int, counter("records not sent because their expiry had passed")] = 0
    too_large_for_peer: Annotated[int, counter("records above a receiver's max-message-size, not sent")] = 0
    rejected_by_peer: Annotated[int, counter("messages that peers have rejected")] = 0
    returned_by_peer: Annotated[int, counter("messages that peers have released or modified")] = 0
    aborted: Annotated[int, counter("deliveries that peers took back")] = 0
    dead_letters: Annotated[int, counter("records for which a dead letter was stored")] = 0
    dead_letters_failed: Annotated[int, counter("dead letters that could not be stored")] = 0
    transactions_committed: Annotated[int, counter("transactions discharged and committed")] = 0
    transactions_rolled_back: Annotated[int, counter("transactions undone, whoever wanted it")] = 0
    transactions_timed_out: Annotated[int, counter("transactions undone because nobody discharged them in time")] = 0
    connections: Annotated[int, counter("connections accepted")] = 0
    refused_logins: Annotated[int, counter("logins refused")] = 0
    refused_links: Annotated[int, counter("attaches refused")] = 0
    broken: Annotated[int, counter("connections that broke: a fault of the peer, silence, or its end")] = 0


class AmqpStatistics(Counts, kw_only=True):
    """A snapshot of `Counts` and of the current values."""

    open_connections: Annotated[int, gauge("connections now")]
    senders: Annotated[int, gauge("links on which peers send")]
    receivers: Annotated[int, gauge("links on which peers receive")]
    credit: Annotated[int, gauge("credit granted to senders and not used")]
    unanswered: Annotated[int, gauge("messages from peers without an outcome yet")]
    unsettled: Annotated[int, gauge("messages to peers without an outcome yet")]
    window: Annotated[int, gauge("messages that senders may have on the way, of all links")]
    waiting_links: Annotated[int, gauge("links that get no credit while a budget is used up")]
    nodes: Annotated[int, gauge("temporary queues and topics")]
    transactions: Annotated[int, gauge("open transactions")]
    transaction_producers: Annotated[int, gauge("Kafka producers for transactions")]
