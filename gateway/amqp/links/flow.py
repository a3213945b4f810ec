"""What a connection tells of its flow: the credit of its links and what is unsettled on them."""

from __future__ import annotations

from collections.abc import Collection

from gateway.amqp.links.incoming import IncomingLink
from gateway.amqp.links.outgoing import OutgoingLink
from gateway.amqp.links.peer import Peer
from gateway.flow import ConnectionFlow, fullest, shown, subject


def flow_of(peer: Peer, incoming: Collection[IncomingLink], outgoing: Collection[OutgoingLink]) -> ConnectionFlow:
    """The flow of a connection that is open, and of its links."""
    budget, pump = peer.budget, peer.pump
    senders = fullest(incoming, lambda link: link.window.unsettled)
    receivers = fullest(outgoing, lambda link: link.unsettled)
    return ConnectionFlow(
        protocol="amqp",
        client=shown(peer.container_id),
        peer=pump.peer,
        principal=shown(peer.principal or ""),
        subject=subject("amqp", peer.container_id, pump.peer),
        bytes=budget.bytes,
        bytes_limit=budget.bytes_limit,
        records=budget.records,
        unwritten=pump.unwritten,
        windows=[*(link.flow() for link in senders), *(link.flow() for link in receivers)],
        windows_total=len(incoming) + len(outgoing),
    )
