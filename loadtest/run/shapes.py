"""The messages of a load test in bytes: several kinds for each protocol, so that no code path is tuned to one.

A message is a template of fixed bytes and slots. Slots have a fixed width, so every message has the same length.
"""

from __future__ import annotations

import base64
import functools
import json
import random
import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, overload

from loadtest.clients import amqp_messages, mqtt
from loadtest.clients.amqp_messages import shapes as captured
from loadtest.clients.amqp_wire import key_annotation, transfer
from loadtest.clients.http_wire import request_head
from loadtest.clients.mqtt_wire import text, varint
from loadtest.clients.pace import Pace
from loadtest.numbering import HEADER_BYTES, Numbering

PROTOCOLS: Final = ("mqtt", "amqp", "http")
MESSAGES: Final = ("minimal", "typical", "jms", "random")
LEAST_BYTES: Final = 48
"""The smallest payload: run, sender, number, and the time it was due (`time.perf_counter`, microseconds)."""
DUE: Final = re.compile(rb"([0-9a-f]{8})\.(\d{5})\.(\d{10})\.(\d{16})\.")
"""The start of every payload."""
KINDS: Final = 64
"""The number of different messages of a random sender, and the maximum for a typical one."""
_STAMP: Final = HEADER_BYTES + 17
_MARK: Final = 1_234_567_890
_TYPES: Final = {name: f"application/vnd.kafka.{name}.v2+json" for name in ("text", "json", "binary")}

Fill = Callable[[int, float], bytes]


class Slot(NamedTuple):
    """Bytes that differ from message to message; `fill` gets the message's number and due time."""

    width: int
    fill: Fill


Pieces = list[bytes | Slot]


class Template:
    """A message whose fixed bytes are already encoded."""

    def __init__(self, pieces: Pieces) -> None:
        self._text = b"".join(b"%b" if isinstance(piece, Slot) else piece.replace(b"%", b"%%") for piece in pieces)
        self._fills = [piece.fill for piece in pieces if isinstance(piece, Slot)]

    def write(self, index: int, due: float) -> bytes:
        """Return message `index`."""
        return self._text % tuple([fill(index, due) for fill in self._fills])


def width(pieces: Sequence[bytes | Slot]) -> int:
    """Return the length of a message."""
    return sum(piece.width if isinstance(piece, Slot) else len(piece) for piece in pieces)


def _digits(places: int) -> Slot:
    most = 10**places
    return Slot(places, lambda index, _due: b"%0*d" % (places, index % most))


_CLOCK: Final = Slot(8, lambda _index, _due: struct.pack(">q", int(time.time() * 1000)))
_IN_AN_HOUR: Final = Slot(8, lambda _index, _due: struct.pack(">q", int(time.time() * 1000) + 3_600_000))
_PACKET_ID: Final = Slot(2, lambda index, _due: struct.pack(">H", mqtt.packet_id(index)))
_DELIVERY_ID: Final = Slot(4, lambda index, _due: struct.pack(">I", index))


def _stamp(numbering: Numbering, sender: int, *, encoded: bool = False) -> Slot:
    """Return the slot at the start of a payload; `encoded` means base64, with two more bytes to avoid padding."""
    head = b"%b.%05d." % (numbering.run.encode(), sender)
    if encoded:
        size = _STAMP + -_STAMP % 3
        return Slot(
            size // 3 * 4,
            lambda index, due: base64.b64encode((b"%b%010d.%016d." % (head, index, due * 1e6)).ljust(size, b"x")),
        )
    return Slot(_STAMP, lambda index, due: b"%b%010d.%016d." % (head, index, due * 1e6))


