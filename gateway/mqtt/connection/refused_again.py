"""Dead letters for refused messages that an MQTT 3.1.1 client sends again after it was disconnected for them.

MQTT 3.1.1 cannot refuse a message: the gateway closes the connection [MQTT311-3.3.5-2], and the client sends the same
message again, forever. So when a client sends the refused packet again with DUP [MQTT-3.3.1-1], the message is stored
in an internal topic, where operators find it, and then acknowledged. As everywhere, an acknowledgement means that the
message is in Kafka.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from gateway.kafka.cluster.topic_info import InternalTopic
from gateway.kafka.contracts import Owner, Result
from gateway.kafka.publish.publisher import Publisher
from gateway.mqtt.counters import Counters
from gateway.mqtt.session.acks import Slot
from gateway.runtime.recent import Recent
from mapping.dead_letters import refused_letter
from mapping.outcomes import Outcome
from mapping.record import INTERNAL_TOPIC_PREFIX, Record

log = structlog.get_logger(__name__)

REFUSED_TOPIC: Final = INTERNAL_TOPIC_PREFIX + "trivium_refused"
REMEMBERED: Final = 10_000
"""Maximum number of clients whose refused packet is remembered: about 2 MB. A forgotten one is disconnected again."""
LOGGED_TOPICS: Final = 1000
"""Maximum number of Kafka topics that are remembered as logged."""


Token = tuple[Callable[[], None], Slot, Result]


def refused_topic(max_record_bytes: int) -> InternalTopic:
    """Return the settings for creating the topic; it accepts every record that a producer may send."""
    return InternalTopic(REFUSED_TOPIC, 1, (("max.message.bytes", str(max_record_bytes)),))


class RefusedAgain(Owner):
    """Remembers the packets that clients were disconnected for, and owns their dead letters."""

    def __init__(self, publisher: Publisher, counters: Counters) -> None:
        self._publisher = publisher
        self._counters = counters
        self._packets: Recent[bytes, int] = Recent(REMEMBERED)
        self._logged: Recent[str, None] = Recent(LOGGED_TOPICS)

    def remember(self, client_id: str, packet_id: int) -> None:
        """Note the packet for which a client is being disconnected."""
        self._packets[_digest(client_id)] = packet_id

    def take(self, client_id: str) -> int:
        """Return and forget the packet for which a client was last disconnected, or 0."""
        return self._packets.pop(_digest(client_id), 0) if self._packets else 0

    def store(self, record: Record, answered: Callable[[], None], slot: Slot, refused: Result) -> None:
        """Store a dead letter; `answered` is called when the slot has a result: stored, or the original refusal."""
        if record.topic not in self._logged:
            self._logged[record.topic] = None
            log.warning("a client resent a message that it was disconnected for; stored as a dead letter",
                        topic=record.topic, refused=REFUSED_TOPIC, outcome=refused.outcome.value,
                        reason=refused.reason)  # fmt: skip
        letter = refused_letter(record, REFUSED_TOPIC, refused.outcome.value, refused.reason)
        self._publisher.submit(letter, self, (answered, slot, refused), internal=True)

    def settle(self, tokens: Sequence[Token], offsets: Sequence[int], result: Result) -> None:
        """Take Kafka's result (contract: `gateway.kafka.contracts.Owner`)."""
        stored = result.outcome is Outcome.STORED
        for answered, slot, refused in tokens:
            self._counters.dead_letters += stored
            slot.result = result if stored else refused
            answered()


def _digest(client_id: str) -> bytes:
    return hashlib.blake2b(client_id.encode(), digest_size=16).digest()  # a client id may have 65,535 bytes
