"""A message that its client sends again after it was disconnected for it: stored as a dead letter, and acknowledged.

MQTT 3.1.1 has no word for a refusal: the connection ends [MQTT311-3.3.5-2], and the client sends the same again, for as
long as it lives. So whoever comes back with the packet that was refused, marked as sent before [MQTT-3.3.1-1], is
acknowledged when the message is stored where people can find it, in a topic of our own that clients cannot reach. The
acknowledgement stays what it is elsewhere: the message is in Kafka.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from gateway.kafka.cluster.topic_info import InternalTopic
from gateway.kafka.contracts import Result
from gateway.kafka.publish.publisher import Publisher
from gateway.mqtt.counters import Counters
from gateway.mqtt.session.acks import Slot
from mapping.dead_letters import refused_letter
from mapping.outcomes import Outcome
from mapping.record import INTERNAL_TOPIC_PREFIX, Record

log = structlog.get_logger(__name__)

REFUSED_TOPIC: Final = INTERNAL_TOPIC_PREFIX + "trivium_refused"
REMEMBERED: Final = 10_000
"""Clients whose last refused packet is known: about 2 MB. The oldest is forgotten, and is disconnected once more."""
TOLD: Final = 1000
"""Kafka topics that the log has named once."""


Token = tuple[Callable[[], None], Slot, Result]


def refused_topic(max_record_bytes: int) -> InternalTopic:
    """How the topic is made, when the first message comes; it takes every record that a producer may send."""
    return InternalTopic(REFUSED_TOPIC, 1, (("max.message.bytes", str(max_record_bytes)),))


class RefusedAgain:
    """The packets that clients were disconnected for; the publisher's owner of their dead letters."""

    def __init__(self, publisher: Publisher, counters: Counters) -> None:
        self._publisher = publisher
        self._counters = counters
        self._packets: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self._told: set[str] = set()

    def remember(self, client_id: str, packet_id: int) -> None:
        """A client's connection ends because its packet is refused."""
        key = _digest(client_id)
        self._packets.pop(key, None)
        if len(self._packets) >= REMEMBERED:
            self._packets.popitem(last=False)
        self._packets[key] = packet_id

    def take(self, client_id: str) -> int:
        """The packet for which a client was disconnected last, 0 for none; it is forgotten."""
        return self._packets.pop(_digest(client_id), 0) if self._packets else 0

    def store(self, record: Record, answered: Callable[[], None], slot: Slot, refused: Result) -> None:
        """Store a refused message; `answered` follows when its slot has a result: stored, or refused as it was."""
        if record.topic not in self._told:
            if len(self._told) >= TOLD:
                self._told.clear()
            self._told.add(record.topic)
            log.warning("a client sends again what it was disconnected for: stored in the topic of refused messages",
                        topic=record.topic, refused=REFUSED_TOPIC, outcome=refused.outcome.value,
                        reason=refused.reason)  # fmt: skip
        letter = refused_letter(record, REFUSED_TOPIC, refused.outcome.value, refused.reason)
        self._publisher.submit(letter, self, (answered, slot, refused), internal=True)

    def settle(self, tokens: Sequence[Token], offsets: Sequence[int], result: Result) -> None:
        """Kafka's answer; see `gateway.kafka.contracts.Owner`."""
        stored = result.outcome is Outcome.STORED
        for answered, slot, refused in tokens:
            self._counters.dead_letters += stored
            slot.result = result if stored else refused
            answered()


def _digest(client_id: str) -> bytes:
    return hashlib.blake2b(client_id.encode(), digest_size=16).digest()  # a client id may have 65,535 bytes
