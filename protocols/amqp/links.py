"""The engine's state of sessions, links and termini, beside proton's handles."""

from __future__ import annotations

import enum
from typing import Any, Final

import msgspec

SETTLED: Final = 1  # snd-settle-mode (part 2.8.2): unsettled 0, settled 1, mixed 2
UNSETTLED: Final = 0
MIXED: Final = 2


class TerminusKind(enum.IntEnum):
    """The type of a source or target field."""

    NONE = 0
    SOURCE = 1
    TARGET = 2
    COORDINATOR = 3  # the target for transactions (part 4.5.1)


class Filter(msgspec.Struct, frozen=True, gc=False):
    """One entry of a source's filter set (part 3.5.8)."""

    name: str  # the peer's key in the filter set
    # the filter's type, as a symbol or a number; None when the value is not described
    descriptor: str | int | None
    value: Any  # without its descriptor
    encoded: tuple[bytes, bytes]  # name and value as the peer wrote them, for the answer


class Terminus(msgspec.Struct, frozen=True, gc=False):
    """A source or a target (parts 3.5.3 and 3.5.4) as the peer wrote it."""

    kind: TerminusKind  # `NONE` is a null terminus
    address: str | None = None  # None is a null address; with `dynamic` the peer asks for a temporary node
    durable: int = 0  # terminus-durability, 0 to 2
    expiry: str = "session-end"  # the expiry policy, such as `never`
    dynamic: bool = False
    filters: tuple[Filter, ...] = ()  # source only: the filter set
    outcomes: tuple[str, ...] = ()  # source only: the outcomes the peer supports
    capabilities: tuple[str, ...] = ()  # such as `queue`
    copies: bool = False  # source only: distribution-mode `copy`, a browser that leaves messages for other receivers


class AmqpSession(msgspec.Struct, eq=False):
    """One AMQP session (part 2.5)."""

    handle: Any  # proton's
    links: dict[Link, None] = msgspec.field(default_factory=dict)  # every link whose memory is not freed yet
    open: bool = True


class Link(msgspec.Struct, eq=False):
    """One link (part 2.6), seen from our side; `source` and `target` are those of the peer's attach."""

    handle: Any  # proton's
    address: int  # of proton's handle
    session: AmqpSession
    name: str  # chosen by the peer
    incoming: bool  # True when the peer sends to us
    source: Terminus
    target: Terminus
    settle_mode: int = MIXED  # the peer's snd-settle-mode
    second: bool = False  # whether the peer asked for rcv-settle-mode `second`
    # incoming, with `second`: addresses of deliveries whose outcome is sent and which the peer has yet to settle
    told: set[int] | None = None
    peer_max_message_bytes: int = 0  # 0 means no limit
    accepted: bool = False  # whether we answered the attach with a terminus
    attached: bool = True  # whether transfers may be sent or received
    finished: bool = False  # both sides have detached, or the session has ended
    credit: int = 0  # incoming: how many more deliveries the peer may start. Outgoing: see `Engine.credit_of`.
    held: int = 0  # deliveries whose handle is in use; the link's memory is not freed before this is 0
    held_bytes: int = 0  # outgoing: the size of their messages
    limit: int = 0  # the max-message-size that we announced, in bytes
    partial: bytearray | None = None  # the incomplete message, if there is one
    partial_size: int = 0
    partial_format: int = 0  # its message-format
    stalled: bool = False  # outgoing: waits for the peer's session window
    context: Any = None  # the owner's object for this link; the engine only drops it together with the link

    def release(self, count: int, size: int) -> None:
        """Count `count` sent deliveries of `size` bytes together as no longer in use."""
        self.held -= count
        self.held_bytes -= size
