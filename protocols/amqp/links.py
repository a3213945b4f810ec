"""What the engine knows of a peer's sessions and links: plain facts beside proton's handles."""

from __future__ import annotations

import enum
from typing import Any, Final

import msgspec

from protocols.amqp.primitives import Pairs

SETTLED: Final = 1  # snd-settle-mode (part 2.8.2): unsettled 0, settled 1, mixed 2
UNSETTLED: Final = 0
MIXED: Final = 2


class TerminusKind(enum.IntEnum):
    """What stands in the place of a source or target."""

    NONE = 0
    SOURCE = 1
    TARGET = 2
    COORDINATOR = 3  # of transactions (part 4.5.1)


class Filter(msgspec.Struct, frozen=True, gc=False):
    """One entry of a source's filter set (part 3.5.8)."""

    name: str  # the peer's name for it
    # what kind of filter it is: a symbol or a number; None when the value is not described
    descriptor: str | int | None
    value: Any  # of the described value
    encoded: tuple[bytes, bytes]  # name and value as the peer wrote them, for the answer


class Terminus(msgspec.Struct, frozen=True, gc=False):
    """A source or a target (parts 3.5.3 and 3.5.4) as the peer wrote it."""

    kind: TerminusKind  # `NONE` is null: no terminus at all
    address: str | None = None  # None is a null address; with `dynamic` the peer asks for a temporary node
    durable: int = 0  # terminus-durability, 0 to 2
    expiry: str = "session-end"  # the expiry policy, such as `never`
    dynamic: bool = False
    filters: tuple[Filter, ...] = ()  # of a source: the filter set
    outcomes: tuple[str, ...] = ()  # of a source: the outcomes the peer can take
    capabilities: tuple[str, ...] = ()  # such as `queue`
    copies: bool = False  # of a source: distribution-mode `copy`: what is received stays there for others (a browser)


class Session:
    """One AMQP session (part 2.5). `links` are the ones that are attached or being attached."""

    __slots__ = ("handle", "links", "open")

    def __init__(self, handle: Any) -> None:
        self.handle = handle  # proton's
        self.links: dict[Link, None] = {}
        self.open = True


class Link:
    """One link (part 2.6), seen from our side.

    Attributes:
        source, target: as the peer asked.
        initial_delivery_count: unused by us; proton does the serial arithmetic.
    """

    __slots__ = (
        "accepted", "address", "attached", "context", "credit", "finished", "handle", "held", "held_bytes", "incoming",
        "limit", "name", "partial", "partial_size", "peer_max_message_bytes", "properties", "second", "session",
        "settle_mode", "source", "stalled", "target",
    )  # fmt: skip

    def __init__(
        self,
        handle: Any,
        address: int,
        session: Session,
        *,
        name: str,
        incoming: bool,
        source: Terminus,
        target: Terminus,
        settle_mode: int = MIXED,
        second: bool = False,
        peer_max_message_bytes: int = 0,
        properties: Pairs = Pairs(),  # noqa: B008 - an immutable constant
    ) -> None:
        self.handle = handle  # proton's
        self.address = address  # likewise, as a number
        self.session = session
        self.name = name  # the peer's name for it
        self.incoming = incoming  # True when the peer sends to us
        self.source = source
        self.target = target
        self.settle_mode = settle_mode  # the peer's snd-settle-mode
        self.second = second  # whether the peer asked for rcv-settle-mode `second`
        self.peer_max_message_bytes = peer_max_message_bytes  # 0 means no limit
        self.properties = properties
        self.accepted = False  # whether we answered the attach with a terminus
        self.attached = True  # whether deliveries may travel
        self.finished = False
        self.credit = 0  # incoming: how many more deliveries the peer may start. Outgoing: see `Connection.credit_of`.
        self.held = 0  # deliveries whose handle somebody keeps; the handle's memory stays until it is 0
        self.held_bytes = 0  # of an outgoing link: their messages
        self.limit = 0  # max-message-size, ours, announced (bytes)
        self.partial: bytearray | None = None  # of a delivery that is not complete
        self.partial_size = 0
        self.stalled = False  # outgoing: waits for the peer's session window
        self.context: Any = None  # the owner's own object; the engine never looks at it, and forgets it with the link

    def release(self, count: int, size: int) -> None:
        """Nobody keeps the handles of `count` deliveries any more that were sent, of `size` bytes together."""
        self.held -= count
        self.held_bytes -= size
