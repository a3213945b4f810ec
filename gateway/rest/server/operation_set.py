"""A subject's operations: their handlers by the contract's operationId, and their start and end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from gateway.rest.server.answers import error_answer
from protocols.rest.errors import RestError

Handler = Callable[..., Awaitable[web.StreamResponse]]
"""Takes the call, then the values of the path's names in order, typed as the contract says."""


class OperationSet:
    """The operations of one subject, such as consumers or topics. A subclass overrides the methods that it needs.

    `RestServer` makes each set with `RestServices`; its part of the contract stands in `protocols/rest/openapi`.
    """

    operations: Mapping[str, Handler]  # the handlers by the contract's operationId

    def refuse(self, error: RestError) -> web.Response:
        """The answer to a refused request for one of these operations, with the error body of its dialect."""
        return error_answer(error)

    def start(self) -> None:
        """Called once the listener accepts connections."""

    async def drain(self) -> None:
        """Called once, in the background, when no new request is taken: end operations that would run for long."""

    async def stop(self) -> None:
        """Called when all requests have ended: close clients, files and timers."""
