"""The management listener: `/healthy`, `/ready`, `/metrics`, `/flow`, `/topics`, `/clients`, `/console`, and so on.

`/healthy` and `/ready` answer everyone, because container runtimes and load balancers have no login. Everything else is
open if the listener's address is loopback (127.0.0.0/8, ::1 or localhost), because only this machine can reach it. On
any other address, all figures, client data and operations (`POST /drain`, `DELETE /clients/{id}`, `POST /trace`) need a
password and the right `admin`.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from gateway.kafka.cluster.topic_safety import TopicsReport
from gateway.kafka.contracts import Refused
from gateway.net.http.heads import HeadError, Heads
from gateway.observe.console import FILES, Console
from gateway.observe.flow import CONNECTIONS, MOST_CONNECTIONS, FlowSnapshots
from gateway.observe.spark_jobs import SparkJobs
from gateway.runtime.audited import Where, audit
from gateway.runtime.version import version
from gateway.security import throttle
from gateway.security.fair_queue import Busy
from gateway.security.login.credentials import name_and_password
from gateway.security.origins import Hosts, Origins
from gateway.settings.config import Address
from telemetry.metrics import Metrics

JSON: Final = "application/json"
SHUTDOWN_S: Final = 1.0
UNGUARDED: Final = frozenset({"/healthy", "/ready"})
CHALLENGE: Final = 'Basic realm="trivium", charset="UTF-8"'


def _is_our_fault(record: logging.LogRecord) -> bool:
    """A filter of aiohttp's log: neither bytes that are not HTTP nor a client that leaves are errors of the gateway."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError | ConnectionError)


server_log: Final = logging.getLogger(f"{__name__}.server")
server_log.addFilter(_is_our_fault)

Ready = Callable[[], tuple[bool, dict[str, Any]]]
"""Returns whether every listener accepts connections and Kafka answers, and the details."""

Topics = Callable[[], Awaitable[TopicsReport]]
"""Asks Kafka which topics are safe; raises Refused if Kafka does not answer."""

Admit = Callable[[str, str, str], Awaitable[bool]]
"""Returns whether this user with this password at this peer (`host:port`) has access."""


def answer(document: object, status: int = 200) -> web.Response:
    """Return a JSON response that must not be cached."""
    headers = {"Cache-Control": "no-store"}
    return web.Response(status=status, body=msgspec.json.encode(document), content_type=JSON, headers=headers)


def where_of_request(request: web.Request) -> Where:
    """Return the requester for the audit trail."""
    return Where("management", peer_of(request), "management")


def record_act(request: web.Request, what: str, on: str) -> None:
    """Record an administrative action in the audit trail. The principal is "" for a request without a login."""
    if audit.enabled:
        audit.act(where_of_request(request), login_of(request)[0], what, on)


def bad(why: str, status: int = 400) -> web.Response:
    """Return an error response with one sentence."""
    return web.Response(status=status, text=f"{why}\n")


def limit_in(request: web.Request, usual: int, most: int) -> int:
    """Return the query's `limit`; raises HTTPBadRequest."""
    limit = request.query.get("limit", str(usual))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 6 and 0 < int(limit) <= most):
        raise web.HTTPBadRequest(text=f"limit: a number from 1 to {most}\n")
    return int(limit)


def login_of(request: web.Request) -> tuple[str, str]:
    """Return user and password of HTTP Basic [RFC 7617], or two empty strings."""
    scheme, _, encoded = request.headers.get("Authorization", "").partition(" ")
    named = name_and_password(encoded) if scheme.lower() == "basic" else None
    return named or ("", "")


def peer_of(request: web.Request) -> str:
    """Return the requester's `host:port`, or "" if it has disconnected."""
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    return throttle.peer_of(peer) if peer else ""


