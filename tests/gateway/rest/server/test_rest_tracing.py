"""Trace context through the gateway, and spans if they are enabled."""

import asyncio
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gateway.observe import tracing
from gateway.observe.tracing import Tracing, make_tracing
from gateway.runtime.version import version
from gateway.settings.config import ConfigError, ObserveConfig
from tests.gateway.rest.conftest import CONTROL, JSON_RECORDS, ask, read_topic, running_gateway
from tests.support.waiting import wait_until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
BODY = {"records": [{"value": 1}, {"value": 2}]}


async def test_the_clients_context_is_stored_with_the_record(http: aiohttp.ClientSession, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    assert (await ask(http, "POST", f"/topics/{topic}", BODY, headers=JSON_RECORDS | CONTEXT))[0] == 200
    _, records = await ask(http, "GET", f"/topics/{topic}/records?from=beginning&format=text")
    for record in records:
        names = [header["key"] for header in record["headers"]]
        assert names.count("traceparent") == names.count("tracestate") == 1


@pytest.mark.part("device requests")
async def test_a_request_and_what_it_publishes_are_spans(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    spans = Tracing(provider)
    async with running_gateway(bootstrap, tracing=spans) as gateway, aiohttp.ClientSession(gateway.url) as http:
        assert (await ask(http, "POST", f"/topics/{topic}", BODY, headers=JSON_RECORDS | CONTEXT))[0] == 200
        publish, request = await finished(kept, 2)
        assert (request.name, request.kind) == ("POST /topics/{topicname}", SpanKind.SERVER)
        assert request.attributes is not None
        assert request.attributes["http.response.status_code"] == 200
        assert request.parent is not None
        assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
        assert (publish.name, publish.kind) == (f"send {topic}", SpanKind.PRODUCER)
        assert publish.parent is not None
        assert publish.parent.span_id == request.context.span_id
        for record in await read_topic(bootstrap, topic, 2):
            headers = dict(record.headers)
            assert headers["traceparent"].decode() == f"00-{TRACE}-{publish.context.span_id:016x}-01"
            assert headers["tracestate"] == b"vendor=1"

        async with asyncio.timeout(60):
            spans_of_it: tuple[ReadableSpan, ...] = ()
            while len(spans_of_it) < 2:  # the first ones may not publish: their topics do not exist yet
                kept.clear()
                status, _ = await ask(http, "POST", "/requests/nobody%2Fthere?timeout=100", b"?", headers=CONTEXT)
                assert status == 504
                await wait_until(lambda: any(span.kind is SpanKind.SERVER for span in kept.get_finished_spans()))
                spans_of_it = kept.get_finished_spans()
        publish, request = spans_of_it
        assert publish.name == "send nobody"
        assert request.status.status_code is StatusCode.ERROR

        kept.clear()
        assert (await ask(http, "GET", "/topics/no%20topic"))[0] == 404
        (request,) = await finished(kept, 1)
        assert request.parent is None
        assert request.status.status_code is StatusCode.UNSET

        kept.clear()
        await ask(http, "POST", "/consumers/spans", {"name": "s"}, headers=CONTROL)
        await ask(http, "POST", "/consumers/spans/instances/s/subscription", {"topics": [topic]}, headers=CONTROL)
        with pytest.raises(TimeoutError):
            await http.get(
                "/consumers/spans/instances/s/records?timeout=60000", timeout=aiohttp.ClientTimeout(total=0.3)
            )
        gone = (await finished(kept, 3))[-1]
        assert (gone.status.status_code, gone.status.description) == (StatusCode.ERROR, "the client has disconnected")
    await spans.stop()


async def finished(kept: InMemorySpanExporter, count: int) -> tuple[ReadableSpan, ...]:
    await wait_until(lambda: len(kept.get_finished_spans()) >= count)
    return kept.get_finished_spans()


def test_spans_are_made_where_they_are_wanted() -> None:
    assert make_tracing(ObserveConfig(), {}) is None
    assert make_tracing(ObserveConfig(), {"OTEL_TRACES_SAMPLER": "always_on"}) is None
    endpoint = ObserveConfig(otlp_endpoint="http://127.0.0.1:1")
    assert make_tracing(endpoint, {"OTEL_SDK_DISABLED": "true"}) is None
    assert make_tracing(endpoint, {"OTEL_TRACES_EXPORTER": "none"}) is None
    for config, environment in (
        (endpoint, {}),
        (ObserveConfig(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}),
    ):
        made = make_tracing(config, environment)
        assert made is not None
        assert isinstance(made._provider, TracerProvider)
        assert made._provider.resource.attributes["service.version"] == version()
        made._provider.shutdown()
    with pytest.raises(ValueError, match="collector"):
        ObserveConfig(otlp_endpoint="127.0.0.1:4318")


def test_without_the_packages_only_an_endpoint_of_ours_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_installed", lambda: False)
    assert make_tracing(ObserveConfig(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is None
    with pytest.raises(ConfigError, match=r"observe\.otlp_endpoint.*trivium\[otel\]"):
        make_tracing(ObserveConfig(otlp_endpoint="http://127.0.0.1:1"), {})
