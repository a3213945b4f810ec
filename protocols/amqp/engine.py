"""qpid-proton as a sans-io engine behind our own verbs: bytes, and what happens per delivery.

The life of connections, sessions and links is rare and in `endpoints`. What happens per delivery is here and in
`deliveries`, which are in C, too (ADR 0065): usual transfers and outcomes are taken there in runs, all others here, and
no Python object of proton's is ever built for one. Only these three modules and `native` know proton.

What proton leaves to its user is done here: link credit is enforced and partial deliveries are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from protocols.amqp import native, outcomes
from protocols.amqp.events import (
    CreditChanged,
    DeliveriesAccepted,
    DispositionReceived,
    TransactionalTransfer,
    TransferAborted,
    TransferOversized,
    TransfersReceived,
)
from protocols.amqp.links import Link
from protocols.amqp.native import ffi, lib
from protocols.amqp.outcomes import State
from protocols.amqp.transacting import Transacting
from protocols.amqp.transactions import TRANSACTIONAL_STATE

try:
    from protocols.amqp._native import accept, send, take_usual
except ImportError:  # not built, or not wanted: `gateway.native` tells
    from protocols.amqp.deliveries import accept, send, take_usual

# Imported once: a look-up in `lib` costs as much as a cheap call.
_peek, _pop = lib.pn_collector_peek, lib.pn_collector_pop
_event_delivery, _event_link = lib.pn_event_delivery, lib.pn_event_link
_delivery_link, _readable, _partial = lib.pn_delivery_link, lib.pn_delivery_readable, lib.pn_delivery_partial
_remote_settled, _remote_state = lib.pn_delivery_settled, lib.pn_delivery_remote_state
_recv, _advance = lib.pn_link_recv, lib.pn_link_advance
_update, _settle = lib.pn_delivery_update, lib.pn_delivery_settle
_capacity, _push = lib.pn_transport_capacity, lib.pn_transport_push
_pending, _peek_output, _pop_output = lib.pn_transport_pending, lib.pn_transport_peek, lib.pn_transport_pop
_outgoing_bytes, _link_credit = lib.pn_session_outgoing_bytes, lib.pn_link_credit
_DELIVERY: Final = int(lib.PN_DELIVERY)
_TERMINAL: Final = frozenset({outcomes.ACCEPTED, outcomes.REJECTED, outcomes.RELEASED, outcomes.MODIFIED})

# One scratch buffer for the process: it is filled and emptied within one call, and nothing here waits.
_SCRATCH_BYTES: Final = 1 << 20
_scratch: Final = ffi.new("char[]", _SCRATCH_BYTES)
_from_buffer, _unpack, _buffer = ffi.from_buffer, ffi.unpack, ffi.buffer

OUTGOING_HIGH: Final = 256 * 1024  # bytes that proton may hold for a session whose window is shut
REFUSABLE_FACTOR: Final = 4
"""A message up to this times the limit is read to its end and rejected alone; above it, the link goes."""


class Engine(Transacting):
    """The AMQP layer of one connection, from its protocol header on. See `protocols.connection` for the contract."""

    # bytes in, events out, bytes out

    def receive_data(self, data: bytes) -> list[Any]:
        """Take bytes; proton takes only as many at a time as it has space for, and raises beyond."""
        events: list[Any] = []
        native.discard_events()
        base = _from_buffer(data)
        at, size, io = 0, len(data), self._io
        while at < size and not self.over:
            capacity = _capacity(io)
            if capacity <= 0:
                break
            taken = _push(io, base + at, min(capacity, size - at))
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
            parts.append(_unpack(_scratch, size))
            _pop_output(io, size)
        if self._untidy or self._ended:
            self._tidy()
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
        native.discard_events()
        deadline = self.schedule(now)
        events: list[Any] = []
        if not self.over:
            self._process(events)
        return events, deadline

    # verbs: links

    def grant(self, link: Link, credit: int) -> None:
        """Let the peer start `credit` more deliveries."""
        if link.attached:
            link.credit += credit
            lib.pn_link_flow(link.handle, credit)

    def accept_deliveries(self, link: Link, deliveries: Sequence[Any]) -> None:
        """Settle received deliveries of one link as accepted; None stands for one that came settled."""
        link.held -= len(deliveries) - deliveries.count(None)
        if link.attached:
            accept(deliveries)
        elif link.finished and not link.held:
            self._untidy.append(link)

    def settle_delivery(self, link: Link, delivery: Any, state: State) -> None:
        """Settle one received delivery."""
        link.held -= 1
        if not link.attached:
            if link.finished and not link.held:
                self._untidy.append(link)
            return
        handle = native.delivery_at(delivery)
        local = lib.pn_delivery_local(handle)
        if state.code == outcomes.REJECTED:
            native.set_condition(lib.pn_disposition_condition(local), state.error)
        elif state.code == outcomes.MODIFIED:
            lib.pn_disposition_set_failed(local, state.delivery_failed)
            lib.pn_disposition_set_undeliverable(local, state.undeliverable_here)
        _update(handle, state.code)
        _settle(handle)

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

    def send(self, link: Link, messages: Sequence[bytes], tokens: Sequence[Any] | None) -> int:
        """Send messages; the token of each comes back with its outcome. Without tokens they are sent settled.

        The caller has checked `credit_of`.

        Returns:
            How many bytes the messages are.
        """
        count = len(messages)
        size = send(link, self._tag + 1, messages, tokens, self._sent)
        self._tag = (self._tag + count) & 0xFFFFFFFF
        if tokens is not None:
            link.held += count
            link.held_bytes += size
        return size

    def drains(self, link: Link) -> bool:
        """Whether the peer wants an outgoing link's credit used up or given back (part 2.6.7)."""
        return bool(lib.pn_link_get_drain(link.handle))

    def drained(self, link: Link) -> None:
        """Give the unused credit of an outgoing link back (part 2.6.7)."""
        if link.attached:
            lib.pn_link_drained(link.handle)

    # events of proton

    def _process(self, events: list[Any]) -> None:
        collector = native.EVENTS
        while not self.over:
            kind = take_usual(self._links, self._sent, self.transactional, events)
            if not kind:
                return
            event = _peek(collector)
            if kind == _DELIVERY:
                self._on_delivery(_event_delivery(event), events)
            else:
                handler = _HANDLERS.get(kind)
                if handler is not None:
                    handler(self, event, events)
            _pop(collector)
        native.discard_events()  # the last event was given

    def _on_delivery(self, delivery: Any, events: list[Any]) -> None:
        if self._sent and _remote_state(delivery) == outcomes.ACCEPTED:
            sent = self._sent.pop(native.address(delivery), None)
            if sent is not None and sent[0].attached:  # else of a link that is gone: its memory may be another's now
                # Settled here and at once: proton reuses the handle, and a second disposition may already be queued.
                _settle(delivery)
                link, token, size = sent
                link.release(1, size)
                last = events[-1] if events else None
                if type(last) is DeliveriesAccepted and last.link is link:
                    last.deliveries.append(token)
                else:
                    events.append(DeliveriesAccepted(link, [token]))
                return
        handle = _delivery_link(delivery)
        found = self._links.get(native.address(handle))
        if found is None or not found.attached:
            return
        if not found.incoming:
            self._on_disposition(found, delivery, events)
        elif _readable(delivery):  # else the peer's own view of a delivery that we have yet to settle: nothing to do
            self._on_transfer(found, delivery, events)

    def _on_transfer(self, link: Link, delivery: Any, events: list[Any]) -> None:
        if link.partial is None:
            if link.credit <= 0:
                self._violated(link, outcomes.TRANSFER_LIMIT_EXCEEDED, "a transfer beyond the link's credit", events)
                return
            link.credit -= 1
            link.partial, link.partial_size = bytearray(), 0
        self._on_part(link, delivery, events)

    def _collect(self, link: Link, size: int) -> None:
        """Keep what `_recv` put into the scratch buffer, unless the message is over its limit already."""
        if size <= 0:
            return
        assert link.partial is not None
        link.partial_size += size
        if link.partial_size > link.limit:
            self._partial_bytes -= len(link.partial)
            link.partial.clear()
        else:
            self._partial_bytes += size
            link.partial += _buffer(_scratch, size)

    def _on_part(self, link: Link, delivery: Any, events: list[Any]) -> None:
        """More of a message, which may span transfers (part 2.6.14)."""
        assert link.partial is not None
        handle = link.handle
        while (size := _recv(handle, _scratch, _SCRATCH_BYTES)) > 0:
            self._collect(link, size)
        if lib.pn_delivery_aborted(delivery):
            self._drop_partial(link)
            _advance(handle)
            _settle(delivery)
            events.append(TransferAborted(link))
            return
        total = link.partial_size
        if total > link.limit * REFUSABLE_FACTOR:
            self._violated(link, outcomes.MESSAGE_SIZE_EXCEEDED, f"a message of more than {total} bytes", events)
            return
        if _partial(delivery):
            if self._partial_bytes > self._limits.partial_bytes:
                reason = f"more than {self._limits.partial_bytes} bytes of messages that are not complete"
                self._violated(link, outcomes.RESOURCE_LIMIT_EXCEEDED, reason, events)
            return
        parts = self._drop_partial(link)
        txn_id = None
        if self.transactional and _remote_state(delivery) == TRANSACTIONAL_STATE:
            txn_id = self._txn_of(link, delivery, events)
            if txn_id is None:
                return
        _advance(handle)
        token = None
        if _remote_settled(delivery):
            _settle(delivery)
        else:
            token = native.address(delivery)
            link.held += 1
        if total > link.limit:
            events.append(TransferOversized(link, token, total, txn_id))
        elif txn_id is not None:
            events.append(TransactionalTransfer(link, token, bytes(parts), txn_id))
        else:
            last = events[-1] if events else None
            if type(last) is TransfersReceived and last.link is link:
                last.deliveries.append(token)
                last.messages.append(bytes(parts))
            else:
                events.append(TransfersReceived(link, [token], [bytes(parts)]))

    def _on_disposition(self, link: Link, delivery: Any, events: list[Any]) -> None:
        """An outcome that is not `accepted`, which `_on_delivery` takes by itself, or one that was heard before."""
        code = _remote_state(delivery)
        settled = bool(_remote_settled(delivery))
        if code == TRANSACTIONAL_STATE:
            self._on_retirement(link, delivery, settled, events)
            return
        if not settled and code not in _TERMINAL:
            return
        sent = self._sent.pop(native.address(delivery), None)
        if sent is None:
            return
        state = self._read_state(delivery, code)
        link.release(1, sent[2])
        _settle(delivery)  # at once, as what is accepted
        events.append(DispositionReceived(link, sent[1], state, settled))

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

    def _on_flow(self, event: Any, events: list[Any]) -> None:
        link = self._links.get(native.address(_event_link(event)))
        if link is not None and link.attached and not link.incoming:
            events.append(CreditChanged(link, self.credit_of(link), self.drains(link)))

    # inside

    def _unstall(self, events: list[Any]) -> None:
        waiting, self._stalled = self._stalled, []
        for link in waiting:
            link.stalled = False
            credit = self.credit_of(link)  # puts it back when there is no change
            if credit:
                events.append(CreditChanged(link, credit, self.drains(link)))


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
