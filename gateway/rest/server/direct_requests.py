"""Requests with a known head (`net.known_heads`), served without a task: as the dispatcher would, in fewer steps.

What a head says does not change: the operation, its parameters, whose page asks. What the gateway says to it may, so
that is asked anew for each request: whether it is shutting down, whose login that is, what is in work, and whatever the
operation asks. An answer of status 200 that nothing is to be added to is written at once; every other one is the
dispatcher's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Protocol

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11

from gateway.net.http_requests import Prepared
from gateway.net.http_server import HttpConnection
from gateway.rest.server.answers import CONTROL_HEAD, control_answer
from gateway.rest.server.overload import ProduceSlot
from gateway.rest.server.quick_answer import COPIED
from gateway.security.authorization import Grant

if TYPE_CHECKING:
    from gateway.rest.server.call import Call
    from gateway.rest.server.request_dispatcher import RequestDispatcher

_OTHERWISE: Final = (hdrs.CONTENT_ENCODING, hdrs.UPGRADE, "traceparent")
"""Fields of requests that are not served directly: a coded body, another protocol, what differs with each request."""


class DirectOperation(Protocol):
    """An operation with the parameters of one head."""

    def accepts(self, size: int) -> bool:
        """Whether a body of so many bytes can be dealt with now without waiting; nothing is done."""
        ...

    def begin(self, request: DirectRequest, grant: Grant, body: bytes) -> None:
        """Serve a request: end it by one of its methods, now or later, or raise what its answer says."""
        ...


def serve_directly(call: Call, dispatcher: RequestDispatcher, operation: DirectOperation) -> None:
    """Serve the next requests with the head of this one by `operation`, where everything about it is as usual."""
    request = call.request
    usual = (
        request.version == HttpVersion11
        and request.keep_alive
        and not call.answer_headers  # a page of another origin
        and call.span is None
        and not any(name in request.headers for name in _OTHERWISE)
    )
    if usual:
        call.connection.remember(request, _KnownRequest(request, call.operation.name, dispatcher, operation))


class _KnownRequest:
    """All requests with one head (`net.known_heads.Direct`)."""

    __slots__ = ("accepts_coding", "authorization", "dispatcher", "message", "name", "operation")

    def __init__(
        self, request: web.BaseRequest, name: str, dispatcher: RequestDispatcher, operation: DirectOperation
    ) -> None:
        self.message = request._message
        self.authorization = request.headers.get(hdrs.AUTHORIZATION)
        self.accepts_coding = hdrs.ACCEPT_ENCODING in request.headers
        self.name = name
        self.dispatcher = dispatcher
        self.operation = operation

    def take(self, connection: HttpConnection, body: bytes) -> bool:
        dispatcher = self.dispatcher
        if dispatcher.draining or not self.operation.accepts(len(body)):
            return False
        client = dispatcher.login.known(connection, self.authorization)
        if client is None:
            return False
        request = DirectRequest(self, connection)
        connection.begin_direct(request)
        try:
            request.client = dispatcher.concurrency.enter(connection, client.grant.identity)
            self.operation.begin(request, client.grant, body)
        except Exception as error:  # the dispatcher tells it, as any other request's
            request.fail(error)
        return True


class DirectRequest:
    """One request in work."""

    __slots__ = ("_connection", "_known", "client", "slot")

    def __init__(self, known: _KnownRequest, connection: HttpConnection) -> None:
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
        if coded or dispatcher.draining or len(body) > COPIED:
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
        raise error

    return run