class Shape(NamedTuple):
    """The form of a sender's messages.

    Attributes:
        protocol: mqtt, amqp or http.
        messages: one of `MESSAGES`.
        topic: the Kafka topic.
        size: payload bytes; `random` uses from `LEAST_BYTES` to four times this.
        topics: the number of MQTT topics, or keys.
        numbering: the run's numbering.
        sender: the sender's number.
        seed: seed of the random choices.
        qos: MQTT's QoS.
        batch: records per HTTP request.
        host: HTTP's Host header.
        login: a complete HTTP header line, or empty.
    """

    protocol: str
    messages: str
    topic: str
    size: int
    topics: int
    numbering: Numbering
    sender: int
    seed: int = 1
    qos: int = 1
    batch: int = 1
    host: str = "gateway"
    login: str = ""

    def templates(self) -> list[Pieces]:
        """Return the messages that are sent in turn; for HTTP the records."""
        rng = random.Random(f"{self.seed}.{self.sender}")
        many = {"minimal": 1, "random": KINDS}.get(self.messages, min(KINDS, self.topics))
        return [piece for number in range(many) for piece in _WRITERS[self.protocol](self, number, rng)]

    def payload(self, rng: random.Random) -> list[bytes | Slot]:
        """Return the pieces of a message's value."""
        size = self.size
        if self.messages == "random":
            size = round(LEAST_BYTES * (4 * self.size / LEAST_BYTES) ** rng.random())
        return [_stamp(self.numbering, self.sender), b"x" * (size - _STAMP)]

    def kind(self, rng: random.Random) -> str:
        """Return the kind of one message."""
        return rng.choice(MESSAGES[:-1]) if self.messages == "random" else self.messages


def _property(code: int, *values: str | bytes) -> bytes:
    parts = [text(one) if isinstance(one, str) else struct.pack(">H", len(one)) + one for one in values]
    return bytes((code,)) + b"".join(parts)


