"""What all AMQP connections of a process share, and the AMQP front as the application sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from flowcontrol.gate import Gate
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
from mapping.outcomes import Outcome

if TYPE_CHECKING:
    from gateway.amqp.links.outgoing import OutgoingLink

PRODUCT: Final = "trivium"


class Counts:
    """What happened on all links; only grows.

    Attributes:
        incoming: messages from peers by what became of them.
        sent: messages to peers.
        expired: records that were not sent because their time was over.
        too_large_for_peer: records above a receiver's own max-message-size, not sent.
        rejected_by_peer, returned_by_peer: outcomes of peers: rejected; released and modified.
        aborted: deliveries that a peer took back.
        dead_letters, dead_letters_failed: records for which one was stored, and attempts at it that failed.
        connections, refused_logins, refused_links: as they say.
        transactions_committed, transactions_rolled_back: discharged by Kafka; undone, whoever wanted it.
        transactions_timed_out: of these, because nobody discharged them.
        broken: connections that a peer ended by breaking the protocol, falling silent or vanishing.
    """

    __slots__ = (
        "aborted", "broken", "connections", "dead_letters", "dead_letters_failed", "expired", "incoming",
        "refused_links", "refused_logins", "rejected_by_peer", "returned_by_peer", "sent", "too_large_for_peer",
        "transactions_committed", "transactions_rolled_back", "transactions_timed_out",
    )  # fmt: skip

    def __init__(self) -> None:
        self.incoming = dict.fromkeys(Outcome, 0)
        self.sent = self.expired = self.too_large_for_peer = self.rejected_by_peer = self.returned_by_peer = 0
        self.dead_letters = self.dead_letters_failed = 0
        self.transactions_committed = self.transactions_rolled_back = self.transactions_timed_out = 0
        self.aborted = self.connections = self.refused_logins = self.refused_links = self.broken = 0


class AmqpStatistics(msgspec.Struct, frozen=True):
    """A snapshot; see `Counts`, and what is there now: connections, links each way, granted and unanswered messages."""

    open_connections: int
    senders: int
    receivers: int
    credit: int
    unanswered: int
    unsettled: int
    starved: int
    nodes: int
    transactions: int
    transaction_producers: int
    incoming: dict[Outcome, int]
    sent: int
    expired: int
    too_large_for_peer: int
    rejected_by_peer: int
    returned_by_peer: int
    aborted: int
    dead_letters: int
    dead_letters_failed: int
    transactions_committed: int
    transactions_rolled_back: int
    transactions_timed_out: int
    connections: int
    refused_logins: int
    refused_links: int
    broken: int


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
        counts: dict[str, Any] = {name: getattr(self.counts, name) for name in Counts.__slots__}
        counts["incoming"] = dict(self.counts.incoming)
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
