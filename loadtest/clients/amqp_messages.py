"""AMQP messages as senders write them: `kind(number, payload)` gives the sections."""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Callable
from typing import Final

from loadtest.clients.amqp_wire import NULL, data_section, key_annotation, listed, mapped, string, symbol

Kind = Callable[[int, bytes], bytes]

KEYS: Final = 100
NOW: Final = int(time.time() * 1000)
_DURABLE: Final = b"\x00\x53\x70\xc0\x02\x01\x41"


def minimal(_number: int, payload: bytes) -> bytes:
    """One Data section."""
    return data_section(payload)


def keyed(key: str) -> Kind:
    """All with one key for Kafka."""
    annotations = key_annotation(key)
    return lambda _number, payload: annotations + data_section(payload)


def many_keys(number: int, payload: bytes) -> bytes:
    """With one of `KEYS` keys in turn."""
    return _annotation(number % KEYS) + data_section(payload)


@functools.cache
def _annotation(device: int) -> bytes:
    return key_annotation(f"device-{device:03d}")


def typical(number: int, payload: bytes) -> bytes:
    """As services send them: header, five properties and three application properties, most of them its own."""
    properties = b"\x00\x53\x73" + listed(
        [string(f"msg-{number:010d}"), NULL, string("telemetry/dev1"), string("subj"), NULL, string(f"corr-{number}"),
         symbol("application/json"), NULL, NULL, b"\x83" + struct.pack(">q", NOW + number // 100)]
    )  # fmt: skip
    application = b"\x00\x53\x74" + mapped(
        string("device"), string("dev-1"), string("seq"), b"\x71" + struct.pack(">i", number),
        string("temp"), b"\x82" + struct.pack(">d", 21.5 + number / 10),
    )  # fmt: skip
    return _DURABLE + properties + application + data_section(payload)
