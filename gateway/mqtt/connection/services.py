"""The services that all MQTT connections of a process share; built once by the application."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.kafka.publish.publisher import Publisher
from gateway.limits.limits import Limits
from gateway.mqtt.connection.refused_again import RefusedAgain
from gateway.mqtt.counters import Counters
from gateway.mqtt.registry.opening import Opening
from gateway.mqtt.registry.session_registry import Sessions
from gateway.mqtt.routing.retained import Retained
from gateway.mqtt.routing.router import Router
from gateway.mqtt.session.self_delivery import SelfDelivery
from gateway.net.writes import Writes
from gateway.security.rights.authorization import AccessList
from gateway.settings.config import MqttConfig
from gateway.views.presence import PresenceReports
from mapping.rules import Rules


class MqttServices(msgspec.Struct, frozen=True):
    """Shared parts of the process; `clock` returns seconds, `wall_clock` epoch milliseconds."""

    config: MqttConfig
    rules: Rules
    publisher: Publisher
    router: Router
    sessions: Sessions
    opening: Opening
    retained: Retained
    access: AccessList
    refused_again: RefusedAgain
    answers: Writes  # of connections whose acknowledgements are due
    counters: Counters
    limits: Limits
    self_delivery: SelfDelivery | None
    presence: PresenceReports | None
    clock: Callable[[], float]
    wall_clock: Callable[[], int]
