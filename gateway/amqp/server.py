"""The AMQP server: it makes an AMQP connection of each accepted socket."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Final

import msgspec

from gateway.amqp.connection import AmqpConnection
from gateway.amqp.counters import AmqpStatistics
from gateway.amqp.services import AmqpServices
from gateway.net.protocol_listener import ProtocolServer
from gateway.net.strangers import Strangers
from gateway.runtime.spawn import Spawn
from gateway.runtime.turns import in_turns
from gateway.security.rights.authorization import Grant
from protocols.amqp.connection import Connection
from protocols.amqp.endpoints import EndpointLimits

WEBSOCKET_SUBPROTOCOL: Final = "amqp"  # AMQP WebSocket binding, part 2.1


class AmqpServer(ProtocolServer):
    """The AMQP server of the process, with all its connections."""

    def __init__(self, services: AmqpServices, spawn: Spawn, strangers: Strangers | None = None) -> None:
        config = services.config
        super().__init__("amqp", spawn, strangers, outgoing=services.publisher.budgets.outgoing)
        self._services = services
        self._open: set[AmqpConnection] = set()
        services.access.watch(lambda changed: in_turns(self._recheck_links(changed)))
        self._limits = EndpointLimits(
            max_frame_bytes=config.max_frame_bytes,
            channel_max=config.channel_max,
            links_per_session=config.links_per_session,
            idle_timeout_s=config.idle_timeout_s,
            session_window_bytes=config.session_window_bytes,
            partial_bytes=max(config.max_message_bytes, services.publisher.budgets.connection().bytes_limit),
        )

    def open(self) -> tuple[Connection, AmqpConnection]:
        """Create the sans-io connection of a new socket and the handler of its events."""
        services = self._services
        connection = Connection(services.container_id, self._limits, open_timeout_s=services.config.open_timeout_s)
        return connection, AmqpConnection(services, connection, self._open)

    def _recheck_links(self, changed: AbstractSet[Grant]) -> Iterator[None]:
        """Recheck the links of the connections whose grant has changed."""
        for connection in tuple(self._open):
            if connection.is_open and not connection.left and connection.grant in changed:
                connection.rights_changed()
            yield

    def departing(self) -> tuple[AmqpConnection, ...]:
        """Return all open connections."""
        return tuple(self._open)

    def stop_accepting(self) -> None:
        """Accept no more connections, and answer an open with a close."""
        super().stop_accepting()
        self._services.is_closed = True

    def stop_receiving(self) -> None:
        """Accept no connection, grant no credit, roll back transactions and stop reading; outcomes are still sent."""
        for connection in self._open:
            connection.prepare_to_leave()
        self._services.coordinators.stop()
        super().stop_receiving()

    async def stop(self, timeout: float) -> None:
        """Wait for commits and rollbacks under way, then close every connection, within `timeout` seconds in all."""
        await self._services.coordinators.wait_ended(timeout / 2)
        await super().stop(timeout / 2)
        self._services.close_nodes()

    def close_connections(self) -> None:
        """Close every connection with `amqp:connection:forced`, or `redirect` (part 2.8.16)."""
        for connection in self.departing():
            connection.leave()

    def statistics(self) -> AmqpStatistics:
        """Return the statistics for the metrics."""
        services = self._services
        now = [connection.statistics() for connection in self._open]
        totals = [sum(column) for column in zip(*now, strict=True)] if now else [0] * 6
        return AmqpStatistics(
            open_connections=len(self._open),
            senders=totals[0],
            receivers=totals[1],
            credit=totals[2],
            unanswered=totals[3],
            unsettled=totals[4],
            window=totals[5],
            waiting_links=services.gates.waiting,
            nodes=services.nodes_count,
            transactions=len(services.coordinators.open),
            transaction_producers=services.coordinators.kafka.producer_pool.producers,
            **msgspec.structs.asdict(services.counts) | {"incoming": dict(services.counts.incoming)},
        )
