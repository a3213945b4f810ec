"""Creates the protocols' servers and listeners from the parts of `gateway.process.assembly`.

All listeners of a protocol share one server, so its sessions, readers and producers exist once.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from functools import partial

from gateway.amqp.server import WEBSOCKET_SUBPROTOCOL as AMQP_SUBPROTOCOL
from gateway.amqp.server import AmqpServer
from gateway.amqp.services import AmqpServices
from gateway.kafka.driver.client_settings import client_settings, consumer_settings
from gateway.kafka.log import Log
from gateway.kafka.transactions.kafka_transaction import Transactions
from gateway.kafka.transactions.transactional_producers import TransactionalProducerPool
from gateway.mqtt.server import WEBSOCKET_SUBPROTOCOLS as MQTT_SUBPROTOCOLS
from gateway.mqtt.server import MqttServer
from gateway.net.http.upgrade import WebSocketEndpoint, WebSocketServer
from gateway.net.listener import Listener, Server
from gateway.process.assembly import ListenerSecurity, Process, StateTables, wall_clock
from gateway.process.ports import listeners
from gateway.rest.produce.idempotency import KeyedRequests
from gateway.rest.rest_server import RestServer
from gateway.rest.services import RestServices
from gateway.security.entrance import Entrance
from gateway.security.origins import Origins


def make_servers(process: Process, security: ListenerSecurity, log: Log, state: StateTables) -> list[Server]:
    """Create all servers with their listeners, in start order; none of them listens yet."""
    config = process.config
    mqtt = make_mqtt(process, security, state)
    amqp = make_amqp(process, security, log, state)
    origins = Origins(config.security)
    mqtt_websockets = WebSocketEndpoint(dict.fromkeys(MQTT_SUBPROTOCOLS, mqtt), origins)
    amqp_websockets = WebSocketEndpoint({AMQP_SUBPROTOCOL: amqp}, origins)
    rest = make_rest(process, security, log, state, {"/mqtt": mqtt_websockets, "/amqp": amqp_websockets})
    servers: list[Server] = [mqtt, amqp, rest]
    for name, endpoint, limit_s in (
        ("mqtt_websocket", mqtt_websockets, config.mqtt.connect_timeout_s),
        ("amqp_websocket", amqp_websockets, config.amqp.open_timeout_s),
    ):
        websockets = WebSocketServer(
            name, endpoint, config.security, handshake_timeout_s=limit_s, strangers=security.strangers
        )
        open_listeners(websockets, process, security)
        servers.append(websockets)
    return servers


def open_listeners(server: Server, process: Process, security: ListenerSecurity) -> None:
    """Add the configured listeners of its protocol to a server; they do not listen yet."""
    for settings in listeners(process.config):
        if settings.protocol == server.name:
            assign_tenant = security.tenants.assigner(settings.name)
            listener = Listener(
                settings,
                Entrance(settings.name, security.authenticator, settings.logins, assign_tenant),
                server.accept,
                tls=security.certificates.context(settings.tls, settings.tls_key),
                strangers=security.strangers,
                proxies=security.proxies if settings.proxy_protocol else None,
            )
            server.add(listener)


def make_mqtt(process: Process, security: ListenerSecurity, state: StateTables) -> MqttServer:
    """Create the MQTT server."""
    server = state.mqtt.make_server(security.access_list, security.limits, security.strangers, state.presence)
    open_listeners(server, process, security)
    return server


def make_amqp(process: Process, security: ListenerSecurity, log: Log, state: StateTables) -> AmqpServer:
    """Create the AMQP server; its transactional producers run in the background until the process stops."""
    config = process.config.amqp
    producer_pool = TransactionalProducerPool(
        log.kafka,
        name=state.identity.name,
        limit=config.transaction_producers,
        timeout_s=config.transaction_timeout_s,
        used_ids_file=state.identity.file("transactions"),
        spawn=process.spawn,
        clock=process.loop.time,
    )
    producer_pool.start()
    process.stack.push_async_callback(producer_pool.stop)
    services = AmqpServices(
        config,
        container_id=f"trivium-{os.getpid()}",
        publisher=log.publisher,
        live_reader=log.live_reader,
        groups=log.groups,
        names=state.groups,
        transactions=Transactions(producer_pool, log.publisher, spawn=process.spawn),
        access=security.access_list,
        limits=security.limits,
        presence=state.presence,
        wall_clock=wall_clock,
        random_id=partial(secrets.token_hex, 16),
    )
    server = AmqpServer(services, process.spawn, security.strangers)
    open_listeners(server, process, security)
    return server


def make_rest(
    process: Process,
    security: ListenerSecurity,
    log: Log,
    state: StateTables,
    websockets: Mapping[str, WebSocketEndpoint] | None = None,
) -> RestServer:
    """Create the HTTP server. `websockets` are the WebSocket endpoints that it serves, by path."""
    services = RestServices(
        config=process.config.http,
        publisher=log.publisher,
        topics=log.topics,
        lookup=log.lookup,
        live_reader=log.live_reader,
        catch_up_reader=log.catch_up_reader,
        groups=log.groups,
        names=state.groups,
        access_list=security.access_list,
        origins=Origins(process.config.security, more=process.config.http.cors_origins),
        security=process.config.security,
        rules=security.rules,
        keyed=KeyedRequests(
            state.requests,
            state.topics,
            log.publisher,
            log.lookup,
            consumer_settings(log.kafka, "requests"),
            delivery_timeout_s=log.kafka.delivery_timeout_s,
            max_running=process.config.http.max_concurrent,
            spawn=process.spawn,
            wall_clock=wall_clock,
            random_id=partial(secrets.token_hex, 8),
        ),
        kafka=client_settings(log.kafka, "http"),
        spawn=process.spawn,
        clock=process.loop.time,
        wall_clock=wall_clock,
        random_id=partial(secrets.token_hex, 16),
        tracing=security.tracing,
        strangers=security.strangers,
        limits=security.limits,
        presence=state.presence,
    )
    server = RestServer(services, websockets=websockets)
    open_listeners(server, process, security)
    return server
