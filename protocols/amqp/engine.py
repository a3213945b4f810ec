"""qpid-proton as a sans-io engine behind our own verbs; with `native` the only module that imports it.

Two tiers. What is rare (the life of connections, sessions, links) is read from proton with care, because a peer's
bytes may be no UTF-8 where proton's Python wrappers expect it. What happens per delivery is a handful of calls into
proton's C functions, and no Python object of proton's is ever built (anchors: 1.1 us per delivery against 16).

What proton leaves to its user is done here: link credit is enforced, partial deliveries are bounded, the number of
links is bounded, and memory of links and sessions is given back once nobody holds a delivery of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import proton

from protocols.amqp import native, outcomes, primitives
from protocols.amqp.events import (
    ConnectionOpened,
    CreditChanged,
    DispositionReceived,
    LinkDetached,
    LinkRequested,
    SessionEnded,
    SessionOpened,
    TransferAborted,
    TransferOversized,
    TransferReceived,
)
from protocols.amqp.links import SETTLED, UNSETTLED, Link, Session, Terminus, TerminusKind
from protocols.amqp.native import ffi, lib
from protocols.amqp.outcomes import Error, State
from protocols.amqp.primitives import DecodeError, Pairs
from protocols.connection import ConnectionClosed, ConnectionFailed

# Imported once: a look-up in `lib` costs as much as a cheap call.
_peek, _pop, _event_type = lib.pn_collector_peek, lib.pn_collector_pop, lib.pn_event_type
_event_delivery, _event_link, _event_session = lib.pn_event_delivery, lib.pn_event_link, lib.pn_event_session
_delivery_link, _readable, _partial = lib.pn_delivery_link, lib.pn_delivery_readable, lib.pn_delivery_partial
_remote_settled, _remote_state = lib.pn_delivery_settled, lib.pn_delivery_remote_state
_recv, _advance = lib.pn_link_recv, lib.pn_link_advance
_update, _settle = lib.pn_delivery_update, lib.pn_delivery_settle
_new_delivery, _send, _link_credit = lib.pn_delivery, lib.pn_link_send, lib.pn_link_credit
_capacity, _push = lib.pn_transport_capacity, lib.pn_transport_push
_pending, _peek_output, _pop_output = lib.pn_transport_pending, lib.pn_transport_peek, lib.pn_transport_pop
_outgoing_bytes = lib.pn_session_outgoing_bytes
_DELIVERY: Final = int(lib.PN_DELIVERY)
_ACCEPTED: Final = int(lib.PN_ACCEPTED)
_TERMINAL: Final = frozenset({outcomes.ACCEPTED, outcomes.REJECTED, outcomes.RELEASED, outcomes.MODIFIED})

# One scratch buffer for the process: it is filled and emptied within one call, and nothing here waits.
_SCRATCH_BYTES: Final = 1 << 20
_scratch: Final = ffi.new("char[]", _SCRATCH_BYTES)
_from_buffer, _view = ffi.from_buffer, ffi.buffer

OUTGOING_HIGH: Final = 256 * 1024  # bytes that proton may hold for a session whose window is shut
REFUSABLE_FACTOR: Final = (
    4  # up to this times the limit a message is read to its end and rejected; above, the link goes
)


def _ignore(_transport: Any, _message: str) -> None:
    """Proton's own log lines about its peer; what matters of them comes as a condition."""


class Limits(msgspec.Struct, frozen=True):
    """What a peer may use. Bytes and seconds."""

    max_frame_bytes: int = 65536
    channel_max: int = 63
    links_per_session: int = 256
    idle_timeout_s: float = 60.0  # proton announces the half of it; 0: none
    session_window_bytes: int = 16 * 1024 * 1024


