"""Creates the management listener's routes for clients and traces from the servers' parts."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.kafka.cluster.lookup import Lookup
from gateway.listeners import ProtocolSide
from gateway.mqtt.registry.session_registry import Sessions
from gateway.mqtt.registry.session_views import SessionViews
from gateway.observe.client_pages import ClientPages
from gateway.observe.clients import Clients
from gateway.observe.management import Route
from gateway.observe.trace_pages import TracePages
from gateway.pauses import pauses
from gateway.trace.traces import Traces


def operator_routes(servers: Sequence[ProtocolSide], sessions: Sessions, lookup: Lookup, traces: Traces) -> list[Route]:
    """Return the routes of `/clients` and `/trace`."""
    clients = Clients([server.clients for server in servers], SessionViews(sessions, lookup), pauses)
    return [*ClientPages(clients).routes(), *TracePages(clients, traces).routes()]
