"""The services that all AMQP connections of a process share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.amqp.counters import Counts
from gateway.amqp.links.credit import CreditGates
from gateway.amqp.links.dead_letters import DeadLetters
from gateway.amqp.links.incoming import Ingress
from gateway.amqp.links.outgoing import Egress
from gateway.amqp.links.subscriptions import LinkSubscriptions
from gateway.amqp.nodes import Nodes
from gateway.amqp.sources import AddressTypes
from gateway.amqp.transactions import Coordinators
from gateway.kafka.groups.membership import Groups
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.publish.sender_partitions import Places
from gateway.kafka.read.live_reader import LiveReader
from gateway.kafka.transactions.kafka_transaction import Transactions
from gateway.limits.limits import Limits
from gateway.runtime.turns import TurnShare
from gateway.security.rights.authorization import AccessList
from gateway.security.rights.group_names import GroupNames
from gateway.settings.config import AmqpConfig
from gateway.views.presence import PresenceReports
from mapping.tenants import Names
from protocols.amqp.outcomes import CONNECTION_FORCED, CONNECTION_REDIRECT, Error

PRODUCT: Final = "trivium"
STOPPING: Final = "the gateway is stopping"


class AmqpServices:
    """The shared services; `wall_clock` returns epoch milliseconds."""

    def __init__(
        self,
        config: AmqpConfig,
        *,
        container_id: str,
        publisher: Publisher,
        live_reader: LiveReader,
        groups: Groups,
        names: GroupNames,
        transactions: Transactions,
        access: AccessList,
        limits: Limits,
        presence: PresenceReports | None = None,
        wall_clock: Callable[[], int],
        random_id: Callable[[], str],
    ) -> None:
        self.config = config
        self.is_closed = False  # the gateway is stopping: an open is answered with a close
        self.container_id = container_id
        self.publisher = publisher
        self.live_reader = live_reader
        self.groups = groups
        self.names = names  # the owners of consumer groups
        self.access = access
        self.limits = limits
        self.presence = presence  # None when the presence topic is off
        self.wall_clock = wall_clock
        self.address_types = AddressTypes(config.addresses)
        self.counts = Counts()
        self.gates = CreditGates(publisher)
        self.subscriptions = LinkSubscriptions()
        dead_letters = DeadLetters(publisher, config.dead_letter_topic, config.max_attempts, self.counts)
        windows = (config.link_credit_least, config.link_credit)
        self.ingress = Ingress(publisher, self.gates, self.counts, windows, config.link_bytes, config.max_body_bytes)
        self.egress = Egress(
            live_reader,
            dead_letters,
            self.subscriptions,
            names,
            self.counts,
            config.max_unsettled,
            publisher.budgets.outgoing,
        )
        self._random_id = random_id
        self._nodes: dict[str, Nodes] = {}  # by tenant prefix
        self.coordinators = Coordinators(
            transactions,
            self.counts,
            limit=config.max_transactions,
            per_client=config.max_transactions_per_client,
            timeout_s=config.transaction_timeout_s,
            random_id=random_id,
        )
        self.places = Places()  # the partitions of links that send without keys
        self.attaching = TurnShare()  # the share of each turn of the loop that is used for attaches

    def nodes(self, names: Names) -> Nodes:
        """Return the dynamic nodes of one tenant."""
        nodes = self._nodes.get(names.prefix)
        if nodes is None:
            own = self.config.reply_topic
            nodes = Nodes(self.live_reader, self.publisher, names.topic(own), self._random_id, own)
            self._nodes[names.prefix] = nodes
        return nodes

    @property
    def nodes_count(self) -> int:
        """The number of dynamic nodes."""
        return sum(map(len, self._nodes.values()))

    def close_nodes(self) -> None:
        """Stop the timers of all dynamic nodes."""
        for nodes in self._nodes.values():
            nodes.close()

    def closing_error(self) -> Error:
        """Return the error for closing connections when the gateway stops, with a redirect if set (part 2.8.16)."""
        target = self.config.redirect
        if target is None:
            return Error(CONNECTION_FORCED, STOPPING)
        where = (("hostname", target.host), ("network-host", target.host), ("port", target.port))
        return Error(CONNECTION_REDIRECT, STOPPING, where)
