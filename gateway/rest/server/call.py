"""One request for an operation, validated against the contract: parameters, body, accepted media types."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, cast

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11

from gateway.net.http.http_requests import AuthenticatedClient
from gateway.net.http.http_server import SERVER, HttpConnection
from gateway.observe.tracing import RequestSpan
from gateway.rest.server.audited import audit_change
from gateway.rest.server.body import BodyReader, answer_expectation
from gateway.rest.server.direct_requests import Accepts, Begin, Dispatcher, KnownRequest
from gateway.rest.server.overload import OverloadGuard, ProduceSlot
from mapping.record import Headers
from mapping.rest.incoming import trace_headers
from protocols.rest.contract import Operation, check_body
from protocols.rest.errors import RestError
from protocols.rest.media import body_type, preferred

_UNUSUAL: Final = (hdrs.CONTENT_ENCODING, hdrs.UPGRADE, "traceparent")
"""Requests with one of these fields are not served directly. `traceparent` differs in every request."""
_NO_QUERY: Final[dict[str, list[str]]] = {}


class Call:
    """A request with its client's rights and its validated parameters: the argument of each handler."""

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
        """Validate the query; RestError 400 if it violates the contract."""
        self.request = request  # read its body with `body` or `pieces`
        self.connection = cast("HttpConnection", request.protocol)
        self.operation = operation  # as the contract describes it
        self.grant = client.grant
        self.expires_ms = client.expires_ms
        self.answer_headers: dict[str, str] = {}  # header fields for the answer, even an error; see `begin`
        self._bodies = bodies
        self._dispatcher = dispatcher
        self._continued = False
        self.span: RequestSpan | None = None  # the request's trace span; None if tracing is off
        # the declared parameters by name, typed; without those that were not sent and have no default
        self.query = operation.query_values(_given(request)) if operation.query else operation.defaults

    def header_values(self) -> Mapping[str, Any]:
        """Return the declared header fields that were sent, by name, typed. Raises RestError 400."""
        values = {}
        for parameter in self.operation.headers:
            texts = self.request.headers.getall(parameter.name, ())
            if texts:
                values[parameter.name] = parameter.value(texts)
            elif parameter.required:
                raise RestError(400, f"Validation error on: the header field {parameter.name} is missing")
        return values

    @property
    def media(self) -> str:
        """The body's media type as the contract spells it; RestError 400 if the contract does not have it."""
        body = self.operation.body
        assert body is not None, "an operation without a body"
        return body_type(self.request.headers.get("Content-Type"), body.media)

    async def unchecked_body(self) -> bytes:
        """Return the whole body, not validated against the contract; see `BodyReader.read`."""
        return await self._bodies.read(self.request)

    async def body(self) -> bytes:
        """Return the whole body, validated against the contract; empty if the body is optional and was not sent.

        Raises:
            RestError: 400 for a wrong type or content (or the status that the schema names) or for a missing body;
                also the errors of `BodyReader.read`.
        """
        declared = self.operation.body
        assert declared is not None, "an operation without a body"
        if not self.request.can_read_body:
            if declared.required:
                raise RestError(400, "Validation error on: the request has no body")
            return b""
        media = self.media
        body = await self.unchecked_body()
        if not body and not declared.required:
            return b""
        check_body(declared.media[media], body)
        return body

    def enter(self, overload: OverloadGuard, topic: str) -> ProduceSlot:
        """Count the request among those that produce to a topic; RestError 429 or 503 if it may not."""
        return overload.enter(topic, self.connection, self.request.content_length or 0, self.grant.identity)

    def pieces(self, idle_s: float) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, not validated; see `BodyReader.pieces`. Check `media` before.

        Raises:
            RestError: 415, and the errors of `BodyReader.pieces`.
        """
        self._send_continue()
        return self._bodies.pieces(self.request, idle_s)

    def negotiate(self, *offered: str) -> str:
        """Return the media type for the answer that the client prefers (RFC 9110 section 12.5.1).

        `offered` is in the order of our own preference; by default it is all types that the contract has for success.

        Raises:
            RestError: 406 if the client accepts none of them.
        """
        choice = offered or self.operation.success_media()
        chosen = preferred(self.request.headers.get("Accept"), choice)
        if chosen is None:
            raise RestError(406, f"Not Acceptable: available are {', '.join(choice)}")
        return chosen

    async def begin(self, answer: web.StreamResponse) -> None:
        """Send the head of an answer, with `answer_headers`; the caller writes the rest."""
        if self.answer_headers:
            answer.headers.update(self.answer_headers)
        await answer.prepare(self.request)

    async def stream(self, media: str) -> web.StreamResponse:
        """Start a 200 answer whose body is sent in pieces: `write` each to the result, and return it when done.

        `write` waits while the client reads too slowly. It raises ConnectionError when the client has closed the
        connection; the operation itself is cancelled then.
        """
        if self.operation.body is not None:
            self._send_continue()
        answer = web.StreamResponse(headers={"Content-Type": media, "Server": SERVER, "Cache-Control": "no-store"})
        await self.begin(answer)
        return answer

    def begin_publish(self, topic: str) -> Headers:
        """Return the trace context for records that this request publishes: our span's, or else the client's."""
        if self.span is not None:
            return self.span.begin_publish(topic)
        fields = self.request.headers
        return trace_headers(fields.get("traceparent"), fields.get("tracestate"))

    def serve_directly(self, accepts: Accepts, begin: Begin) -> None:
        """Let `begin` serve later requests with this head on this connection, if nothing about it is unusual."""
        request = self.request
        usual = (
            request.version == HttpVersion11
            and request.keep_alive
            and not self.answer_headers  # a page of another origin
            and self.span is None
            and not any(name in request.headers for name in _UNUSUAL)
        )
        if usual:
            known = KnownRequest(request, self.operation.name, self._dispatcher, accepts, begin)
            self.connection.remember(request, known)

    def audit_change(self, what: str, on: str) -> None:
        """Write a change by an administrator to the audit trail."""
        audit_change(self.connection, self.grant, what, on)

    def _send_continue(self) -> None:
        """Send `100 Continue` if the client waits for it; once, and never after the head of an answer."""
        if not self._continued:
            self._continued = True
            answer_expectation(self.request)


def _given(request: web.BaseRequest) -> Mapping[str, list[str]]:
    if "?" not in request.raw_path:
        return _NO_QUERY
    query = request.rel_url.query
    return {name: query.getall(name) for name in query}
