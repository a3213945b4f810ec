"""Accepts sockets for one protocol: bind, TLS, count, stop accepting, say goodbye, close."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ssl
from collections.abc import Callable
from typing import Final

import structlog

from gateway.config import Address
from gateway.net.pump import Pump

log = structlog.get_logger(__name__)

BACKLOG: Final = 4096  # a fleet that reconnects at once waits in the kernel, not in a refusal
HANDSHAKE_S: Final = 10.0

MakePump = Callable[[Callable[[Pump], None]], Pump]
"""Builds the pump of one socket; the argument is to be told when the socket is gone."""


class ListenError(Exception):
    """An address cannot be listened on; the text says which and why."""


class Bound:
    """What a listening socket shows, and how it is closed."""

    _server: asyncio.Server | None = None

    @property
    def bound(self) -> str:
        """The address really bound, as `HOST:PORT`; "" while not listening."""
        return _bound_address(self._server)

    @property
    def accepting(self) -> bool:
        """Whether new sockets are accepted."""
        return self._server is not None and self._server.is_serving()

    def stop_accepting(self) -> None:
        """Close the listening socket; open connections live on."""
        if self._server is not None:
            self._server.close()


class Listener(Bound):
    """One listening address of one protocol, and the sockets it accepted."""

    def __init__(self, name: str, address: Address, make: MakePump, tls: ssl.SSLContext | None) -> None:
        """`name` is the configuration's section and stands in errors and logs."""
        self.name = name
        self.pumps: set[Pump] = set()
        self.accepted = 0
        self._address = address
        self._make = make
        self._lost = self._lose  # one bound method for all
        self._tls = tls
        self._empty = asyncio.Event()

    async def start(self) -> None:
        """Bind and accept; ListenError when the address cannot be had."""
        self._server = await open_server(self.accept, self.name, f"{self.name}.address", self._address, self._tls)

    async def wait_closed(self, timeout: float) -> None:
        """Close every connection's socket after its last bytes, and abort what is left after `timeout` seconds."""
        for pump in list(self.pumps):
            pump.close()
        if self.pumps:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), timeout)
        for pump in list(self.pumps):
            pump.abort()

    def accept(self) -> Pump:
        """The pump of a connection that this listener counts from now on, accepted here or handed over to it."""
        self.accepted += 1
        pump = self._make(self._lost)
        self.pumps.add(pump)
        self._empty.clear()
        return pump

    def _lose(self, pump: Pump) -> None:
        self.pumps.discard(pump)
        if not self.pumps:
            self._empty.set()


async def open_server(
    factory: Callable[[], asyncio.BaseProtocol],
    protocol: str,
    key: str,
    address: Address,
    tls: ssl.SSLContext | None,
) -> asyncio.Server:
    """Bind and accept.

    Args:
        factory: makes the protocol of each new socket.
        protocol: its name, for the log.
        key: the configuration's, for the error.
        address: to bind.
        tls: what the sockets speak.

    Raises:
        ListenError: the address cannot be had.
    """
    try:
        server = await asyncio.get_running_loop().create_server(
            factory,
            address.host,
            address.port,
            ssl=tls,
            ssl_handshake_timeout=HANDSHAKE_S if tls else None,
            backlog=BACKLOG,
        )
    except OSError as error:
        raise ListenError(listen_error(key, address, error)) from error
    log.info("listening", protocol=protocol, address=_bound_address(server), tls=tls is not None)
    return server


def _bound_address(server: asyncio.Server | None) -> str:
    if server is None or not server.sockets:
        return ""
    name = server.sockets[0].getsockname()
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{host}:{name[1]}"


def listen_error(key: str, address: Address, error: OSError) -> str:
    """One line about a listener that could not be opened: which `key` of the configuration, and why."""
    if error.errno == errno.EADDRINUSE:
        return f"{key}: {address} is in use by another program"
    if error.errno == errno.EACCES:
        return f"{key}: {address} needs a privilege this process has not"
    return f"{key}: {address}: {error.strerror or error}"
