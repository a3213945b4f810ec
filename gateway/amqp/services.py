"""What all AMQP connections of a process share, and the AMQP front as the application sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from flowcontrol.gate import Gate
from gateway.amqp.counters import AmqpStatistics, Counts
from gateway.amqp.links.dead_letters import DeadLetters
from gateway.amqp.links.incoming import IncomingLink
from gateway.amqp.login import Authenticator
from gateway.amqp.nodes import Nodes
from gateway.amqp.sources import Kinds
from gateway.amqp.transactions import Coordinators
from gateway.config import AmqpConfig
from gateway.kafka.groups.membership import Groups
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.publish.sender_partitions import Places
from gateway.kafka.read.live_reader import Tail
from gateway.kafka.transactions.kafka_transaction import Transactions
from gateway.security.authorization import AccessList
from gateway.security.group_names import GroupNames
from gateway.turns import Share

if TYPE_CHECKING:
    from gateway.amqp.links.outgoing import OutgoingLink

PRODUCT: Final = "trivium"


class SessionLike(Protocol):
    """What the front needs of a session."""

    def statistics(self) -> tuple[int, int, int, int, int]:
        """(senders, receivers, credit, unanswered, unsettled)."""
        ...

    def quiesce(self) -> None:
        """Grant and send nothing more."""
        ...

    def goodbye(self, description: str) -> None:
        """Close with amqp:connection:forced."""
        ...


class Services:
    """Constructor arguments of every session, in one object.

    Attributes:
        config, container_id: the listener's.
        publisher, tail, groups: the ways into and out of Kafka.
        names: whose the groups are.
        authenticator, access: who may do what.
        wall_clock: epoch milliseconds.
        counts: see `Counts`.
        dead_letters: what receivers cannot take.
        nodes: temporary queues and topics.
        coordinators: transactions.
        sessions: the open connections'.
        senders: incoming links of the process; they share the budget.
        places: the partitions of links that send without keys.
        subscriptions: the one link of each exclusive subscription, by its group.
        attaching: the part of each turn that attaches have.
    """

    def __init__(
        self,
        config: AmqpConfig,
        *,
        container_id: str,
        publisher: Publisher,
        tail: Tail,
        groups: Groups,
        names: GroupNames,
        transactions: Transactions,
        authenticator: Authenticator,
        access: AccessList,
        wall_clock: Callable[[], int],
        unguessable: Callable[[], str],
    ) -> None:
        self.config = config
        self.container_id = container_id
        self.publisher = publisher
        self.tail = tail
        self.groups = groups
        self.names = names
        self.authenticator = authenticator
        self.access = access
        self.wall_clock = wall_clock
        self.kinds = Kinds(config.addresses)
        self.counts = Counts()
        self.dead_letters = DeadLetters(publisher, config.dead_letter_topic, config.max_attempts, self.counts)
        self.nodes = Nodes(tail, publisher, config.reply_topic, unguessable)
        self.coordinators = Coordinators(
            transactions,
            self.counts,
            limit=config.max_transactions,
            timeout_s=config.transaction_timeout_s,
            unguessable=unguessable,
        )
        self.sessions: set[SessionLike] = set()
        self.senders = 0
        self.places = Places()
        self.subscriptions: dict[str, OutgoingLink] = {}
        self.attaching = Share()
        self._ending: dict[str, set[asyncio.Task[None]]] = {}
        self._starved: dict[Gate, set[IncomingLink]] = {}
        self._callbacks: dict[Gate, Callable[[bool], None]] = {}

    def ends(self, group: str, departure: asyncio.Task[None]) -> None:
        """A subscription of `group` is being ended by `departure`."""
        departures = self._ending.setdefault(group, set())
        departures.add(departure)

        def gone(done: asyncio.Task[None]) -> None:
            departures.discard(done)
            if not departures:
                self._ending.pop(group, None)

        departure.add_done_callback(gone)

    async def ended(self, group: str) -> None:
        """Wait until no subscription of `group` is being ended here: whoever attaches then begins a new one."""
        while departures := self._ending.get(group):
            await asyncio.wait(departures)

    def shut_gate(self, topic: str | None) -> Gate | None:
        """The budget gate that forbids more credit for `topic` now, if any; None is no topic in particular."""
        publisher = self.publisher
        if not publisher.gate.is_open:
            return publisher.gate
        if topic is None:
            return None
        gate = publisher.topic_gate(topic)
        return None if gate.is_open else gate

    def wait_for(self, gate: Gate, link: IncomingLink) -> None:
        """Top `link` up when `gate` opens."""
        waiting = self._starved.get(gate)
        if waiting is None:
            waiting = self._starved[gate] = set()

            def opened(is_open: bool) -> None:
                if is_open:
                    # In the next turn: a gate opens in the middle of somebody's settlement.
                    asyncio.get_running_loop().call_soon(self._gate_opened, gate)

            self._callbacks[gate] = opened
            gate.subscribe(opened)
        waiting.add(link)

    def forget(self, link: IncomingLink) -> None:
        """The link is gone."""
        for waiting in self._starved.values():
            waiting.discard(link)

    @property
    def starved(self) -> int:
        """Links that wait for a budget."""
        return sum(len(waiting) for waiting in self._starved.values())

    def _gate_opened(self, gate: Gate) -> None:
        if not gate.is_open:
            return
        callback = self._callbacks.pop(gate, None)
        if callback is not None:
            gate.unsubscribe(callback)
        for link in self._starved.pop(gate, ()):
            link.gate_opened()

    def statistics(self) -> AmqpStatistics:
        """A snapshot."""
        now = [session.statistics() for session in self.sessions]
        totals = [sum(column) for column in zip(*now, strict=True)] if now else [0] * 5
        counts = msgspec.structs.asdict(self.counts) | {"incoming": dict(self.counts.incoming)}
        return AmqpStatistics(
            open_connections=len(self.sessions),
            senders=totals[0],
            receivers=totals[1],
            credit=totals[2],
            unanswered=totals[3],
            unsettled=totals[4],
            starved=self.starved,
            nodes=len(self.nodes),
            transactions=len(self.coordinators.open),
            transaction_producers=self.coordinators.kafka.transactors.producers,
            **counts,
        )
