"""Dispatches each request to its operation, and answers every failure with the dialect's error body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, cast

import structlog
from aiohttp import web

from gateway.kafka.contracts import Refused
from gateway.kafka.groups.refusals import NotAssignedError
from gateway.net.http.http_server import SERVER, HttpConnection
from gateway.net.http.upgrade import UpgradeError, WebSocketEndpoint
from gateway.observe.tracing import Tracing
from gateway.rest.server.answers import error_answer
from gateway.rest.server.audited import audit_denied, audit_refusal
from gateway.rest.server.body import BodyReader
from gateway.rest.server.call import Call
from gateway.rest.server.client_limits import RequestLimits
from gateway.rest.server.concurrency import ConcurrencyLimit
from gateway.rest.server.content_coding import compress
from gateway.rest.server.cors import Cors, allowed, is_preflight
from gateway.rest.server.operation_set import Handler, OperationSet
from gateway.rest.server.request_login import TOKEN_PARAMETER, RequestLogin
from gateway.runtime.failures import failures
from gateway.security.rights.authorization import Grant
from mapping.outcomes import ANSWERS, Outcome
from mapping.tenants import Names
from protocols.rest.contract import Contract, Operation
from protocols.rest.errors import INTERNAL_ERROR, SHUTTING_DOWN, Fault, RestError, busy, not_found, retry_after
from protocols.rest.routes import Dialect, Routes

log = structlog.get_logger(__name__)

OPEN_WEBSOCKET: Final = "openWebSocket"  # its name in the metrics
OPTIONS: Final = "options"
CONSUMING: Final = frozenset({"poll", "v2Poll", "streamRecords"})
"""Operations that consume records. HEAD is safe (RFC 9110 section 9.2.1), so it must not run them."""
NAME_PARAMETERS: Final = frozenset({"topicname", "groupid"})
"""Path parameters that name a topic or a consumer group."""


class _RequestState:
    """The state of one request; grows as it is processed."""

    __slots__ = ("call", "client", "fields", "name", "refuse")

    def __init__(
        self, fields: dict[str, str], name: str = "none", refuse: Callable[[RestError], web.Response] = error_answer
    ) -> None:
        self.fields = fields  # header fields for its answer, even an error
        self.name = name
        self.refuse = refuse
        self.call: Call | None = None
        self.client: str | None = None  # once it is counted by `ConcurrencyLimit.enter`

    def refused(self, error: RestError) -> web.Response:
        """Return the answer for an error, with topics and groups as the tenant names them."""
        if self.call is not None:
            error.message = self.call.grant.names.text(error.message)
        return self.refuse(error)

    @property
    def grant(self) -> Grant | None:
        """The client's rights; None before the login."""
        return None if self.call is None else self.call.grant


