"""PROXY headers that come slowly or never: limited in time and memory, counted, and no other client waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.net import unfinished
from gateway.net.listener import Listener
from gateway.net.proxied import ProxiedSource, Proxies
from gateway.net.strangers import Strangers
from gateway.net.unfinished import BUFFER_BYTES
from gateway.security.throttle import address_of, peer_of
from gateway.settings.config import Address
from protocols.proxy import SIGNATURE
from tests.support.listeners import one_listener
from tests.support.waiting import wait_until

NETWORKS = (ipaddress.ip_network("127.0.0.1/32"), ipaddress.ip_network("::1/128"))
IPV6 = SIGNATURE + struct.pack(">BBH", 0x21, 0x21, 36)
FAR = "2001:db8::7"


class Served(asyncio.Protocol):
    """The protocol behind the header."""

    def __init__(self) -> None:
        self.source: ProxiedSource | None = None
        self.heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.heard = b""

    def data_received(self, data: bytes) -> None:
        self.heard += data


class Behind:
    """A listener behind balancers."""

    def __init__(self, limit_bytes: int, **options: Any) -> None:
        self.came: list[Served] = []
        self.strangers = Strangers(limit_bytes)
        self.proxies = Proxies(NETWORKS, common_names=False)
        self.listener: Listener = one_listener(self.make, strangers=self.strangers, proxies=self.proxies, **options)

    def make(self, _: Any) -> Served:
        self.came.append(Served())
        return self.came[-1]

    async def connect(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.listener.bound.rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.write(sent)
        return reader, writer


@contextlib.asynccontextmanager
async def behind(limit_bytes: int = 1 << 20, **options: Any) -> AsyncIterator[Behind]:
    made = Behind(limit_bytes, **options)
    await made.listener.start()
    try:
        yield made
    finally:
        made.listener.close()


async def closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(1), 60) == b""


def header(source: str) -> bytes:
    addresses = ipaddress.ip_address(source).packed + ipaddress.ip_address("::1").packed
    return IPV6 + addresses + struct.pack(">HH", 4712, 1883)


async def test_a_missing_or_slow_header_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished, "HEADER_S", 0.2)
    async with behind() as gateway:
        silent, mute = await gateway.connect()
        dripping, dripper = await gateway.connect()

        for byte in SIGNATURE + b"\x21\x21\x10\x00":  # and 4,096 more that do not come
            dripper.write(bytes([byte]))
            await dripper.drain()
        await closed(silent)
        await closed(dripping)
        for writer in (mute, dripper):
            writer.close()
        counts = gateway.proxies.statistics()
        assert (counts.broken_total, counts.headers_total, counts.waiting) == (2, 0, 0)
        assert gateway.strangers.statistics().bytes == 0
        assert gateway.came == []


async def test_no_other_client_waits_for_them_and_their_memory_is_bounded() -> None:
    """Over the limit the balancer's oldest connections are aborted."""
    async with behind(limit_bytes=8 * BUFFER_BYTES) as gateway:
        waiting = [await gateway.connect(SIGNATURE) for _ in range(8)]
        await wait_until(lambda: gateway.proxies.statistics().waiting == 8)
        assert gateway.strangers.statistics().bytes == 8 * BUFFER_BYTES
        _, writer = await gateway.connect(header(FAR) + b"hello")
        await wait_until(lambda: [one.heard for one in gateway.came] == [b"hello"])
        await closed(waiting[0][0])
        assert gateway.strangers.statistics().dropped_total == 1
        assert gateway.proxies.statistics().waiting == 7
        for _, one in [*waiting, (None, writer)]:
            one.close()
        await wait_until(lambda: gateway.listener.connections == 1)  # `Served` does not decrement the entrance's count
        assert gateway.proxies.statistics().broken_total == 7


async def test_a_health_check_that_closes_immediately_is_no_error() -> None:
    async with behind() as gateway:
        host, _, port = gateway.listener.bound.rpartition(":")
        for _ in range(50):
            check = socket.create_connection((host, int(port)))
            check.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            check.close()  # with a reset
        _, writer = await gateway.connect(header(FAR))
        await wait_until(lambda: len(gateway.came) == 1)
        await wait_until(lambda: gateway.proxies.statistics().waiting == 0)
        counts = gateway.proxies.statistics()
        assert (counts.untrusted_total, counts.broken_total) == (0, 0)
        writer.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_over_ipv6_of_a_client_with_ipv6() -> None:
    async with behind(address=Address("[::1]:0")) as gateway:
        assert gateway.listener.bound.startswith("[::1]:")
        _, writer = await gateway.connect(header(FAR) + b"hello")
        await wait_until(lambda: [one.heard for one in gateway.came] == [b"hello"])
        (served,) = gateway.came
        assert served.source is not None
        assert peer_of(served.source.peername) == f"[{FAR}]:4712"
        assert address_of(peer_of(served.source.peername)) == "2001:db8::/64"
        writer.close()
