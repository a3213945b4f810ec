"""aiohttp's low-level HTTP server as this gateway uses it.

Malformed requests get the gateway's own answers, and after an upgrade the socket is handed over to a WebSocket.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, Protocol, cast

import structlog
from aiohttp import EMPTY_PAYLOAD, StreamReader, web
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError, InvalidURLError, LineTooLong
from aiohttp.web_protocol import _ErrInfo

from flowcontrol.budget import UNBOUNDED, Budget, ConnectionBudget
from gateway.limits.limits import ClientLimits
from gateway.net.http.heads import HEAD_END, HeadError, Heads, one_request
from gateway.net.http.http_requests import Abandonable, Request, RequestsInTurn, UpgradeTail
from gateway.net.http.known_heads import BUDGET_BYTES, KnownHeads
from gateway.net.listener import Listener, Server
from gateway.net.proxied import ProxiedSource, certificate
from gateway.net.pump import LINGER_S
from gateway.net.strangers import Stranger, Strangers
from gateway.net.unread import Unread
from gateway.runtime.taps import taps
from gateway.security.entrance import Entrance
from gateway.security.origins import Hosts
from gateway.security.throttle import address_of, peer_of
from gateway.settings.config import SecurityConfig
from gateway.views.flow import subject
from gateway.views.pauses import SLOW_READER, pauses

log = structlog.get_logger(__name__)

SERVER: Final = "trivium"  # the field Server of every answer
HEADER_BYTES: Final = 16 * 1024  # of one field; enough for the long tokens that proxies send
HEADER_FIELDS: Final = 100
HEAD_BYTES: Final = 64 * 1024
SMALL_BYTES: Final = 2048
"""A complete request of this size takes less memory than its connection; it is counted only while its login waits."""
_CHUNKED: Final = -1
_TOO_MANY: Final = "Too many headers received"  # aiohttp has no exception of its own for it

_HEAD_TOO_LARGE: Final = "the head is too large"

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Refuse = Callable[[int, str], web.StreamResponse]
"""Makes the answer to a malformed HTTP request, from a status and one line of text."""


class DirectHandler(Protocol):
    """Serves requests that have one known head (`gateway.net.http.known_heads`)."""

    def serve(self, connection: HttpConnection, body: bytes) -> bool:
        """Serve a request, starting with `begin_direct`; never raises. False: nothing was done, parse the request."""
        ...


class HttpConnection(RequestsInTurn):
    """One connection. It answers malformed requests itself; they never reach the application."""

    __slots__ = (
        "_address", "_body", "_body_left", "_broken", "_client_closed", "_head_bytes", "_identified", "_known",
        "_last", "_max_bytes", "_max_head_bytes", "_outgoing", "_refuse", "_requests", "_rest", "_small", "_stranger",
        "_strangers", "_tail", "_unread", "_whole_request", "entrance", "limits", "source", "unacknowledged",
    )  # fmt: skip

    def __init__(
        self,
        server: HttpServer,
        entrance: Entrance,
        refuse: Refuse,
        *,
        max_bytes: int,
        max_head_bytes: int,
        strangers: Strangers | None,
        outgoing: Budget,
        **options: Any,
    ) -> None:
        super().__init__(server, **options)
        self.source: ProxiedSource | None = None  # see `gateway.net.proxied.Sourced`
        self.entrance = entrance  # of the listener that accepted it
        self._address: str | None = None  # cached by `address`
        self._outgoing = outgoing
        self._unread: Unread | None = None  # an answer that the client reads slowly
        # counts in-flight records of requests that were already answered; None: there was no such request
        self.unacknowledged: ConnectionBudget | None = None
        self.limits: ClientLimits | None = None  # of the client that sent requests; None before the first, or no limits
        self._max_bytes = max_bytes
        self._max_head_bytes = max_head_bytes
        self._refuse = refuse
        self._strangers = strangers
        self._stranger: Stranger | None = None
        self._identified = False  # whether the client of the current request has logged in
        self._small = 0  # bytes of a small complete request that are not counted yet
        self._head_bytes = 0  # of an incomplete head
        self._requests = 0  # complete heads
        self._body: StreamReader | None = None  # of the last request, while it is incomplete
        self._body_left = 0  # bytes of that body that are missing; `_CHUNKED` when its head does not say
        self._tail = UpgradeTail()
        self._broken = False  # whether what was received is not valid HTTP
        self._client_closed: asyncio.Future[None] | None = None  # `_linger` waits for the client to close
        self._last = b""  # the last bytes that were parsed: the end of a head may arrive in parts
        self._rest = b""  # not parsed yet, because enough requests are queued
        self._direct = self._leaves_at = None
        self._known: KnownHeads[DirectHandler] | None = None  # None while no head is remembered
        self._whole_request: tuple[object, bytes] | None = None  # the last request that came in one read, and its head

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to count the bytes received before the login."""
        super().connection_made(transport)
        if self.source is not None:
            self._cache["peername"] = self.source.peername  # aiohttp caches it there
        if self._strangers is not None:
            self._stranger = self._strangers.enter(address_of(self.peer), cast("asyncio.Transport", transport).abort)
        if taps.watchers:
            taps.opened(self)

    def pause_writing(self) -> None:
        """The kernel's send buffer is full: count the unsent answer until it is read. The next request waits for it."""
        super().pause_writing()
        if self.transport is not None:
            self._unread = Unread(self._outgoing, sys.maxsize)
            self._unread.count(self.transport.get_write_buffer_size())
            pauses.begin(SLOW_READER, self, subject("http", "", self.peer))

    def resume_writing(self) -> None:
        """The client has read the answer."""
        super().resume_writing()
        self._forget_unread()

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.count(0)
            self._unread = None
            pauses.end(SLOW_READER, self)

    def _forget(self) -> None:
        """Release everything: the socket is no longer ours, and no reference cycle may be left."""
        self.identified()
        self._forget_unread()
        if self._known is not None:
            self._known.clear()
        self._stranger = self._body = self._known = self._whole_request = None

    def identified(self) -> None:
        """The client of this request has logged in: stop counting its bytes as a stranger's."""
        self._identified = True
        self._small = 0
        if self._stranger is not None and self._stranger.share is not None:
            self._stranger.leave()

    def login_pending(self) -> None:
        """The login of this request must wait: count a small request as a stranger's too."""
        if self._small:
            self._count_received(0)

    def _count_received(self, size: int) -> bool:
        """Count received bytes and those not counted yet. False means that the connection was aborted for them."""
        size += self._small
        self._small = 0
        return self._stranger is None or self._stranger.received(size)

    def _handled(self) -> None:
        """The request was answered. The next one may come from another client, so it must log in itself."""
        if not self._identified:
            self.identified()
        self._identified = False
        self._whole_request = None

    def data_received(self, data: bytes) -> None:
        """Parse one head at a time: aiohttp loses valid requests that it gets together with a malformed one.

        A body is handed over as it comes; the end of a head is searched for only behind it.
        """
        if self._broken:
            return
        body_ended = self._body is None or (self._body_left == 0 and self._body.is_eof())
        is_boundary = body_ended and not (self._head_bytes or self._rest or self._upgraded)
        if is_boundary and self._known is not None and self._serve_directly(self._known, data):
            return
        head = one_request(data, self._max_head_bytes) if is_boundary else 0
        is_whole = head > 0  # the usual read: one complete request
        if not self._identified:
            if is_whole and not self._small and len(data) <= SMALL_BYTES:
                self._small = len(data)
            elif data and not self._count_received(len(data)):
                return
        if is_whole:
            count = self._request_count
            self._parse(data)
            self._last = b""
            if self._request_count == count + 1:
                self._whole_request = self._messages[-1][0], data[:head]
            return
        if self._rest:
            data, self._rest = self._rest + data, b""
        start = 0
        while True:
            end = self._end_of_piece(data, start)
            self._take_piece(data[start:end])
            if self._broken:
                return
            start = end
            if start >= len(data):
                break
            if not self._upgraded and (self._reading_paused or len(self._messages) >= self._max_msg_queue_size):
                self._rest = data[start:]
                break
        self._last = (self._last + data[max(0, start - 3) : start])[-3:]

    def _serve_directly(self, known: KnownHeads[DirectHandler], data: bytes) -> bool:
        """Serve a request with a known head if `data` is exactly that request. False means: parse it."""
        head = known.find(data) if self.is_idle else None
        return head is not None and head[0].serve(self, head[1])

    def begin_direct(self, request: Abandonable) -> None:
        """Start to serve a request directly; its client is authenticated."""
        super().begin_direct(request)
        self._identified = True

    def end_direct(self) -> None:
        """The direct request was answered."""
        self._handled()
        super().end_direct()

    def remember(self, request: web.BaseRequest, direct: DirectHandler) -> None:
        """Let `direct` serve later requests with the current request's head, if that request came in one read."""
        whole = self._whole_request
        if whole is not None and whole[0] is cast("Request", request).message:
            if self._known is None:
                self._known = KnownHeads(cast("HttpServer", self._manager).known_heads)
            self._known.remember(whole[1], direct)

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """Return where the head or the body that continues at `start` ends; the end of `data` if it does not end."""
        size = len(data)
        if self._upgraded:
            return size
        if self._body is not None and not self._body.is_eof():
            if self._body_left <= 0:
                return size  # chunked: only the parser knows where it ends; or the parser is paused before the end
            end = min(start + self._body_left, size)
            self._body_left -= end - start
            return end
        if start == 0:
            head_end = (self._last + data[:3]).find(HEAD_END)  # one that started in an earlier read
            if head_end >= 0:
                return head_end + len(HEAD_END) - len(self._last)
        head_end = data.find(HEAD_END, start)
        return size if head_end < 0 else head_end + len(HEAD_END)

    def _take_piece(self, piece: bytes) -> None:
        """Parse a piece with at most one end of a head. Answer a head that is too large, and nothing after it.

        A head that starts in the same piece behind a chunked body is not counted: that is one read at most.
        """
        if not self._upgraded and (self._body is None or self._body.is_eof()):
            self._head_bytes += len(piece)
            if self._head_bytes > self._max_head_bytes:
                fault = BadHttpMessage(_HEAD_TOO_LARGE)
                self._messages.append((_ErrInfo(status=431, exc=fault, message=fault.message), EMPTY_PAYLOAD))
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_result(None)
                self._break()
                return
        self._parse(piece)

    def _parse(self, piece: bytes) -> None:
        """Parse, and note the request that started."""
        super().data_received(piece)
        if self._request_count == self._requests:
            return
        self._requests = self._request_count
        self._head_bytes = 0
        self._body = None
        if self._messages:
            message, body = self._messages[-1]
            if isinstance(message, _ErrInfo):
                self._break()
            elif not body.is_eof():
                self._body = body
                self._body_left = int(message.headers.get("Content-Length", _CHUNKED))

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume reading if it was paused. aiohttp calls this whenever a body is read or ends."""
        if self._reading_paused or self._buffer_paused or self._rest:
            super().resume_reading(resume_parser)

    def _break(self) -> None:
        """The last message reports malformed HTTP: stop parsing, and fail a body that is still being read."""
        self._broken = True
        if len(self._messages) > 1:
            payload: StreamReader = self._messages[-2][1]
        elif self._current_request is not None:
            payload = self._current_request.content
        else:
            return
        if not payload.is_eof():
            payload.set_exception(web.RequestPayloadError("the framing of the body is broken"))

    def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> Coroutine[Any, Any, tuple[web.StreamResponse, bool]]:
        """Write an answer. After an answer to malformed HTTP, wait while the client may still be sending."""
        self._handled()
        written = super().finish_response(request, resp, start_time)
        return self._linger(written, resp) if self._broken else written

    async def _linger(
        self, written: Coroutine[Any, Any, tuple[web.StreamResponse, bool]], resp: web.StreamResponse
    ) -> tuple[web.StreamResponse, bool]:
        """Wait before closing: a reset might destroy the answer on its way (RFC 9112 section 9.6)."""
        result = await written
        transport = self.transport
        if not resp.keep_alive and transport is not None and not transport.is_closing():
            if transport.can_write_eof():
                transport.write_eof()
            self._client_closed = self._loop.create_future()
            await asyncio.wait([self._client_closed], timeout=LINGER_S)
        return result

    def leave_limits(self) -> None:
        """Stop counting the connection against its client's limits."""
        limits, self.limits = self.limits, None
        if limits is not None:
            limits.leave()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The socket is closed: release everything of the connection."""
        if taps.watchers:
            taps.closed(self, str(exc or ""))
        self._forget()
        self.entrance.connections -= 1
        self.leave_limits()
        if self._client_closed is not None and not self._client_closed.done():
            self._client_closed.set_result(None)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer with `refuse` instead of aiohttp's text or HTML, and close."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer was already started")
        if isinstance(exc, LineTooLong):
            status = 414 if exc.args[1] == self._max_bytes else 431  # the two limits differ by one, see `HttpServer`
            message = f"The request's {'line' if status == 414 else 'head has a field that'} is too long"
        elif isinstance(exc, BadHttpMessage) and exc.message == _HEAD_TOO_LARGE:
            status, message = 431, "The request's head is too large"
        elif isinstance(exc, BadHttpMessage) and exc.message == _TOO_MANY:
            status, message = 431, "The request's head has too many fields"  # RFC 6585 section 5
        elif isinstance(exc, InvalidURLError):
            status, message = 400, "Bad request: its target is not a valid URL"  # not shown: it may contain a password
        elif isinstance(exc, HttpProcessingError) and exc.code:
            status, message = exc.code, f"Bad request: {(exc.message or 'malformed').partition(chr(10))[0]}"
        elif exc is not None and status >= 500:
            log.error("request failed", error=repr(exc))
        return self._refuse(status, message or "Bad request")

    def log_exception(self, *arguments: Any, **options: Any) -> None:
        """Log an exception that aiohttp calls unhandled, except for a truncated or malformed body after its answer."""
        if not isinstance(options.get("exc_info"), web.RequestPayloadError | HttpProcessingError):
            super().log_exception(*arguments, **options)

    @property
    def address(self) -> str:
        """The address that an anonymous client is counted by: see `address_of`."""
        if self._address is None:
            self._address = address_of(self.peer)
        return self._address

    @property
    def share(self) -> str:
        """What the client of the current request is counted by in limits that clients share; see `share_of`."""
        assert self.client is not None, "no client is logged in"
        return self.client.share

    @property
    def peer(self) -> str:
        """The client's `host:port`."""
        return peer_of(self.peername)  # aiohttp caches `peername`

    @property
    def peercert(self) -> Mapping[str, Any] | None:
        """The client's verified certificate, in the form of `SSLObject.getpeercert`."""
        return certificate(self.source, self.transport)

    @property
    def upgraded(self) -> bool:
        """Whether the current request asks for another protocol. The bytes behind it are not HTTP and not parsed."""
        return self._upgraded

    def accept_upgrade(self) -> None:
        """Keep the bytes behind the request for `release` instead of parsing them."""
        self.set_parser(cast("Any", self._tail))  # aiohttp uses only these methods of its WebSocketReader

    def release(self) -> tuple[asyncio.Transport, bytes] | None:
        """Give up the socket once the answer to the upgrade is written. This object does not use it any more.

        The new owner of the socket also gets this connection's `limits` and must leave them when the socket is closed.

        Returns:
            The transport and the bytes received behind the request, or None when the client has disconnected. The new
            owner must decrement the entrance's `connections` when the socket is closed.
        """
        transport, server = self.transport, self._manager
        if transport is None or server is None:
            return None
        self.transport = None
        self._parser = None  # it refers to this connection
        self._forget()
        server.connection_lost(self, None)
        self.keep_alive(False)
        self.force_close()
        return transport, bytes(self._tail.data)


