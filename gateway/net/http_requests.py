"""The requests of one HTTP connection, served one after the other by the connection's own task.

aiohttp makes a task for each request, to be answered in a context of its own (Python before 3.12 cannot start one at
once). Nothing here keeps anything in a context, and the task costs as much as reading a small request.

A request whose head is known (`net.known_heads`) is served without any of that while the task waits for the next one:
it is answered with bytes. Where its answer is out of the ordinary, the task writes it.

All that is known here of aiohttp's inside is held by `tests/gateway/net/test_aiohttp_inside.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, cast

from aiohttp import EMPTY_PAYLOAD, StreamReader, web
from aiohttp.http import RawRequestMessage, StreamWriter
from aiohttp.web_protocol import _PAYLOAD_ACCESS_ERROR, ERROR, _ErrInfo

from gateway.security.identity import Identity

LEAVE_S: Final = 1.0  # a connection that is to end is kept for a request that may be on its way


class Request(web.BaseRequest):
    """aiohttp's request, which knows the task that serves it."""

    @property
    def message(self) -> RawRequestMessage:
        """Its head, as it was parsed."""
        return self._message

    def drop_references(self) -> None:
        """It is done: an exception that has it in its traceback is no cycle with the task."""
        self._task = cast("asyncio.Task[None]", None)


class Abandoned(Protocol):
    """A request that is served directly."""

    def abandon(self) -> None:
        """Its client has left."""
        ...


class _Written:
    """It was answered, and the client has not read the answer yet."""

    def abandon(self) -> None:
        """Nothing is left of it."""


class Prepared:
    """A request that was served directly, but for its answer, which `handle` gives."""

    __slots__ = ("handle", "message")

    def __init__(
        self, message: RawRequestMessage, handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    ) -> None:
        self.message = message
        self.handle = handle


Message = RawRequestMessage | _ErrInfo | Prepared
"""What the connection's task takes: a head, what is no HTTP, or a request that lacks its answer only."""


class RequestsInTurn(web.RequestHandler):
    """aiohttp's connection, but for what runs its requests."""

    __slots__ = ("_direct", "_leaves_at", "_opened", "identity")

    identity: Identity | None  # whose request was looked at last; None: nobody's
    _opened: float  # when, by the loop's clock
    _direct: Abandoned | None  # the request that is served directly; the next ones wait for its answer
    _leaves_at: float | None  # it is to end with the next answer, or by then if nothing is asked

    @property
    def is_idle(self) -> bool:
        """Whether nothing was asked that is not answered and read, and nothing is held up or about to end."""
        return (
            self._waiter is not None
            and not (self._waiter.done() or self._messages or self._close or self._force_close)
            and self._direct is None
            and not (self._paused or self._reading_paused or self._buffer_paused)
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self.identity = None
        self._opened = self._loop.time()

    @property
    def age_s(self) -> float:
        """For how long the connection has been open."""
        return self._loop.time() - self._opened

    def kick(self) -> None:
        """End it: behind the answer to what was asked, if that comes within `LEAVE_S`."""
        self.prepare_to_leave()
        self.close()
        self._loop.call_later(LEAVE_S, self.force_close)

    # drain.Departing

    @property
    def leaving(self) -> bool:
        """Whether the next answer is the last one."""
        return self._leaves_at is not None

    @property
    def left(self) -> bool:
        """See `gateway.drain.Departing`."""
        return self.transport is None or self._close or self._force_close

    def prepare_to_leave(self) -> bool:
        """The answer to the next request, or to the one now served, will say `Connection: close`."""
        self._leaves_at = self._loop.time() + LEAVE_S
        return True

    @property
    def may_leave(self) -> bool:
        """Whether nothing was asked for a while: who asks at the moment of the close would not know its fate."""
        return self.is_idle and self._leaves_at is not None and self._loop.time() >= self._leaves_at

    def leave(self) -> None:
        """See `gateway.drain.Departing`."""
        self.close()

    def begin_direct(self, request: Abandoned) -> None:
        """A request is served directly; the connection is idle, and is not until its answer is given."""
        assert self._manager is not None
        self._direct = request
        self._request_in_progress = True
        self._manager.requests_count += 1

    def answer_direct(self, answer: bytes) -> None:
        """Write the whole answer to that request; the next one is served when it is read."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(answer)
        if self._paused:
            self._direct = _Written()
        else:
            self.end_direct()

    def answer_prepared(self, prepared: Prepared) -> None:
        """Let the connection's task answer that request."""
        self._messages.appendleft((cast("RawRequestMessage", prepared), EMPTY_PAYLOAD))
        self.end_direct()

    def end_direct(self) -> None:
        """That request has its answer: go on with the next one, or with what waited for the end."""
        self._direct = None
        self._request_in_progress = False
        if self._handler_waiter is not None and not self._handler_waiter.done():
            self._handler_waiter.set_result(None)
        waiting: object = self._messages[0][0] if self._messages else None
        if (self._close or self._force_close) and not isinstance(waiting, Prepared):
            self.close()
        elif waiting is not None:
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        else:
            self._keep_for_a_while()

    def resume_writing(self) -> None:
        """The answer is read."""
        super().resume_writing()
        if isinstance(self._direct, _Written):
            self.end_direct()

    def close(self) -> None:
        """End behind the answer to the request now served."""
        if self._direct is None:
            super().close()
        else:
            self._close = True

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol`."""
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.abandon()
            self._request_in_progress = False
            if self._handler_waiter is not None and not self._handler_waiter.done():
                self._handler_waiter.set_result(None)
        super().connection_lost(exc)

    def _process_keepalive(self) -> None:
        """End a connection that was idle for too long: it is not while it waits for Kafka."""
        if self._direct is None:
            super()._process_keepalive()
        else:
            self._keepalive_handle = None  # the end of the request sets another one

    def _keep_for_a_while(self) -> None:
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(self._next_keepalive_close_time, self._process_keepalive)

    async def start(self) -> None:
        """Serve until either side has had enough, then close."""
        try:
            while not self._force_close:
                message, payload = await self._next_message()
                if not await self._serve(message, payload) or self._ending:
                    break
                self._keep_for_a_while()
        except BaseException:  # cancelled, as a rule: the client left
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
        """Wait for the next head, and let the parser go on where it stopped because enough were waiting."""
        while not self._messages or self._direct is not None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message, payload = cast("tuple[Message, StreamReader]", self._messages.popleft())
        if self._parser is not None and not isinstance(message, Prepared):  # None once the client has left
            self._parser.message_consumed()
        if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()
        return message, payload

    async def _serve(self, message: Message, payload: StreamReader) -> bool:
        """Answer one request; whether its client is still there."""
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
            payload.set_exception(_PAYLOAD_ACCESS_ERROR)  # whoever still has it
        except ConnectionError:
            return False
        except Exception as error:
            self.log_exception("Unhandled exception", exc_info=error)
            self.force_close()
        finally:
            request.drop_references()
        return True

    async def _drain(self, payload: StreamReader) -> None:
        """Read what is left of a body that nobody wanted, for a while, so that the answer is not lost in a reset."""
        if self._lingering_time and not self._force_close:
            try:
                async with asyncio.timeout(self._lingering_time):
                    while not payload.is_eof():
                        await payload.readany()
            except TimeoutError:
                pass
        if not payload.is_eof() and not self._force_close:
            self.close()


class Behind:
    """Keeps what comes behind the request of an upgrade."""

    def __init__(self) -> None:
        self.data = bytearray()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """It has sent more; none of it is to be parsed again."""
        self.data += data
        return False, b""

    def feed_eof(self) -> None:
        """The client is gone; so will be what it said."""