class RequestDispatcher:
    """Finds operations by the contract's paths and runs them."""

    def __init__(
        self,
        contract: Contract,
        operations: Sequence[OperationSet],
        login: RequestLogin,
        bodies: BodyReader,
        websockets: Mapping[str, WebSocketEndpoint],
        *,
        concurrency: ConcurrencyLimit,
        limits: RequestLimits,
        cors: Cors,
        tracing: Tracing | None = None,
        dialect: Dialect = Dialect.STRIMZI,
        compress_from: int,
    ) -> None:
        """Serve the contract with the handlers of `operations`.

        `websockets` maps paths to endpoints that are not in the contract; their protocols authenticate the client.
        `concurrency` limits concurrent requests, `limits` limits clients, web pages of the origins in `cors` may call,
        and `tracing` makes a span for each request. `dialect` decides which operation serves a path that both dialects
        have. Answers of at least `compress_from` bytes are compressed for clients that accept it.

        Raises:
            ValueError: The contract has an operation without a handler, or the other way round.
        """
        self.draining = False
        self.login = login
        self._bodies = bodies
        self._websockets = websockets
        self.concurrency = concurrency
        self.limits = limits
        self._cors = cors
        self.compress_from = compress_from
        self._tracing = tracing
        self._router = Routes(contract.operations.values(), dialect=dialect)
        self._handlers: dict[str, tuple[Handler, Callable[[RestError], web.Response]]] = {}
        for operation_set in operations:
            for name, handler in operation_set.operations.items():
                if name in self._handlers:
                    raise ValueError(f"{name} has two handlers")
                self._handlers[name] = (handler, operation_set.refuse)
        differing = contract.operations.keys() ^ self._handlers.keys()
        if differing:
            raise ValueError(f"only in the contract or only served: {', '.join(sorted(differing))}")
        self._answers: dict[tuple[str, int], int] = {}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Only cancellation and a lost connection leave it as exceptions."""
        work = _RequestState(self._cors.fields(request))
        return await self._answered(request, work, self._run(request, work))

    async def finish(
        self, request: web.BaseRequest, name: str, run: Callable[[], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Like `handle`, for a request of the operation `name` whose answer or error is the result of `run`."""
        work = _RequestState(self._cors.fields(request), name, self._handlers[name][1])
        return await self._answered(request, work, run())

    async def _run(self, request: web.BaseRequest, work: _RequestState) -> web.StreamResponse:
        """Find the operation and run it; `work` records the progress."""
        raw_path = self._path(request)
        endpoint = self._websockets.get(raw_path)
        if endpoint is not None:
            work.name = OPEN_WEBSOCKET
            return endpoint.upgrade(request)
        if request.method == "OPTIONS" and (raw_path == "*" or is_preflight(request)):
            work.name = OPTIONS
            if raw_path == "*":
                return allowed(self._router.methods())
            return self._cors.preflight(request, self._router.methods(raw_path))
        operation, texts = self._router.match(request.method, raw_path)
        work.name = name = operation.name
        handler, work.refuse = self._handlers[name]
        client = await self.login.authenticate(request, token_in_query=TOKEN_PARAMETER in operation.query)
        connection = cast("HttpConnection", request.protocol)
        connection.identified()
        self.concurrency.enter(client.share)
        work.client = client.share
        self.limits.enter(connection, client)
        work.call = call = Call(request, operation, client, self._bodies, self)
        if work.fields:
            call.answer_headers.update(work.fields)
        work.fields = call.answer_headers
        if self._tracing is not None:
            call.span = self._tracing.begin(name, request.method, operation.template, request.headers)
        if request.method == "HEAD" and name in CONSUMING:
            return web.Response(headers={"Content-Type": call.negotiate(), "Server": SERVER})
        return await handler(call, *_whole_names(operation, operation.path_values(texts), client.grant.names))

    async def _answered(
        self, request: web.BaseRequest, work: _RequestState, running: Awaitable[web.StreamResponse]
    ) -> web.StreamResponse:
        """Return the answer of `running` or to its failure, with the common header fields; count it."""
        answer: web.StreamResponse
        try:
            answer = await running
        except RestError as error:
            audit_refusal(cast("HttpConnection", request.protocol), request, work.grant, error)
            answer = work.refused(error)
        except Refused as refused:
            if refused.outcome is Outcome.DENIED:
                audit_denied(cast("HttpConnection", request.protocol), work.grant, refused.reason)
            answer = work.refused(refusal(refused))
        except NotAssignedError as error:
            answer = work.refused(not_found(str(error), Fault.NOT_ASSIGNED))
        except UpgradeError as refused:
            answer = error_answer(RestError(refused.status, str(refused), headers=refused.headers, close=True))
        except (asyncio.CancelledError, ConnectionError):
            if work.call is not None and work.call.span is not None:
                work.call.span.end(None)
            raise  # the client has disconnected
        except Exception as error:
            failures.report("request", error, work.name)
            if request.writer.output_size > 0:
                raise ConnectionError("the answer was already started") from error
            answer = work.refuse(RestError(500, INTERNAL_ERROR, close=True))
        finally:
            if work.client is not None:
                self.concurrency.leave(work.client)
        if not answer.prepared:
            if work.fields:
                answer.headers.update(work.fields)
            if self.draining or cast("HttpConnection", request.protocol).leaving:
                answer.force_close()
            if "Accept-Encoding" in request.headers:
                await compress(request, answer, self.compress_from)
        if work.call is not None and work.call.span is not None:
            work.call.span.end(answer.status)
        self.count(work.name, answer.status)
        return answer

    def count(self, name: str, status: int) -> None:
        """Count an answer of an operation."""
        counted = (name, status // 100)
        self._answers[counted] = self._answers.get(counted, 0) + 1

    def _path(self, request: web.BaseRequest) -> str:
        """Return the path, still percent-encoded; RestError for a request that no operation can serve."""
        if self.draining:
            raise busy(SHUTTING_DOWN, close=True)
        if request.version < (1, 0):
            raise RestError(505, "HTTP/1.1 is required", close=True)
        if request.method == "CONNECT":
            raise RestError(
                405, "CONNECT is not supported", headers=(("Allow", ", ".join(self._router.methods())),), close=True
            )
        raw_path = request.raw_path.partition("?")[0]
        return raw_path if raw_path[:1] in {"/", "*"} else request.rel_url.raw_path  # a proxy's absolute form

    def answers(self) -> dict[str, dict[str, int]]:
        """Return the number of answers by operation and class of status ("2xx"); unknown paths count as "none"."""
        counts: dict[str, dict[str, int]] = {}
        for (operation, kind), count in self._answers.items():
            counts.setdefault(operation, {})[f"{kind}xx"] = count
        return counts


def _whole_names(operation: Operation, values: tuple[Any, ...], names: Names) -> tuple[Any, ...]:
    """Return path values with the tenant's prefix added to topics and groups (`mapping.tenants`)."""
    if not names.prefix:
        return values
    return tuple(
        names.topic(value) if parameter.name in NAME_PARAMETERS else value
        for parameter, value in zip(operation.path, values, strict=True)
    )


def refusal(refused: Refused) -> RestError:
    """Turn a `Refused` of the Kafka side into an HTTP error."""
    status = ANSWERS[refused.outcome].http
    headers = retry_after(status)
    fault = Fault.TOPIC if refused.outcome is Outcome.UNKNOWN_TOPIC else None
    return RestError(status, refused.reason, headers=headers, fault=fault)
