"""The life cycle of an AMQP connection, its sessions and its links, on proton's engine: everything except deliveries.

The fields of open and attach are read through `native`, because a peer may send invalid UTF-8 or no map. This module
enforces the limits on sessions and links, and frees the memory of both when none of their deliveries is in use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from protocols.amqp import native, outcomes, primitives
from protocols.amqp.events import ConnectionOpened, LinkDetached, LinkRequested, SessionEnded
from protocols.amqp.formats import START
from protocols.amqp.links import AmqpSession, Filter, Link, Terminus, TerminusKind
from protocols.amqp.native import lib
from protocols.amqp.outcomes import Error
from protocols.amqp.primitives import DecodeError
from protocols.connection import ConnectionClosed, ConnectionFailed

_event_link, _event_session, _event_type = lib.pn_event_link, lib.pn_event_session, lib.pn_event_type


LEAST_IDLE_MS: Final = 100  # the shortest idle time-out that a peer may ask for
UNANSWERED_LIMIT: Final = 1024  # links detached here and not yet by the peer; each uses memory until the peer detaches
TOLD_LIMIT: Final = 8192  # deliveries of a connection with an outcome that the peer has not settled; each takes 0.6 KB
ATTACH_BYTES: Final = 128  # the largest attach without its name and its termini


class EndpointLimits(msgspec.Struct, frozen=True):
    """The limits of one connection, in bytes and seconds."""

    max_frame_bytes: int = 65536
    channel_max: int = 63
    links_per_session: int = 256
    idle_timeout_s: float = 60.0  # proton announces half of it; 0 means none
    session_window_bytes: int = 128 * 1024 * 1024
    partial_bytes: int = 32 * 1024 * 1024  # incomplete messages of all links together


class Endpoints:
    """One connection with its sessions and links."""

    def __init__(self, container_id: str, limits: EndpointLimits, *, with_sasl: bool) -> None:
        self.opened = False  # both sides have sent their open
        self.over = False  # the last event was returned, nothing more is read, and our close is in the output
        self.transactional = False  # the peer attached a coordinator, so transfers may carry a txn-id
        self._limits = limits
        self._with_sasl = with_sasl
        self._remote_opened = False
        self._conn = conn = native.owned(lib.pn_connection())
        self._io = io = native.owned(lib.pn_transport())
        lib.pn_connection_collect(conn, native.EVENTS)
        lib.pn_connection_set_container(conn, container_id.encode())
        lib.pn_transport_set_server(io)
        lib.pn_transport_set_max_frame(io, limits.max_frame_bytes)
        lib.pn_transport_set_channel_max(io, limits.channel_max)
        if limits.idle_timeout_s:
            lib.pn_transport_set_idle_timeout(io, int(limits.idle_timeout_s * 1000))
        native.silence(io)
        lib.pn_transport_bind(io, conn)
        self._links: dict[int, Link] = {}  # by address
        self._sessions: list[AmqpSession] = []  # few and rarely searched: a dict would need three times the memory
        self._sent: dict[int, tuple[Link, Any, int]] = {}  # unsettled deliveries by address: link, token, size in bytes
        self._stale = 0  # entries of `_sent` whose link is detached
        self._stalled: list[Link] = []
        self._to_free: list[Link] = []  # to free after the next output: finished links, and answered links' termini
        self._ended: list[AmqpSession] = []
        self._partial_bytes = 0
        self._unanswered = 0  # see `UNANSWERED_LIMIT`
        self._told = 0  # see `TOLD_LIMIT`
        self._tag = 0
        self._frames = START  # how far the stream of frames was scanned for foreign formats
        self._format = 0  # of deliveries that begin now

    # commands: the connection

    def open(self, offered: Iterable[str], properties: Iterable[tuple[str, str]]) -> None:
        """Answer the peer's open."""
        native.put(lib.pn_connection_offered_capabilities(self._conn), primitives.symbols(offered))
        items = [encoded for name, text in properties for encoded in (primitives.symbol(name), primitives.string(text))]
        native.put(lib.pn_connection_properties(self._conn), primitives.map_of(items))
        lib.pn_connection_open(self._conn)
        self.opened = True
        for session in self._sessions:  # opened by a pipelining peer; our begin must follow our open (part 2.4.1)
            lib.pn_session_open(session.handle)

    def close(self, error: Error | None = None) -> None:
        """Send close; everything that the peer still sends is ignored."""
        if self.over:
            return
        self.over = True
        if not self.opened:  # part 2.4.1: an open must precede a close
            lib.pn_connection_open(self._conn)
        native.set_condition(lib.pn_connection_condition(self._conn), error)
        lib.pn_connection_close(self._conn)

    # commands: links

    def accept_link(
        self,
        link: Link,  # as requested
        *,
        max_message_bytes: int = 0,  # incoming: announced and enforced
        capabilities: Iterable[str] = (),  # the capabilities that our terminus has
        filters: Iterable[Filter] = (),  # outgoing: the requested filters that are applied
        durable: str | None = None,  # outgoing: the address of the existing durable source for a null source
        dynamic: str | None = None,  # the address of the dynamic node that was created for the peer
        kept: bool = False,  # whether our terminus stays when the link is detached, until it is closed
    ) -> None:
        """Answer an attach with the termini the peer asked for.

        The answer contains only `filters`: a filter in it means that it is applied (part 3.5.3). Our terminus has the
        expiry policy and the timeout that it really has.
        """
        if not link.attached or self.over:  # the peer has detached in the meantime
            return
        assert not link.accepted
        link.accepted = True
        link.limit = max_message_bytes
        handle = link.handle
        source, target = lib.pn_link_source(handle), lib.pn_link_target(handle)
        lib.pn_terminus_copy(source, lib.pn_link_remote_source(handle))
        lib.pn_terminus_copy(target, lib.pn_link_remote_target(handle))
        applied = [item for entry in filters for item in entry.encoded]
        if link.source.filters:
            lib.pn_data_clear(lib.pn_terminus_filter(source))
        if applied:
            native.put(lib.pn_terminus_filter(source), primitives.map_of(applied))
        terminus = target if link.incoming else source
        if durable is not None:
            native.set_durable_source(source, durable)
        native.set_expiry(terminus, kept=kept)
        if dynamic is not None:
            lib.pn_terminus_set_address(terminus, dynamic.encode())
        native.put(lib.pn_terminus_capabilities(terminus), primitives.symbols(capabilities))
        if link.incoming:
            lib.pn_link_set_max_message_size(handle, max_message_bytes)
        lib.pn_link_set_snd_settle_mode(handle, link.settle_mode)  # both modes as asked
        lib.pn_link_set_rcv_settle_mode(handle, 1 if link.second else 0)
        self._answer(link)

    def refuse_link(self, link: Link, error: Error) -> None:
        """Answer an attach with a null terminus, then detach with the reason (part 2.6.3)."""
        if not link.attached or self.over:
            return
        handle = link.handle
        if link.incoming:
            lib.pn_terminus_copy(lib.pn_link_source(handle), lib.pn_link_remote_source(handle))
            lib.pn_terminus_set_type(lib.pn_link_target(handle), lib.PN_UNSPECIFIED)
        else:
            lib.pn_terminus_copy(lib.pn_link_target(handle), lib.pn_link_remote_target(handle))
            lib.pn_terminus_set_type(lib.pn_link_source(handle), lib.PN_UNSPECIFIED)
        # proton omits null fields at the end of a list, but some clients (Azure's for Python) read all of them.
        native.put(lib.pn_link_properties(handle), primitives.map_of(()))
        if self._answer(link):
            self.close_link(link, error)

    def close_link(self, link: Link, error: Error | None = None) -> None:
        """Detach with closed=true, and forget the link's deliveries."""
        if not link.attached:
            return
        self._unanswered += 1
        self._detached(link)
        native.set_condition(lib.pn_link_condition(link.handle), error)
        lib.pn_link_close(link.handle)

    def release(self) -> None:
        """Break the reference cycles between sessions and links; no other method will be called."""
        self.over = True
        # Detach the collector: freeing proton's objects makes events, and no code would read them.
        native.discard_events()
        lib.pn_connection_collect(self._conn, native.ffi.NULL)
        for session in self._sessions:
            for link in session.links:
                link.context = None
            session.links.clear()
        self._links.clear()
        self._sent.clear()
        self._stalled.clear()
        self._to_free.clear()

    # handlers of proton's events

    def _on_open(self, _event: Any, events: list[Any]) -> None:
        if self._remote_opened:
            return
        self._remote_opened = True
        try:
            container = native.text(lib.pn_connection_remote_container(self._conn)) or ""
            native.text(lib.pn_connection_remote_hostname(self._conn))  # this and the next ones are only checked
            native.mapping(lib.pn_connection_remote_properties(self._conn))
            native.symbols(lib.pn_connection_remote_desired_capabilities(self._conn))
        except DecodeError as error:
            self._fail(events, f"open: {error}", outcomes.DECODE_ERROR)
            return
        idle_ms = int(lib.pn_transport_get_remote_idle_timeout(self._io))
        if 0 < idle_ms < LEAST_IDLE_MS:  # part 2.4.5: a peer that cannot support the time-out closes with an error
            self._fail(events, f"an idle time-out of {idle_ms} ms is too short", outcomes.NOT_ALLOWED)
            return
        events.append(ConnectionOpened(container, self._with_sasl))

    def _on_close(self, _event: Any, events: list[Any]) -> None:
        self.over = True
        lib.pn_connection_close(self._conn)
        error = native.condition(lib.pn_connection_remote_condition(self._conn))
        events.append(ConnectionClosed(error.condition if error else ""))

    def _on_begin(self, event: Any, events: list[Any]) -> None:
        handle = _event_session(event)
        if self._session(handle) is not None:
            return
        if not self._remote_opened:  # part 2.4.1: an open comes first
            self._fail(events, "a begin before the open", outcomes.ILLEGAL_STATE)
            return
        if sum(session.open for session in self._sessions) > self._limits.channel_max:
            # proton accepts a second begin on a channel in use and keeps both sessions, so they are counted here.
            self._fail(events, f"more than {self._limits.channel_max + 1} sessions", outcomes.NOT_ALLOWED)
            return
        session = AmqpSession(handle)
        self._sessions.append(session)
        lib.pn_session_set_incoming_capacity(handle, self._limits.session_window_bytes)
        if self.opened:
            lib.pn_session_open(handle)

    def _on_end(self, event: Any, events: list[Any]) -> None:
        session = self._session(_event_session(event))
        if session is None or not session.open:
            return
        session.open = False
        links = tuple(link for link in session.links if link.attached)
        self._unanswered -= sum(not link.attached and not link.finished for link in session.links)
        for link in links:
            self._detached(link)
        for link in session.links:
            self._finish(link)
        lib.pn_session_close(session.handle)
        self._ended.append(session)
        events.append(SessionEnded(links))

    def _on_attach(self, event: Any, events: list[Any]) -> None:
        handle = _event_link(event)
        session = self._session(lib.pn_link_session(handle))
        address = native.address(handle)
        if session is None or address in self._links:
            return
        if self._unanswered >= UNANSWERED_LIMIT:
            reason = f"the peer has not answered {self._unanswered} detaches"
            self._fail(events, reason, outcomes.RESOURCE_LIMIT_EXCEEDED)
            return
        incoming = bool(lib.pn_link_is_receiver(handle))
        fault: Error | None = None
        name = ""
        source = target = Terminus(TerminusKind.NONE)
        try:
            name = native.text(lib.pn_link_name(handle)) or ""
            source = native.terminus(lib.pn_link_remote_source(handle))
            target = native.terminus(lib.pn_link_remote_target(handle))
            native.mapping(lib.pn_link_remote_properties(handle))  # only checked
        except DecodeError as error:
            fault = Error(outcomes.INVALID_FIELD, str(error))
        if len(session.links) >= self._limits.links_per_session:
            fault = Error(outcomes.RESOURCE_LIMIT_EXCEEDED, f"more than {self._limits.links_per_session} links")
        link = Link(
            handle,
            address,
            session,
            name=name,
            incoming=incoming,
            source=source,
            target=target,
            settle_mode=int(lib.pn_link_remote_snd_settle_mode(handle)),
            second=int(lib.pn_link_remote_rcv_settle_mode(handle)) == 1,
            peer_max_message_bytes=int(lib.pn_link_remote_max_message_size(handle)),
        )
        if target.kind is TerminusKind.COORDINATOR:
            self.transactional = True
        self._links[address] = link
        session.links[link] = None
        if fault is not None:
            self.refuse_link(link, fault)
        else:
            events.append(LinkRequested(link))

    def _on_detach(self, event: Any, events: list[Any]) -> None:
        link = self._links.get(native.address(_event_link(event)))
        if link is None:
            return
        closed = _event_type(event) == lib.PN_LINK_REMOTE_CLOSE
        if not link.attached and not link.finished:
            self._unanswered -= 1
        if link.attached:
            self._detached(link)
            # If the peer detached before our attach, we must attach before we detach (part 2.6.3).
            if link.accepted or self._answer(link):
                (lib.pn_link_close if closed else lib.pn_link_detach)(link.handle)
            error = native.condition(lib.pn_link_remote_condition(link.handle))
            events.append(LinkDetached(link, closed, error))
        self._finish(link)

    def _on_error(self, _event: Any, events: list[Any]) -> None:
        error = native.condition(lib.pn_transport_condition(self._io)) or Error(outcomes.FRAMING_ERROR)
        self._fail(events, error.description or error.condition, error.condition)

    # helpers, also for `engine`

    def _session(self, handle: Any) -> AmqpSession | None:
        return next((session for session in self._sessions if session.handle == handle), None)

    def _fail(self, events: list[Any], reason: str, code: str) -> None:
        if self.over:
            return
        self.close(Error(code, reason))
        events.append(ConnectionFailed(reason, code))

    def _answer(self, link: Link) -> bool:
        """Send our attach, or close the connection if it exceeds the peer's max-frame-size: it cannot be split."""
        handle = link.handle
        largest = int(lib.pn_transport_get_remote_max_frame(self._io))
        termini = (lib.pn_link_source(handle), lib.pn_link_target(handle))
        size = ATTACH_BYTES + len(link.name.encode()) + sum(map(native.terminus_size, termini))
        if largest and size > largest:
            self.close(Error(outcomes.FRAME_SIZE_TOO_SMALL, f"the answer to an attach takes {size} bytes"))
            return False
        lib.pn_link_open(handle)
        self._to_free.append(link)
        return True

    def _drop_partial(self, link: Link) -> bytearray:
        """Forget the link's incomplete message, and return the bytes received so far."""
        parts, link.partial = link.partial, None
        if parts is None:
            return bytearray()
        self._partial_bytes -= len(parts)
        return parts

    def _detach_with_error(self, link: Link, condition: str, description: str, events: list[Any]) -> None:
        error = Error(condition, description)
        self.close_link(link, error)
        events.append(LinkDetached(link, True, error, by_us=True))

    def _detached(self, link: Link) -> None:
        """Forget the deliveries of a link that is detached now: nothing can arrive for them any more."""
        link.attached = False
        self._drop_partial(link)
        if link.told:
            self._told -= len(link.told)
            link.told = None
        if link.incoming or not link.held:
            return
        self._stale += link.held
        link.held = link.held_bytes = 0
        # Sweep `_sent` only when half of it is stale: thousands of links may be detached one by one.
        if self._stale * 2 >= len(self._sent):
            self._sent = {delivery: sent for delivery, sent in self._sent.items() if sent[0].attached}
            self._stale = 0

    def _finish(self, link: Link) -> None:
        """Mark a link as detached by both sides; its memory is freed when none of its deliveries is in use."""
        link.finished = True
        if not link.held:
            self._to_free.append(link)

    def _release(self, link: Link, count: int) -> bool:
        """Count received deliveries as no longer in use; return whether they can still be settled."""
        link.held -= count
        if link.finished and not link.held:
            self._to_free.append(link)
        return link.attached

    def _conclude(self, link: Link, handle: Any, code: int) -> None:
        """Send the outcome of a received delivery, and settle it.

        With rcv-settle-mode `second` (part 2.8.3) it is settled only when the peer has settled it, or at once if the
        peer leaves more than `TOLD_LIMIT` of them unsettled.
        """
        lib.pn_delivery_update(handle, code)
        if link.second and self._told < TOLD_LIMIT and not lib.pn_delivery_settled(handle):
            if link.told is None:
                link.told = set()
            link.told.add(native.address(handle))
            self._told += 1
        else:
            lib.pn_delivery_settle(handle)

    def _free_unused(self) -> None:
        """Free the memory of answered and finished links and of ended sessions; all output must have been taken."""
        links, self._to_free = self._to_free, []
        for link in links:
            if link.finished and not link.held:
                if self._links.get(link.address) is link:  # else it is freed, and proton may have reused its address
                    del self._links[link.address]
                    link.session.links.pop(link, None)
                    link.context = None
                    lib.pn_link_free(link.handle)
            elif self.opened:  # else our attach is not written yet: it waits for our open
                native.forget_termini(link.handle)
        for session in [session for session in self._ended if not session.links]:
            self._ended.remove(session)
            self._sessions.remove(session)
            lib.pn_session_free(session.handle)
