"""Bytes <-> packet <-> error, one row per case, written by hand from the standard."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from protocols.errors import PeerError
from protocols.mqtt import packets
from protocols.mqtt.decoding import decode_packet
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import Properties
from tests.protocols.mqtt.wire import wire
from tests.support.mqtt_packets import encode_packet

VECTORS = Path(__file__).parents[2] / "vectors" / "mqtt"


def rows(name: str) -> list[Any]:
    cases = tomllib.loads((VECTORS / name).read_text())["case"]
    return [
        pytest.param(case, id=case["name"], marks=[pytest.mark.clause(one) for one in case.get("clauses", ())])
        for case in cases
    ]


def parts(data: bytes) -> tuple[int, bytes]:
    """Split the fixed header off (section 2.1)."""
    at = 1
    while data[at] & 0x80:
        at += 1
    return data[0], data[at + 1 :]


@pytest.mark.parametrize("case", rows("packets.toml"))
def test_packet(case: dict[str, Any]) -> None:
    version = Version(case.get("version", 5))
    data = wire(case["bytes"])
    expected = eval(case["packet"], {**vars(packets), "Properties": Properties, "bytes": bytes})
    first, body = parts(data)
    assert decode_packet(first, body, version) == expected
    encoded = encode_packet(expected, version)
    if not case.get("one_way"):
        assert encoded == data
    first, body = parts(encoded)
    assert decode_packet(first, body, version) == expected


@pytest.mark.parametrize("case", rows("packets.toml"))
def test_a_shorter_body_is_never_something_else_than_malformed_or_shorter(case: dict[str, Any]) -> None:
    version = Version(case.get("version", 5))
    first, body = parts(wire(case["bytes"]))
    whole = decode_packet(first, body, version)
    for size in range(len(body)):
        try:
            packet = decode_packet(first, body[:size], version)
        except PeerError:
            continue
        assert packet != whole or case.get("one_way")  # what is optional at the end was left out


@pytest.mark.parametrize("case", rows("faults.toml"))
def test_fault(case: dict[str, Any]) -> None:
    first, body = parts(wire(case["bytes"]))
    with pytest.raises(PeerError) as caught:
        decode_packet(first, body, Version(case.get("version", 5)))
    assert caught.value.code == case["error"], str(caught.value)