class Engine:
    """The AMQP layer of one connection, from its protocol header on. See `protocols.connection` for the contract.

    Attributes:
        opened: both sides have sent their open.
        over: the last event was given; nothing more is read.
        closing: nothing more is to be read, and the goodbye is in the output.
    """

    def __init__(self, container_id: str, limits: Limits, *, with_sasl: bool) -> None:
        self.opened = False
        self.over = False
        self.closing = False
        self._limits = limits
        self._with_sasl = with_sasl
        self._remote_opened = False
        self._connection = proton.Connection()
        self._collector = proton.Collector()
        self._connection.collect(self._collector)
        self._connection.container = container_id
        self._transport = proton.Transport(proton.Transport.SERVER)
        self._transport.max_frame_size = limits.max_frame_bytes
        self._transport.channel_max = limits.channel_max
        if limits.idle_timeout_s:
            self._transport.idle_timeout = limits.idle_timeout_s
        self._transport.tracer = _ignore  # else a peer could fill our standard error
        self._transport.bind(self._connection)
        self._conn = self._connection._impl
        self._events = self._collector._impl
        self._io = self._transport._impl
        self._links: dict[Any, Link] = {}
        self._sessions: dict[Any, Session] = {}
        self._sent: dict[Any, Any] = {}  # delivery -> the token of its sender
        self._stalled: list[Link] = []
        self._finished: list[Link] = []
        self._ended: list[Session] = []
        self._tag = 0

    @property
    def is_empty_of_links(self) -> bool:
        """Whether no link is left, not even one of which deliveries are held."""
        return not self._links and not self._sent

    @property
    def is_empty(self) -> bool:
        """Whether neither sessions nor links are left."""
        return not self._sessions and self.is_empty_of_links

    # bytes in, events out, bytes out

    def receive_data(self, data: bytes) -> list[Any]:
        """Take bytes; proton takes only as many at a time as it has room for, and raises beyond."""
        events: list[Any] = []
        base = _from_buffer(data)
        at, size, io = 0, len(data), self._io
        while at < size and not self.over:
            room = _capacity(io)
            if room <= 0:
                break
            taken = _push(io, base + at, min(room, size - at))
            if taken <= 0:
                break
            at += taken
            self._process(events)
        if at < size and not self.over:
            self._process(events)
            self._fail(events, "the peer sent on after its end", outcomes.FRAMING_ERROR)
        if self._stalled and not self.over:
            self._unstall(events)
        return events

    def receive_eof(self) -> list[Any]:
        """The peer will send no more."""
        events: list[Any] = []
        if not self.over:
            self._fail(events, "the peer left without a close", outcomes.CONNECTION_FORCED)
        return events

    def data_to_send(self) -> bytes:
        """Take the bytes that wait to be written."""
        parts: list[bytes] = []
        io = self._io
        while (size := _pending(io)) > 0:
            size = min(size, _SCRATCH_BYTES)
            _peek_output(io, _scratch, size)
            parts.append(_view(_scratch, size)[:])
            _pop_output(io, size)
        if self._finished or self._ended:
            self._reap()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def schedule(self, now: float) -> float | None:
        """Tell the time (seconds) and learn when to tell it again; heartbeats go to the output."""
        deadline = float(lib.pn_transport_tick(self._io, int(now * 1000)) / 1000)
        if deadline <= 0 or self.over:
            return None
        # proton sends a heartbeat when a tick finds that nothing was sent since the tick before: between two of them
        # the peer's half may pass twice. Looking four times as often keeps the silence below three quarters.
        peers = float(lib.pn_transport_get_remote_idle_timeout(self._io) / 1000)
        return min(deadline, now + peers / 4) if peers else deadline

    def tick(self, now: float) -> tuple[list[Any], float | None]:
        """As `schedule`, and the events of a peer that fell silent."""
        deadline = self.schedule(now)
        events: list[Any] = []
        if not self.over:
            self._process(events)
        return events, deadline

    # verbs: the connection

    def open(self, offered: Iterable[str], properties: Iterable[tuple[str, str]]) -> None:
        """Answer the peer's open."""
        native.put(lib.pn_connection_offered_capabilities(self._conn), primitives.symbols(offered))
        items = [encoded for name, text in properties for encoded in (primitives.symbol(name), primitives.string(text))]
        native.put(lib.pn_connection_properties(self._conn), primitives.map_of(items))
        lib.pn_connection_open(self._conn)
        self.opened = True
        for session in self._sessions.values():  # begun ahead of our open, which must come first (part 2.4.1)
            lib.pn_session_open(session.handle)

    def close(self, error: Error | None = None) -> None:
        """Say goodbye; nothing the peer still sends is looked at."""
        if self.over:
            return
        self.over = self.closing = True
        if not self.opened:  # part 2.4.1: an open must precede a close
            lib.pn_connection_open(self._conn)
        native.set_condition(lib.pn_connection_condition(self._conn), error)
        lib.pn_connection_close(self._conn)

    # verbs: links

    def accept_link(
        self, link: Link, *, max_message_bytes: int = 0, capabilities: Iterable[str] = (), settled: bool = False
    ) -> None:
        """Answer an attach with the termini the peer asked for.

        Filters are not echoed: a filter in our answer would say that it is applied (part 3.5.3).

        Args:
            link: as requested.
            max_message_bytes: incoming: announced and enforced.
            capabilities: of our terminus, those that are true.
            settled: outgoing: every delivery is sent settled.
        """
        if not link.attached or self.over:  # the peer has left meanwhile
            return
        assert not link.accepted
        link.accepted = True
        link.limit = max_message_bytes
        handle = link.handle
        source, target = lib.pn_link_source(handle), lib.pn_link_target(handle)
        lib.pn_terminus_copy(source, lib.pn_link_remote_source(handle))
        lib.pn_terminus_copy(target, lib.pn_link_remote_target(handle))
        lib.pn_data_clear(lib.pn_terminus_filter(source))
        terminus = target if link.incoming else source
        native.put(lib.pn_terminus_capabilities(terminus), primitives.symbols(capabilities))
        if link.incoming:
            lib.pn_link_set_snd_settle_mode(handle, link.settle_mode)
            lib.pn_link_set_max_message_size(handle, max_message_bytes)
        else:
            lib.pn_link_set_snd_settle_mode(handle, SETTLED if settled else UNSETTLED)
            lib.pn_link_set_rcv_settle_mode(handle, 1 if link.second else 0)
        lib.pn_link_open(handle)

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
        lib.pn_link_open(handle)
        self.close_link(link, error)

    def close_link(self, link: Link, error: Error | None = None) -> None:
        """Detach for good; deliveries on it are forgotten."""
        if not link.attached:
            return
        link.attached = False
        link.partial = None
        self._forget_sent(link)
        native.set_condition(lib.pn_link_condition(link.handle), error)
        lib.pn_link_close(link.handle)

    def grant(self, link: Link, credit: int) -> None:
        """Let the peer start `credit` more deliveries."""
        if link.attached:
            link.credit += credit
            lib.pn_link_flow(link.handle, credit)

    def accept_delivery(self, link: Link, delivery: Any) -> None:
        """Settle one received delivery as accepted; the common case, apart because it is hot."""
        link.held -= 1
        if link.attached:
            _update(delivery, _ACCEPTED)
            _settle(delivery)
        elif link.finished and not link.held:
            self._finished.append(link)

    def settle_delivery(self, link: Link, delivery: Any, state: State) -> None:
        """Settle one received delivery."""
        link.held -= 1
        if not link.attached:
            if link.finished and not link.held:
                self._finished.append(link)
            return
        local = lib.pn_delivery_local(delivery)
        if state.code == outcomes.REJECTED:
            native.set_condition(lib.pn_disposition_condition(local), state.error)
        elif state.code == outcomes.MODIFIED:
            lib.pn_disposition_set_failed(local, state.delivery_failed)
            lib.pn_disposition_set_undeliverable(local, state.undeliverable_here)
        _update(delivery, state.code)
        _settle(delivery)

    def credit_of(self, link: Link) -> int:
        """How many deliveries may be sent on an outgoing link now; 0 while the session's window is shut.

        `CreditChanged` follows when a shut window opens.
        """
        if not link.attached or self.over:
            return 0
        if _outgoing_bytes(link.session.handle) > OUTGOING_HIGH:
            if not link.stalled:
                link.stalled = True
                self._stalled.append(link)
            return 0
        return int(_link_credit(link.handle))

    def send(self, link: Link, data: bytes, token: Any) -> None:
        """Send one message; `token` comes back with its outcome, None sends it settled.

        The caller has checked `credit_of`.
        """
        handle = link.handle
        self._tag = tag = (self._tag + 1) & 0xFFFFFFFF
        delivery = _new_delivery(handle, (4, _from_buffer(tag.to_bytes(4, "big"))))
        _send(handle, _from_buffer(data), len(data))
        _advance(handle)
        if token is None:
            _settle(delivery)
        else:
            self._sent[delivery] = token
            link.held += 1

    def drained(self, link: Link) -> None:
        """Give the unused credit of an outgoing link back (part 2.6.7)."""
        if link.attached:
            lib.pn_link_drained(link.handle)

    # events of proton

    def _process(self, events: list[Any]) -> None:
        collector = self._events
        handlers = _HANDLERS
        while event := _peek(collector):
            kind = _event_type(event)
            if self.over:
                pass  # the last event was given
            elif kind == _DELIVERY:
                self._on_delivery(_event_delivery(event), events)
            else:
                handler = handlers.get(kind)
                if handler is not None:
                    handler(self, event, events)
            _pop(collector)

    def _on_delivery(self, delivery: Any, events: list[Any]) -> None:
        handle = _delivery_link(delivery)
        link = self._links.get(handle)
        if link is None or not link.attached:
            return
        if not link.incoming:
            self._on_disposition(link, delivery, events)
            return
        if not _readable(delivery):
            return  # the peer's own view of a delivery that we have yet to settle: nothing to do
        if link.partial is None:
            if link.credit <= 0:
                self._violated(link, outcomes.TRANSFER_LIMIT_EXCEEDED, "a transfer beyond the link's credit", events)
                return
            link.credit -= 1
            if not _partial(delivery):
                size = _recv(handle, _scratch, _SCRATCH_BYTES)
                if 0 <= size <= link.limit and size < _SCRATCH_BYTES:
                    _advance(handle)
                    if _remote_settled(delivery):
                        _settle(delivery)
                        delivery = None
                    else:
                        link.held += 1
                    events.append(TransferReceived(link, delivery, _view(_scratch, size)[:]))
                    return
                link.partial, link.partial_size = [], 0
                self._collect(link, size)
            else:
                link.partial, link.partial_size = [], 0
        self._on_part(link, delivery, events)

    def _collect(self, link: Link, size: int) -> None:
        """Keep what `_recv` put into the scratch buffer, unless the message is over its limit already."""
        if size <= 0:
            return
        assert link.partial is not None
        link.partial_size += size
        if link.partial_size > link.limit:
            link.partial.clear()
        else:
            link.partial.append(_view(_scratch, size)[:])

    def _on_part(self, link: Link, delivery: Any, events: list[Any]) -> None:
        """More of a message that spans transfers (part 2.6.14), or is larger than the scratch buffer."""
        assert link.partial is not None
        handle = link.handle
        while (size := _recv(handle, _scratch, _SCRATCH_BYTES)) > 0:
            self._collect(link, size)
        if lib.pn_delivery_aborted(delivery):
            link.partial = None
            _advance(handle)
            _settle(delivery)
            events.append(TransferAborted(link))
            return
        total = link.partial_size
        if total > link.limit * REFUSABLE_FACTOR:
            self._violated(link, outcomes.MESSAGE_SIZE_EXCEEDED, f"a message of more than {total} bytes", events)
            return
        if _partial(delivery):
            return
        parts, link.partial = link.partial, None
        _advance(handle)
        token = delivery
        if _remote_settled(delivery):
            _settle(delivery)
            token = None
        else:
            link.held += 1
        if total > link.limit:
            events.append(TransferOversized(link, token, total))
        else:
            events.append(TransferReceived(link, token, b"".join(parts)))

    def _on_disposition(self, link: Link, delivery: Any, events: list[Any]) -> None:
        code = _remote_state(delivery)
        settled = bool(_remote_settled(delivery))
        if not settled and code not in _TERMINAL:
            return
        token = self._sent.pop(delivery, None)
        if token is None:
            return
        # Settled here and at once: proton reuses the handle, and a second disposition may already be queued.
        state: State | None = outcomes.STATE_ACCEPTED if code == _ACCEPTED else self._read_state(delivery, code)
        link.held -= 1
        _settle(delivery)
        events.append(DispositionReceived(link, token, state, settled))

    def _read_state(self, delivery: Any, code: int) -> State | None:
        remote = lib.pn_delivery_remote(delivery)
        if code == outcomes.REJECTED:
            return State(code, error=native.condition(lib.pn_disposition_condition(remote)))
        if code == outcomes.MODIFIED:
            return State(
                code,
                delivery_failed=bool(lib.pn_disposition_is_failed(remote)),
                undeliverable_here=bool(lib.pn_disposition_is_undeliverable(remote)),
            )
        return State(code) if code in _TERMINAL else None

    def _on_open(self, _event: Any, events: list[Any]) -> None:
        if self._remote_opened:
            return
        self._remote_opened = True
        try:
            container = native.text(lib.pn_connection_remote_container(self._conn)) or ""
            hostname = native.text(lib.pn_connection_remote_hostname(self._conn))
            properties = native.mapping(lib.pn_connection_remote_properties(self._conn))
            desired = native.symbols(lib.pn_connection_remote_desired_capabilities(self._conn))
        except DecodeError as error:
            self._fail(events, f"open: {error}", outcomes.DECODE_ERROR)
            return
        events.append(ConnectionOpened(container, hostname, self._with_sasl, properties, desired))

    def _on_close(self, _event: Any, events: list[Any]) -> None:
        self.over = self.closing = True
        lib.pn_connection_close(self._conn)
        error = native.condition(lib.pn_connection_remote_condition(self._conn))
        events.append(ConnectionClosed(error.condition if error else ""))

    def _on_begin(self, event: Any, events: list[Any]) -> None:
        handle = _event_session(event)
        if handle in self._sessions:
            return
        session = self._sessions[handle] = Session(handle)
        lib.pn_session_set_incoming_capacity(handle, self._limits.session_window_bytes)
        if self.opened:
            lib.pn_session_open(handle)
        events.append(SessionOpened(session))

    def _on_end(self, event: Any, events: list[Any]) -> None:
        session = self._sessions.get(_event_session(event))
        if session is None or not session.open:
            return
        session.open = False
        links = tuple(link for link in session.links.values() if link.attached)
        for link in links:
            link.attached = False
            link.partial = None
            self._forget_sent(link)
        for link in session.links.values():
            self._finish(link)
        lib.pn_session_close(session.handle)
        self._ended.append(session)
        error = native.condition(lib.pn_session_remote_condition(session.handle))
        events.append(SessionEnded(session, links, error))

    def _on_attach(self, event: Any, events: list[Any]) -> None:
        handle = _event_link(event)
        session = self._sessions.get(lib.pn_link_session(handle))
        if session is None or handle in self._links:
            return
        incoming = bool(lib.pn_link_is_receiver(handle))
        fault: Error | None = None
        name, properties = "", Pairs()
        source = target = Terminus(TerminusKind.NONE)
        try:
            name = native.text(lib.pn_link_name(handle)) or ""
            source = native.terminus(lib.pn_link_remote_source(handle))
            target = native.terminus(lib.pn_link_remote_target(handle))
            properties = native.mapping(lib.pn_link_remote_properties(handle))
        except DecodeError as error:
            fault = Error(outcomes.INVALID_FIELD, str(error))
        if len(session.links) >= self._limits.links_per_session:
            fault = Error(outcomes.RESOURCE_LIMIT_EXCEEDED, f"more than {self._limits.links_per_session} links")
        link = Link(
            handle,
            session,
            name=name,
            incoming=incoming,
            source=source,
            target=target,
            settle_mode=int(lib.pn_link_remote_snd_settle_mode(handle)),
            second=int(lib.pn_link_remote_rcv_settle_mode(handle)) == 1,
            peer_max_message_bytes=int(lib.pn_link_remote_max_message_size(handle)),
            properties=properties,
        )
        self._links[handle] = session.links[handle] = link
        if fault is not None:
            self.refuse_link(link, fault)
        else:
            events.append(LinkRequested(link))

    def _on_detach(self, event: Any, events: list[Any]) -> None:
        link = self._links.get(_event_link(event))
        if link is None:
            return
        closed = _event_type(event) == lib.PN_LINK_REMOTE_CLOSE
        if link.attached:
            link.attached = False
            link.partial = None
            self._forget_sent(link)
            if not link.accepted:  # it gave up before we had an answer: the answer comes first (part 2.6.3)
                lib.pn_link_open(link.handle)
            (lib.pn_link_close if closed else lib.pn_link_detach)(link.handle)
            error = native.condition(lib.pn_link_remote_condition(link.handle))
            events.append(LinkDetached(link, closed, error))
        self._finish(link)

    def _on_flow(self, event: Any, events: list[Any]) -> None:
        link = self._links.get(_event_link(event))
        if link is not None and link.attached and not link.incoming:
            events.append(CreditChanged(link, self.credit_of(link), bool(lib.pn_link_get_drain(link.handle))))

    def _on_error(self, _event: Any, events: list[Any]) -> None:
        error = native.condition(lib.pn_transport_condition(self._io)) or Error(outcomes.FRAMING_ERROR)
        self._fail(events, error.description or error.condition, error.condition)

    # inside

    def _fail(self, events: list[Any], reason: str, code: str) -> None:
        if self.over:
            return
        self.close(Error(code, reason))
        events.append(ConnectionFailed(reason, code))

    def _violated(self, link: Link, condition: str, description: str, events: list[Any]) -> None:
        error = Error(condition, description)
        self.close_link(link, error)
        events.append(LinkDetached(link, True, error, by_us=True))

    def _unstall(self, events: list[Any]) -> None:
        waiting, self._stalled = self._stalled, []
        for link in waiting:
            link.stalled = False
            credit = self.credit_of(link)  # puts it back when there is no change
            if credit:
                events.append(CreditChanged(link, credit, bool(lib.pn_link_get_drain(link.handle))))

    def _forget_sent(self, link: Link) -> None:
        """The outcomes of what was sent on `link` will not come any more."""
        if not link.incoming and link.held:
            link.held = 0
            handle = link.handle
            self._sent = {key: token for key, token in self._sent.items() if _delivery_link(key) != handle}

    def _finish(self, link: Link) -> None:
        """Both sides have detached: the memory goes as soon as no delivery of it is held."""
        link.finished = True
        if not link.held:
            self._finished.append(link)

    def _reap(self) -> None:
        finished, self._finished = self._finished, []
        for link in finished:
            if self._links.pop(link.handle, None) is None:
                continue
            session = link.session
            del session.links[link.handle]
            lib.pn_link_free(link.handle)
        for session in [session for session in self._ended if not session.links]:
            self._ended.remove(session)
            del self._sessions[session.handle]
            lib.pn_session_free(session.handle)


_HANDLERS: Final[dict[int, Callable[[Engine, Any, list[Any]], None]]] = {
    int(lib.PN_CONNECTION_REMOTE_OPEN): Engine._on_open,
    int(lib.PN_CONNECTION_REMOTE_CLOSE): Engine._on_close,
    int(lib.PN_SESSION_REMOTE_OPEN): Engine._on_begin,
    int(lib.PN_SESSION_REMOTE_CLOSE): Engine._on_end,
    int(lib.PN_LINK_REMOTE_OPEN): Engine._on_attach,
    int(lib.PN_LINK_REMOTE_CLOSE): Engine._on_detach,
    int(lib.PN_LINK_REMOTE_DETACH): Engine._on_detach,
    int(lib.PN_LINK_FLOW): Engine._on_flow,
    int(lib.PN_TRANSPORT_ERROR): Engine._on_error,
}
"""proton's events that mean something here; deliveries apart, they are hot."""
