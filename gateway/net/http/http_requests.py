"""Serves the requests of one HTTP connection one after the other, in the connection's own task.

aiohttp makes a task for each request, to give it a context of its own (Python before 3.12 cannot start a task eagerly).
Nothing here uses contexts, and such a task costs as much as reading a small request.

A request with a known head (`net.known_heads`) needs no task: it is served while the connection's task waits for the
next request, and answered with ready bytes. If its answer is not the usual one, the connection's task writes it.

`tests/gateway/net/http/test_aiohttp_inside.py` tests every private part of aiohttp that is used here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, Protocol, cast

from aiohttp import EMPTY_PAYLOAD, StreamReader, web
from aiohttp.http import RawRequestMessage, StreamWriter
from aiohttp.web_protocol import _PAYLOAD_ACCESS_ERROR, ERROR, _ErrInfo

from gateway.security.identity import Identity
from gateway.security.rights.authorization import Grant, Rulebook

LEAVE_S: Final = 1.0  # how long a connection to be closed is kept open for a request that may be in flight


class Request(web.BaseRequest):
    """aiohttp's request, with the task that serves it."""

    @property
    def message(self) -> RawRequestMessage:
        """The parsed head."""
        return self._message

    def drop_references(self) -> None:
        """Drop the task after the request is served, so that a traceback with the request makes no reference cycle."""
        self._task = cast("asyncio.Task[None]", None)


class AuthenticatedClient(NamedTuple):
    """The client of a request, as one connection has authenticated it."""

    grant: Grant  # its rights
    expires_ms: int | None  # when its credentials expire, in epoch milliseconds; None: never
    share: str  # what its concurrent requests are counted by
    login: Identity  # as it has logged in: without a tenant and what is taken from its certificate
    rules: Rulebook | None  # that its rights are from


class Abandonable(Protocol):
    """A request that is served directly."""

    def abandon(self) -> None:
        """The client has disconnected."""
        ...


class _UnreadAnswer:
    """A direct request whose answer is written, but not read by the client yet."""

    def abandon(self) -> None:
        """Nothing is left to do."""


class Prepared:
    """A direct request that is done except for its answer, which `handle` returns."""

    __slots__ = ("handle", "message")

    def __init__(
        self, message: RawRequestMessage, handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    ) -> None:
        self.message = message
        self.handle = handle


Message = RawRequestMessage | _ErrInfo | Prepared
"""Input of the connection's task: a parsed head, an error of the parser, or a request that needs only its answer."""


