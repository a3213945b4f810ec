"""Views of MQTT sessions for operators, connected or not."""

from __future__ import annotations

from typing import Final

from aiokafka import TopicPartition

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from gateway.mqtt.registry.session_registry import Sessions
from gateway.mqtt.state.records import NEVER, InflightRecord, Offsets, SessionRecord, decode
from gateway.views.clients import SUBSCRIPTIONS, ClientView, SessionView, SubscriptionView

PARTITIONS: Final = 1000  # a session with more has no lag in its view


class SessionViews:
    """Builds the view of one session."""

    def __init__(self, sessions: Sessions, lookup: Lookup) -> None:
        """`lookup` finds the end offsets of the log."""
        self._sessions = sessions
        self._lookup = lookup

    async def of(self, client_id: str) -> SessionView | None:
        """Return the view of a client id's session, or None."""
        live = self._sessions.live.get(client_id)
        if live is not None and not live.kept:
            return SessionView(kept=False)
        if live is not None:
            return await self._view(live.describe(), live.inflight_record())
        record = self._sessions.record(client_id)
        if record is None:
            return None
        return await self._view(record, decode(InflightRecord, self._sessions.parts.store.inflight.get(client_id)))

    async def away(self, client_id: str) -> ClientView | None:
        """Return the view of a client whose session has no connection at this gateway, or None."""
        record = self._sessions.record(client_id)
        if record is None:
            return None
        filters = [
            SubscriptionView(subscription.options.topic_filter, qos=subscription.options.qos)
            for subscription in record.subscriptions
        ]
        return ClientView(
            id=f"mqtt/{client_id}",
            protocol="mqtt",
            kind="session",
            principal=record.principal,
            subscriptions=filters[:SUBSCRIPTIONS],
            subscriptions_total=len(filters),
            session=await self.of(client_id),
        )

    async def _view(self, record: SessionRecord, inflight: InflightRecord | None) -> SessionView:
        return SessionView(
            kept=True,
            expiry_s=None if record.expiry == NEVER else record.expiry,
            gone_at=None if record.gone_at is None else record.gone_at / 1000,
            gateway=record.owner,
            in_flight=0 if inflight is None else len(inflight.messages),
            lag=None if inflight is None else await self._lag(inflight.reached),
        )

    async def _lag(self, reached: Offsets) -> int | None:
        """Return the number of records above the offsets; None for too many partitions or if Kafka does not answer."""
        offsets = {TopicPartition(topic, number): at for topic, ats in reached.items() for number, at in ats.items()}
        if len(offsets) > PARTITIONS:
            return None
        try:
            ends = await self._lookup.ends(offsets, led=True) if offsets else {}
        except Refused:
            return None
        return sum(max(0, end - offsets[partition]) for partition, end in ends.items())
