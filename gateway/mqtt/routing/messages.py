"""Maps each offered record to its MQTT form once, and encodes it once for all receivers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mapping.mqtt.outgoing import MqttDelivery, from_record
from mapping.record import Received
from mapping.rules import Rules
from protocols.mqtt.encoding import PreparedPublish, encode_prepared, prepare_publish
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import Properties


class _RoutedMessage(msgspec.Struct, eq=False):
    """The cached forms of one record."""

    record: Received
    delivery: MqttDelivery | None  # None: the record has no MQTT topic name
    prepared: dict[Version, PreparedPublish] = {}


class Packets(msgspec.Struct, frozen=True, gc=False):
    """The encoded PUBLISH packets of a run at QoS 0."""

    data: bytes
    largest: int  # size of the largest packet, in bytes
    topic: str  # of all packets


class Messages:
    """Caches the forms of the records being offered, and of the last other record requested."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._run: dict[int, _RoutedMessage] = {}  # by `id`
        self._last: _RoutedMessage | None = None
        # the last run, and its packets by whether the version is 5.0 and whether RETAIN is set
        self._packets: tuple[Sequence[Received] | None, dict[tuple[bool, bool], Packets | None]] = (None, {})

    def begin_run(self, first: Received) -> None:
        """Start a new run: drop the forms of the last one."""
        prepared = self._run.get(id(first))
        self._run.clear()
        if prepared is not None and prepared.record is first:
            self._run[id(first)] = prepared  # it was mapped already to find the end of the last run

    def peek(self, record: Received) -> MqttDelivery | None:
        """Return `delivery` of a record of this run or of the next one."""
        prepared = self._run.get(id(record))
        if prepared is None or prepared.record is not record:
            prepared = self._run[id(record)] = _RoutedMessage(record, from_record(record, self._rules))
        return prepared.delivery

    def delivery(self, record: Received) -> MqttDelivery | None:
        """Return the record's MQTT form, or None if it has no MQTT topic name."""
        return self._find(record).delivery

    def prepared(self, record: Received, delivery: MqttDelivery, version: Version) -> PreparedPublish:
        """Return the encoded PUBLISH that all receivers of one version share; the record must have no expiry."""
        prepared = self._find(record).prepared
        message = prepared.get(version)
        if message is None:
            message = prepared[version] = self.prepare(delivery, delivery.properties, version)
        return message

    def prepare(self, delivery: MqttDelivery, properties: Properties | None, version: Version) -> PreparedPublish:
        """Encode a PUBLISH with these properties, and with the topic as receivers see it (without tenant prefix)."""
        return prepare_publish(self._rules.own_name(delivery.topic), delivery.payload, properties, version)

    def packets(self, run: Sequence[Received], v5: bool, retain: bool) -> Packets | None:
        """Return the packets that all receivers of one version share, for a run at QoS 0 of one MQTT topic.

        Returns:
            None if a record has an expiry, which must be checked and updated for each receiver.
        """
        known, forms = self._packets
        if known is not run:
            forms = {}
            self._packets = (run, forms)
        form = v5, retain
        try:
            return forms[form]
        except KeyError:
            encoded = forms[form] = self._encode(run, Version.V5 if v5 else Version.V311, retain)
            return encoded

    def _encode(self, run: Sequence[Received], version: Version, retain: bool) -> Packets | None:
        packets: list[bytes] = []
        topic = ""
        for record in run:
            delivery = self.delivery(record)
            if delivery is None or delivery.expires is not None:
                return None
            topic = delivery.topic
            packets.append(encode_prepared(self.prepared(record, delivery, version), retain=retain))
        return Packets(b"".join(packets), max(map(len, packets)), topic)

    def _find(self, record: Received) -> _RoutedMessage:
        message = self._run.get(id(record))
        if message is not None and message.record is record:
            return message
        message = self._last
        if message is None or message.record is not record:
            message = self._last = _RoutedMessage(record, from_record(record, self._rules))
        return message
