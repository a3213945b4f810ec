"""PROXY headers: valid, malformed, in parts of any size, and never a byte behind them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.proxy import LARGEST_V2, SIGNATURE, HeaderParser, ProxyError, ProxyHeader, crc32c

V4 = bytes([203, 0, 113, 7]) + bytes([10, 0, 0, 1]) + struct.pack(">HH", 4711, 1883)
V6 = b"\x20\x01\x0d\xb8" + bytes(11) + b"\x07" + bytes(15) + b"\x01" + struct.pack(">HH", 4712, 1883)
CLIENT = ProxyHeader(("203.0.113.7", 4711))


def v2(rest: bytes, kind: int = 0x11, command: int = 0x21, size: int | None = None) -> bytes:
    return SIGNATURE + struct.pack(">BBH", command, kind, len(rest) if size is None else size) + rest


def tlv(kind: int, value: bytes) -> bytes:
    return struct.pack(">BH", kind, len(value)) + value


def tls(name: bytes = b"pump-7", client: int = 0x03, verify: int = 0) -> bytes:
    return tlv(0x20, struct.pack(">BI", client, verify) + tlv(0x21, b"TLSv1.3") + tlv(0x22, name))


def checked(rest: bytes) -> bytes:
    """With PP2_TYPE_CRC32C at the end."""
    blank = v2(rest + tlv(0x03, bytes(4)))
    return blank[:-4] + struct.pack(">I", crc32c(blank))


def parse(data: bytes, most: int = 1 << 20) -> tuple[ProxyHeader, bytes]:
    """Read at most `needed` bytes at a time. Returns the header and the rest."""
    parser, at = HeaderParser(), 0
    while parser.header is None:
        piece = data[at : at + min(parser.needed, most)]
        if not piece:
            raise EOFError
        at += len(piece)
        parser.receive_data(piece)
    assert parser.needed == 0
    return parser.header, data[at:]


GOOD = {
    b"PROXY TCP4 203.0.113.7 10.0.0.1 4711 1883\r\n": CLIENT,
    b"PROXY TCP6 2001:db8::7 ::1 4712 1883\r\n": ProxyHeader(("2001:db8::7", 4712)),
    b"PROXY TCP4 1.1.1.1 2.2.2.2 0 65535\r\n": ProxyHeader(("1.1.1.1", 0)),
    b"PROXY UNKNOWN\r\n": ProxyHeader(),
    b"PROXY UNKNOWN ffff::1 ffff::2 65535 65535\r\n": ProxyHeader(),
    v2(V4): CLIENT,
    v2(V4, 0x12): CLIENT,
    v2(V6, 0x21): ProxyHeader(("2001:db8::7", 4712)),
    v2(b"", 0x00, 0x20): ProxyHeader(),
    v2(b"anything", 0xFF, 0x20): ProxyHeader(),
    v2(b"", 0x00): ProxyHeader(),
    v2(bytes(216), 0x31): ProxyHeader(),
    v2(V4 + tlv(0x04, bytes(3000)) + tlv(0x05, b"id") + tlv(0xEE, b"")): CLIENT,
    v2(V4 + tls()): ProxyHeader(CLIENT.source, "pump-7"),
    v2(V4 + tls(client=0x05)): ProxyHeader(CLIENT.source, "pump-7"),
    v2(V4 + tls(client=0x01)): CLIENT,
    v2(V4 + tls(client=0x02)): CLIENT,
    v2(V4 + tls(verify=1)): CLIENT,
    v2(V4 + tls(name=b"")): CLIENT,
    checked(V4 + tls()): ProxyHeader(CLIENT.source, "pump-7"),
}


@pytest.mark.parametrize("most", [1, 3, 1 << 20])
def test_good_headers_in_parts_of_any_size_and_nothing_behind_them(most: int) -> None:
    for data, header in GOOD.items():
        assert parse(data + b"\x10\x00\r\n", most) == (header, b"\x10\x00\r\n"), data


BROKEN = (
    b"GET / HTTP/1.1\r\n",
    b"\x10\x20\x00\x04MQTT\x05\x00\x00\x00",
    b"PROXy TCP4 1.1.1.1 2.2.2.2 1 2\r\n",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\n\n",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 1\r\r\n",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 1\r\n",
    b"PROXY TCP4 1.1.1.1  2.2.2.2 1 2\r\n",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2 3\r\n",
    b"PROXY TCP4 1.1.1.256 2.2.2.2 1 2\r\n",
    b"PROXY TCP4 ::1 ::1 1 2\r\n",
    b"PROXY TCP6 1.1.1.1 2.2.2.2 1 2\r\n",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 65536 2\r\n",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 01 2\r\n",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 +1 2\r\n",
    b"PROXY TCP5 1.1.1.1 2.2.2.2 1 2\r\n",
    b"PROXY UDP4 1.1.1.1 2.2.2.2 1 2\r\n",
    b"PROXY TCP4 \xff.1.1.1 2.2.2.2 1 2\r\n",
    b"PROXY UNKNOWN " + b"x" * 200 + b"\r\n",
    SIGNATURE[:-1] + b"X" + bytes(8),
    v2(V4, command=0x11),
    v2(V4, command=0x22),
    v2(V4, kind=0x13),
    v2(V4, size=LARGEST_V2 + 1),
    v2(V4[:-1]),
    v2(V4, kind=0x21),
    v2(V4 + b"\x04\x00"),
    v2(V4 + b"\x04\x00\x02\x00"),
    v2(V4 + tlv(0x20, b"\x01\x00")),
    v2(V4 + tlv(0x20, bytes(5) + b"\x22\x00\x09x")),
    v2(V4 + tls(name=b"\xff")),
    v2(V4 + tlv(0x03, bytes(4))),
    v2(V4 + tlv(0x03, bytes(3))),
)


@pytest.mark.parametrize("most", [1, 1 << 20])
def test_broken_headers_are_refused_as_soon_as_that_is_certain(most: int) -> None:
    for data in BROKEN:
        with pytest.raises(ProxyError):
            parse(data, most)


def test_a_header_that_breaks_off_is_no_header() -> None:
    for data in GOOD:
        for end in range(0, len(data), 1 + len(data) // 64):
            with pytest.raises(EOFError):
                parse(data[:end])


@given(st.one_of(st.binary(max_size=80), st.binary(max_size=60).map(v2)), st.integers(1, 30))
def test_any_bytes_are_a_header_or_are_refused(data: bytes, most: int) -> None:
    try:
        header, rest = parse(data, most)
    except (ProxyError, EOFError):
        return
    assert data.endswith(rest)
    assert parse(data) == (header, rest)


@given(st.ip_addresses(), st.integers(0, 65535), st.binary(max_size=20))
def test_both_versions_say_the_same(address: object, port: int, rest: bytes) -> None:
    text = str(address)
    version = 6 if ":" in text else 4
    line = f"PROXY TCP{version} {text} {text} {port} 1\r\n".encode()
    packed = address.packed  # type: ignore[attr-defined]
    block = v2(packed + packed + struct.pack(">HH", port, 1), 0x21 if version == 6 else 0x11)
    assert parse(line + rest) == parse(block + rest) == (ProxyHeader((text, port)), rest)


def test_the_checksum() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value in catalogues of checksums