class HttpServer(Server, web.Server):
    """HTTP/1.1 for all listeners of one protocol."""

    def __init__(
        self,
        name: str,
        handle: Handle,
        refuse: Refuse,
        security: SecurityConfig,
        *,
        head_timeout_s: float,
        handler_cancellation: bool = False,
        max_bytes: int = HEADER_BYTES,
        max_fields: int = HEADER_FIELDS,
        max_head_bytes: int = HEAD_BYTES,
        strangers: Strangers | None = None,
        outgoing: Budget = UNBOUNDED,
    ) -> None:
        """Start without listeners.

        `security` has the host names that are accepted. `head_timeout_s` is the time for a request's head, and between
        two requests of a connection. `max_bytes` limits a request line and each field of a head. With
        `handler_cancellation`, `handle` is cancelled when its client disconnects. `strangers` counts bytes that are
        received before `HttpConnection.identified`, `outgoing` counts answers that are not read.
        """
        Server.__init__(self)
        web.Server.__init__(
            self,
            self._checked,
            handler_cancellation=handler_cancellation,
            access_log=None,
            auto_decompress=False,  # aiohttp accepts truncated data; `protocols.rest.content_coding` decompresses
            keepalive_timeout=head_timeout_s,
            lingering_time=LINGER_S,  # the rest of a refused body is read and dropped, so that the answer is not lost
            max_line_size=max_bytes,
            max_field_size=max_bytes + 1,  # different from `max_line_size`, see `HttpConnection.handle_error`
            max_headers=max_fields,
        )
        self.known_heads = Budget(BUDGET_BYTES, sys.maxsize)  # memory of all connections' known heads
        self.name = name
        self._handle = handle
        self._security = security
        self._heads: dict[Entrance, Heads] = {}
        self._refuse = refuse
        self._options: dict[str, Any] = {
            "max_bytes": max_bytes, "max_head_bytes": max_head_bytes, "strangers": strangers, "outgoing": outgoing,
        }  # fmt: skip

    def add(self, listener: Listener) -> None:
        """Serve this listener too. Must be called before the start."""
        super().add(listener)
        hosts = Hosts(self._security, login_needed="anonymous" not in listener.settings.logins)
        self._heads[listener.entrance] = Heads(hosts, secure=listener.is_secure)

    def accept(self, entrance: Entrance) -> HttpConnection:
        """Return the connection for a new socket."""
        return HttpConnection(self, entrance, self._refuse, loop=self._loop, **self._options, **self._kwargs)

    def _checked(self, request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        try:
            self._heads[cast("HttpConnection", request.protocol).entrance].check(request)
        except HeadError as error:
            return self._refused(error)
        return self._handle(request)

    async def _refused(self, error: HeadError) -> web.StreamResponse:
        return self._refuse(error.status, str(error))

    async def stop(self, timeout: float) -> None:
        """Let running requests finish, cancel them after half of `timeout` seconds, and close everything by its end."""
        self.stop_accepting()
        self.pre_shutdown()
        await self.shutdown(timeout / 2)  # it waits the same time again for the requests that it has cancelled
