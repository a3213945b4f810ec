"""Unacknowledged deliveries of shared subscriptions, which are not settled with their consumer group yet."""

from __future__ import annotations

from typing import Final

from gateway.mqtt.routing.shared_groups import Share
from mapping.record import Received

AT_LEAST_ONCE: Final = 1


class SharedInflight:
    """Maps packet identifiers to the group's records to be settled."""

    __slots__ = ("_given",)

    def __init__(self) -> None:
        self._given: dict[int, tuple[Share, Received, int]] = {}

    def __contains__(self, packet_id: int) -> bool:
        """Whether the delivery under a packet identifier is from a group."""
        return packet_id in self._given

    def add(self, packet_id: int, share: Share, record: Received, qos: int) -> None:
        """Note a delivery in flight."""
        self._given[packet_id] = (share, record, qos)

    def settle(self, packet_id: int) -> None:
        """Settle a delivery that the client has acknowledged or refused; ignore one that is not from a group."""
        given = self._given.pop(packet_id, None)
        if given is not None:
            share, record, _ = given
            share.done(record)

    def give_up(self, share: Share) -> None:
        """Give deliveries in flight back to the group for another member, except at QoS 2 [MQTT-4.8.2-5]."""
        for packet_id, (other, record, qos) in list(self._given.items()):
            if other is share:
                del self._given[packet_id]
                if qos > AT_LEAST_ONCE:
                    share.done(record)
