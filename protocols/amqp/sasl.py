"""The server side of the SASL layer (AMQP 1.0 part 5.3); proton's own supports only ANONYMOUS.

Sans-io: bytes in, events out, bytes out. The mechanisms are implemented by the caller: it gets the initial response and
each further response as an event, and answers with `challenge` or `outcome`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Final

from protocols.amqp import primitives
from protocols.amqp.events import SaslInitReceived, SaslResponseReceived
from protocols.amqp.primitives import DecodeError, Described, Symbol, code_of

HEADER: Final = b"AMQP\x03\x01\x00\x00"  # part 5.3.1
FRAME_LIMIT: Final = 16384  # part 5.3.1 says 512, but OAUTHBEARER clients send longer tokens in one frame

MECHANISMS, INIT, CHALLENGE, RESPONSE, OUTCOME = 0x40, 0x41, 0x42, 0x43, 0x44  # part 5.3.3


class SaslCode(enum.IntEnum):
    """sasl-code (part 5.3.3.6)."""

    OK = 0
    AUTH = 1
    SYS = 2
    SYS_PERM = 3
    SYS_TEMP = 4


class SaslLayer:
    """One SASL exchange, from the end of the peer's protocol header on."""

    def __init__(self, mechanisms: Sequence[str]) -> None:
        self._mechanisms = tuple(mechanisms)
        self._output: list[bytes] = [HEADER]
        self._waiting = False  # an event is unanswered: `challenge` or `outcome` must follow
        self._started = False
        self.failure: str | None = None  # set when the peer broke the protocol or failed to log in; reading ends
        self.done = False  # the outcome was OK; the rest of the buffer belongs to the next layer
        self._send(MECHANISMS, [primitives.symbols(self._mechanisms)])

    def receive(self, buffer: bytearray) -> list[Any]:
        """Remove complete frames from `buffer` and return their events, up to the first that needs an answer."""
        events: list[Any] = []
        while not (self._waiting or self.done or self.failure) and len(buffer) >= 4:
            size = int.from_bytes(buffer[:4], "big")
            if size < 8 or size > FRAME_LIMIT:
                self.failure = f"a SASL frame of {size} bytes"
                break
            if len(buffer) < size:
                break
            frame = bytes(buffer[:size])
            del buffer[:size]
            try:
                event = self._event(frame)
            except DecodeError as error:
                self.failure = f"SASL: {error}"
                break
            if event is not None:
                self._waiting = True
                events.append(event)
        return events

    def challenge(self, data: bytes) -> None:
        """Send a challenge, which asks the peer for another response."""
        assert self._waiting
        self._waiting = False
        self._send(CHALLENGE, [primitives.binary(data)])

    def outcome(self, code: SaslCode, additional: bytes | None = None) -> None:
        """Send the outcome, which ends the exchange."""
        assert self._waiting
        self._waiting = False
        items = [primitives.ubyte(code)]
        if additional is not None:
            items.append(primitives.binary(additional))
        self._send(OUTCOME, items)
        if code is SaslCode.OK:
            self.done = True
        else:
            self.failure = f"SASL outcome {code.name.lower()}"

    def data_to_send(self) -> bytes:
        """Return the bytes to write, and forget them."""
        data = b"".join(self._output)
        self._output.clear()
        return data

    def _event(self, frame: bytes) -> Any:
        offset = frame[4] * 4  # data offset in words (part 2.3.1)
        if frame[5] != 1 or offset < 8 or offset > len(frame):
            raise DecodeError("not a SASL frame")
        if offset == len(frame):
            return None
        body, end = primitives.decode(frame, offset, len(frame))
        if end != len(frame) or not isinstance(body, Described) or not isinstance(body.value, list):
            raise DecodeError("not a SASL performative")
        code, fields = code_of(body.descriptor), [*body.value, None, None, None]
        if code == INIT and not self._started:
            mechanism, response, hostname = fields[:3]
            if (
                type(mechanism) is not Symbol
                or not isinstance(response, bytes | None)
                or not isinstance(hostname, str | None)
            ):
                raise DecodeError("a SASL init with invalid fields")
            self._started = True
            if mechanism not in self._mechanisms:
                self._waiting = True
                self.outcome(SaslCode.AUTH)
                return None
            return SaslInitReceived(str(mechanism), response)
        if code == RESPONSE and self._started:
            if not isinstance(fields[0], bytes):
                raise DecodeError("a SASL response with invalid fields")
            return SaslResponseReceived(fields[0])
        raise DecodeError("a SASL frame out of turn")

    def _send(self, code: int, items: list[bytes]) -> None:
        body = primitives.described(code, primitives.list_of(items))
        self._output.append((len(body) + 8).to_bytes(4, "big") + b"\x02\x01\x00\x00" + body)
