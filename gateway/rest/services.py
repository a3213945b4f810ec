"""The parts of the gateway that HTTP operations use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.groups.membership import Groups
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.read.catch_up_reader import CatchUpReader
from gateway.kafka.read.live_reader import LiveReader
from gateway.limits.limits import Limits
from gateway.net.strangers import Strangers
from gateway.observe.tracing import Tracing
from gateway.rest.produce.idempotency import KeyedRequests
from gateway.runtime.spawn import Spawn
from gateway.security.origins import Origins
from gateway.security.rights.authorization import AccessList
from gateway.security.rights.group_names import GroupNames
from gateway.settings.config import HttpConfig, SecurityConfig
from gateway.views.presence import PresenceReports
from mapping.rules import Rules


class RestServices(msgspec.Struct, frozen=True):
    """References to the parts; one instance for a process."""

    config: HttpConfig  # the `http` section
    publisher: Publisher  # publishes to Kafka
    topics: Topics  # a cache of Kafka's topics
    lookup: Lookup  # partitions and offsets
    live_reader: LiveReader  # reads at the end of the log
    catch_up_reader: CatchUpReader  # the shared readers of the log
    groups: Groups  # shared readers of consumer groups
    names: GroupNames  # which principal owns which consumer group
    access_list: AccessList  # the rights of principals
    origins: Origins  # the web pages that may call
    security: SecurityConfig  # the `security` section, with the accepted host names
    rules: Rules  # map MQTT topics to Kafka
    keyed: KeyedRequests  # requests with an `Idempotency-Key`
    # connection arguments of an aiokafka client; see `gateway.kafka.driver.client_settings.client_settings`
    kafka: dict[str, Any]
    spawn: Spawn  # starts background work in the app's task group
    clock: Callable[[], float]  # monotonic seconds; the loop's
    wall_clock: Callable[[], int]  # epoch milliseconds
    random_id: Callable[[], str]  # returns a new unguessable id that is legal in an MQTT topic
    limits: Limits  # connections and rates of clients
    presence: PresenceReports | None = None  # publishes which clients are connected; None: off
    tracing: Tracing | None = None  # makes a span for each request; None: off
    strangers: Strangers | None = None  # counts bytes received before the login; None: not counted
