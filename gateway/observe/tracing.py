"""OpenTelemetry spans. Nothing of OpenTelemetry is imported unless spans are configured.

An HTTP request is a server span; its publishing is a producer span below it. The records carry the producer span's
context (W3C Trace Context), so that consumers can continue the trace.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit, urlunsplit

import structlog

from gateway.runtime.version import version
from gateway.settings.config import ConfigError, ObserveConfig
from mapping.record import TRACEPARENT, TRACESTATE, Headers

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

log = structlog.get_logger(__name__)

SERVICE: Final = "trivium"
STOP_S: Final = 2.0  # for sending the last spans; the collector may be unreachable
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PATH: Final = "/v1/traces"
_MISSING: Final = "spans need the packages of the extra otel: pip install trivium[otel]"
_SERVER_ERROR: Final = 500


class RequestSpan:
    """The span of one request, and the span of its publishing."""

    __slots__ = ("_context", "_publish", "_span", "_tracing")

    def __init__(self, tracing: Tracing, span: Span, context: Context) -> None:
        self._tracing = tracing
        self._span = span
        self._context = context
        self._publish: Span | None = None

    def begin_publish(self, topic: str) -> Headers:
        """Start the publish span and return the records' headers. `published` ends it, at the latest `end`."""
        self.published()
        tracing = self._tracing
        attributes = {
            "messaging.system": "kafka",
            "messaging.operation.type": "send",
            "messaging.destination.name": topic,
        }
        self._publish = tracing.tracer.start_span(
            f"send {topic}", self._context, kind=tracing.api.SpanKind.PRODUCER, attributes=attributes
        )
        carrier: dict[str, str] = {}
        tracing.propagator.inject(carrier, tracing.api.set_span_in_context(self._publish, self._context))
        return tuple((name, carrier[name].encode()) for name in (TRACEPARENT, TRACESTATE) if name in carrier)

    def published(self) -> None:
        """End the publish span: Kafka has answered."""
        if self._publish is not None:
            self._publish.end()
            self._publish = None

    def end(self, status: int | None) -> None:
        """End the request's span. `status` is None if the client has disconnected."""
        self.published()
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
        if status is None or status >= _SERVER_ERROR:
            reason = "the client has disconnected" if status is None else None
            self._span.set_status(self._tracing.api.StatusCode.ERROR, reason)
        self._span.end()


class Tracing:
    """Creates spans."""

    def __init__(self, provider: TracerProvider) -> None:
        """`provider` receives the spans; `stop` shuts it down."""
        # An optional package, imported only where it is configured and installed.
        from opentelemetry import trace  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._provider = provider
        self.api = trace
        self.tracer = provider.get_tracer(SERVICE)
        self.propagator = TraceContextTextMapPropagator()

    def begin(self, operation: str, method: str, route: str, fields: Mapping[str, str]) -> RequestSpan:
        """Start the span of a request: the contract's `operation`, and its path template (`route`).

        `fields` are the request's header fields; a `traceparent` gives the parent span.
        """
        parent = self.propagator.extract(fields)
        attributes = {"http.request.method": method, "http.route": route, "url.scheme": "http", "trivium.op": operation}
        span = self.tracer.start_span(f"{method} {route}", parent, kind=self.api.SpanKind.SERVER, attributes=attributes)
        return RequestSpan(self, span, self.api.set_span_in_context(span, parent))

    async def stop(self) -> None:
        """Send the remaining spans, for at most `STOP_S` seconds."""
        ending = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, STOP_S)


def make_tracing(config: ObserveConfig, environment: Mapping[str, str] = os.environ) -> Tracing | None:
    """Create the tracing, or return None if spans are not configured.

    Spans are configured by `observe.otlp_endpoint`, or by OpenTelemetry's own variables that name an endpoint. Its
    other variables (sampling, resource, headers) apply in both cases.

    Raises:
        ConfigError: `observe.otlp_endpoint` is set but the packages are not installed.
    """
    endpoint = config.otlp_endpoint.get_secret_value() if config.otlp_endpoint is not None else None
    wanted = endpoint is not None or any(environment.get(name) for name in _ENDPOINTS)
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        wanted = False
    if not wanted:
        return None
    if not _installed():
        if endpoint is not None:
            raise ConfigError(f"observe.otlp_endpoint: {_MISSING}")
        log.warning("no spans", reason=_MISSING)
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({"service.version": version()} | ({} if named else {"service.name": SERVICE}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    address = None if endpoint is None else _traces_url(endpoint)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address)))
    return Tracing(provider)


def _traces_url(endpoint: str) -> str:
    """Return the collector's URL for traces; a query, which may hold a key, is kept."""
    parts = urlsplit(endpoint)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/").removesuffix(_PATH) + _PATH))


def _installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False
