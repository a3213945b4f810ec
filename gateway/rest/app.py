"""From a request to an operation, and from whatever goes wrong to the dialect's error body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import structlog
from aiohttp import web

from gateway.kafka.contracts import Refused
from gateway.net.upgrade import UpgradeError, WebSocketEndpoint
from gateway.rest.access import Access
from gateway.rest.answers import error_answer
from mapping.outcomes import ANSWERS, Outcome
from protocols.rest.errors import RETRY_AFTER_S, RestError, busy
from protocols.rest.routes import ROUTES, Router

log = structlog.get_logger(__name__)

Operation = Callable[..., Awaitable[web.StreamResponse]]
"""Takes the request, the client's grant and the values of the path's names, in order."""

OPEN_WEBSOCKET: Final = "openWebSocket"  # what the counts call it
INTERNAL_ERROR: Final = "The request failed inside the gateway; its log says why"


class RestApp:
    """The operations behind one listener."""

    def __init__(
        self, access: Access, operations: Mapping[str, Operation], websockets: Mapping[str, WebSocketEndpoint]
    ) -> None:
        """Serve `operations`, named as in the table of routes; ValueError when one of the table is missing.

        `websockets`, by path, are not of the dialect and not in its table; what is opened there asks who its client
        is by itself.
        """
        missing = {route.operation for route in ROUTES} - operations.keys()
        if missing:
            raise ValueError(f"no handler for {sorted(missing)}")
        self.draining = False
        self._access = access
        self._operations = operations
        self._websockets = websockets
        self._router = Router()
        self._answers: dict[tuple[str, int], int] = {}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Only cancellation and a lost connection leave it as exceptions."""
        operation = "none"
        try:
            if self.draining:
                raise busy("The gateway is shutting down", close=True)
            if request.version < (1, 0):
                raise RestError(505, "HTTP/1.1 is served", close=True)
            if request.method == "CONNECT":
                raise RestError(405, "No tunnels here", headers=(("Allow", "DELETE, GET, POST"),), close=True)
            raw_path = request.raw_path.partition("?")[0]
            if not raw_path.startswith("/"):  # a proxy's absolute form
                raw_path = request.rel_url.raw_path
            endpoint = self._websockets.get(raw_path)
            if endpoint is not None:
                operation = OPEN_WEBSOCKET
                answer = endpoint.upgrade(request)
            else:
                match = self._router.match(request.method, raw_path)
                operation = match.operation
                grant = await self._access.grant(request)
                answer = await self._operations[operation](request, grant, *match.values)
        except RestError as error:
            answer = error_answer(error)
        except Refused as refused:
            answer = error_answer(refusal(refused))
        except UpgradeError as refused:
            answer = error_answer(RestError(refused.status, str(refused), headers=refused.headers, close=True))
        except (asyncio.CancelledError, ConnectionError):
            raise  # the client left
        except Exception:
            log.exception("request failed", operation=operation)
            answer = error_answer(RestError(500, INTERNAL_ERROR, close=True))
        if self.draining:
            answer.force_close()
        counted = (operation, answer.status // 100)
        self._answers[counted] = self._answers.get(counted, 0) + 1
        return answer

    def answers(self) -> dict[str, dict[str, int]]:
        """How many answers each operation gave, by class of the status ("2xx"); unknown paths count as "none"."""
        counts: dict[str, dict[str, int]] = {}
        for (operation, kind), count in self._answers.items():
            counts.setdefault(operation, {})[f"{kind}xx"] = count
        return counts


def refusal(refused: Refused) -> RestError:
    """What Kafka's side refused, as an HTTP error."""
    status = ANSWERS[refused.outcome].http
    headers = (("Retry-After", str(RETRY_AFTER_S)),) if refused.outcome is Outcome.BUSY else ()
    return RestError(status, refused.reason, headers=headers)
