"""The server side of one AMQP connection: protocol headers, the SASL layer, then the AMQP layer.

`Connection` implements `protocols.connection.Connection`. The methods of the AMQP layer are on `Connection.engine`.
Those of the SASL exchange are on `Connection` itself: the SASL outcome decides which layer reads the next bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from protocols.amqp.endpoints import EndpointLimits
from protocols.amqp.engine import Engine
from protocols.amqp.outcomes import FRAMING_ERROR, INTERNAL_ERROR, RESOURCE_LIMIT_EXCEEDED, Error
from protocols.amqp.sasl import HEADER as SASL_HEADER
from protocols.amqp.sasl import SaslCode, SaslLayer
from protocols.connection import ConnectionFailed

AMQP_HEADER: Final = b"AMQP\x00\x01\x00\x00"  # part 2.2
EARLY_LIMIT: Final = 65536  # bytes buffered while a SASL outcome is pending


class Connection:
    """One AMQP connection."""

    __slots__ = (
        "_buffer", "_closed", "_container_id", "_deadline", "_limits", "_now", "_open_by", "_open_timeout_s", "_output",
        "_passed", "_sasl", "allow_without_sasl", "engine", "mechanisms",
    )  # fmt: skip

    engine: Engine  # the AMQP layer; usable from `ConnectionOpened` on

    def __init__(
        self,
        container_id: str,
        limits: EndpointLimits,
        *,
        mechanisms: Sequence[str] = ("ANONYMOUS",),
        allow_without_sasl: bool = True,
        open_timeout_s: float = 10.0,
    ) -> None:
        """Expect the peer's open within `open_timeout_s` of the first tick; `container_id` names this gateway."""
        self._container_id = container_id
        self._limits = limits
        self.mechanisms = mechanisms  # SASL mechanisms to offer, in order; read when the peer asks for SASL
        # whether a peer may skip SASL and start with the AMQP header (part 5.3: it is then anonymous)
        self.allow_without_sasl = allow_without_sasl
        self._open_timeout_s = open_timeout_s
        self._open_by: float | None = None
        self._deadline: float | None = None
        self._now = 0.0
        self._buffer: bytearray | None = bytearray()  # None once the AMQP layer reads
        self._output = b""  # from the layers before AMQP
        self._sasl: SaslLayer | None = None
        self._passed = False  # the SASL outcome was OK
        self._closed = False

    def receive_data(self, data: bytes) -> list[Any]:
        """Process received bytes, split anywhere."""
        if self._buffer is None:
            return self.engine.receive_data(data)
        if self._closed:
            return []
        self._buffer += data
        if len(self._buffer) > EARLY_LIMIT:
            return self._fail(f"more than {EARLY_LIMIT} bytes before the SASL outcome")
        return self._advance()

    def receive_eof(self) -> list[Any]:
        """Handle the end of the peer's stream."""
        if self._buffer is None:
            return self.engine.receive_eof()
        if self._closed:
            return []
        return self._fail("the peer disconnected before its open")

    def data_to_send(self) -> bytes:
        """Return the bytes to write, and forget them."""
        if self._buffer is None and not self._output:
            return self.engine.data_to_send()
        if self._sasl is not None:
            self._output += self._sasl.data_to_send()
        data, self._output = self._output, b""
        return data + self.engine.data_to_send() if self._buffer is None else data

    def next_deadline(self) -> float | None:
        """Return the latest time for the next `tick`."""
        return self._deadline

    def tick(self, now: float) -> list[Any]:
        """Check idle time-outs and the time limit for open, and send heartbeats."""
        self._now = now
        if self._buffer is None and self.engine.opened:
            events, self._deadline = self.engine.tick(now)
            return events
        if self._open_by is None:
            self._open_by = self._deadline = now + self._open_timeout_s
        elif now >= self._open_by and not self.closing:
            self._deadline = None
            return self._fail(f"no open within {self._open_timeout_s:g} s", RESOURCE_LIMIT_EXCEEDED)
        return []

    @property
    def closing(self) -> bool:
        """Whether nothing more is to be read."""
        return self._closed or (self._buffer is None and self.engine.over)

    def open(self, offered: Sequence[str], properties: Sequence[tuple[str, str]]) -> None:
        """Answer the peer's open; from now on the idle time-out applies."""
        self.engine.open(offered, properties)
        self._open_by = None
        self._deadline = self.engine.schedule(self._now)

    def close(self, error: Error | None = None) -> None:
        """Close, whichever layer is reading."""
        if self._buffer is None:
            self.engine.close(error)
        self._closed = True

    def give_up(self) -> list[Any]:
        """Close after a bug of ours; before the AMQP layer there is no frame that could report an error."""
        return [] if self.closing else self._fail("internal error", INTERNAL_ERROR)

    def release(self) -> None:
        """Free the engine: the socket is closed, and no other method will be called."""
        self._closed = True
        if self._buffer is None:
            self.engine.release()

    def sasl_challenge(self, data: bytes) -> list[Any]:
        """Send a SASL challenge; frames that the peer has sent ahead may give events."""
        if self._sasl is None or self._closed:
            return []
        self._sasl.challenge(data)
        return self._advance()

    def sasl_outcome(self, code: SaslCode, additional: bytes | None = None) -> list[Any]:
        """Send the SASL outcome; frames that the peer has sent ahead may give events."""
        if self._sasl is None or self._closed:
            return []
        self._sasl.outcome(code, additional)
        return self._advance()

    def _advance(self) -> list[Any]:
        """Let the current layer read the buffer."""
        buffer = self._buffer
        assert buffer is not None
        if self._sasl is None or self._passed:
            header = bytes(buffer[:8])
            first = not self._passed
            if first and header == SASL_HEADER:
                del buffer[:8]
                self._sasl = SaslLayer(self.mechanisms)
            elif header == AMQP_HEADER and (not first or self.allow_without_sasl):
                return self._start()
            elif len(header) < 8 and (AMQP_HEADER.startswith(header) or (first and SASL_HEADER.startswith(header))):
                return []
            else:
                # Part 2.2: answer with the header that would have been right, and close.
                self._output += SASL_HEADER if first and not self.allow_without_sasl else AMQP_HEADER
                return self._fail(f"protocol header {header.hex()} is not supported")
        sasl = self._sasl
        assert sasl is not None
        events = sasl.receive(buffer)
        if sasl.failure is not None:
            events += self._fail(sasl.failure)
        elif sasl.done:
            self._passed = True
            events += self._advance()
        return events

    def _start(self) -> list[Any]:
        """Hand over to the AMQP layer, which reads the protocol header itself."""
        assert self._buffer is not None
        data = bytes(self._buffer)
        if self._sasl is not None:
            self._output += self._sasl.data_to_send()
            self._sasl = None
        self._buffer = None
        self.mechanisms = ()
        self.engine = Engine(self._container_id, self._limits, with_sasl=self._passed)
        return self.engine.receive_data(data)

    def _fail(self, reason: str, code: str = FRAMING_ERROR) -> list[Any]:
        self.close(Error(code, reason))
        return [ConnectionFailed(reason, code)]
