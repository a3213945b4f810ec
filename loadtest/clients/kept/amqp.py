"""AMQP 1.0 clients that outlive their connections, at least once in both directions, on a plain socket.

A sender resends the messages that had no outcome when the connection broke; a receiver attaches to the same source
again and accepts what it receives. Each connection has one session with one link.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import heapq
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from loadtest.clients.amqp_wire import (
    ACCEPTED,
    ATTACH,
    BEGIN,
    CLOSE,
    CLOSING,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    GREETING,
    IDLE,
    SASL_OUTCOME,
    TRANSFER,
    Splitter,
    accept,
    attach_receiver,
    attach_sender,
    credit,
    data_section,
    key_annotation,
    opening,
    read_value,
    transfer,
)
from loadtest.clients.kept.lasting import Delivery, LastingClient, Messages, NumberedSender, Place

_TRANSIENT: Final = frozenset({"amqp:connection:forced", "amqp:internal-error", "amqp:resource-limit-exceeded"})
"""Error conditions of a gateway that is stopping, or has lost Kafka."""

_REJECTED, _RELEASED, _MODIFIED = 0x25, 0x26, 0x27
_OUTCOMES: Final = {_REJECTED: "rejected", _RELEASED: "released", _MODIFIED: "modified"}
_ENDS: Final = {DETACH: "detach", END: "end", CLOSE: "close"}
_MORE: Final = 5  # index of the field in a transfer


class KeptLink(LastingClient):
    """A link that is attached again whenever it is lost."""

    closing = CLOSING
    sign_of_life = IDLE

    def __init__(self, address: tuple[str, int], container: str) -> None:
        super().__init__(address, container)
        self._splitter = Splitter()

    @abc.abstractmethod
    def _attach(self) -> bytes:
        """Return the frame that attaches the link."""

    @abc.abstractmethod
    def _frame(self, code: int, fields: list[Any], payload: bytes) -> None:
        """Handle any frame of the session and the link, except their ends."""

    def _begin(self) -> None:
        self._splitter = Splitter()
        self.write(GREETING)

    def _serve(self) -> None:
        """Count a usable link."""
        self.connects += 1
        self._served()

    def data_received(self, data: bytes) -> None:
        """Handle frames."""
        for body in self._splitter.feed(data):
            (code, fields), at = read_value(body, 0)
            if code == SASL_OUTCOME:
                if fields[0]:
                    self.faults.append(f"SASL outcome {fields[0]}")
                self.write(opening(self.client_id) + self._attach())
            elif code in (DETACH, END, CLOSE):
                self._ended(code, fields)
            else:
                self._frame(code, fields, body[at:])

    def _ended(self, code: int, fields: list[Any]) -> None:
        """Handle the end of the link, the session or the connection."""
        error = next((field[1] for field in fields if isinstance(field, tuple)), None)
        condition = error[0].decode() if error else ""
        word = f"{_ENDS[code]} {condition}".strip()
        self.refusals[word] += 1
        if condition not in _TRANSIENT and not self._stopping:
            self.faults.append(f"{word}: {error}")
        if self._transport is not None:
            self._transport.close()


class KeptSender(NumberedSender, KeptLink):
    """Sends numbered unsettled messages."""

    def __init__(
        self, address: tuple[str, int], container: str, target: str, messages: Messages, *, again: bool = True
    ) -> None:
        """With `again`, messages with the outcome released or modified are sent again."""
        super().__init__(address, container)
        self.messages = messages
        self._send_again = again
        self._target = target
        self._annotations = key_annotation(messages.key)
        self._again: list[int] = []  # a heap of messages to send again
        self._waiting: dict[int, int] = {}  # delivery-id -> message
        self._sent = 0  # deliveries on this link
        self._limit = 0  # the server's credit for them

    def push(self) -> None:
        """Send as many messages as window and credit allow."""
        if not self.connected.is_set():
            return
        out = bytearray()
        while len(self._waiting) < self.messages.window and self._sent < self._limit:
            if self._again:
                message = heapq.heappop(self._again)
            elif self._next < self.total:
                message = self._next
                self._next += 1
            else:
                break
            self._waiting[self._sent] = message
            body = self._annotations + data_section(self.messages.payload(message))
            out += transfer(self._sent, struct.pack(">I", message), body)
            self._sent += 1
        if out:
            self.write(bytes(out))

    def connection_lost(self, exc: Exception | None) -> None:
        """Queue the messages without an outcome for sending again."""
        super().connection_lost(exc)
        for message in self._waiting.values():
            heapq.heappush(self._again, message)
        self._waiting.clear()
        self._sent = self._limit = 0

    def _attach(self) -> bytes:
        return attach_sender("kept", self.client_id, self._target)

    def _frame(self, code: int, fields: list[Any], payload: bytes) -> None:
        if code == FLOW and len(fields) > 6 and fields[4] is not None:
            self._limit = (fields[5] or 0) + (fields[6] or 0)
            if not self.connected.is_set():
                self._serve()
            self.push()
        elif code == DISPOSITION:
            first = fields[1]
            last = fields[2] if len(fields) > 2 and fields[2] is not None else first
            state = fields[4] if len(fields) > 4 else None
            for delivery in range(first, last + 1):
                self._settled(delivery, state)
            self.push()

    def _settled(self, delivery: int, state: Any) -> None:
        message = self._waiting.pop(delivery, None)
        outcome = state[0] if state is not None else None
        if message is None:
            self.faults.append(f"an unexpected outcome for delivery {delivery}")
        elif outcome == ACCEPTED:
            self.acknowledge(message)
        else:
            word = _outcome(state)
            self.refusals[word] += 1
            if outcome not in (_RELEASED, _MODIFIED):
                self.faults.append(f"{word}: message {message} got {state}")
            if self._send_again:
                heapq.heappush(self._again, message)
            else:
                self.given_up += 1


def _outcome(state: Any) -> str:
    """Return the name of a delivery state, with the condition of its error."""
    if state is None:
        return "settled without an outcome"
    error = next((field[1] for field in state[1] if isinstance(field, tuple)), None)
    return f"{_OUTCOMES.get(state[0], state[0])} {error[0].decode() if error else ''}".strip()


class KeptReceiver(KeptLink):
    """Receives from one source, and accepts each message after `lag` seconds.

    Attributes:
        attached: set when the source was attached for the first time.
        generation_at_start: the value of `generation` when the connection started.
    """

    def __init__(
        self,
        address: tuple[str, int],
        container: str,
        link: str,
        source: str,
        *,
        on_delivery: Callable[[Delivery], None],
        on_accept: Callable[[Delivery, float], None],
        generation: Callable[[], int],
        durable: bool = False,
        capabilities: Sequence[str] = (),
        window: int = 100,
        lag: float = 0.02,
    ) -> None:
        """`on_accept` is called with the time (`time.monotonic`) when the disposition was written."""
        super().__init__(address, container)
        self.attached = asyncio.Event()
        self.generation_at_start = 0
        self._terms = (link, container, source)
        self._durable = durable
        self._capabilities = capabilities
        self._on_delivery = on_delivery
        self._on_accept = on_accept
        self._generation = generation
        self._window = window
        self._lag = lag
        self._first_transfer = 0
        self._received = 0
        self._granted = 0
        self._held: collections.deque[tuple[int, Delivery]] = collections.deque()
        self._due: asyncio.TimerHandle | None = None

    def _begin(self) -> None:
        self.generation_at_start = self._generation()
        self._held.clear()
        self._received = self._granted = 0
        super()._begin()

    def _attach(self) -> bytes:
        return attach_receiver(*self._terms, durable=self._durable, capabilities=self._capabilities)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget unaccepted messages, which will be delivered again."""
        super().connection_lost(exc)
        self._held.clear()
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _frame(self, code: int, fields: list[Any], payload: bytes) -> None:
        if code == BEGIN:
            self._first_transfer = fields[1] or 0
        elif code == ATTACH:
            if fields[5] is None:
                return  # refused: a detach with the reason follows
            self.attached.set()
            self._serve()
            self._grant()
        elif code == TRANSFER:
            self._transferred(fields, payload)

    def _transferred(self, fields: list[Any], payload: bytes) -> None:
        if len(fields) > _MORE and fields[_MORE]:
            self.faults.append("a small message arrived in several transfers")
        delivery = take_apart(payload, self.generation_at_start)
        self._received += 1
        self._on_delivery(delivery)
        self._held.append((fields[1], delivery))
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(self._lag, self._accept)
        if self._granted - self._received < self._window // 2:
            self._grant()

    def _grant(self) -> None:
        self._granted = self._received + self._window
        self.write(credit(self._first_transfer + self._received, self._received, self._window))

    def _accept(self) -> None:
        """Accept the held messages; the delivery-ids of one link are consecutive."""
        self._due = None
        if not self._held or self._transport is None:
            return
        self.write(accept(self._held[0][0], self._held[-1][0]))
        now = time.monotonic()
        for _, delivery in self._held:
            self._on_accept(delivery, now)
        self._held.clear()


def take_apart(message: bytes, generation: int) -> Delivery:
    """Decode a message with one Data section and the annotations of its record's position."""
    notes: dict[bytes, Any] = {}
    payload = b""
    at = 0
    while at < len(message):
        (section, value), at = read_value(message, at)
        if section == 0x72:
            notes = dict(zip(value[::2], value[1::2], strict=True))
        elif section == 0x75:
            payload = value
    place = Place(notes[b"x-opt-bridge.partition"], notes[b"x-opt-bridge.offset"])
    return Delivery(payload, place, generation, time.monotonic())
