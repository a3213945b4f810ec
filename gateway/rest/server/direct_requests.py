"""Serves requests with a known head (`net.known_heads`) without a task: like the dispatcher, in fewer steps.

What follows from the head alone is not checked again: the operation, its parameters, the page's origin. What may change
is checked for each request: shutdown, the login, concurrency, limits, and the operation's own conditions. A 200 answer
that needs no further header fields is written directly; the dispatcher writes every other answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Protocol, cast

from aiohttp import hdrs, web

from gateway.net.http.http_requests import Prepared, Request
from gateway.net.http.http_server import HttpConnection
from gateway.rest.server.answers import control_answer, direct_answer
from gateway.rest.server.client_limits import RequestLimits
from gateway.rest.server.concurrency import ConcurrencyLimit
from gateway.rest.server.overload import ProduceSlot
from gateway.rest.server.request_login import RequestLogin
from gateway.security.rights.authorization import Grant

MAX_COPIED_BYTES: Final = 64 * 1024
"""The longest body that is copied behind its head; a longer one would be in memory twice until it is read."""


Accepts = Callable[[int], bool]
"""Tells whether a body of this size can be processed now without waiting. Has no effects."""
Begin = Callable[["DirectRequest", Grant, bytes], None]
"""Serves a request with this body: answers it with one of its methods, now or later, or raises the error for it."""


class Dispatcher(Protocol):
    """The part of `RequestDispatcher` that is used here."""

    draining: bool
    compress_from: int
    login: RequestLogin
    concurrency: ConcurrencyLimit
    limits: RequestLimits

    async def finish(
        self, request: web.BaseRequest, name: str, run: Callable[[], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Return the answer to a request of the operation `name` whose result or error comes from `run`."""
        ...

    def count(self, name: str, status: int) -> None:
        """Count an answer of an operation."""
        ...


class KnownRequest:
    """All requests with one head (`net.http_server.DirectHandler`)."""

    __slots__ = ("accepts", "accepts_coding", "authorization", "begin", "dispatcher", "message", "name")

    def __init__(
        self, request: web.BaseRequest, name: str, dispatcher: Dispatcher, accepts: Accepts, begin: Begin
    ) -> None:
        """Serve requests with the head of `request`, which is for the operation `name`. See `Call.serve_directly`."""
        self.message = cast("Request", request).message
        self.authorization = request.headers.get(hdrs.AUTHORIZATION)
        self.accepts_coding = hdrs.ACCEPT_ENCODING in request.headers
        self.name = name
        self.dispatcher = dispatcher
        self.accepts = accepts
        self.begin = begin

    def serve(self, connection: HttpConnection, body: bytes) -> bool:
        """Start to serve a request with the known head; False if it must be parsed."""
        dispatcher = self.dispatcher
        if dispatcher.draining or connection.leaving or not self.accepts(len(body)):
            return False
        client = dispatcher.login.known(connection, self.authorization)
        if client is None:
            return False
        request = DirectRequest(self, connection)
        connection.begin_direct(request)
        try:
            dispatcher.concurrency.enter(client.share)
            request.client = client.share
            dispatcher.limits.enter(connection, client)
            self.begin(request, client.grant, body)
        except Exception as error:  # the dispatcher answers and logs it
            request.fail(error)
        return True


class DirectRequest:
    """One direct request in progress."""

    __slots__ = ("_connection", "_known", "client", "slot")

    def __init__(self, known: KnownRequest, connection: HttpConnection) -> None:
        self._known = known
        self._connection: HttpConnection | None = connection  # None once it is answered or the client disconnected
        self.client: str | None = None  # once it is counted by `ConcurrencyLimit.enter`
        self.slot: ProduceSlot | None = None  # once it counts as a produce request

    @property
    def connection(self) -> HttpConnection:
        """The connection of a request that is not answered yet."""
        assert self._connection is not None
        return self._connection

    def answer(self, body: bytes) -> None:
        """Answer 200 with the control media type."""
        known = self._known
        dispatcher = known.dispatcher
        coded = known.accepts_coding and len(body) >= dispatcher.compress_from
        leaving = dispatcher.draining or (self._connection is not None and self._connection.leaving)
        if coded or leaving or len(body) > MAX_COPIED_BYTES:
            self.answer_by(_returning(body))
            return
        connection = self._end()
        if connection is not None:
            dispatcher.count(known.name, 200)
            connection.answer_direct(direct_answer(body))

    def answer_by(self, run: Callable[[], Awaitable[web.StreamResponse]]) -> None:
        """Let the dispatcher answer with the result or the error of `run`."""
        known = self._known
        connection = self._end()
        if connection is not None:
            finish = known.dispatcher.finish
            connection.answer_prepared(Prepared(known.message, lambda request: finish(request, known.name, run)))

    def fail(self, error: Exception) -> None:
        """Answer with an error."""
        self.answer_by(_raising(error))

    def abandon(self) -> None:
        """The client has disconnected; records that were submitted to Kafka are still stored."""
        self._end()

    def _end(self) -> HttpConnection | None:
        """Stop counting the request, once. Returns the connection, or None if it was answered or the client left."""
        connection, self._connection = self._connection, None
        if connection is None:
            return None
        if self.slot is not None:
            self.slot.leave()
        if self.client is not None:
            self._known.dispatcher.concurrency.leave(self.client)
        return connection


def _returning(body: bytes) -> Callable[[], Awaitable[web.StreamResponse]]:
    async def run() -> web.StreamResponse:
        return control_answer(body)

    return run


def _raising(error: Exception) -> Callable[[], Awaitable[web.StreamResponse]]:
    async def run() -> web.StreamResponse:
        nonlocal error
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame: avoids a reference cycle

    return run