class RequestsInTurn(web.RequestHandler):
    """aiohttp's connection with another way to run requests."""

    __slots__ = ("_direct", "_leaves_at", "_opened", "client")

    client: AuthenticatedClient | None  # of the most recent request that was admitted; None before the first
    _opened: float  # when, by the loop's clock
    _direct: Abandonable | None  # the request that is served directly; later ones wait for its answer
    _leaves_at: float | None  # once set: close after the next answer, or at this time if there is no request

    @property
    def is_idle(self) -> bool:
        """Whether every request is answered and its answer read, nothing is paused, and it is not about to close."""
        return (
            self._waiter is not None
            and not (self._waiter.done() or self._messages or self._close or self._force_close)
            and self._direct is None
            and not (self._paused or self._reading_paused or self._buffer_paused)
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open: no client has logged in."""
        super().connection_made(transport)
        self.client = None
        self._opened = self._loop.time()

    @property
    def age_s(self) -> float:
        """Seconds since the connection was opened."""
        return self._loop.time() - self._opened

    def kick(self) -> None:
        """Close the connection after the current answer, or after `LEAVE_S` at the latest."""
        self.prepare_to_leave()
        self.close()
        self._loop.call_later(LEAVE_S, self._abort)

    def _abort(self) -> None:
        """Close now, whether the client has read the answer or not."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    # drain.Departing

    @property
    def leaving(self) -> bool:
        """Whether the next answer is the last one."""
        return self._leaves_at is not None

    @property
    def left(self) -> bool:
        """Whether the connection is closed or will close after its answer."""
        return self.transport is None or self._close or self._force_close

    def prepare_to_leave(self) -> bool:
        """Send `Connection: close` with the answer to the current or the next request."""
        self._leaves_at = self._loop.time() + LEAVE_S
        return True

    @property
    def may_leave(self) -> bool:
        """Whether it was idle long enough: a client that sends at the moment of a close cannot know the result."""
        return self.is_idle and self._leaves_at is not None and self._loop.time() >= self._leaves_at

    def leave(self) -> None:
        """Close the connection after its answer."""
        self.close()

    def begin_direct(self, request: Abandonable) -> None:
        """Start to serve a request directly; the connection must be idle, and is not again until the answer."""
        assert self._manager is not None
        self._direct = request
        self._request_in_progress = True
        self._manager.requests_count += 1

    def answer_direct(self, answer: bytes) -> None:
        """Write the whole answer to the direct request; the next request is served when the client has read it."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(answer)
        if self._paused:
            self._direct = _UnreadAnswer()
        else:
            self.end_direct()

    def answer_prepared(self, prepared: Prepared) -> None:
        """Let the connection's task answer the direct request."""
        self._messages.appendleft((cast("RawRequestMessage", prepared), EMPTY_PAYLOAD))
        self.end_direct()

    def end_direct(self) -> None:
        """The direct request is answered: continue with the next request, or with a close that waited for it."""
        self._direct = None
        waiting: object = self._messages[0][0] if self._messages else None
        if not isinstance(waiting, Prepared):  # else aiohttp's shutdown waits until the connection's task has answered
            self._request_in_progress = False
            if self._handler_waiter is not None and not self._handler_waiter.done():
                self._handler_waiter.set_result(None)
        if (self._close or self._force_close) and not isinstance(waiting, Prepared):
            self.close()
        elif waiting is not None:
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        else:
            self._keep_for_a_while()

    def resume_writing(self) -> None:
        """The client has read the answer."""
        super().resume_writing()
        if isinstance(self._direct, _UnreadAnswer):
            self.end_direct()

    def close(self) -> None:
        """Close after the answer to the current request."""
        if self._direct is None:
            super().close()
        else:
            self._close = True

    def connection_lost(self, exc: BaseException | None) -> None:
        """The socket is closed: abandon the request that is served directly."""
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.abandon()
            self._request_in_progress = False
            if self._handler_waiter is not None and not self._handler_waiter.done():
                self._handler_waiter.set_result(None)
        super().connection_lost(exc)

    def _process_keepalive(self) -> None:
        """Close a connection that was idle for too long; one that waits for Kafka is not idle."""
        if self._direct is None:
            super()._process_keepalive()
        else:
            self._keepalive_handle = None  # set again at the end of the request

    def _keep_for_a_while(self) -> None:
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(self._next_keepalive_close_time, self._process_keepalive)

    async def start(self) -> None:
        """Serve requests until either side closes."""
        try:
            while not self._force_close:
                message, payload = await self._next_message()
                if not await self._serve(message, payload) or self._ending:
                    break
                self._keep_for_a_while()
        except BaseException:  # usually cancelled because the client has disconnected
            self.force_close()
            raise
        if not self._force_close:
            self._task_handler = None
            if self.transport is not None:
                self.transport.close()

    @property
    def _ending(self) -> bool:
        return self._close or self._force_close or not self._keepalive

    async def _next_message(self) -> tuple[Message, StreamReader]:
        """Wait for the next head, and resume a parser that stopped because enough requests were queued."""
        while not self._messages or self._direct is not None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message, payload = cast("tuple[Message, StreamReader]", self._messages.popleft())
        if self._parser is not None and not isinstance(message, Prepared):  # None once the client has disconnected
            self._parser.message_consumed()
        if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()
        return message, payload

    async def _serve(self, message: Message, payload: StreamReader) -> bool:
        """Answer one request, and return whether its client is still connected."""
        manager, handle = self._manager, self._request_handler
        assert manager is not None
        assert handle is not None
        if isinstance(message, Prepared):
            handle, message = message.handle, message.message
        else:
            manager.requests_count += 1
        if isinstance(message, _ErrInfo):
            handle, message = self._make_error_handler(message), ERROR
        task = cast("asyncio.Task[None]", self._task_handler or asyncio.current_task())
        request = Request(message, payload, self, StreamWriter(self, self._loop), task, self._loop)
        try:
            answer, left = await self._handle_request(request, None, handle)
            if left:
                return False
            self._keepalive = bool(answer.keep_alive)
            if not payload.is_eof():
                await self._drain(payload)
            payload.set_exception(_PAYLOAD_ACCESS_ERROR)  # for code that still reads it
        except ConnectionError:
            return False
        except Exception as error:
            self.log_exception("Unhandled exception", exc_info=error)
            self.force_close()
        finally:
            request.drop_references()
        return True

    async def _drain(self, payload: StreamReader) -> None:
        """Read the rest of an unread body for a while, so that a reset does not destroy the answer."""
        if self._lingering_time and not self._force_close:
            try:
                async with asyncio.timeout(self._lingering_time):
                    while not payload.is_eof():
                        await payload.readany()
            except TimeoutError:
                pass
        if not payload.is_eof() and not self._force_close:
            self.close()


class UpgradeTail:
    """Collects the bytes received behind an upgrade request."""

    def __init__(self) -> None:
        self.data = bytearray()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Keep the bytes, and return that none of them are left to parse."""
        self.data += data
        return False, b""

    def feed_eof(self) -> None:
        """The client has disconnected; nothing to do."""
