"""What happened on an AMQP connection, in the order in which it happened.

`delivery` is the engine's handle of one delivery: opaque, hashable, valid until it is settled or its link is gone.
The last event is `protocols.connection.ConnectionFailed` or `ConnectionClosed`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from protocols.amqp.links import Link, Session
from protocols.amqp.outcomes import Error, State
from protocols.amqp.primitives import Pairs


class SaslInitReceived(msgspec.Struct, frozen=True, gc=False):
    """The peer chose a mechanism (part 5.3.3.2); answer by `sasl_challenge` or `sasl_outcome`."""

    mechanism: str
    response: bytes | None
    hostname: str | None


class SaslResponseReceived(msgspec.Struct, frozen=True, gc=False):
    """The peer answered a challenge (part 5.3.3.4)."""

    response: bytes


class ConnectionOpened(msgspec.Struct, frozen=True, gc=False):
    """The peer's open (part 2.7.1); answer by `open` or `close`."""

    container_id: str
    hostname: str | None
    with_sasl: bool
    properties: Pairs
    desired_capabilities: tuple[str, ...]


class SessionOpened(msgspec.Struct, frozen=True, gc=False):
    """The peer began a session; the engine has answered."""

    session: Session


class LinkRequested(msgspec.Struct, frozen=True, gc=False):
    """The peer's attach; answer by `accept_link` or `refuse_link`."""

    link: Link


class TransferReceived(msgspec.Struct, frozen=True, gc=False):
    """A complete message.

    Attributes:
        link: on which it came.
        delivery: None when the peer settled it already: it needs no outcome.
        data: the message's sections, undecoded.
    """

    link: Link
    delivery: Any
    data: bytes


class TransferOversized(msgspec.Struct, frozen=True, gc=False):
    """A complete message above the link's max-message-size; its bytes were thrown away as they came.

    Attributes:
        link: on which it came.
        delivery: None when the peer settled it already.
        size: of the message in bytes.
        txn_id: of the transaction that it was for.
    """

    link: Link
    delivery: Any
    size: int
    txn_id: bytes | None = None


class TransactionalTransfer(msgspec.Struct, frozen=True, gc=False):
    """A complete message for a transaction (part 4.4.1); answer by `settle_posted`.

    Attributes:
        link: on which it came.
        delivery: None when the peer settled it already: it needs no outcome.
        data: the message's sections, undecoded.
        txn_id: as the peer wrote it.
    """

    link: Link
    delivery: Any
    data: bytes
    txn_id: bytes


class TransferAborted(msgspec.Struct, frozen=True, gc=False):
    """The peer took back a message that it had begun (part 2.6.14); it used a credit."""

    link: Link


class DeliveriesAccepted(msgspec.Struct, frozen=True, gc=False):
    """The peer accepted deliveries of ours, one after the other or in a range (part 2.7.6).

    Attributes:
        link: on which we sent them.
        deliveries: the tokens that `send` was given, in the peer's order.
    """

    link: Link
    deliveries: list[Any]


class DispositionReceived(msgspec.Struct, frozen=True, gc=False):
    """The peer's word on a delivery of ours that it did not accept; its state is terminal, or it is settled.

    Attributes:
        link: on which we sent it.
        delivery: the token that `send` was given.
        state: None when the peer settled without a state.
        settled: whether the peer has forgotten it.
    """

    link: Link
    delivery: Any
    state: State | None
    settled: bool


class Retired(msgspec.Struct, frozen=True, gc=False):
    """The peer gave a delivery of ours an outcome within a transaction (part 4.4.2).

    Attributes:
        link: on which we sent it.
        token: what `send` was given.
        delivery: for `settle_retired`; None when the peer has settled it, and will not hear of it again.
        txn_id: as the peer wrote it.
        state: the outcome; None: it has settled without one.
    """

    link: Link
    token: Any
    delivery: Any
    txn_id: bytes
    state: State | None


class CreditChanged(msgspec.Struct, frozen=True, gc=False):
    """The peer changed an outgoing link's credit, or its session window opened again.

    Attributes:
        link: the link.
        credit: how many more deliveries it takes now.
        drain: use it at once or give it back (part 2.6.7): send what there is, then call `drained`.
    """

    link: Link
    credit: int
    drain: bool


class LinkDetached(msgspec.Struct, frozen=True, gc=False):
    """A link is gone: the peer detached it, or the engine did for a fault of the peer.

    Attributes:
        link: handles of its deliveries are dead from now on.
        closed: False when the peer keeps the terminus (a durable subscription).
        error: why, if anybody said.
        by_us: True when the peer broke a limit.
    """

    link: Link
    closed: bool
    error: Error | None
    by_us: bool = False


class SessionEnded(msgspec.Struct, frozen=True, gc=False):
    """A session is gone, and its links with it: there is no `LinkDetached` for them.

    Attributes:
        session: the session.
        links: the links that were attached.
        error: why, if the peer said.
    """

    session: Session
    links: tuple[Link, ...]
    error: Error | None
