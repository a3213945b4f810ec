"""The events of an AMQP connection.

`delivery` is the engine's handle of a delivery: opaque, hashable, valid until it is settled or its link is detached.
The last event is `protocols.connection.ConnectionFailed` or `ConnectionClosed`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from protocols.amqp.links import Link
from protocols.amqp.outcomes import DeliveryState, Error


class SaslInitReceived(msgspec.Struct, frozen=True, gc=False):
    """The peer chose a mechanism (part 5.3.3.2); answer with `sasl_challenge` or `sasl_outcome`."""

    mechanism: str
    response: bytes | None


class SaslResponseReceived(msgspec.Struct, frozen=True, gc=False):
    """The peer answered a challenge (part 5.3.3.4)."""

    response: bytes


class ConnectionOpened(msgspec.Struct, frozen=True, gc=False):
    """The peer's open (part 2.7.1); answer with `open` or `close`."""

    container_id: str
    with_sasl: bool


class LinkRequested(msgspec.Struct, frozen=True, gc=False):
    """The peer's attach; answer with `accept_link` or `refuse_link`."""

    link: Link


class TransfersReceived(msgspec.Struct, frozen=True, gc=False):
    """Consecutive complete messages on one link; without C, and of several transfers, each is an event of its own."""

    link: Link
    deliveries: list[Any]  # None for one that the peer sent settled: it needs no outcome
    messages: list[bytes]  # one for each delivery: its sections, undecoded


class TransferUnfit(msgspec.Struct, frozen=True, gc=False):
    """A complete message above the link's max-message-size, whose bytes were not kept, or of a foreign format."""

    link: Link
    delivery: Any  # None when the peer sent it settled
    size: int  # of the message in bytes
    format: int  # its message-format (part 2.7.5); 0 is AMQP's own
    txn_id: bytes | None = None  # of the transaction that it belongs to, if any


class TransactionalTransfer(msgspec.Struct, frozen=True, gc=False):
    """A complete message posted in a transaction (part 4.4.1); answer with `settle_posted`."""

    link: Link
    delivery: Any  # None when the peer sent it settled: it needs no outcome
    data: bytes  # the message's sections, undecoded
    txn_id: bytes  # as the peer wrote it


class TransferAborted(msgspec.Struct, frozen=True, gc=False):
    """The peer aborted a delivery between two transfers (part 2.6.14); the delivery used one credit."""

    link: Link


class DeliveriesAccepted(msgspec.Struct, frozen=True, gc=False):
    """The peer accepted deliveries that we sent, in one disposition or in consecutive ones (part 2.7.6).

    Without C, each is an event of its own.
    """

    link: Link
    deliveries: list[Any]  # the tokens passed to `send`, in the order of the peer's dispositions


class DispositionReceived(msgspec.Struct, frozen=True, gc=False):
    """The peer's disposition, other than accepted, of a delivery that we sent: a terminal state, or settled."""

    link: Link
    delivery: Any  # the token passed to `send`
    state: DeliveryState | None  # None when the peer settled without a state


class Retired(msgspec.Struct, frozen=True, gc=False):
    """The peer retired a delivery that we sent: it gave it an outcome within a transaction (part 4.4.2)."""

    link: Link
    token: Any  # the token passed to `send`
    delivery: Any  # for `settle_retired`; None when the peer has already settled it
    txn_id: bytes  # as the peer wrote it
    state: DeliveryState | None  # the outcome; None when the peer settled without one


class CreditChanged(msgspec.Struct, frozen=True, gc=False):
    """The peer changed an outgoing link's credit, or its session window opened again; see `Engine.credit_of`."""

    link: Link
    drain: bool  # part 2.6.7: send the messages that are available now, then call `drained`


class LinkDetached(msgspec.Struct, frozen=True, gc=False):
    """A link was detached, by the peer or by the engine for a fault of the peer."""

    link: Link  # the handles of its deliveries are invalid from now on
    closed: bool  # False when the terminus is kept (a durable subscription)
    error: Error | None  # the reason, if there is one
    by_us: bool = False  # True when the engine detached it, because the peer violated a limit or sent invalid data


class SessionEnded(msgspec.Struct, frozen=True, gc=False):
    """The peer ended a session, and its links with it: no `LinkDetached` follows for them."""

    links: tuple[Link, ...]  # the links that were attached
