"""What every MQTT session of a process needs; built once by the application."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.config import MqttConfig
from gateway.kafka.publisher import Publisher
from gateway.kafka.tail import Tail
from gateway.mqtt.counters import Counters
from gateway.mqtt.echoes import Echoes
from gateway.mqtt.exchanges import Floors
from gateway.mqtt.login import Login
from gateway.mqtt.retained import Retained
from gateway.mqtt.router import Router
from gateway.mqtt.sessions import Sessions
from gateway.mqtt.sharing import Sharing
from gateway.security.authorization import AccessList
from gateway.security.group_names import GroupNames
from gateway.spawn import Spawn
from mapping.rules import Rules


class Services(msgspec.Struct, frozen=True):
    """See the module."""

    config: MqttConfig
    rules: Rules
    publisher: Publisher
    tail: Tail
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
