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


class TransfersReceived(msgspec.Struct, frozen=True, gc=False):
    """Complete messages that came on one link, one after the other."""

    link: Link  # on which they came
    deliveries: list[Any]  # None for one that the peer settled already: it needs no outcome
    messages: list[bytes]  # beside them: each message's sections, undecoded


class TransferOversized(msgspec.Struct, frozen=True, gc=False):
    """A complete message above the link's max-message-size; its bytes were thrown away as they came."""

    link: Link  # on which it came
    delivery: Any  # None when the peer settled it already
    size: int  # of the message in bytes
    txn_id: bytes | None = None  # of the transaction that it was for


class TransactionalTransfer(msgspec.Struct, frozen=True, gc=False):
    """A complete message for a transaction (part 4.4.1); answer by `settle_posted`."""

    link: Link  # on which it came
    delivery: Any  # None when the peer settled it already: it needs no outcome
    data: bytes  # the message's sections, undecoded
    txn_id: bytes  # as the peer wrote it


class TransferAborted(msgspec.Struct, frozen=True, gc=False):
    """The peer took back a message that it had begun (part 2.6.14); it used a credit."""

    link: Link


class DeliveriesAccepted(msgspec.Struct, frozen=True, gc=False):
    """The peer accepted deliveries of ours, one after the other or in a range (part 2.7.6)."""

    link: Link  # on which we sent them
    deliveries: list[Any]  # the tokens that `send` was given, in the peer's order


class DispositionReceived(msgspec.Struct, frozen=True, gc=False):
    """The peer's word on a delivery of ours that it did not accept; its state is terminal, or it is settled."""

    link: Link  # on which we sent it
    delivery: Any  # the token that `send` was given
    state: State | None  # None when the peer settled without a state
    settled: bool  # whether the peer has forgotten it


class Retired(msgspec.Struct, frozen=True, gc=False):
    """The peer gave a delivery of ours an outcome within a transaction (part 4.4.2)."""

    link: Link  # on which we sent it
    token: Any  # what `send` was given
    delivery: Any  # for `settle_retired`; None when the peer has settled it, and will not hear of it again
    txn_id: bytes  # as the peer wrote it
    state: State | None  # the outcome; None: it has settled without one


class CreditChanged(msgspec.Struct, frozen=True, gc=False):
    """The peer changed an outgoing link's credit, or its session window opened again."""

    link: Link  # the link
    credit: int  # how many more deliveries it takes now
    drain: bool  # use it at once or give it back (part 2.6.7): send what there is, then call `drained`


class LinkDetached(msgspec.Struct, frozen=True, gc=False):
    """A link is gone: the peer detached it, or the engine did for a fault of the peer."""

    link: Link  # handles of its deliveries are dead from now on
    closed: bool  # False when the peer keeps the terminus (a durable subscription)
    error: Error | None  # why, if anybody said
    by_us: bool = False  # True when the peer broke a limit


class SessionEnded(msgspec.Struct, frozen=True, gc=False):
    """A session is gone, and its links with it: there is no `LinkDetached` for them."""

    session: Session  # the session
    links: tuple[Link, ...]  # the links that were attached
    error: Error | None  # why, if the peer said
