"""Wills: published when a connection ends without DISCONNECT (section 3.1.2.5), also after its gateway has died."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog

from gateway.kafka.contracts import Owner, Result
from gateway.kafka.publish.publisher import Publisher
from gateway.mqtt.routing.retained import Retained
from gateway.mqtt.state.records import NEVER, PendingWill
from mapping.mqtt.incoming import Inbound
from mapping.outcomes import Outcome
from mapping.rules import Rules
from protocols.mqtt.properties import NONE

log = structlog.get_logger(__name__)


def due_at(pending: PendingWill, expiry: int, gone_at: int) -> int:
    """Return when a will is due: after its delay or at the session's end, whichever is first [MQTT-3.1.2-8].

    `gone_at` (the end of the connection) and the result are epoch milliseconds; `expiry` is in seconds.
    """
    properties = pending.will.properties or NONE
    delay = properties.will_delay_interval or 0
    return gone_at + 1000 * (delay if expiry == NEVER else min(delay, expiry))


class _Ticket(Owner, msgspec.Struct, eq=False):
    """The owner of one will's record."""

    client_id: str
    principal: str
    then: Callable[[], None]

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Take Kafka's result (contract: `gateway.kafka.contracts.Owner`)."""
        if result.outcome is not Outcome.STORED:
            log.warning("a will was not stored", client=self.client_id, reason=result.reason)
        self.then()


class Wills:
    """Publishes wills."""

    def __init__(self, rules: Rules, publisher: Publisher, retained: Retained, wall_clock: Callable[[], int]) -> None:
        self._rules = rules
        self._publisher = publisher
        self._retained = retained
        self._wall_clock = wall_clock
        self.published = 0  # total

    def publish(self, client_id: str, principal: str, pending: PendingWill, then: Callable[[], None]) -> None:
        """Publish a client's will; `then` is called after Kafka's answer, whether the will was stored or not.

        The Message Expiry Interval counts from now (section 3.1.3.2.4).
        """
        will = pending.will
        inbound = Inbound(self._rules, pending.version, client_id)
        record = inbound.to_record(will.topic, will.payload, will.qos, will.retain, will.properties, self._wall_clock())
        self.published += 1
        ticket = _Ticket(client_id, principal, then)
        if will.retain:
            self._retained.put(record, will.topic, ticket, None)
        else:
            self._publisher.submit(record, ticket)
