"""The clients of all protocols in one list, for operators: listed, inspected and closed.

No list is stored: the listeners are asked, in slices over several turns of the event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from gateway.runtime.turns import sliced
from gateway.views.clients import ClientView, Connected, matches_id
from gateway.views.pauses import Pauses

if TYPE_CHECKING:  # the commands, which read pages, do without the gateway
    from gateway.mqtt.registry.session_views import SessionViews

log = structlog.get_logger(__name__)

PAGE: Final = 100  # default number of clients in a page
LARGEST_PAGE: Final = 1_000
MQTT: Final = "mqtt/"


class Query(msgspec.Struct, frozen=True):
    """The filter and position of a requested page."""

    protocol: str = ""
    principal: str = ""
    prefix: str = ""  # prefix of the name, which is the id without its protocol
    after: str = ""  # only ids greater than this one
    limit: int = PAGE


class ClientsPage(msgspec.Struct, frozen=True):
    """A part of the list, sorted by id."""

    clients: list[ClientView]
    next: str | None = None  # the value of `after` for the next page; None: the last page


class ClientList:
    """All clients of this gateway."""

    def __init__(
        self, listeners: Sequence[Callable[[], Iterable[Connected]]], sessions: SessionViews, pauses: Pauses
    ) -> None:
        """Each of `listeners` returns its clients; `sessions` finds MQTT sessions."""
        self._listeners = listeners
        self._sessions = sessions
        self._pauses = pauses

    def all(self) -> AsyncIterator[Connected]:
        """Yield all clients, including those that have not logged in."""
        return sliced(self._listeners)

    async def page(self, query: Query) -> ClientsPage:
        """Return a page. Only clients that come or go meanwhile may be missing; none is listed twice."""
        start = f"{query.protocol}/{query.prefix}" if query.protocol else ""
        chosen: list[tuple[str, Connected]] = []
        most = query.limit + 1
        last: str | None = None  # greater ids are not on the page
        async for client in self.all():
            name = client.identifier
            if not name or name <= query.after or not name.startswith(start) or (last is not None and name > last):
                continue
            if query.prefix and not start and not name.partition("/")[2].startswith(query.prefix):
                continue
            if query.principal and client.principal != query.principal:
                continue
            chosen.append((name, client))
            if len(chosen) >= 4 * most:  # sort in parts: fifty thousand clients in one go take too long
                chosen = sorted(chosen, key=_by_id)[:most]
                last = chosen[-1][0]
        chosen = sorted(chosen, key=_by_id)[:most]
        there = [client for name, client in chosen[: query.limit] if client.identifier == name]
        more = len(chosen) > query.limit
        return ClientsPage([client.view(whole=False) for client in there], chosen[query.limit - 1][0] if more else None)

    async def find(self, wanted: str) -> list[Connected]:
        """Return the connected clients with an id. A container id without an address gives all its connections."""
        exact: list[Connected] = []
        others: list[Connected] = []
        async for client in self.all():
            name = client.identifier
            if name == wanted:
                exact.append(client)
            elif matches_id(wanted, name):
                others.append(client)
        return exact or others

    async def details(self, wanted: str) -> list[ClientView]:
        """Return all details of the clients with an id, including an MQTT session without a connection."""
        clients = [client for client in await self.find(wanted) if client.identifier]
        paused = self._pauses.open() if clients else {}
        views = []
        for client in clients:
            view = client.view(whole=True)
            if view.flow is not None:
                view.flow.paused = [*paused.get(client.subject, ()), *view.flow.paused]
            views.append(view)
        if wanted.startswith(MQTT):
            client_id = wanted.removeprefix(MQTT)
            for view in views:
                view.session = await self._sessions.of(client_id)
            away = None if views else await self._sessions.away(client_id)
            views += [] if away is None else [away]
        return views

    async def kick(self, wanted: str) -> int:
        """Close the clients with an id and return their number."""
        clients = [client for client in await self.find(wanted) if client.identifier]
        for client in clients:
            client.kick()
            log.info("closed by an operator", client=wanted)
        return len(clients)


def _by_id(entry: tuple[str, Connected]) -> str:
    return entry[0]
