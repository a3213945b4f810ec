"""qpid-proton as a sans-io engine: bytes in and out, transfers, dispositions and flow.

Connections, sessions and links open and close rarely; `endpoints` handles that. The work per delivery is here and in
`deliveries`, which also exists in C (ADR 0088): it processes usual transfers and outcomes in runs, this module all
others. None of proton's Python objects is ever built for a delivery. Only `endpoints`, `transacting`, `deliveries`,
`native` and this module use proton.

This module adds what proton leaves to its user: it enforces link credit, limits incomplete deliveries, and finds
messages of a foreign format (`formats`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from protocols.amqp import native, outcomes
from protocols.amqp._native import accept, scan, send, take_usual
from protocols.amqp.endpoints import UNANSWERED_LIMIT
from protocols.amqp.events import (
    CreditChanged,
    DeliveriesAccepted,
    DispositionReceived,
    TransactionalTransfer,
    TransferAborted,
    TransfersReceived,
    TransferUnfit,
)
from protocols.amqp.frames import mend_flows
from protocols.amqp.links import Link
from protocols.amqp.native import ffi, lib
from protocols.amqp.outcomes import DeliveryState
from protocols.amqp.transacting import Transacting
from protocols.amqp.transactions import TRANSACTIONAL_STATE

# Imported once: a look-up in `lib` costs as much as a cheap call.
_peek, _pop, _type = lib.pn_collector_peek, lib.pn_collector_pop, lib.pn_event_type
_capacity, _push = lib.pn_transport_capacity, lib.pn_transport_push
_pending, _peek_output, _pop_output = lib.pn_transport_pending, lib.pn_transport_peek, lib.pn_transport_pop
_outgoing_bytes, _link_credit = lib.pn_session_outgoing_bytes, lib.pn_link_credit
_DELIVERY: Final = int(lib.PN_DELIVERY)

# One scratch buffer for the process: each call fills and empties it without an await in between.
_SCRATCH_BYTES: Final = 1 << 20
_scratch: Final = ffi.new("char[]", _SCRATCH_BYTES)
_from_buffer, _unpack, _buffer = ffi.from_buffer, ffi.unpack, ffi.buffer

OUTGOING_HIGH: Final = 256 * 1024  # bytes that proton may buffer for a session whose window is shut
REFUSABLE_FACTOR: Final = 4
"""A message up to this multiple of the limit is read to its end and rejected; a larger one detaches the link."""


class Engine(Transacting):
    """The AMQP layer of one connection, from its protocol header on. See `protocols.connection` for the contract."""

    # bytes in, events out, bytes out

    def receive_data(self, data: bytes) -> list[Any]:
        """Process received bytes, in pieces that fit proton's input buffer: more would be an error."""
        events: list[Any] = []
        native.discard_events()
        self._frames, foreign = scan(data, self._frames)
        at, base = 0, _from_buffer(data)
        for begin, end, format_ in foreign or ():  # each alone, so that its delivery is known
            self._push(base, at, begin, 0, events)
            self._push(base, begin, end, format_, events)
            at = end
        self._push(base, at, len(data), 0, events)
        if not self.over and _capacity(self._io) < 0:
            self._process(events)
            self._fail(events, "a frame that cannot be decoded", outcomes.DECODE_ERROR)
        if self._stalled and not self.over:
            self._unstall(events)
        return events

    def _push(self, base: Any, at: int, end: int, format_: int, events: list[Any]) -> None:
        """Have proton read the bytes from `at` to `end`; the deliveries that begin in them have a message-format."""
        self._format, io = format_, self._io
        while at < end and not self.over:
            capacity = _capacity(io)
            taken = _push(io, base + at, min(capacity, end - at)) if capacity > 0 else 0
            if taken <= 0:
                return
            at += taken
            self._process(events)

    def receive_eof(self) -> list[Any]:
        """Handle the end of the peer's stream."""
        events: list[Any] = []
        if not self.over:
            self._fail(events, "the peer disconnected without a close", outcomes.CONNECTION_FORCED)
        return events

    def data_to_send(self) -> bytes:
        """Return the bytes to write, and forget them."""
        parts: list[bytes] = []
        io = self._io
        while (size := _pending(io)) > 0:
            size = min(size, _SCRATCH_BYTES)
            _peek_output(io, _scratch, size)
            parts.append(_unpack(_scratch, size))
            _pop_output(io, size)
        if self._to_free or self._ended:
            self._free_unused()
        output = parts[0] if len(parts) == 1 else b"".join(parts)
        return mend_flows(output) if self._unanswered else output

    def schedule(self, now: float) -> float | None:
        """Let proton check its timers at `now` (seconds) and write heartbeats; return the time of the next check."""
        deadline = float(lib.pn_transport_tick(self._io, int(now * 1000)) / 1000)
        if deadline <= 0 or self.over:
            return None
        # proton sends a heartbeat when nothing was sent since the previous tick, so our silence can last almost two
        # intervals. A tick every quarter of the peer's idle time-out keeps it below three quarters.
        peers = float(lib.pn_transport_get_remote_idle_timeout(self._io) / 1000)
        return min(deadline, now + peers / 4) if peers else deadline

    def tick(self, now: float) -> tuple[list[Any], float | None]:
        """Like `schedule`, and also return the events of an idle time-out."""
        native.discard_events()
        deadline = self.schedule(now)
        events: list[Any] = []
        if not self.over:
            self._process(events)
        return events, deadline

    # commands: links

    def grant(self, link: Link, credit: int) -> None:
        """Grant the peer credit for `credit` more deliveries."""
        if link.attached:
            link.credit += credit
            lib.pn_link_flow(link.handle, credit)

    def accept_deliveries(self, link: Link, deliveries: Sequence[Any]) -> None:
        """Settle received deliveries of one link as accepted; None stands for one that the peer sent settled."""
        if not self._release(link, len(deliveries) - deliveries.count(None)):
            return
        if link.second:
            for delivery in deliveries:
                if delivery is not None:
                    self._conclude(link, native.delivery_at(delivery), outcomes.ACCEPTED)
        else:
            accept(link, deliveries)

    def settle_delivery(self, link: Link, delivery: Any, state: DeliveryState) -> None:
        """Settle one received delivery with `state`."""
        if not self._release(link, 1):
            return
        handle = native.delivery_at(delivery)
        local = lib.pn_delivery_local(handle)
        if state.code == outcomes.REJECTED:
            native.set_condition(lib.pn_disposition_condition(local), state.error)
        elif state.code == outcomes.MODIFIED:
            lib.pn_disposition_set_failed(local, state.delivery_failed)
            lib.pn_disposition_set_undeliverable(local, state.undeliverable_here)
        self._conclude(link, handle, state.code)

    def credit_of(self, link: Link) -> int:
        """Return how many deliveries may be sent on an outgoing link now.

        It is 0 while the session's window is shut; a `CreditChanged` follows when it opens.
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
        """Send messages, and return their size in bytes. The caller has checked `credit_of`.

        Each token is returned in the event with the delivery's outcome. Without tokens the messages are sent settled.
        """
        count = len(messages)
        size = send(link, self._tag + 1, messages, tokens, self._sent)
        self._tag = (self._tag + count) & 0xFFFFFFFF
        if tokens is not None:
            link.held += count
            link.held_bytes += size
        return size

    def drains(self, link: Link) -> bool:
        """Whether the peer has set drain on an outgoing link: its credit must be used or given up (part 2.6.7)."""
        return bool(lib.pn_link_get_drain(link.handle))

    def drained(self, link: Link) -> None:
        """Give up the unused credit of an outgoing link (part 2.6.7)."""
        if link.attached:
            lib.pn_link_drained(link.handle)

    # handlers of proton's events

    def _process(self, events: list[Any]) -> None:
        collector = native.EVENTS
        while not self.over:
            if self._format:  # an unusual transfer is among the events
                event = _peek(collector)
                kind = _type(event) if event else 0
            else:
                kind = take_usual(self._links, self._sent, self.transactional, events)
                event = _peek(collector)
            if not kind:
                return
            if kind == _DELIVERY:
                self._on_delivery(lib.pn_event_delivery(event), events)
            else:
                handler = _HANDLERS.get(kind)
                if handler is not None:
                    handler(self, event, events)
            _pop(collector)
        native.discard_events()  # nothing may follow the last event

    def _on_delivery(self, delivery: Any, events: list[Any]) -> None:
        handle = lib.pn_delivery_link(delivery)
        link = self._links.get(native.address(handle))
        if link is None or not link.attached:
            if link is not None and link.incoming:
                self._discard(link, events)
            return
        if not link.incoming:
            self._on_disposition(link, delivery, events)
        elif lib.pn_delivery_readable(delivery):
            self._on_transfer(link, delivery, events)
        elif link.told and lib.pn_delivery_settled(delivery):  # else the peer updated one that has no outcome yet
            self._on_settled(link, delivery)

    def _on_settled(self, link: Link, delivery: Any) -> None:
        """Settle a received delivery that the peer has settled after its outcome (part 2.8.3)."""
        address = native.address(delivery)
        if link.told is not None and address in link.told:
            link.told.remove(address)
            self._told -= 1
            lib.pn_delivery_settle(delivery)

    def _discard(self, link: Link, events: list[Any]) -> None:
        """Drop what arrives for a link that we have detached: proton would keep it until the peer detaches, too."""
        handle = link.handle
        while current := lib.pn_link_current(handle):
            while lib.pn_link_recv(handle, _scratch, _SCRATCH_BYTES) > 0:
                pass
            if lib.pn_delivery_partial(current):
                return
            lib.pn_link_advance(handle)
            link.credit -= 1
        if link.credit < -UNANSWERED_LIMIT:
            self._fail(events, "transfers beyond the credit of a detached link", outcomes.TRANSFER_LIMIT_EXCEEDED)

    def _on_transfer(self, link: Link, delivery: Any, events: list[Any]) -> None:
        if link.partial is None:
            if link.credit <= 0:
                reason = "a transfer beyond the link's credit"
                self._detach_with_error(link, outcomes.TRANSFER_LIMIT_EXCEEDED, reason, events)
                return
            link.credit -= 1
            link.partial, link.partial_size, link.partial_format = bytearray(), 0, self._format
        self._on_part(link, delivery, events)

    def _collect(self, link: Link, size: int) -> None:
        """Append the scratch buffer to the link's partial message, or drop it all if the message is too large."""
        assert link.partial is not None
        link.partial_size += size
        if link.partial_size > link.limit:
            self._partial_bytes -= len(link.partial)
            link.partial.clear()
        else:
            self._partial_bytes += size
            link.partial += _buffer(_scratch, size)

    def _on_part(self, link: Link, delivery: Any, events: list[Any]) -> None:
        """Read the pending bytes of a message, which may span several transfers (part 2.6.14)."""
        assert link.partial is not None
        handle = link.handle
        while (size := lib.pn_link_recv(handle, _scratch, _SCRATCH_BYTES)) > 0:
            self._collect(link, size)
        if lib.pn_delivery_aborted(delivery):
            self._drop_partial(link)
            lib.pn_link_advance(handle)
            lib.pn_delivery_settle(delivery)
            events.append(TransferAborted(link))
            return
        total = link.partial_size
        if total > link.limit * REFUSABLE_FACTOR:
            reason = f"a message of more than {total} bytes"
            self._detach_with_error(link, outcomes.MESSAGE_SIZE_EXCEEDED, reason, events)
            return
        if lib.pn_delivery_partial(delivery):
            if self._partial_bytes > self._limits.partial_bytes:
                reason = f"more than {self._limits.partial_bytes} bytes of incomplete messages"
                self._detach_with_error(link, outcomes.RESOURCE_LIMIT_EXCEEDED, reason, events)
            return
        parts = self._drop_partial(link)
        txn_id = None
        if self.transactional and lib.pn_delivery_remote_state(delivery) == TRANSACTIONAL_STATE:
            txn = self._read_txn(link, delivery, events)
            if txn is None:
                return
            txn_id = txn[0]
        lib.pn_link_advance(handle)
        token = None
        if lib.pn_delivery_settled(delivery):
            lib.pn_delivery_settle(delivery)
        else:
            token = native.address(delivery)
            link.held += 1
        if total > link.limit or link.partial_format:
            events.append(TransferUnfit(link, token, total, link.partial_format, txn_id))
        elif txn_id is not None:
            events.append(TransactionalTransfer(link, token, bytes(parts), txn_id))
        else:
            events.append(TransfersReceived(link, [token], [bytes(parts)]))

    def _on_disposition(self, link: Link, delivery: Any, events: list[Any]) -> None:
        """Handle a disposition of a delivery that we sent."""
        code = lib.pn_delivery_remote_state(delivery)
        settled = bool(lib.pn_delivery_settled(delivery))
        if code == TRANSACTIONAL_STATE:
            self._on_retirement(link, delivery, settled, events)
            return
        if not settled and code not in outcomes.TERMINAL:
            return
        owner, token, size = self._sent.pop(native.address(delivery), (None, None, 0))
        if owner is not link:  # a repeated disposition; of a detached link, whose delivery had the same address
            return
        state = self._read_state(delivery, code)
        link.release(1, size)
        # Settle before the next event: proton reuses the handle, and a second disposition may already wait.
        lib.pn_delivery_settle(delivery)
        if code == outcomes.ACCEPTED:
            events.append(DeliveriesAccepted(link, [token]))
        else:
            events.append(DispositionReceived(link, token, state))

    def _read_state(self, delivery: Any, code: int) -> DeliveryState | None:
        remote = lib.pn_delivery_remote(delivery)
        if code == outcomes.REJECTED:
            return DeliveryState(code, error=native.condition(lib.pn_disposition_condition(remote)))
        if code == outcomes.MODIFIED:
            return DeliveryState(
                code,
                delivery_failed=bool(lib.pn_disposition_is_failed(remote)),
                undeliverable_here=bool(lib.pn_disposition_is_undeliverable(remote)),
            )
        return DeliveryState(code) if code in outcomes.TERMINAL else None

    def _on_flow(self, event: Any, events: list[Any]) -> None:
        link = self._links.get(native.address(lib.pn_event_link(event)))
        if link is not None and link.attached and not link.incoming:
            events.append(CreditChanged(link, self.drains(link)))

    # helpers

    def _unstall(self, events: list[Any]) -> None:
        waiting, self._stalled = self._stalled, []
        for link in waiting:
            link.stalled = False
            if self.credit_of(link):  # adds the link to `_stalled` again if the window is still shut
                events.append(CreditChanged(link, self.drains(link)))


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
"""The handled events of proton, except PN_DELIVERY: that is the hot path, and `_process` tests for it first."""
