"""Creates the parts of the gateway from the configuration; `gateway.process.app` runs them.

`gateway.process.listeners` creates the protocols' servers and listeners.

Every function starts what it creates and pushes the stops onto the exit stack, so that they run in reverse order.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from random import Random, SystemRandom
from typing import Any, Final

import msgspec

from flowcontrol.admission import Admission, client_share
from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.cluster.topic_creation import PartitionCapacity, any_capacity
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.driver.client_settings import client_settings, consumer_settings
from gateway.kafka.driver.fetch.unreadable import unreadable
from gateway.kafka.groups.membership import Groups
from gateway.kafka.groups.times import GroupTimes
from gateway.kafka.log import Log
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.read.catch_up_reader import CatchUpReader
from gateway.kafka.read.live_reader import LiveReader
from gateway.kafka.state import StateTopics
from gateway.limits.limits import Limits
from gateway.mqtt.composition import MqttState
from gateway.mqtt.registry.heartbeats import Gateways
from gateway.mqtt.registry.upkeep import Upkeep
from gateway.mqtt.routing.retained import Retained
from gateway.net.proxied import Proxies
from gateway.net.strangers import Strangers
from gateway.observe.tracing import Tracing, make_tracing
from gateway.process.ports import listeners
from gateway.rest.produce.idempotency_table import RequestTable
from gateway.runtime.identity import GatewayIdentity
from gateway.runtime.spawn import Spawn, Tasks, keep_running
from gateway.security.login.authentication import Authenticator
from gateway.security.rights.acl_source import AclSource
from gateway.security.rights.authorization import AccessList
from gateway.security.rights.group_names import GroupNames
from gateway.security.tenancy import TenantSource, tenant_source
from gateway.security.tls import Certificates
from gateway.settings.config import MEBIBYTE, Config, ConfigError, KafkaConfig
from gateway.settings.installed import need
from gateway.views.presence import PresenceReports
from mapping.dead_letters import TOPIC_FIELD
from mapping.presets import PRESETS
from mapping.rules import MANY, Rules, RuleText
from mapping.tenants import Tenancy

CLOSE_S: Final = 1.0
"""Time for the last bytes of every connection, and for the last records of the sessions."""

CONNECT_WAIT_S: Final = 1.0  # for Kafka's first answer; then the listeners open, but the gateway is not ready


class Process(msgspec.Struct, frozen=True):
    """Everything that all parts are created with."""

    config: Config  # the whole configuration
    tasks: Tasks  # starts background work
    stack: contextlib.AsyncExitStack  # collects the stops
    loop: asyncio.AbstractEventLoop  # its clock is used everywhere
    # for random decisions, such as the partition of a record without a key
    rng: Random = msgspec.field(default_factory=SystemRandom)

    @property
    def spawn(self) -> Spawn:
        """The function that starts one background job."""
        return self.tasks.spawn

    def keep_running(self, place: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start work that is restarted after failures and cancelled at the stop; see `spawn.keep_running`."""
        self.end_by_cancelling(self.spawn(keep_running(work, place)))

    def end_by_cancelling(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        """Push the task's cancellation onto the stack of stops."""
        self.stack.push_async_callback(_end, task)
        return task


class ListenerSecurity(msgspec.Struct, frozen=True):
    """The security parts that all listeners share."""

    certificates: Certificates  # the TLS contexts of the listeners, which can be reloaded
    authenticator: Authenticator  # checks logins
    tenants: TenantSource  # assigns tenants to clients
    access_list: AccessList  # the rights of identities
    acls: AclSource  # applies Kafka's ACLs to the access list, if configured
    rules: Rules  # map MQTT topics to Kafka, also for access decisions
    tracing: Tracing | None  # creates spans; None: off
    strangers: Strangers  # counts bytes from clients that have not logged in
    limits: Limits  # limits of clients
    proxies: Proxies  # the load balancers whose PROXY headers are trusted


class StateTables(msgspec.Struct, frozen=True):
    """The state that the gateway stores in its internal topics."""

    identity: GatewayIdentity
    topics: StateTopics
    mqtt: MqttState
    requests: RequestTable
    groups: GroupNames
    presence: PresenceReports | None  # None: off


def compile_rules(config: Config) -> Rules:
    """Compile the mapping rules; raises RuleError, which names the bad rule."""
    own_rules = (RuleText(rule.mqtt, rule.topic, rule.key) for rule in config.mapping.rules)
    texts = (*own_rules, *(rule for name in config.mapping.presets for rule in PRESETS[name]))
    dotted = config.mapping.dotted_topics
    if dotted is None and config.creates_topics:
        dotted = (MANY,)
    if dotted is not None:  # replies from MQTT clients must reach these topics
        dotted = (*dotted, config.amqp.reply_topic, config.http.reply_topic)
        if config.presence.topic:
            dotted = (*dotted, config.presence.topic)
    if not config.security.tenants.enabled:
        return Rules(texts, catch_all=config.mapping.catch_all_topic, dotted=dotted)
    rules: Rules = need("tenants", "security.tenants.sources").tenant_rules(config, texts, dotted)
    return rules


def load_certificates(config: Config) -> Certificates:
    """Load the TLS files of all listeners, including management; raises ConfigError, which names the setting."""
    certificates = Certificates()
    certificates.context(config.security.tls)
    for listener in listeners(config):
        certificates.context(listener.tls, listener.tls_key)
    return certificates


async def open_listener_security(process: Process) -> ListenerSecurity:
    """Create TLS, logins, the access list, the mapping rules and tracing."""
    config = process.config
    certificates = load_certificates(config)
    authenticator = Authenticator(config.security, config.kafka)
    await authenticator.start()
    process.stack.push_async_callback(authenticator.stop)
    process.keep_running("authentication", authenticator.run)
    tracing = make_tracing(config.observe)
    rules = compile_rules(config)
    tenants = tenant_source(config, listeners(config))
    if tracing is not None:
        process.stack.push_async_callback(tracing.stop)
    listed = config.security.access if config.security.access_source == "list" else None
    access_list = AccessList(listed, rules, partial=config.mqtt.partial_subscriptions, tenancy=tenants.tenancy)
    return ListenerSecurity(
        certificates=certificates,
        authenticator=authenticator,
        tenants=tenants,
        access_list=access_list,
        acls=AclSource(config.security, access_list, clock=process.loop.time),
        rules=rules,
        tracing=tracing,
        strangers=Strangers(config.budget.login_bytes),
        limits=Limits(
            config.limits, process.loop.time, [listener.name for listener in listeners(config)], most_debt(config)
        ),
        proxies=Proxies(config.security.trusted_proxies, common_names=config.security.proxy_common_names),
    )


def most_debt(config: Config) -> tuple[int, int]:
    """Return the messages and bytes of the largest packet, link window or request that a client may send."""
    mqtt, amqp, http = config.mqtt, config.amqp, config.http
    largest = max(mqtt.max_packet_bytes, amqp.max_message_bytes, http.max_body_bytes)
    return max(amqp.link_credit, http.max_records), largest


def may_create(config: Config, rules: Rules) -> Callable[[str], bool]:
    """Return the check whether a topic may be created: dead-letter topics, and what the mapping rules allow."""
    before, field, behind = (config.amqp.dead_letter_topic or "").partition(TOPIC_FIELD)
    tenancy = Tenancy(config.security.tenants.enabled)

    def allowed(whole: str) -> bool:
        name = tenancy.of(whole).own(whole)
        dead = field and len(name) > len(before) + len(behind) and name.startswith(before) and name.endswith(behind)
        return bool(dead) or name == before or rules.may_create(whole)

    return allowed


async def open_log(
    process: Process,
    kafka: KafkaConfig,
    security: ListenerSecurity,
    capacity: PartitionCapacity = any_capacity,
) -> Log:
    """Create producers and readers and wait briefly for Kafka's first answer. `capacity` limits new partitions."""
    config, spawn, stack = process.config, process.spawn, process.stack
    topics = Topics(
        kafka,
        create=config.creates_topics,
        spawn=spawn,
        clock=process.loop.time,
        capacity=capacity,
        may_create=may_create(config, security.rules),
    )
    process.keep_running("topics", topics.run)
    process.keep_running("acls", partial(security.acls.run, topics.queries.request))
    stack.push_async_callback(topics.stop)
    publisher = Publisher(
        kafka,
        config.budget,
        topics,
        spawn=spawn,
        clock=process.loop.time,
        wall_clock=wall_clock,
        rng=process.rng,
        max_headers=config.mapping.max_headers,
        tenancy=Tenancy(config.security.tenants.enabled),
    )
    stack.push_async_callback(publisher.stop)
    unreadable.most_headers = publisher.most_headers
    await asyncio.wait([process.end_by_cancelling(spawn(publisher.start()))], timeout=CONNECT_WAIT_S)
    lookup = Lookup(client_settings(kafka, "lookup"), spawn=spawn, ensure=topics.get)
    stack.push_async_callback(lookup.stop)
    catch_up_reader = CatchUpReader(consumer_settings(kafka, "replay"), spawn, lookup)
    stack.push_async_callback(catch_up_reader.stop)
    live_reader = LiveReader(consumer_settings(kafka, "tail"), spawn, lookup, catch_up_reader)
    publisher.stored = live_reader.note_stored
    await live_reader.start()
    stack.push_async_callback(live_reader.stop)
    groups = Groups(
        consumer_settings(kafka, "group"),
        spawn,
        lookup,
        catch_up_reader,
        random=process.rng.random,
        times=GroupTimes(kept_ms=days * 86_400_000 if (days := process.config.kafka.group_retention_days) else -1),
        patience=topics.queries.silence_limit.bound,
        places=Admission(kafka.max_groups, client_share(kafka.max_groups, kafka.max_groups_per_client)),
    )
    stack.push_async_callback(groups.stop)
    return Log(
        kafka=kafka,
        topics=topics,
        publisher=publisher,
        lookup=lookup,
        catch_up_reader=catch_up_reader,
        live_reader=live_reader,
        groups=groups,
    )


async def open_state(process: Process, log: Log, rules: Rules, give_up: Callable[[ConfigError], None]) -> StateTables:
    """Create sessions, retained messages, keyed requests and group owners; they load while the gateway starts.

    `give_up` is called if the state in Kafka does not allow the gateway to run.
    """
    config, stack = process.config, process.stack
    state = StateTopics(
        consumer_settings(log.kafka, "state"),
        log.topics,
        log.publisher,
        log.lookup,
        spawn=process.spawn,
        partitions=config.mqtt.state_partitions,
        largest_bytes=config.mqtt.max_packet_bytes + MEBIBYTE,
        failed=give_up,
    )
    identity = GatewayIdentity(config.data_dir)
    stack.callback(identity.close)
    groups = GroupNames(
        state,
        log.groups,
        log.topics,
        anonymous=config.security.allow_anonymous,
        wall_clock=wall_clock,
        random_id=partial(secrets.token_hex, 8),
    )
    mqtt = MqttState(
        config.mqtt,
        rules,
        log,
        state=state,
        names=groups,
        identity=identity,
        spawn=process.spawn,
        clock=process.loop.time,
        wall_clock=wall_clock,
    )
    presence = _presence(config, log.publisher, state, mqtt.gateways, mqtt.retained)
    mqtt.bind(presence)
    requests = RequestTable(
        gateway=identity.name,
        window_s=config.http.idempotency_window_s,
        max_keys=config.http.max_idempotency_keys,
        max_keys_per_client=config.http.max_idempotency_keys_per_client,
        wall_clock=wall_clock,
    )
    requests.bind(state)
    await state.start()
    stack.push_async_callback(state.stop)
    await mqtt.retained.start()
    stack.push_async_callback(mqtt.retained.stop)
    process.keep_running("sessions", partial(mqtt.upkeep.run, state.loaded))
    process.keep_running("groups", groups.run)
    if presence is not None:
        process.keep_running("presence", presence.run)
    stack.push_async_callback(_stop_sessions, mqtt.upkeep, presence, log.publisher)
    return StateTables(
        identity=identity,
        topics=state,
        mqtt=mqtt,
        requests=requests,
        groups=groups,
        presence=presence,
    )


def _presence(
    config: Config, publisher: Publisher, state: StateTopics, gateways: Gateways, retained: Retained
) -> PresenceReports | None:
    if not config.presence.topic:
        return None
    presence: PresenceReports = need("presence", "presence.topic").Presence(
        config.presence.topic,
        gateways.owner,
        publisher,
        state,
        on_valid=retained.mirror,
        keep_offline_s=config.presence.keep_offline_s,
        wall_clock=wall_clock,
        is_alive=gateways.is_alive,
        is_dead=gateways.is_dead,
        takes_over=gateways.takes_over,
    )
    return presence


def parts_with_statistics(
    security: ListenerSecurity, log: Log, state: StateTables
) -> Sequence[tuple[str, Callable[[], Any]]]:
    """Return metric prefix and statistics function of every part that is not a protocol's server."""
    return (
        ("topics", log.topics.creation.statistics),
        ("replication", log.topics.safety.statistics),
        ("publisher", log.publisher.statistics),
        ("budget", log.publisher.budgets.statistics),
        ("live_reader", log.live_reader.statistics),
        ("state", state.topics.statistics),
        ("retained", state.mqtt.retained.statistics),
        ("kafka", log.groups.by_group),
        ("group_names", state.groups.statistics),
        ("strangers", security.strangers.statistics),
        ("proxy_protocol", security.proxies.statistics),
        ("limits", security.limits.statistics),
        ("authentication", security.authenticator.statistics),
        ("tenants", security.tenants.statistics),
        ("kafka_acls", security.acls.statistics),
        *(() if state.presence is None else (("presence", state.presence.statistics),)),
    )


async def _stop_sessions(upkeep: Upkeep, presence: PresenceReports | None, publisher: Publisher) -> None:
    """Write the sessions' remaining state, and the wills of those that the stop has ended."""
    if presence is not None:
        await presence.stop()
    await upkeep.stop()
    await publisher.drain(CLOSE_S)


def wall_clock() -> int:
    """Return the time in epoch milliseconds."""
    return time.time_ns() // 1_000_000


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
