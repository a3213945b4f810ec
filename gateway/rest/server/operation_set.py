"""A set of related operations: their handlers by the contract's operationId, and their start and stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import ClassVar

import msgspec
from aiohttp import web

from gateway.rest.server.answers import error_answer
from gateway.views.clients import Connected
from gateway.views.drain import Departing
from gateway.views.flow import Flowing
from protocols.rest.errors import RestError

Handler = Callable[..., Awaitable[web.StreamResponse]]
"""Takes the call, then the values of the path parameters in order, typed as the contract says."""


class OperationSet:
    """The operations on one subject, such as consumers or topics. A subclass overrides the methods that it needs.

    `RestServer` makes each set with `RestServices`; its part of the contract is in `protocols/rest/openapi`.
    """

    operations: Mapping[str, Handler]  # the handlers by the contract's operationId
    name: ClassVar[str] = ""  # of its counts in the metrics; "": it has none

    def refuse(self, error: RestError) -> web.Response:
        """Return the answer to a refused request for one of these operations, with the dialect's error body."""
        return error_answer(error)

    def departing(self) -> Iterable[Departing]:
        """Return its own connections, to be closed when the gateway stops."""
        return ()

    def clients(self) -> Iterable[Connected]:
        """Return its clients, for operators."""
        return ()

    def flowing(self) -> Iterable[Flowing]:
        """Return what can report its flow, for /flow."""
        return ()

    def statistics(self) -> msgspec.Struct:
        """Return its counts; never called without a `name`."""
        raise NotImplementedError

    def start(self) -> None:
        """Called once the listener accepts connections."""

    async def drain(self) -> None:
        """Called once, in the background, when new requests are refused: end operations that run for long."""

    async def stop(self) -> None:
        """Called when all requests are done: close clients, files and timers."""
