"""The common behaviour of operations: validation by the contract, streams in both directions, error bodies."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.limits.limits import Limits
from gateway.net.http.http_server import HttpServer
from gateway.rest.server.answers import control_answer, error_answer
from gateway.rest.server.body import BodyReader
from gateway.rest.server.call import Call
from gateway.rest.server.client_limits import RequestLimits
from gateway.rest.server.concurrency import ConcurrencyLimit
from gateway.rest.server.cors import Cors
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.overload import OverloadGuard
from gateway.rest.server.request_dispatcher import RequestDispatcher
from gateway.rest.server.request_login import RequestLogin
from gateway.security.origins import Origins
from gateway.security.rights.authorization import AccessList
from gateway.settings.config import LimitsConfig, SecurityConfig
from protocols.rest.contract import Contract, assemble
from protocols.rest.errors import RestError
from protocols.rest.responses import encode
from tests.gateway.rest.conftest import raw_exchange
from tests.support.listeners import BareHttpServer, listening

OK = {"200": {"description": "ok", "content": {"text/plain": {}, "application/json": {}}}}
CONTRACT = {
    "openapi": "3.1.0",
    "paths": {
        "/echo/{number}": {
            "parameters": [
                {"name": "number", "in": "path", "required": True, "schema": {"type": "integer", "maximum": 9}},
                {"name": "wanted", "in": "query", "required": True, "schema": {"type": "string"}},
                {"name": "X-Level", "in": "header", "required": True, "schema": {"type": "integer"}},
                {"name": "tag", "in": "query", "schema": {"type": "array", "items": {"enum": ["a", "b"]}}},
            ],
            "get": {"operationId": "show", "responses": OK},
        },
        "/stream": {
            "post": {
                "operationId": "stream",
                "requestBody": {"required": True, "content": {"text/plain": {}}},
                "responses": OK,
            }
        },
    },
}


class Echo(OperationSet):
    def __init__(self) -> None:
        self.operations = {"show": self.show, "stream": self.stream}

    def refuse(self, error: RestError) -> web.Response:
        answer = error_answer(error)
        answer.headers["X-Dialect"] = "echo"
        return answer

    async def show(self, call: Call, number: int) -> web.StreamResponse:
        call.answer_headers["X-Media"] = call.negotiate()
        return control_answer(encode({"number": number, "query": call.query, "fields": call.header_values()}))

    async def stream(self, call: Call) -> web.StreamResponse:
        assert call.media == "text/plain"
        call.answer_headers["X-Extra"] = "1"
        answer = await call.stream("text/plain")
        async for piece in call.pieces(idle_s=20):
            await answer.write(piece.upper())
        return answer


def app_of(*modules: OperationSet) -> RequestDispatcher:
    limits = RequestLimits(Limits(LimitsConfig(), time.monotonic, ()))
    overload = OverloadGuard(None, limits, 10)  # type: ignore[arg-type]  # nothing here publishes
    bodies = BodyReader(overload, 1000, 20.0, 16 * 1024)
    login = RequestLogin(AccessList(), Origins(SecurityConfig()))
    return RequestDispatcher(
        Contract(assemble([CONTRACT])),
        modules,
        login,
        bodies,
        {},
        concurrency=ConcurrencyLimit(100, 100),
        limits=limits,
        cors=Cors(()),
        compress_from=4096,
    )


@pytest.fixture
async def served() -> AsyncIterator[HttpServer]:
    server = BareHttpServer(
        "echo",
        app_of(Echo()).handle,
        lambda status, reason: error_answer(RestError(status, reason)),
        SecurityConfig(),
        head_timeout_s=20.0,
    )
    listening(server)
    await server.start()
    yield server
    await server.stop(1.0)


async def test_parameters_are_typed_and_errors_have_the_modules_form(served: HttpServer) -> None:
    level = {"X-Level": "3"}
    async with aiohttp.ClientSession(f"http://{served.bound}") as http:
        async with http.get("/echo/7?wanted=x&tag=a&tag=b", headers=level) as response:
            assert (response.status, response.headers["X-Media"]) == (200, "text/plain")
            assert await response.json(content_type=None) == {
                "number": 7, "query": {"wanted": "x", "tag": ["a", "b"]}, "fields": {"X-Level": 3},
            }  # fmt: skip
        async with http.get("/echo/7?wanted=x", headers={**level, "Accept": "text/plain;q=0.1, */*"}) as response:
            assert response.headers["X-Media"] == "application/json"
        for path, fields, status in (
            ("/echo/10?wanted=x", level, 400),
            ("/echo/x?wanted=x", level, 400),
            ("/echo/7", level, 400),
            ("/echo/7?wanted=x&wanted=y", level, 400),
            ("/echo/7?wanted=x&tag=c", level, 400),
            ("/echo/7?wanted=x", {}, 400),
            ("/echo/7?wanted=x", {"X-Level": "high"}, 400),
            ("/echo/7?wanted=x", {**level, "Accept": "image/png"}, 406),
        ):
            async with http.get(path, headers=fields) as response:
                assert (response.status, response.headers["X-Dialect"]) == (status, "echo"), path
        async with http.get("/nowhere") as response:
            assert response.status == 404


async def test_an_operation_answers_while_its_body_is_still_coming(served: HttpServer) -> None:
    host, _, port = served.bound.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(60):
        writer.write(
            b"POST /stream HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n"
            b"Expect: 100-continue\r\nConnection: close\r\n\r\n"
        )
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"X-Extra: 1" in head
        writer.write(b"3\r\none\r\n")
        assert b"ONE" in await reader.readuntil(b"ONE")
        writer.write(b"3\r\ntwo\r\n")
        assert b"TWO" in await reader.readuntil(b"TWO")
        writer.write(b"0\r\n\r\n")
        assert (await reader.read()).endswith(b"0\r\n\r\n")
    writer.close()


async def test_a_stream_of_an_unsupported_type_or_a_truncated_one_is_refused(served: HttpServer) -> None:
    answer = await raw_exchange(
        served.bound, b"POST /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"not supported" in answer


@pytest.mark.parametrize("modules", [(), (Echo(), Echo())])
def test_an_operation_has_exactly_one_handler(modules: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"only in the contract or only served|two handlers"):
        app_of(*modules)
