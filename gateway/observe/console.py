"""The console: one page for operators, and the event stream (WHATWG HTML section 9.2) that updates it.

The page consists of three files in `pages`. It fetches nothing from elsewhere, has no inline code, and shows
texts from clients as text only. Pages with the same filter share one snapshot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from gateway.observe.flow import FlowSnapshots, Snapshot
from gateway.observe.spark_jobs import SparkJob, SparkJobs
from telemetry.metrics import Metrics

PAGES: Final = Path(__file__).with_name("pages")
PERIOD_S: Final = 1.0  # between two events
REST: Final = 20  # pause at least this multiple of an event's CPU time, so a view costs at most a twentieth of the CPU
MOST: Final = 16  # concurrent consoles
EPISODES: Final = 200  # past pauses in an event
STALL_S: Final = 30.0  # a browser that reads nothing for this long is disconnected
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
FILES: Final = {
    "/console": ("console.html", "text/html"),
    "/console.css": ("console.css", "text/css"),
    "/console.js": ("console.js", "text/javascript"),
}
FIGURES: Final = frozenset(
    {
        "trivium_amqp_dead_letters_failed_total",
        "trivium_amqp_dead_letters_total",
        "trivium_amqp_open_connections",
        "trivium_event_loop_worst_lag_seconds",
        "trivium_http_connections",
        "trivium_http_produce_refused_total",
        "trivium_kafka_group_lag",
        "trivium_kafka_group_subscribers",
        "trivium_kafka_group_unsettled",
        "trivium_kafka_group_waiting",
        "trivium_mqtt_connections",
        "trivium_mqtt_messages_dead_letters_total",
        "trivium_mqtt_messages_dropped_total",
        "trivium_mqtt_messages_lost_at_qos_0_total",
        "trivium_mqtt_messages_refused_total",
        "trivium_mqtt_sessions_connected",
        "trivium_mqtt_sessions_expired_total",
        "trivium_mqtt_sessions_stored",
        "trivium_mqtt_sessions_takeovers_total",
        "trivium_mqtt_sessions_wills_total",
        "trivium_mqtt_subscriptions",
        "trivium_retained_messages",
        "trivium_live_reader_gaps_total",
        "trivium_live_reader_lag",
    }
)
"""The metrics that the page shows."""


class _Event(msgspec.Struct, frozen=True):
    """One event of the stream."""

    flow: Snapshot
    figures: dict[str, list[tuple[dict[str, str], float]]]
    ready: dict[str, Any]
    spark: tuple[SparkJob, ...] | None  # None: no jobs are configured


class Console:
    """The console's files and event streams."""

    def __init__(
        self, flow: FlowSnapshots, metrics: Metrics, ready: Callable[[], tuple[bool, dict[str, Any]]], spark: SparkJobs
    ) -> None:
        self._flow = flow
        self._metrics = metrics
        self._ready = ready
        self._spark = spark
        self._files = {path: (PAGES.joinpath(name).read_bytes(), media) for path, (name, media) in FILES.items()}
        self._streams: set[asyncio.Task[Any]] = set()
        self._last: dict[str, tuple[float, bytes]] = {}  # time and event, by filter
        self._making = asyncio.Lock()
        self._took_s = 0.0

    async def file(self, request: web.Request) -> web.Response:
        """Serve `GET /console` and the page's other files."""
        body, media = self._files[request.path]
        return web.Response(body=body, content_type=media, charset="utf-8", headers=HEADERS)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Serve `GET /console/events`: an event every second until the browser disconnects."""
        if len(self._streams) >= MOST:
            return web.Response(status=503, text="too many consoles are open\n", headers={"Retry-After": "5"})
        answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            await answer.prepare(request)
            while True:
                event = await self._event(request.query.get("client", ""))
                async with asyncio.timeout(STALL_S):
                    await answer.write(event)
                await asyncio.sleep(self._period)
        except (ConnectionError, TimeoutError):
            return answer
        finally:
            self._streams.discard(task)

    def stop(self) -> None:
        """End the streams, which otherwise never end."""
        for task in tuple(self._streams):
            task.cancel()

    @property
    def _period(self) -> float:
        return max(PERIOD_S, REST * self._took_s)

    async def _event(self, client: str) -> bytes:
        """Return the current event, shared by pages with the same filter."""
        async with self._making:
            now = time.monotonic()
            made_at, event = self._last.get(client, (float("-inf"), b""))
            if now - made_at >= self._period / 2:
                if len(self._last) >= MOST:
                    self._last.clear()
                event = await self._make(client)
                self._last[client] = (now, event)
            return event

    async def _make(self, client: str) -> bytes:
        cpu = time.thread_time()
        flow = await self._flow.snapshot(client=client)
        flow = msgspec.structs.replace(flow, episodes=flow.episodes[:EPISODES])
        _, ready = self._ready()
        content = _Event(flow, self._metrics.figures(FIGURES), ready, self._spark.last())
        event = b"data: %b\n\n" % msgspec.json.encode(content)
        self._took_s = time.thread_time() - cpu  # includes turns in between, which only lengthens the pause
        return event
