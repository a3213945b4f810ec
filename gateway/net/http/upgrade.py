"""From an HTTP request to a WebSocket: the opening handshake (RFC 6455 section 4.2), then the pump of a subprotocol."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final

import msgspec
from aiohttp import web

from gateway.net.http.http_server import SERVER, HttpConnection, HttpServer
from gateway.net.http.websocket import WebSocket
from gateway.net.protocol_listener import ProtocolServer
from gateway.net.strangers import Strangers
from gateway.security.origins import Origins
from gateway.settings.config import SecurityConfig
from protocols.websocket import accept_token
from telemetry.statistics import counter, gauge

VERSION: Final = "13"  # of RFC 6455
KEY_BYTES: Final = 16
UPGRADE: Final = (("Upgrade", "websocket"), ("Connection", "Upgrade"))
RETRY_AFTER: Final = ("Retry-After", "1")

TakeOver = Callable[[asyncio.Transport, bytes], None]
"""Takes over a WebSocket's socket, and the bytes received behind the opening handshake."""


class UpgradeError(Exception):
    """A request that cannot be upgraded to a WebSocket; the text says why."""

    def __init__(self, status: int, reason: str, *headers: tuple[str, str]) -> None:
        """`headers` are added to the answer."""
        super().__init__(reason)
        self.status = status
        self.headers: Sequence[tuple[str, str]] = headers


class WebSocketEndpoint:
    """Opens WebSockets for some subprotocols and for web pages of allowed origins."""

    def __init__(self, subprotocols: Mapping[str, ProtocolServer], origins: Origins) -> None:
        """`subprotocols` maps names to servers, the preferred one first."""
        self._subprotocols = subprotocols
        self._origins = origins

    def upgrade(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the answer that turns the request's connection into a WebSocket once it is sent.

        Raises:
            UpgradeError: The request is refused; has the status and fields of the answer.
        """
        offer = check_upgrade(request)
        entrance = offer.connection.entrance
        if not self._origins.allow_request(
            request.raw_path, request.headers, secure=request.secure, login_in_protocol=entrance.needs_explicit_login
        ):
            raise UpgradeError(403, "Pages of this origin may not connect")
        subprotocol = offer.choose(tuple(self._subprotocols))
        server = self._subprotocols[subprotocol]
        if server.stopped:
            raise UpgradeError(503, "The gateway is shutting down", RETRY_AFTER)

        def take_over(transport: asyncio.Transport, received: bytes) -> None:
            offer.connection.leave_limits()  # the subprotocol's login has limits of its own
            pump = server.accept(entrance)
            pump.source = offer.connection.source
            WebSocket(transport, pump, server).start(received)

        return offer.accept(subprotocol, take_over)


class Offer(msgspec.Struct, frozen=True):
    """A valid opening handshake (RFC 6455 section 4.2.1) that is not answered yet."""

    connection: HttpConnection
    key: str
    subprotocols: frozenset[str]

    def choose(self, ours: Sequence[str]) -> str:
        """Return the first of `ours` that the client offers [MQTT-6.0.0-3], or raise UpgradeError."""
        for name in ours:
            if name in self.subprotocols:
                return name
        raise UpgradeError(400, f"Sec-WebSocket-Protocol must name one of: {', '.join(ours)}")

    def accept(self, subprotocol: str, take_over: TakeOver) -> web.StreamResponse:
        """Return the answer; after its last byte `take_over` gets the socket."""
        self.connection.accept_upgrade()
        return _SwitchingProtocols(self.connection, self.key, subprotocol, take_over)


def check_upgrade(request: web.BaseRequest) -> Offer:
    """Check the opening handshake, and raise UpgradeError if it is not valid. The caller checks the origin."""
    connection = request.protocol
    assert isinstance(connection, HttpConnection)
    headers = request.headers
    if request.method not in {"GET", "HEAD"}:
        raise UpgradeError(405, "Method Not Allowed", ("Allow", "GET"))
    if not connection.upgraded or headers.get("Upgrade", "").strip().lower() != "websocket":
        raise UpgradeError(426, "This path needs a WebSocket handshake", *UPGRADE)
    if request.body_exists or request.version < (1, 1):
        raise UpgradeError(400, "A WebSocket handshake is an HTTP/1.1 request without a body")
    if headers.get("Sec-WebSocket-Version", "").strip() != VERSION:
        raise UpgradeError(426, "Unknown version", ("Sec-WebSocket-Version", VERSION), *UPGRADE)
    key = headers.get("Sec-WebSocket-Key", "").strip()
    if not _is_key(key):
        raise UpgradeError(400, "Sec-WebSocket-Key must be 16 bytes in Base64")
    offered = headers.getall("Sec-WebSocket-Protocol", ())
    return Offer(connection, key, frozenset(name.strip() for line in offered for name in line.split(",")))


class _SwitchingProtocols(web.StreamResponse):
    """The 101 answer. After its last byte the socket is handed over, and the request's task ends."""

    def __init__(self, connection: HttpConnection, key: str, subprotocol: str, take_over: TakeOver) -> None:
        super().__init__(status=101, headers=(*UPGRADE, ("Server", SERVER)))
        self.headers["Sec-WebSocket-Accept"] = accept_token(key)
        self.headers["Sec-WebSocket-Protocol"] = subprotocol  # [MQTT-6.0.0-4]
        self._connection = connection
        self._take_over = take_over

    async def write_eof(self, data: bytes = b"") -> None:
        await super().write_eof(data)
        released = self._connection.release()
        if released is not None:
            self._take_over(*released)


class UpgradeStatistics(msgspec.Struct, frozen=True):
    """Counts of listeners for WebSockets only. Upgraded connections are counted with their subprotocol."""

    handshaking: Annotated[int, gauge("connections that are not upgraded yet")]
    requests_total: Annotated[int, counter("upgrade requests; upgraded connections are counted with their protocol")]


class WebSocketServer(HttpServer):
    """Serves WebSocket handshakes only, at any path.

    After the upgrade, connections belong to the subprotocol's server, which stops, drains and lists them.
    """

    def __init__(
        self,
        name: str,
        endpoint: WebSocketEndpoint,
        security: SecurityConfig,
        *,
        handshake_timeout_s: float,
        strangers: Strangers | None = None,
    ) -> None:
        """`name` is the listeners' name for the protocol; `security` has the host names that are accepted."""
        super().__init__(name, self._open, _refusal, security, head_timeout_s=handshake_timeout_s, strangers=strangers)
        self._endpoint = endpoint

    def statistics(self) -> UpgradeStatistics:
        """Return the counts so far."""
        return UpgradeStatistics(handshaking=len(self.connections), requests_total=self.requests_count)

    async def _open(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return self._endpoint.upgrade(request)
        except UpgradeError as refused:
            answer = _refusal(refused.status, str(refused))
            for name, value in refused.headers:
                answer.headers[name] = value
            return answer


def _refusal(status: int, reason: str) -> web.Response:
    answer = web.Response(status=status, text=f"{reason}\n", headers={"Server": SERVER})
    answer.force_close()
    return answer


def _is_key(key: str) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == KEY_BYTES
    except ValueError:
        return False
