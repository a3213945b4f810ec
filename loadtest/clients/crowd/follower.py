"""A subscriber that knows the expected bytes, so that it verifies a whole read with one memory compare.

A thousand of them in one process are cheap. Messages of one sender arrive in order, so the expected stream is known as
soon as the form of the first PUBLISH is. Different bytes are parsed, and missing numbers count as lost (QoS 0 allows
it).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence

from loadtest.clients.connection import Connection
from loadtest.clients.mqtt import DISCONNECT
from loadtest.clients.mqtt_wire import Splitter, connect_packet, packet, read_varint, subscribe_packet


class Stream:
    """The bytes that every follower of one run should receive, in the form of the first PUBLISH of any follower.

    Attributes:
        expected: all packets, when the form is known.
        length: of one packet.
    """

    def __init__(self, payloads: Sequence[bytes]) -> None:
        """All `payloads` have the same size."""
        self._payloads = payloads
        self.expected = b""
        self.length = 0

    def derive_form(self, first: int, body: bytes) -> None:
        """Derive the form from a PUBLISH at QoS 0."""
        head = body[: -len(self._payloads[0])]
        self.expected = b"".join(packet(first, head + payload) for payload in self._payloads)
        self.length = len(self.expected) // len(self._payloads)

    def number(self, payload: bytes) -> int:
        """Return the message number of a payload."""
        return self._payloads.index(payload)


class Follower(Connection):
    """Subscribes to one filter at QoS 0, and counts messages.

    Attributes:
        subscribed: done after SUBACK.
        got: number of messages so far.
        wrong: always False: other bytes than the expected ones are an error.
        position: number of the next expected message; `position - got` messages were lost.
    """

    closing = DISCONNECT
    wrong = False

    def __init__(
        self,
        client_id: str,
        filters: Sequence[str],
        stream: Stream,
        total: int,
        on_message: Callable[[int, float], None],
    ) -> None:
        """`on_message` is called with the number of the last message of each read, and its time."""
        super().__init__()
        self.greeting = connect_packet(client_id, keep_alive_s=0)
        self._filters = filters
        self._stream = stream
        self._total = total
        self._on_message = on_message
        self._splitter = Splitter()
        self._rest = b""
        self.subscribed = self.promise()
        self.finished = self.promise()
        self.got = 0
        self.position = 0

    def close(self) -> None:
        """Disconnect and close, whatever is missing."""
        self.finished.cancel()
        super().close()

    def data_received(self, data: bytes) -> None:
        """Handle packets, mostly messages."""
        now = time.perf_counter()
        stream = self._stream
        before = self.position
        if self._rest:
            data, self._rest = self._rest + data, b""
        if stream.length and self.subscribed.done():
            count = len(data) // stream.length
            begin, whole = self.position * stream.length, count * stream.length
            if stream.expected.startswith(data[:whole] if whole != len(data) else data, begin):
                self._rest = data[whole:]
                self.got += count
                self.position += count
            else:
                self._parse(data)
        else:
            self._parse(data)
        if self.position > before:
            self._on_message(self.position - 1, now)
        if self.position >= self._total and not self.finished.done():
            self.finished.set_result(None)

    def _parse(self, data: bytes) -> None:
        for first, body in self._splitter.feed(data):
            if first & 0xF0 == 0x30:
                if not self._stream.length:
                    self._stream.derive_form(first, body)
                at = 2 + struct.unpack_from(">H", body)[0]
                length, at = read_varint(body, at)
                self.position = self._stream.number(body[at + length :]) + 1
                self.got += 1
            elif first == 0x20 and not body[1]:
                filters = [(topic_filter, 0) for topic_filter in self._filters]
                self.write(subscribe_packet(1, filters))
            elif first == 0x90 and not self.subscribed.done():
                self.subscribed.set_result(None)
            else:
                raise AssertionError(f"packet 0x{first:02x} {body.hex()}")
        self._rest, self._splitter = self._splitter.take(), Splitter()
