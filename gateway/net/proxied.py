"""The load balancers in front of listeners, and what they say about their clients (the PROXY header)."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Protocol

import msgspec
import structlog

from gateway.runtime.failures import Repeats
from protocols.proxy import ProxyHeader
from telemetry.statistics import counter, gauge

log = structlog.get_logger(__name__)

WARN_INTERVAL_S: Final = 60.0

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ProxiedSource(msgspec.Struct, frozen=True):
    """The client behind a connection, as its load balancer states."""

    peername: tuple[str, int]  # the client's address
    peercert: Mapping[str, Any] | None = None  # its certificate, in the form of `SSLObject.getpeercert`


def certificate(source: ProxiedSource | None, transport: asyncio.BaseTransport | None) -> Mapping[str, Any] | None:
    """Return a client's certificate in the form of `SSLObject.getpeercert`; the balancer or we have verified it."""
    if source is not None and source.peercert is not None:
        return source.peercert
    shown: Mapping[str, Any] | None = transport.get_extra_info("peercert") if transport is not None else None
    return shown


class Sourced(Protocol):
    """A protocol whose `source` is set before `connection_made`. None means that the socket's peer is the client."""

    source: ProxiedSource | None


class ProxyStatistics(msgspec.Struct):
    """Counts of connections to listeners with `proxy_protocol`, since the start."""

    headers_total: Annotated[int, counter("connections with a valid PROXY header")] = 0
    untrusted_total: Annotated[int, counter("connections refused: not from security.trusted_proxies")] = 0
    broken_total: Annotated[
        int, counter("connections refused: the PROXY header was missing, malformed or too slow")
    ] = 0
    waiting: Annotated[int, gauge("connections that wait for their PROXY header")] = 0


class Proxies:
    """The trusted load balancers."""

    def __init__(self, trusted: Sequence[Network], *, common_names: bool) -> None:
        """Trust headers from these networks; with `common_names` also their common name of a client's certificate."""
        self._trusted = trusted
        self._common_names = common_names
        self._counts = ProxyStatistics()
        self._repeats = Repeats(WARN_INTERVAL_S)
        self.waiting = 0  # connections whose header is not complete yet

    def trusts(self, peer: object) -> bool:
        """Whether a socket's `peername` is a trusted balancer."""
        if not isinstance(peer, tuple):
            return False
        address = ipaddress.ip_address(peer[0].partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._trusted)

    def source(self, header: ProxyHeader) -> ProxiedSource | None:
        """Return the client of a connection with this header. None means that it is the balancer's own connection."""
        self._counts.headers_total += 1
        if header.source is None:
            return None
        name = header.common_name if self._common_names else None
        return ProxiedSource(header.source, None if name is None else {"subject": ((("commonName", name),),)})

    def refuse_untrusted(self, peer: object) -> None:
        """Count a connection that does not come from a trusted balancer, and log it at times."""
        self._counts.untrusted_total += 1
        self._warn("connection refused: not from security.trusted_proxies", peer)

    def refuse_broken(self, peer: object, reason: str) -> None:
        """Count a balancer's connection without a valid header, and log it at times."""
        self._counts.broken_total += 1
        self._warn(f"connection refused, no valid PROXY header: {reason}", peer)

    def _warn(self, event: str, peer: object) -> None:
        if self._repeats.suppressed() is not None:
            log.warning(event, peer=peer[0] if isinstance(peer, tuple) else "unknown", further="none for a minute")

    def statistics(self) -> ProxyStatistics:
        """Return the counts so far."""
        return msgspec.structs.replace(self._counts, waiting=self.waiting)
