"""What every MQTT session of a process needs; built once by the application."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.config import MqttConfig
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.read.live_reader import LiveReader
from gateway.mqtt.connection.login import Login
from gateway.mqtt.counters import Counters
from gateway.mqtt.registry.session_registry import Sessions
from gateway.mqtt.routing.retained import Retained
from gateway.mqtt.routing.router import Router
from gateway.mqtt.routing.shared_groups import Sharing
from gateway.mqtt.session.qos2 import Floors
from gateway.mqtt.session.self_delivery import Echoes
from gateway.security.authorization import AccessList
from gateway.security.group_names import GroupNames
from gateway.spawn import Spawn
from mapping.rules import Rules


class Services(msgspec.Struct, frozen=True):
    """See the module."""

    config: MqttConfig
    rules: Rules
    publisher: Publisher
    live_reader: LiveReader
    router: Router
    sessions: Sessions
    retained: Retained
    sharing: Sharing
    names: GroupNames
    floors: Floors
    login: Login
    access: AccessList
    counters: Counters
    echoes: Echoes | None
    clock: Callable[[], float]
    wall_clock: Callable[[], int]
    spawn: Spawn
