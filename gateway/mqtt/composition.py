"""Makes the parts of MQTT, from what all protocols share."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

from gateway.kafka.driver.client_settings import consumer_settings
from gateway.kafka.log import Log
from gateway.kafka.state import StateTopics
from gateway.limits.limits import Limits
from gateway.mqtt.connection.refused_again import RefusedAgain, refused_topic
from gateway.mqtt.connection.services import MqttServices
from gateway.mqtt.counters import Counters
from gateway.mqtt.registry.crash_recovery import CrashRecovery, find_qos2_messages
from gateway.mqtt.registry.heartbeats import Gateways
from gateway.mqtt.registry.opening import Opening
from gateway.mqtt.registry.session_registry import TOPIC as SESSIONS
from gateway.mqtt.registry.session_registry import Sessions
from gateway.mqtt.registry.upkeep import Upkeep
from gateway.mqtt.registry.wills import Wills
from gateway.mqtt.routing.retained import Retained
from gateway.mqtt.routing.router import Router
from gateway.mqtt.routing.share_starts import ShareStarts
from gateway.mqtt.routing.shared_groups import Sharing
from gateway.mqtt.server import MqttServer
from gateway.mqtt.session.deliveries import DeliveryParts
from gateway.mqtt.session.qos2 import Qos2Offsets, Qos2Parts
from gateway.mqtt.session.self_delivery import SelfDelivery
from gateway.mqtt.session.session import SessionParts, forget_topics
from gateway.mqtt.session.shared import ShareParts
from gateway.mqtt.state.counted_records import UNLIMITED, SessionLimits
from gateway.mqtt.state.store import SessionStore
from gateway.net.strangers import Strangers
from gateway.net.writes import Writes
from gateway.runtime.identity import GatewayIdentity
from gateway.runtime.spawn import Spawn
from gateway.security.rights.authorization import AccessList
from gateway.security.rights.group_names import GroupNames
from gateway.settings.config import MqttConfig
from gateway.views.presence import MQTT, PresenceReports
from mapping.rules import Rules


class MqttState:
    """Sessions and retained messages, which outlive connections and processes."""

    def __init__(
        self,
        config: MqttConfig,
        rules: Rules,
        log: Log,
        *,
        state: StateTopics,
        names: GroupNames,
        identity: GatewayIdentity,
        spawn: Spawn,
        clock: Callable[[], float],
        wall_clock: Callable[[], int],
    ) -> None:
        """`names` has the owners of groups; `clock` returns seconds, `wall_clock` epoch milliseconds."""
        self.config = config
        self._rules = rules
        self._log = log
        self._state = state
        self._spawn = spawn
        self._clock = clock
        self._wall_clock = wall_clock
        self.retained = Retained(
            state,
            log.publisher,
            rules,
            limit=config.max_retained,
            limit_bytes=config.max_retained_bytes,
            limits_of_principal=(config.max_retained_per_principal, config.max_retained_bytes_per_principal),
            spawn=spawn,
            wall_clock=wall_clock,
        )
        self.gateways = Gateways(identity, clock, wall_clock)
        self.parts = self._session_parts(names)
        wills = Wills(rules, log.publisher, self.retained, wall_clock)
        self.sessions = Sessions(self.gateways, self.parts, wills, wall_clock)

    def _session_parts(self, names: GroupNames) -> SessionParts:
        """Create the parts that sessions use."""
        log, config = self._log, self.config
        router = Router(self._rules, log.topics, log.live_reader, self._spawn)
        limits = SessionLimits(
            config.max_sessions,
            config.max_session_bytes,
            config.max_sessions_per_principal or UNLIMITED,
            config.max_session_bytes_per_principal or UNLIMITED,
        )
        store = SessionStore(self.gateways.owner, limits)
        starts = ShareStarts(log.groups, log.lookup, store)
        names.released.append(starts.forget)
        counters = Counters()
        wait_s = config.echo_wait_ms / 1000
        return SessionParts(
            router=router,
            live_reader=log.live_reader,
            counters=counters,
            budget=log.publisher.budgets.connection,
            store=store,
            deliveries=DeliveryParts(
                messages=router.messages,
                retained=self.retained,
                counters=counters,
                wall_clock=self._wall_clock,
                touched=set(),
            ),
            shares=ShareParts(
                sharing=Sharing(log.groups, self._rules, log.topics, router.messages.delivery, starts),
                names=names,
                spawn=self._spawn,
            ),
            qos2=Qos2Parts(
                publisher=log.publisher,
                retained=self.retained,
                start_offsets=Qos2Offsets(log.lookup),
                spawn=self._spawn,
                self_delivery=SelfDelivery(log.live_reader, wait_s, self._clock) if wait_s else None,
            ),
        )

    def bind(self, presence: PresenceReports | None) -> None:
        """Create what opens sessions and keeps them, and read their table once `state` starts."""
        log, state, sessions = self._log, self._state, self.sessions
        find = partial(find_qos2_messages, consumer_settings(log.kafka, "recovery"), log.lookup, self._spawn)
        recovery = CrashRecovery(find, log.lookup.partitions)
        self.opening = Opening(
            sessions,
            recovery,
            wall_clock=self._wall_clock,
            new_session_id=partial(secrets.token_hex, 6),
            follow=lambda client_id: state.read_to_end(SESSIONS, client_id.encode()),
            elsewhere=lambda client_id: (
                None if presence is None else presence.principal_elsewhere(f"{MQTT}/{client_id}")
            ),
        )

        async def read_to_end() -> None:
            await state.read_to_end(SESSIONS)
            if presence is not None:
                await state.read_to_end(presence.topic)

        owners_died = presence.report_dead if presence is not None else lambda: None
        self.upkeep = Upkeep(
            sessions, recovery, self.opening.ready, read_to_end, log.publisher.fence, owners_died=owners_died
        )
        parts = self.parts
        parts.store.bind(state.open(SESSIONS, sessions.apply, sessions.restarted))
        log.topics.watch(lambda _appeared, disappeared: forget_topics(sessions.live, parts, disappeared))
        parts.router.listen(lambda topic: forget_topics(sessions.live, parts, (topic,)))

    def make_server(
        self, access: AccessList, limits: Limits, strangers: Strangers, presence: PresenceReports | None
    ) -> MqttServer:
        """Create the server; it has no listeners yet."""
        log, parts = self._log, self.parts
        log.topics.declare(refused_topic(log.kafka.max_request_bytes))
        services = MqttServices(
            config=self.config,
            rules=self._rules,
            publisher=log.publisher,
            router=parts.router,
            sessions=self.sessions,
            opening=self.opening,
            retained=self.retained,
            access=access,
            refused_again=RefusedAgain(log.publisher, parts.counters),
            answers=Writes(),
            counters=parts.counters,
            limits=limits,
            self_delivery=parts.qos2.self_delivery,
            presence=presence,
            clock=self._clock,
            wall_clock=self._wall_clock,
        )
        server = MqttServer(services, self._spawn, strangers)
        log.live_reader.distributor.written = server.pumps.writes.written
        return server
