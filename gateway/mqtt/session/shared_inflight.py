"""Deliveries of shared subscriptions that the client has not acknowledged: each is still its consumer group's."""

from __future__ import annotations

from typing import Final

from gateway.mqtt.routing.shared_groups import Share
from mapping.record import Received

AT_LEAST_ONCE: Final = 1


class SharedInflight:
    """By packet identifier, what to settle with the group that gave the record."""

    __slots__ = ("_given",)

    def __init__(self) -> None:
        self._given: dict[int, tuple[Share, Received, int]] = {}

    def __contains__(self, packet_id: int) -> bool:
        """Whether the delivery under an identifier is a group's."""
        return packet_id in self._given

    def add(self, packet_id: int, share: Share, record: Received, qos: int) -> None:
        """A delivery is in flight."""
        self._given[packet_id] = (share, record, qos)

    def settle(self, packet_id: int) -> None:
        """The client has it, or has refused it; nothing for a delivery that is no group's."""
        given = self._given.pop(packet_id, None)
        if given is not None:
            share, record, _ = given
            share.done(record)

    def give_up(self, share: Share) -> None:
        """What is in flight goes to another member; at QoS 2 nobody else gets it [MQTT-4.8.2-5]."""
        for packet_id, (other, record, qos) in list(self._given.items()):
            if other is share:
                del self._given[packet_id]
                if qos > AT_LEAST_ONCE:
                    share.done(record)
