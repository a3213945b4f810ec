"""Accepts sockets for one protocol: bind, TLS, count, stop accepting, wait until all are closed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable
from typing import Final

import structlog

from gateway.config import Address
from gateway.failures import ForeseenError
from gateway.net.descriptors import descriptors
from gateway.net.handshakes import Factory, Handshakes
from gateway.net.proxied import Proxies
from gateway.net.pump import Pump
from gateway.net.strangers import Strangers

log = structlog.get_logger(__name__)

BACKLOG: Final = 4096  # a fleet that reconnects at once waits in the kernel, not in a refusal

MakePump = Callable[[Callable[[Pump], None]], Pump]
"""Builds the pump of one socket; the argument is to be told when the socket is gone."""


class ListenError(Exception):
    """An address cannot be listened on; the text says which and why."""


class NoDescriptorsError(ForeseenError):
    """A socket was accepted in the turn of the loop in which open files were used up."""


class Listening:
    """Listening sockets that can pause: who connects meanwhile waits in the kernel's backlog.

    uvloop's server knows no pause, so it is closed and made anew around the same sockets, which are kept here.
    """

    def __init__(
        self, factory: Factory, tls: ssl.SSLContext | None, strangers: Strangers | None, proxies: Proxies | None
    ) -> None:
        self._proxies = proxies
        self._handshakes = None if tls is None else Handshakes(tls, factory, strangers)
        self._factory = factory if self._handshakes is None else self._handshakes.accept
        self._servers: list[asyncio.Server] = []
        self._sockets: list[socket.socket] = []
        self.address = ""

    async def open(self, address: Address) -> None:
        """Bind and accept; OSError when that is not possible."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._accept, address.host, address.port, backlog=BACKLOG)
        self._servers = [server]
        self._sockets = [socket.socket(fileno=os.dup(one.fileno())) for one in server.sockets]
        name = server.sockets[0].getsockname()
        self.address = f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
        descriptors.listeners.add(self)

    def _accept(self) -> asyncio.BaseProtocol:
        if descriptors.paused:
            raise NoDescriptorsError  # libuv accepts nothing more then, until the server is closed in this very turn
        descriptors.accepted()
        return self._factory() if self._proxies is None else self._proxies.accept(self._factory)

    @property
    def accepting(self) -> bool:
        """Whether new sockets are accepted."""
        return any(server.is_serving() for server in self._servers)

    def pause(self) -> None:
        """Accept nothing; clients wait in the kernel's backlog."""
        for server in self._servers:
            server.close()
        self._servers = []

    async def resume(self) -> None:
        """Accept again, on the same sockets."""
        for one in self._sockets:
            copy = one.dup()
            server = await asyncio.get_running_loop().create_server(self._accept, sock=copy, backlog=BACKLOG)
            if self._sockets and not descriptors.paused:
                self._servers.append(server)
            else:
                server.close()

    def close(self) -> None:
        """Listen no more; open connections live on."""
        descriptors.listeners.discard(self)
        self.pause()
        if self._handshakes is not None:
            self._handshakes.stop()
        if self._proxies is not None:
            self._proxies.stop()
        for one in self._sockets:
            one.close()
        self._sockets = []
        self.address = ""


class Bound:
    """What a listening socket shows, and how it is closed."""

    _server: Listening | None = None
    proxies: Proxies | None = None  # what clients come through; set before the start. None: they come themselves
    stopped = False  # for good: it is not only waiting for free descriptors

    @property
    def bound(self) -> str:
        """The address really bound, as `HOST:PORT`; "" while not listening."""
        return self._server.address if self._server is not None else ""

    @property
    def accepting(self) -> bool:
        """Whether new sockets are accepted."""
        return self._server is not None and self._server.accepting

    def stop_accepting(self) -> None:
        """Close the listening socket; open connections live on."""
        self.stopped = True
        if self._server is not None:
            self._server.close()


class Listener(Bound):
    """One listening address of one protocol, and the sockets it accepted."""

    def __init__(
        self,
        name: str,
        address: Address,
        make: MakePump,
        tls: ssl.SSLContext | None,
        strangers: Strangers | None = None,
    ) -> None:
        """`name` is the configuration's section and stands in errors and logs; `strangers` count TLS handshakes."""
        self.name = name
        self.pumps: set[Pump] = set()
        self.accepted = 0
        self._address = address
        self._make = make
        self._lost = self._lose  # one bound method for all
        self._tls = tls
        self._strangers = strangers
        self._empty = asyncio.Event()

    async def start(self) -> None:
        """Bind and accept; ListenError when the address cannot be had."""
        self._server = await open_server(
            self.accept,
            self.name,
            f"{self.name}.address",
            self._address,
            self._tls,
            strangers=self._strangers,
            proxies=self.proxies,
        )

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
    factory: Factory,
    protocol: str,
    key: str,
    address: Address,
    tls: ssl.SSLContext | None,
    *,
    strangers: Strangers | None = None,
    proxies: Proxies | None = None,
) -> Listening:
    """Bind and accept; `factory` makes the protocol of each new socket, with TLS when its handshake is done.

    `protocol` is its name for the log, `key` the configuration's for the error.

    Raises:
        ListenError: the address cannot be had.
    """
    server = Listening(factory, tls, strangers, proxies)
    try:
        await server.open(address)
    except OSError as error:
        raise ListenError(listen_error(key, address, error)) from error
    log.info("listening", protocol=protocol, address=server.address, tls=tls is not None)
    return server


def listen_error(key: str, address: Address, error: OSError) -> str:
    """One line about a listener that could not be opened: which `key` of the configuration, and why."""
    if error.errno == errno.EADDRINUSE:
        return f"{key}: {address} is in use by another program"
    if error.errno == errno.EACCES:
        return f"{key}: {address} needs a privilege this process has not"
    return f"{key}: {address}: {error.strerror or error}"
