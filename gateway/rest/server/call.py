"""One request on its way to its operation, judged by the contract: parameters, body, what the client accepts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

from aiohttp import web

from gateway.net.http_server import SERVER
from gateway.observe.tracing import RequestSpan
from gateway.rest.server.access import Admitted
from gateway.rest.server.answers import error_answer
from gateway.rest.server.body import BodyReader, answer_expectation
from mapping.record import Headers
from mapping.rest import trace_headers
from protocols.rest.contract import Operation, check_body
from protocols.rest.errors import RestError, not_acceptable
from protocols.rest.media import body_type, preferred

_NO_QUERY: Final[dict[str, list[str]]] = {}


class Call:
    """What an operation is given.

    Attributes:
        request: the request itself; its body is read through `body`, or in pieces by who streams it.
        operation: what the contract says of it.
        grant: who the client is and what it may do.
        expires_ms: when (epoch milliseconds) that ends; None: never.
        query: the declared parameters by name, typed; one that was not sent and has no default is missing.
        span: the request's, where spans are made.
        answer_headers: fields that go with the answer, whatever it is; see `begin`.
    """

    __slots__ = (
        "_bodies", "_continued", "answer_headers", "expires_ms", "grant", "operation", "query", "request", "span",
    )  # fmt: skip

    def __init__(self, request: web.BaseRequest, operation: Operation, admitted: Admitted, bodies: BodyReader) -> None:
        """Check the query.

        Raises:
            RestError: 400, the query is against the contract.
        """
        self.request = request
        self.operation = operation
        self.grant, self.expires_ms = admitted
        self.answer_headers: dict[str, str] = {}
        self._bodies = bodies
        self._continued = False
        self.span: RequestSpan | None = None
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
        """The body's media type, as the contract spells it.

        Raises:
            RestError: 400, the contract does not have it.
        """
        body = self.operation.body
        assert body is not None, "an operation without a body"
        return body_type(self.request.headers.get("Content-Type"), body.media)

    async def body(self, limit: int | None = None) -> bytes:
        """The whole body, checked against the contract; empty where none is needed and none was sent.

        Args:
            limit: bytes, where the operation has its own; else `http.max_body_bytes`.

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

    def pieces(self, idle_s: float) -> AsyncIterator[bytes]:
        """The body as it comes, unchecked; see `BodyReader.pieces`. Ask for `media` before.

        Raises:
            RestError: 415; and see there.
        """
        self._go_on()
        return self._bodies.pieces(self.request, idle_s)

    def negotiate(self, *offered: str) -> str:
        """The media type of the answer that the client prefers (RFC 9110 section 12.5.1).

        Args:
            offered: of which; our own preference is the order. None: all that the contract has for success.

        Raises:
            RestError: 406.
        """
        choice = offered or self.operation.success_media()
        found = preferred(self.request.headers.get("Accept"), choice)
        if found is None:
            raise not_acceptable(choice)
        return found

    async def begin(self, answer: web.StreamResponse) -> None:
        """Send the head of an answer, with `answer_headers`; for who writes or awaits the rest itself."""
        if self.answer_headers:
            answer.headers.update(self.answer_headers)
        await answer.prepare(self.request)

    async def stream(self, media: str, headers: Mapping[str, str] | None = None) -> web.StreamResponse:
        """Begin an answer of status 200 whose body comes in pieces: `write` each, and return it when done.

        `write` waits while the client is slower than we, and raises ConnectionError when it has left; the operation
        itself is cancelled then.
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

    def _go_on(self) -> None:
        """Tell a client that waits for it to send its body: once, and never behind the head of an answer."""
        if not self._continued:
            self._continued = True
            answer_expectation(self.request)


Handler = Callable[..., Awaitable[web.StreamResponse]]
"""Takes the call, then the values of the path's names in order, typed as the contract says."""


class Module:
    """One subject's operations, and what they need to live. The methods here do nothing: a module has what it needs.

    A module is made with `RestServices` in `RestListener`; its part of the contract stands in `protocols/rest/openapi`.
    """

    def operations(self) -> Mapping[str, Handler]:
        """The handlers by the contract's operationId."""
        return {}

    def refuse(self, error: RestError) -> web.Response:
        """The answer to a request of this module that is refused; the dialect's error body."""
        return error_answer(error)

    def start(self) -> None:
        """The listener is bound."""

    async def drain(self) -> None:
        """Nothing new comes from now on: end what would run for long. Called once, in the background."""

    async def stop(self) -> None:
        """All requests have ended: close what is open."""


def _given(request: web.BaseRequest) -> Mapping[str, list[str]]:
    if "?" not in request.raw_path:
        return _NO_QUERY
    query = request.rel_url.query
    return {name: query.getall(name) for name in query}
