"""AMQP messages in several forms: `kind(number, payload)` returns the sections."""

from __future__ import annotations

import functools
import itertools
import json
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from loadtest.clients.amqp_wire import NULL, data_section, key_annotation, listed, mapped, string, symbol

Kind = Callable[[int, bytes], bytes]

KEYS: Final = 100
CAPTURED: Final = 1_795_000_000_000
"""A time (epoch ms) at which no recorded message has expired."""
NOW: Final = int(time.time() * 1000)
_DURABLE: Final = b"\x00\x53\x70\xc0\x02\x01\x41"


def shapes() -> dict[str, list[bytes]]:
    """Return the messages recorded from real clients, by client and kind: `amqp_shapes.json`."""
    text = Path(__file__).with_name("amqp_shapes.json").read_text("utf-8")
    return {name: [bytes.fromhex(one) for one in found] for name, found in json.loads(text)["shapes"].items()}


def minimal(_number: int, payload: bytes) -> bytes:
    """Return one Data section."""
    return data_section(payload)


def keyed(key: str) -> Kind:
    """Return a kind whose messages all have one Kafka key."""
    annotations = key_annotation(key)
    return lambda _number, payload: annotations + data_section(payload)


def many_keys(number: int, payload: bytes) -> bytes:
    """Use `KEYS` keys in turn."""
    return _annotation(number % KEYS) + data_section(payload)


@functools.cache
def _annotation(device: int) -> bytes:
    return key_annotation(f"device-{device:03d}")


def typical(number: int, payload: bytes) -> bytes:
    """Return a typical message of a service: header, five properties and three application properties."""
    properties = b"\x00\x53\x73" + listed(
        [string(f"msg-{number:010d}"), NULL, string("telemetry/dev1"), string("subj"), NULL, string(f"corr-{number}"),
         symbol("application/json"), NULL, NULL, b"\x83" + struct.pack(">q", NOW + number // 100)]
    )  # fmt: skip
    application = b"\x00\x53\x74" + mapped(
        string("device"), string("dev-1"), string("seq"), b"\x71" + struct.pack(">i", number),
        string("temp"), b"\x82" + struct.pack(">d", 21.5 + number / 10),
    )  # fmt: skip
    return _DURABLE + properties + application + data_section(payload)


@functools.cache
def _jms_start() -> tuple[bytes, bytes]:
    """Return Qpid JMS's bytes before a text, split where the last part of the message id's UUID was."""
    message = shapes()["jms-text"][0]
    start = message[: message.index(b"\x00\x53\x77")]
    digits = re.search(rb"(?<=-)[0-9a-f]{12}(?=:)", start)
    assert digits is not None
    return start[: digits.start()], start[digits.end() :]


def jms_text(number: int, payload: bytes) -> bytes:
    """Return a TextMessage of Qpid JMS: header, two annotations, message id, `to`, creation time, and an amqp-value."""
    before, behind = _jms_start()
    return before + b"%012x" % number + behind + b"\x00\x53\x77\xa1" + bytes((len(payload),)) + payload


def _short(code: int) -> Callable[[bytes], bytes]:
    return lambda payload: b"\x00\x53" + bytes((code >> 8, code & 0xFF, len(payload))) + payload


def _long(code: int) -> Callable[[bytes], bytes]:
    """Return a section with an eight-byte descriptor and a four-byte length."""
    start = b"\x00\x80" + bytes(7) + bytes((code >> 8, (code & 0xFF) + 0x10))
    return lambda payload: start + struct.pack(">I", len(payload)) + payload


def _halves(payload: bytes) -> bytes:
    half = len(payload) // 2
    return data_section(payload[:half]) + data_section(payload[half:])


_HEADERS: Final = (
    b"", _DURABLE, b"\x00\x53\x70\x45", b"\x00\x53\x70\xd0\x00\x00\x00\x05\x00\x00\x00\x01\x41",
    b"\x00\x80" + bytes(7) + b"\x70\xc0\x04\x02\x41\x50\x04",
)  # fmt: skip
_BODIES: Final = (
    data_section, _long(0x75A0), _short(0x77A1), _long(0x77A1), _short(0x77A0), _long(0x77A0), _halves,
)  # fmt: skip
_ENCODINGS: Final = tuple(itertools.product(_HEADERS, _BODIES))
FORMS: Final = len(_ENCODINGS)


def encodings(number: int, payload: bytes) -> bytes:
    """Use all combinations in turn: a header or none; Data, text or binary, short or long, or two Data sections."""
    header, body = _ENCODINGS[number % len(_ENCODINGS)]
    return header + body(payload)