def _mqtt(shape: Shape, number: int, rng: random.Random) -> Iterator[Pieces]:
    kind = shape.kind(rng)
    device = f"device-{number % shape.topics:04d}"
    topic = f"{shape.topic}/sender-{shape.sender}" + ("" if kind == "minimal" else f"/{device}/state")
    properties: Pieces = []
    if kind == "typical":
        properties = [_property(0x03, "application/json"), _property(0x26, "device", device)]
    elif kind == "jms":
        properties = [
            b"\x01\x01\x02" + struct.pack(">I", 3600),
            _property(0x03, "text/plain") + _property(0x08, f"replies/{device}"),
            b"\x09\x00\x0c", _digits(12), _property(0x26, "device", device), _property(0x26, "type", "text"),
            _property(0x26, "traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ]  # fmt: skip
    body = [text(topic), _PACKET_ID, varint(width(properties)), *properties, *shape.payload(rng)]
    yield [bytes((0x30 | shape.qos << 1,)) + varint(width(body)), *body]


_BODY: Final = re.compile(rb"\x00S([uw])(?:([\xa0\xa1])d|([\xb0\xb1])\x00\x00\x00d).{100}", re.DOTALL)
_FRESH: Final = re.compile(rb"(?P<id>(?<=-)[0-9a-f]{12}(?=[:@]))|\x83(?P<time>\x00\x00\x01[\x90-\xff].{4})", re.DOTALL)
"""Parts that a client changes in each message: the last part of the message id's UUID, expiry time, creation time."""


def _amqp(shape: Shape, number: int, rng: random.Random) -> Iterator[Pieces]:
    kind = shape.kind(rng)
    payload = shape.payload(rng)
    key = key_annotation(f"device-{number % shape.topics:04d}")
    if kind == "typical":
        # x marks the payload; the encoded forms of the number are then found and replaced
        raw = amqp_messages.typical(_MARK, b"x" * width(payload))[: -width(payload)]
        now = struct.pack(">q", amqp_messages.NOW + _MARK // 100)
        marks: dict[bytes, Slot] = {b"%d" % _MARK: _digits(10), struct.pack(">i", _MARK): _DELIVERY_ID, now: _CLOCK}
        fresh = re.compile(b"|".join(re.escape(mark) for mark in marks))
        parts: Pieces = []
        at = 0
        for match in fresh.finditer(raw):
            parts += [raw[at : match.start()], marks[match[0]]]
            at = match.end()
        yield _transfer([*parts, raw[at:], *payload])
    elif kind == "jms":
        for one in _client_messages(every=shape.messages == "random"):
            yield _transfer([*one[0], _section(one[1], one[2], width(payload)), *payload])
    else:
        yield _transfer([key, _section(b"u", b"\xa0", width(payload)), *payload])


@functools.cache
def _client_messages(*, every: bool) -> list[tuple[Pieces, bytes, bytes]]:
    """Return real clients' bytes before the body, and the body's type and form: Qpid JMS only, or `every` client."""
    found: list[tuple[Pieces, bytes, bytes]] = []
    for name, messages in captured().items():
        if not (every or name.startswith("jms-")):
            continue
        for message in messages if not every else messages[:1]:
            body = _BODY.search(message)
            if body is None or body.end() != len(message):
                continue  # a map, a list or an object cannot contain the number
            parts: Pieces = []
            at = 0
            fresh = list(_FRESH.finditer(message, 0, body.start()))
            for place, match in enumerate(fresh, 1):
                start, end = match.span(match.lastgroup or 0)
                time_of = _CLOCK if place == len(fresh) else _IN_AN_HOUR  # the creation time is the last one
                parts += [message[at:start], _digits(12) if match.lastgroup == "id" else time_of]
                at = end
            found.append(([*parts, message[at : body.start()]], body[1], body[2] or body[3]))
    return found


def _section(what: bytes, form: bytes, size: int) -> bytes:
    """Return the start of a data or text section, in the short form if the original had it and the size allows."""
    if form in b"\xa0\xa1" and size < 256:
        return b"\x00S" + what + form + bytes((size,))
    return b"\x00S" + what + bytes((form[0] | 0x10,)) + struct.pack(">I", size)


def _transfer(message: Pieces) -> Pieces:
    size, mark, tag = width(message), 0x7A7B7C7D, b"tag!"
    head = transfer(mark, tag, bytes(size))[:-size]
    before, _, rest = head.partition(struct.pack(">I", mark))
    between, _, behind = rest.partition(tag)
    return [before, _DELIVERY_ID, between, _DELIVERY_ID, behind, *message]


def _http(shape: Shape, number: int, rng: random.Random) -> Iterator[Pieces]:
    kind = _TYPES_OF[shape.kind(rng) if shape.messages != "random" else _whole(shape)]
    key = f"device-{number % shape.topics:04d}"
    stamp, padding = shape.payload(rng)
    assert isinstance(padding, bytes)
    if kind == "json":
        yield [
            f'{{"key":"{key}","value":{{"device":"{key}","temperature":21.5,"text":"'.encode(), stamp,
            padding + b'"}}',
        ]  # fmt: skip
    elif kind == "binary":
        headers = [{"key": name, "value": base64.b64encode(name.encode()).decode()} for name in ("type", "trace", "id")]
        head = json.dumps({"key": base64.b64encode(key.encode()).decode(), "headers": headers}, separators=(",", ":"))
        rest = padding[-_STAMP % 3 :]
        yield [
            head[:-1].encode() + b',"value":"', _stamp(shape.numbering, shape.sender, encoded=True),
            base64.b64encode(rest) + b'"}',
        ]  # fmt: skip
    else:
        yield [b'{"value":"', stamp, padding + b'"}']


_TYPES_OF: Final = {"minimal": "text", "typical": "json", "jms": "binary"}
_WRITERS: Final[dict[str, Callable[[Shape, int, random.Random], Iterator[Pieces]]]] = {
    "mqtt": _mqtt, "amqp": _amqp, "http": _http,
}  # fmt: skip


def _whole(shape: Shape) -> str:
    """Return the kind of all records of a random HTTP sender, since a request has one content type."""
    return MESSAGES[shape.sender % 3]


class Packets(Sequence[bytes]):
    """The endless packets of a sender, each encoded when it is requested; see `Sender.more`."""

    def __init__(self, shape: Shape, pace: Pace) -> None:
        self._templates = [Template(pieces) for pieces in shape.templates()]
        self._pace = pace

    def __len__(self) -> int:
        """Return 0: no packet is encoded in advance."""
        return 0

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> list[bytes]: ...
    def __getitem__(self, place: int | slice) -> Any:
        """Return one packet, or consecutive ones."""
        if isinstance(place, slice):
            return self._written(place.start, place.stop)
        return self._written(place, place + 1)[0]

    def _written(self, first: int, behind: int) -> list[bytes]:
        templates, due = self._templates, self._pace.due
        return [templates[index % len(templates)].write(index, due(index)) for index in range(first, behind)]


class Requests(Packets):
    """The requests of an HTTP sender, `batch` records in each."""

    def __init__(self, shape: Shape, pace: Pace) -> None:
        super().__init__(shape, pace)
        kind = _TYPES_OF[_whole(shape) if shape.messages == "random" else shape.messages]
        self._head = f"/topics/{shape.topic}", _TYPES[kind]
        self._login, self._host = shape.login, shape.host
        self._batch = shape.batch

    def __getitem__(self, place: Any) -> Any:
        """Return request `place`."""
        records = self._written(place * self._batch, (place + 1) * self._batch)
        body = b'{"records":[' + b",".join(records) + b"]}"
        fields = f"{self._login}Content-Length: {len(body)}"
        return request_head("POST", *self._head, fields, host=self._host) + body
