"""The PROXY protocol, versions 1 and 2: a load balancer's header about the client, before the client's own bytes.

The specification is HAProxy's `proxy-protocol.txt`; the sections named here are its own. `HeaderParser.needed` is the
number of bytes that may be read without reading any of the client's, so nothing need be pushed back.
"""

from __future__ import annotations

import ipaddress
import struct
from typing import Final

import msgspec

SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
LARGEST_V1: Final = 107  # with its line end (section 2.1)
LARGEST_V2: Final = 4096  # behind the first 16 bytes; addresses and TLVs of real balancers take some hundred

_BEGIN_V1: Final = b"PROXY "
_SHORTEST_V1: Final = len(b"PROXY UNKNOWN\r\n")
_FIXED_V2: Final = 16
_TCP4, _TCP6, _UDP4, _UDP6, _UNIX_STREAM, _UNIX_DATAGRAM, _UNSPECIFIED = 0x11, 0x21, 0x12, 0x22, 0x31, 0x32, 0x00
_ADDRESS_BYTES: Final = {
    _TCP4: 12, _UDP4: 12, _TCP6: 36, _UDP6: 36, _UNIX_STREAM: 216, _UNIX_DATAGRAM: 216, _UNSPECIFIED: 0,
}  # fmt: skip
_LOCAL, _PROXY = 0x20, 0x21
_CRC32C, _SSL, _COMMON_NAME = 0x03, 0x20, 0x22
_OVER_TLS: Final = 0x01  # PP2_CLIENT_SSL
_CERTIFIED: Final = 0x02 | 0x04  # a certificate on this connection, or in its TLS session
_LARGEST_PORT: Final = 65535


class ProxyError(ValueError):
    """A missing or malformed PROXY header."""


class ProxyHeader(msgspec.Struct, frozen=True):
    """The contents of a PROXY header."""

    source: tuple[str, int] | None = None  # the client's address; None: the connection's own (LOCAL, UNKNOWN)
    common_name: str | None = None  # of the client's certificate, which the balancer has verified


class HeaderParser:
    """Reads one header, in parts of any size."""

    __slots__ = ("_data", "header", "needed")

    def __init__(self) -> None:
        self._data = b""
        self.header: ProxyHeader | None = None  # once it is complete
        self.needed = len(SIGNATURE)  # bytes that certainly belong to the header; 0 once it is complete

    @property
    def started(self) -> bool:
        """Whether any byte was received."""
        return bool(self._data)

    def receive_data(self, data: bytes) -> None:
        """Parse at most `needed` bytes.

        Raises:
            ProxyError: The bytes are no header or a malformed one; raised as soon as that is certain.
        """
        self._data = data = self._data + data
        if data[: len(SIGNATURE)] == SIGNATURE[: len(data)]:
            self._read_v2(data)
        elif data[: len(_BEGIN_V1)] == _BEGIN_V1[: len(data)]:
            self._read_v1(data)
        else:
            raise ProxyError("the connection does not start with a PROXY header")

    def _read_v1(self, data: bytes) -> None:
        if len(data) > LARGEST_V1 or (len(data) == LARGEST_V1 and not data.endswith(b"\r\n")):
            raise ProxyError(f"the line has more than {LARGEST_V1} bytes")
        if data.endswith(b"\r\n"):
            self.header, self.needed = _read_line(data[:-2]), 0
            return
        if b"\n" in data or b"\r" in data[:-1]:
            raise ProxyError("the line does not end with CR and LF")
        # The shortest line has 15 bytes. Behind them, at least the rest of a line end is needed.
        self.needed = max(_SHORTEST_V1 - len(data), 1 if data.endswith(b"\r") else 2)

    def _read_v2(self, data: bytes) -> None:
        if len(data) < _FIXED_V2:
            self.needed = _FIXED_V2 - len(data)
            return
        command, kind, size = struct.unpack_from(">BBH", data, len(SIGNATURE))
        if command not in (_LOCAL, _PROXY):
            raise ProxyError(f"unknown version or command: 0x{command:02x}")
        if size > LARGEST_V2:
            raise ProxyError(f"the header is too large: {size} bytes")
        self.needed = _FIXED_V2 + size - len(data)
        if self.needed == 0:
            self.header = ProxyHeader() if command == _LOCAL else _read_block(kind, data)


