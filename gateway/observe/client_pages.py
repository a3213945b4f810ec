"""`/clients` of the management listener: lists, inspects and closes clients."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

import msgspec
from aiohttp import web

from gateway.observe.clients import LARGEST_PAGE, PAGE, ClientList, ClientsPage, Query
from gateway.observe.management import answer, bad, limit_in, record_act
from gateway.views.clients import PROTOCOLS

PATH: Final = "/clients"
KNOWN: Final = frozenset({"protocol", "principal", "prefix", "after", "limit"})


class ClientPages:
    """The routes for clients."""

    def __init__(self, clients: ClientList) -> None:
        self._clients = clients

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        one_client = PATH + r"/{id:[\s\S]+}"  # an id may have line breaks
        return [
            web.get(PATH, self._list, allow_head=False),
            web.get(one_client, self._show, allow_head=False),
            web.delete(one_client, self._kick),
        ]

    async def _list(self, request: web.Request) -> web.StreamResponse:
        asked = request.query
        unknown = set(asked) - KNOWN
        if unknown:
            return bad(f"{min(unknown)}: expected {', '.join(sorted(KNOWN))}")
        if asked.get("protocol", "") not in {"", *PROTOCOLS}:
            return bad(f"protocol: expected {', '.join(PROTOCOLS)}")
        limit = limit_in(request, PAGE, LARGEST_PAGE)
        texts = {name: asked[name] for name in asked if name != "limit"}
        return answer(await self._clients.page(Query(limit=limit, **texts)))

    async def _show(self, request: web.Request) -> web.StreamResponse:
        wanted = _id(request)
        clients = await self._clients.details(wanted)
        return answer(ClientsPage(clients)) if clients else _not_found(wanted)

    async def _kick(self, request: web.Request) -> web.StreamResponse:
        wanted = _id(request)
        closed = await self._clients.kick(wanted)
        if not closed:
            return _not_found(wanted)
        record_act(request, "kick", wanted)
        return answer({"closed": closed})


def _id(request: web.Request) -> str:
    """Return the client id from the raw path, because path normalization (dots, repeated slashes) would change it."""
    return unquote(request.raw_path.partition("?")[0].removeprefix(PATH + "/"))


def _not_found(wanted: str) -> web.Response:
    """Return 404. The requested name is repeated only as JSON, because it may be anything."""
    return web.Response(status=404, text=f"no client has the id {msgspec.json.encode(wanted[:200]).decode()} here\n")
