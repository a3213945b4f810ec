"""The optional parts of HTTP: what they are made with, and those that are installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from gateway.rest.admin.topics import TopicOperations
from gateway.rest.consume.instances import Consumers
from gateway.rest.consume.subscriptions import ConsumerSubscriptions
from gateway.rest.produce.line_uploads import Uploads
from gateway.rest.produce.requests import Storing
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.overload import OverloadGuard
from gateway.rest.services import RestServices
from gateway.rest.streams.feeds import Feeds
from gateway.runtime.parts import PARTS, load

OPTIONAL: Final = tuple(name for name, part in PARTS.items() if part.contract)
"""The parts of HTTP. Their entry module has `OPERATIONS`: classes of operation sets, each made with `RestParts`."""


class RestParts(msgspec.Struct, frozen=True):
    """What the core's operations share with those of the optional parts."""

    services: RestServices
    overload: OverloadGuard
    storing: Storing
    uploads: Uploads
    consumers: Consumers
    subscriptions: ConsumerSubscriptions
    topics: TopicOperations
    feeds: Feeds


def installed(rest: RestParts) -> Iterator[OperationSet]:
    """Make the operation sets of the parts that are installed."""
    for name in OPTIONAL:
        part = load(name)
        if part is not None:
            yield from (make(rest) for make in part.OPERATIONS)