class Management:
    """The HTTP server for operators."""

    def __init__(
        self,
        metrics: Metrics,  # for `/metrics`
        ready: Ready,  # for `/ready`; must be fast and must not wait
        flow: FlowSnapshots,  # for `/flow` and `/console`
        *,
        admit: Admit,  # checks access on a listener beyond loopback
        hosts: Hosts,  # the allowed host names
        origins: Origins,  # the allowed origins of web pages
        ssl_context: ssl.SSLContext | None = None,  # for TLS
        spark_jobs: Sequence[Address] = (),  # jobs whose metrics `/console` shows too
        drain: Callable[[], None],  # disconnects the clients, then stops the gateway
        topics: Topics,  # for `/topics`
        more: Sequence[web.RouteDef] = (),  # routes of other parts
    ) -> None:
        self._more = more
        self._topics = topics
        self._metrics = metrics
        self._ready = ready
        self._flow = flow
        self._drain = drain
        self._spark_jobs = SparkJobs(spark_jobs)
        self._console = Console(flow, metrics, ready, self._spark_jobs)
        self._admit = admit
        self._guarded = False
        self._host = ""
        self._heads = Heads(hosts, secure=ssl_context is not None)
        self._origins = origins
        self._ssl_context = ssl_context
        self._runner: web.AppRunner | None = None
        self._bound: tuple[str, int] | None = None

    async def start(self, address: Address) -> None:
        """Listen on `address`; raises OSError."""
        self._guarded = not address.is_loopback
        self._host = address.host
        app = web.Application(client_max_size=1024, middlewares=[self._check])
        app.add_routes(
            [
                web.get("/", self._lead),
                web.get("/healthy", self._healthy),
                web.get("/ready", self._is_ready),
                web.get("/metrics", self._serve_metrics),
                web.get("/flow", self._serve_flow),
                web.post("/drain", self._start_drain),
                web.get("/topics", self._serve_topics),
                *self._more,
                web.get("/console/events", self._console.events),
                *(web.get(path, self._console.file) for path in FILES),
            ]
        )
        runner = web.AppRunner(
            app, access_log=None, logger=server_log, shutdown_timeout=SHUTDOWN_S, handle_signals=False,
            auto_decompress=False,  # a body that is not gzip would be an error of the gateway
        )  # fmt: skip
        await runner.setup()
        self._runner = runner
        try:
            site = web.TCPSite(runner, address.host, address.port, ssl_context=self._ssl_context)
            await site.start()
        except BaseException:
            await self.stop()
            raise
        bound = runner.addresses[0]
        self._bound = (bound[0], bound[1])

    @property
    def port(self) -> int:
        """The bound port."""
        if self._bound is None:
            raise RuntimeError("the management listener is not open")
        return self._bound[1]

    @property
    def address(self) -> str:
        """The configured host with the bound port, as `HOST:PORT`."""
        return throttle.peer_of((self._host, self.port))

    @property
    def url(self) -> str:
        """The URL of this address."""
        return f"{'https' if self._ssl_context is not None else 'http'}://{self.address}"

    async def stop(self) -> None:
        """Close the listener and its connections."""
        self._console.stop()
        await self._spark_jobs.stop()
        runner, self._runner, self._bound = self._runner, None, None
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._heads.check(request)
        except HeadError as error:
            return web.Response(status=error.status, text=f"{error}\n")
        if not self._origins.allow_request(request.raw_path, request.headers, secure=request.secure):
            return web.Response(status=403, text="pages of other sites have no access\n")
        resource = request.match_info.route.resource  # None: there is no such page
        if self._guarded and resource is not None and resource.canonical not in UNGUARDED:
            user, password = login_of(request)
            try:
                admitted = bool(user) and await self._admit(user, password, peer_of(request))
            except Busy as busy:
                return web.Response(status=503, text=f"{busy}\n", headers={"Retry-After": "1"})
            if not admitted:
                if user:
                    audit.refused(where_of_request(request), "wrong password, or no right admin", name=user)
                return web.Response(status=401, text="a password is needed\n", headers={"WWW-Authenticate": CHALLENGE})
        return await handler(request)

    async def _lead(self, request: web.Request) -> web.Response:
        raise web.HTTPFound("/console")

    async def _healthy(self, request: web.Request) -> web.Response:
        body = {"healthy": True} if self._guarded else {"healthy": True, "version": version()}
        return web.Response(body=msgspec.json.encode(body), content_type=JSON)

    async def _is_ready(self, request: web.Request) -> web.Response:
        ready, details = self._ready()
        body: dict[str, Any] = {"ready": ready}
        if not self._guarded:
            body.update(details)
        return web.Response(status=200 if ready else 503, body=msgspec.json.encode(body), content_type=JSON)

    async def _start_drain(self, request: web.Request) -> web.Response:
        if self._ready()[1]["stopping"]:  # a second drain would stop the gateway immediately, as a second signal does
            return web.Response(status=409, text="the gateway is stopping already\n")
        record_act(request, "drain", "")
        self._drain()
        return web.Response(status=202, body=b'{"draining":true}', content_type=JSON)

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        body, media_type = self._metrics.rendered_for(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": media_type})

    async def _serve_flow(self, request: web.Request) -> web.Response:
        limit = limit_in(request, CONNECTIONS, MOST_CONNECTIONS)
        return answer(await self._flow.snapshot(limit, request.query.get("client", "")))

    async def _serve_topics(self, request: web.Request) -> web.Response:
        wanted = request.query.get("safe")
        if wanted not in {None, "true", "false"}:
            return bad("safe: true or false")
        try:
            report = await self._topics()
        except Refused as refused:
            return web.Response(status=503, text=f"{refused.reason}\n", headers={"Retry-After": "1"})
        if wanted is not None:
            shown = [topic for topic in report.topics if topic.safe == (wanted == "true")]
            report = msgspec.structs.replace(report, topics=shown)
        return answer(report)