def _read_line(line: bytes) -> ProxyHeader:
    """Version 1: `PROXY TCP4 <source> <destination> <port> <port>` (section 2.1)."""
    fields = line.split(b" ")
    if fields[1] == b"UNKNOWN":  # the rest of the line must be ignored
        return ProxyHeader()
    if fields[1] not in (b"TCP4", b"TCP6") or len(fields) != 6:
        raise ProxyError("the line is malformed")
    version = 4 if fields[1] == b"TCP4" else 6
    try:
        addresses = [ipaddress.ip_address(field.decode("ascii")) for field in fields[2:4]]
    except ValueError:
        raise ProxyError("invalid address") from None
    if any(address.version != version for address in addresses):
        raise ProxyError("an address is not of the stated family")
    ports = [_port(field) for field in fields[4:]]
    return ProxyHeader((str(addresses[0]), ports[0]))


def _port(field: bytes) -> int:
    if not field.isdigit() or (field[:1] == b"0" and field != b"0") or len(field) > 5 or int(field) > _LARGEST_PORT:
        raise ProxyError("invalid port")
    return int(field)


def _read_block(kind: int, data: bytes) -> ProxyHeader:
    """Version 2: addresses and TLVs (section 2.2)."""
    size = _ADDRESS_BYTES.get(kind)
    if size is None:
        raise ProxyError(f"unknown address family or transport: 0x{kind:02x}")
    end = _FIXED_V2 + size
    if len(data) < end:
        raise ProxyError("the header is shorter than its addresses")
    source = None
    if kind in (_TCP4, _UDP4):
        source = (str(ipaddress.IPv4Address(data[16:20])), int.from_bytes(data[24:26], "big"))
    elif kind in (_TCP6, _UDP6):
        source = (str(ipaddress.IPv6Address(data[16:32])), int.from_bytes(data[48:50], "big"))
    common_name = None
    for tag, start, stop in _values(data, end, len(data)):
        if tag == _CRC32C:
            _check(data, start, stop)
        elif tag == _SSL:
            common_name = _common_name(data, start, stop)
    return ProxyHeader(source, common_name)


def _values(data: bytes, at: int, end: int) -> list[tuple[int, int, int]]:
    """Return type, start and end of each TLV."""
    values: list[tuple[int, int, int]] = []
    while at < end:
        if end - at < 3:
            raise ProxyError("truncated TLV")
        stop = at + 3 + int.from_bytes(data[at + 1 : at + 3], "big")
        if stop > end:
            raise ProxyError("a TLV is longer than the header")
        values.append((data[at], at + 3, stop))
        at = stop
    return values


def _common_name(data: bytes, start: int, stop: int) -> str | None:
    """Return the common name in PP2_TYPE_SSL, if the client's certificate was verified (section 2.2.5)."""
    if stop - start < 5:
        raise ProxyError("truncated TLS TLV")
    client, verified = data[start], data[start + 1 : start + 5] == bytes(4)
    names = [data[first:last] for tag, first, last in _values(data, start + 5, stop) if tag == _COMMON_NAME]
    if not verified or not client & _OVER_TLS or not client & _CERTIFIED or len(names) != 1:
        return None
    try:
        return names[0].decode("utf-8") or None
    except UnicodeDecodeError:
        raise ProxyError("the common name is not UTF-8") from None


def _check(data: bytes, start: int, stop: int) -> None:
    """Check PP2_TYPE_CRC32C, computed over the whole header with zeros in the checksum's place (section 2.2.3)."""
    if stop - start != 4 or crc32c(data[:start] + bytes(4) + data[stop:]) != int.from_bytes(data[start:stop], "big"):
        raise ProxyError("wrong checksum")


def crc32c(data: bytes) -> int:
    """Return the Castagnoli CRC (RFC 3720 appendix B.4), bit by bit: a header is short and comes once."""
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF
