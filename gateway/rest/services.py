"""The parts of the gateway that the operations of HTTP use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.config import HttpConfig
from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.groups.membership import Groups
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.read.catch_up_reader import CatchUpReader
from gateway.kafka.read.live_reader import LiveReader
from gateway.net.strangers import Strangers
from gateway.observe.tracing import Tracing
from gateway.rest.produce.idempotency import KeyedRequests
from gateway.security.authentication import Authenticator
from gateway.security.authorization import AccessList
from gateway.security.group_names import GroupNames
from gateway.security.origins import Hosts, Origins
from gateway.spawn import Spawn
from mapping.rules import Rules


class RestServices(msgspec.Struct, frozen=True):
    """The parts; one instance for a process.

    Attributes:
        config: the `http` section.
        publisher: the way into Kafka.
        topics: what is known of Kafka's topics.
        lookup: partitions and offsets.
        live_reader: the end of the log, and what a reader behind it is brought.
        catch_up_reader: the shared readers of the log.
        groups: shared readers of consumer groups.
        names: which principal owns which consumer group.
        authenticator: identifies clients.
        access_list: the rights of principals.
        origins: the web pages that may call.
        hosts: the names that the gateway may be called by.
        rules: from MQTT topics to Kafka.
        keyed: requests that are done once, by their `Idempotency-Key`.
        kafka: connection arguments of an aiokafka client; see `gateway.kafka.driver.client_settings.client_settings`.
        spawn: starts background work in the app's task group.
        clock: monotonic seconds; the loop's.
        wall_clock: epoch milliseconds.
        tracing: makes spans of requests; None: tracing is off.
        strangers: counts what clients send before they are authenticated; None: not counted.
        random_id: gives a new id that nobody can guess, legal in an MQTT topic.
    """

    config: HttpConfig
    publisher: Publisher
    topics: Topics
    lookup: Lookup
    live_reader: LiveReader
    catch_up_reader: CatchUpReader
    groups: Groups
    names: GroupNames
    authenticator: Authenticator
    access_list: AccessList
    origins: Origins
    hosts: Hosts
    rules: Rules
    keyed: KeyedRequests
    kafka: dict[str, Any]
    spawn: Spawn
    clock: Callable[[], float]
    wall_clock: Callable[[], int]
    random_id: Callable[[], str]
    tracing: Tracing | None = None
    strangers: Strangers | None = None
