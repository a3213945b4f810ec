"""One request on its way to its operation, judged by the contract: parameters, body, what the client accepts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, cast

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11

from gateway.net.http_server import SERVER, HttpConnection
from gateway.observe.tracing import RequestSpan
from gateway.rest.server.audited import audit_act
from gateway.rest.server.body import BodyReader, answer_expectation
from gateway.rest.server.direct_requests import DirectOperation, Dispatcher, KnownRequest
from gateway.rest.server.overload import OverloadGuard, ProduceSlot
from gateway.rest.server.request_login import AuthenticatedClient
from mapping.record import Headers
from mapping.rest.incoming import trace_headers
from protocols.rest.contract import Operation, check_body
from protocols.rest.errors import RestError, not_acceptable
from protocols.rest.media import body_type, preferred

_UNUSUAL: Final = (hdrs.CONTENT_ENCODING, hdrs.UPGRADE, "traceparent")
"""Fields of requests that are not served directly: a coded body, another protocol, what differs with each request."""
_NO_QUERY: Final[dict[str, list[str]]] = {}


class Call:
    """A request with its client's rights and its checked parameters: the argument of each handler."""

    __slots__ = (
        "_bodies", "_continued", "_dispatcher", "answer_headers", "connection", "expires_ms", "grant", "operation",
        "query", "request", "span",
    )  # fmt: skip

    def __init__(
        self,
        request: web.BaseRequest,
        operation: Operation,
        client: AuthenticatedClient,
        bodies: BodyReader,
        dispatcher: Dispatcher,
    ) -> None:
        """Check the query; RestError: 400, the query is against the contract."""
        # the request itself; its body is read through `body`, or piece by piece through `pieces`
        self.request = request
        self.connection = cast("HttpConnection", request.protocol)
        self.operation = operation  # its description in the contract
        self.grant, self.expires_ms = client  # the client's rights, and epoch ms until when; None: for ever
        self.answer_headers: dict[str, str] = {}  # header fields of the answer, errors too; see `begin`
        self._bodies = bodies
        self._dispatcher = dispatcher
        self._continued = False
        self.span: RequestSpan | None = None  # the request's trace span; None where tracing is off
        # the declared parameters by name, typed; one that was not sent and has no default is missing
        self.query = operation.query_values(_given(request)) if operation.query else operation.defaults

    def header_values(self) -> Mapping[str, Any]:
        """The declared header fields by name, typed; one that was not sent is missing. Raises RestError 400."""
        found = {}
        for parameter in self.operation.headers:
            texts = self.request.headers.getall(parameter.name, ())
            if texts:
                found[parameter.name] = parameter.value(texts)
            elif parameter.required:
                raise RestError(400, f"Validation error on: the header field {parameter.name} is missing")
        return found

    @property
    def media(self) -> str:
        """The body's media type, as the contract spells it; RestError: 400, the contract does not have it."""
        body = self.operation.body
        assert body is not None, "an operation without a body"
        return body_type(self.request.headers.get("Content-Type"), body.media)

    async def body(self, limit: int | None = None) -> bytes:
        """The whole body, checked against the contract; empty where none is needed and none was sent.

        It has `limit` bytes at most, where the operation has its own; else `http.max_body_bytes`.

        Raises:
            RestError: 400 for a wrong type or content (or the status that the schema names), or none where one is
                needed; and what `BodyReader.read` raises.
        """
        declared = self.operation.body
        assert declared is not None, "an operation without a body"
        if not self.request.can_read_body:
            if declared.required:
                raise RestError(400, "Validation error on: the request has no body")
            return b""
        media = self.media
        body = await self._bodies.read(self.request, limit)
        if not body and not declared.required:
            return b""
        check_body(declared.media[media], body)
        return body

    def enter(self, overload: OverloadGuard, topic: str) -> ProduceSlot:
        """See `OverloadGuard.enter`."""
        return overload.enter(topic, self.connection, self.request.content_length or 0, self.grant.identity)

    def pieces(self, idle_s: float) -> AsyncIterator[bytes]:
        """The body as it comes, unchecked; see `BodyReader.pieces`. Ask for `media` before.

        Raises:
            RestError: 415; and see there.
        """
        self._go_on()
        return self._bodies.pieces(self.request, idle_s)

    def negotiate(self, *offered: str) -> str:
        """The media type of the answer that the client prefers (RFC 9110 section 12.5.1).

        Our own preference is the order of `offered`; None: all that the contract has for success.

        Raises:
            RestError: 406.
        """
        choice = offered or self.operation.success_media()
        found = preferred(self.request.headers.get("Accept"), choice)
        if found is None:
            raise not_acceptable(choice)
        return found

    async def begin(self, answer: web.StreamResponse) -> None:
        """Send the head of an answer, with `answer_headers`; the caller writes the rest."""
        if self.answer_headers:
            answer.headers.update(self.answer_headers)
        await answer.prepare(self.request)

    async def stream(self, media: str, headers: Mapping[str, str] | None = None) -> web.StreamResponse:
        """Begin an answer of status 200 whose body is sent in pieces: `write` each, and return it when done.

        `write` waits while the client reads too slowly, and raises ConnectionError when the client has closed the
        connection; the operation itself is cancelled then.
        """
        if self.operation.body is not None:
            self._go_on()
        answer = web.StreamResponse(
            headers={"Content-Type": media, "Server": SERVER, "Cache-Control": "no-store", **(headers or {})}
        )
        await self.begin(answer)
        return answer

    def begin_publish(self, topic: str) -> Headers:
        """The trace context for records that this request now publishes: of a span of ours, else the client's."""
        if self.span is not None:
            return self.span.begin_publish(topic)
        fields = self.request.headers
        return trace_headers(fields.get("traceparent"), fields.get("tracestate"))

    def serve_directly(self, operation: DirectOperation) -> None:
        """Serve the next requests of this connection with this one's head by `operation`, where it is as usual."""
        request = self.request
        usual = (
            request.version == HttpVersion11
            and request.keep_alive
            and not self.answer_headers  # a page of another origin
            and self.span is None
            and not any(name in request.headers for name in _UNUSUAL)
        )
        if usual:
            known = KnownRequest(request, self.operation.name, self._dispatcher, operation)
            self.connection.remember(request, known)

    def acted(self, what: str, on: str) -> None:
        """The client has changed something as an administrator: the audit trail has it."""
        audit_act(self.connection, self.grant, what, on)

    def _go_on(self) -> None:
        """Tell a client that waits for it to send its body: once, and never behind the head of an answer."""
        if not self._continued:
            self._continued = True
            answer_expectation(self.request)


def _given(request: web.BaseRequest) -> Mapping[str, list[str]]:
    if "?" not in request.raw_path:
        return _NO_QUERY
    query = request.rel_url.query
    return {name: query.getall(name) for name in query}
