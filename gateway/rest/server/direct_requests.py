"""Requests with a known head (`net.known_heads`), served without a task: as the dispatcher would, in fewer steps.

What a head says does not change: the operation, its parameters, whose page asks. What the gateway says to it may, so
that is asked anew for each request: whether it is shutting down, whose login that is, what is in work, and whatever the
operation asks. An answer of status 200 that nothing is to be added to is written at once; every other one is the
dispatcher's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from aiohttp import hdrs, web

from gateway.net.http_requests import Prepared, Request
from gateway.net.http_server import HttpConnection
from gateway.rest.server.answers import CONTROL_HEAD, control_answer
from gateway.rest.server.client_limits import RequestLimits
from gateway.rest.server.concurrency import ConcurrencyLimit
from gateway.rest.server.overload import ProduceSlot
from gateway.rest.server.quick_answer import COPIED
from gateway.rest.server.request_login import RequestLogin
from gateway.security.authorization import Grant


class DirectOperation(Protocol):
    """An operation with the parameters of one head."""

    def accepts(self, size: int) -> bool:
        """Whether a body of so many bytes can be dealt with now without waiting; nothing is done."""
        ...

    def begin(self, request: DirectRequest, grant: Grant, body: bytes) -> None:
        """Serve a request: end it by one of its methods, now or later, or raise what its answer says."""
        ...


class Dispatcher(Protocol):
    """What the dispatcher of the listener does for every request."""

    draining: bool
    compress_from: int
    login: RequestLogin
    concurrency: ConcurrencyLimit
    limits: RequestLimits

    async def finish(
        self, request: web.BaseRequest, name: str, run: Callable[[], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """The answer to a request of the operation `name` that is done but for what `run` gives or raises."""
        ...

    def count(self, name: str, status: int) -> None:
        """Count an answer of an operation."""
        ...


class KnownRequest:
    """All requests with one head (`net.http_server.Direct`)."""

    __slots__ = ("accepts_coding", "authorization", "dispatcher", "message", "name", "operation")

    def __init__(self, request: web.BaseRequest, name: str, dispatcher: Dispatcher, operation: DirectOperation) -> None:
        """Those with the head of `request`, which is for the operation `name`; `Call.serve_directly` says which."""
        self.message = cast("Request", request).message
        self.authorization = request.headers.get(hdrs.AUTHORIZATION)
        self.accepts_coding = hdrs.ACCEPT_ENCODING in request.headers
        self.name = name
        self.dispatcher = dispatcher
        self.operation = operation

    def take(self, connection: HttpConnection, body: bytes) -> bool:
        """See `net.http_server.Direct`."""
        dispatcher = self.dispatcher
        if dispatcher.draining or connection.leaving or not self.operation.accepts(len(body)):
            return False
        client = dispatcher.login.known(connection, self.authorization)
        if client is None:
            return False
        request = DirectRequest(self, connection)
        connection.begin_direct(request)
        try:
            request.client = dispatcher.concurrency.enter(connection, client.grant.identity)
            dispatcher.limits.enter(connection, client.grant.identity)
            self.operation.begin(request, client.grant, body)
        except Exception as error:  # the dispatcher tells it, as any other request's
            request.fail(error)
        return True


class DirectRequest:
    """One request in work."""

    __slots__ = ("_connection", "_known", "client", "slot")

    def __init__(self, known: KnownRequest, connection: HttpConnection) -> None:
        self._known = known
        self._connection: HttpConnection | None = connection  # None: it has its answer, or its client left
        self.client: str | None = None  # counted in, see `ConcurrencyLimit.enter`
        self.slot: ProduceSlot | None = None  # it counts as a produce request

    @property
    def connection(self) -> HttpConnection:
        """Its connection, while it is in work."""
        assert self._connection is not None
        return self._connection

    def answer(self, body: bytes) -> None:
        """Answer 200 of the control type."""
        known = self._known
        dispatcher = known.dispatcher
        coded = known.accepts_coding and len(body) >= dispatcher.compress_from
        leaving = dispatcher.draining or (self._connection is not None and self._connection.leaving)
        if coded or leaving or len(body) > COPIED:
            self.answer_by(_given(body))
            return
        connection = self._end()
        if connection is not None:
            dispatcher.count(known.name, 200)
            connection.answer_direct(CONTROL_HEAD.with_body(body))

    def answer_by(self, run: Callable[[], Awaitable[web.StreamResponse]]) -> None:
        """Answer what `run` gives or raises, with all that the dispatcher does for an answer."""
        known = self._known
        connection = self._end()
        if connection is not None:
            finish = known.dispatcher.finish
            connection.answer_prepared(Prepared(known.message, lambda request: finish(request, known.name, run)))

    def fail(self, error: Exception) -> None:
        """Answer what an exception says."""
        self.answer_by(_raised(error))

    def abandon(self) -> None:
        """Its client has left; what was given to Kafka stays there."""
        self._end()

    def _end(self) -> HttpConnection | None:
        """Count it out, once; the connection, unless the client has left."""
        connection, self._connection = self._connection, None
        if connection is None:
            return None
        if self.slot is not None:
            self.slot.leave()
        if self.client is not None:
            self._known.dispatcher.concurrency.leave(self.client)
        return connection


def _given(body: bytes) -> Callable[[], Awaitable[web.StreamResponse]]:
    async def run() -> web.StreamResponse:
        return control_answer(body)

    return run


def _raised(error: Exception) -> Callable[[], Awaitable[web.StreamResponse]]:
    async def run() -> web.StreamResponse:
        nonlocal error
        try:
            raise error
        finally:
            del error  # whose traceback has this frame: no cycle

    return run
