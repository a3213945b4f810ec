"""The requests of one HTTP connection, served one after the other by the connection's own task.

aiohttp makes a task for each request, to be answered in a context of its own (Python before 3.12 cannot start one at
once). Nothing here keeps anything in a context, and the task costs as much as reading a small request.
"""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import StreamReader, web
from aiohttp.http import RawRequestMessage, StreamWriter
from aiohttp.web_protocol import _PAYLOAD_ACCESS_ERROR, ERROR, _ErrInfo


class Request(web.BaseRequest):
    """aiohttp's request, which knows the task that serves it."""

    def drop_references(self) -> None:
        """It is done: an exception that has it in its traceback is no cycle with the task."""
        self._task = cast("asyncio.Task[None]", None)


class RequestsInTurn(web.RequestHandler):
    """aiohttp's connection, but for what runs its requests."""

    __slots__ = ()

    async def start(self) -> None:
        """Serve until either side has had enough, then close."""
        try:
            while not self._force_close:
                message, payload = await self._next_message()
                if not await self._serve(message, payload) or self._ending:
                    break
                self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
                if self._keepalive_handle is None:
                    self._keepalive_handle = self._loop.call_at(
                        self._next_keepalive_close_time, self._process_keepalive
                    )
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

    async def _next_message(self) -> tuple[RawRequestMessage | _ErrInfo, StreamReader]:
        """Wait for the next head, and let the parser go on where it stopped because enough were waiting."""
        if not self._messages:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message, payload = self._messages.popleft()
        if self._parser is not None:  # None once the client has left
            self._parser.message_consumed()
        if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()
        return message, payload

    async def _serve(self, message: RawRequestMessage | _ErrInfo, payload: StreamReader) -> bool:
        """Answer one request; whether its client is still there."""
        manager, handle = self._manager, self._request_handler
        assert manager is not None
        assert handle is not None
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
