"""Makes the protocols' listeners out of the parts that `gateway.assembly` has made."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Protocol

import msgspec

from gateway.amqp.listener import WEBSOCKET_SUBPROTOCOL as AMQP_SUBPROTOCOL
from gateway.amqp.listener import AmqpListener
from gateway.amqp.services import Services as AmqpServices
from gateway.assembly import ListenerSecurity, Log, Process, State, wall_clock
from gateway.clients import Connected
from gateway.drain import Departing
from gateway.flow import Flowing
from gateway.kafka.driver.client_settings import client_settings, consumer_settings
from gateway.kafka.transactions.kafka_transaction import Transactions
from gateway.kafka.transactions.transactional_producers import TransactionalProducerPool
from gateway.mqtt.connection.answers import Answers
from gateway.mqtt.connection.login import Login
from gateway.mqtt.connection.refused_again import RefusedAgain, refused_topic
from gateway.mqtt.connection.services import Services as MqttServices
from gateway.mqtt.listener import WEBSOCKET_SUBPROTOCOLS as MQTT_SUBPROTOCOLS
from gateway.mqtt.listener import MqttListener
from gateway.net.upgrade import WebSocketEndpoint, WebSocketListener
from gateway.rest.listener import RestListener
from gateway.rest.produce.idempotency import KeyedRequests
from gateway.rest.services import RestServices
from gateway.security.origins import Hosts, Origins


class Listener(Protocol):
    """One protocol at one address, from accepted sockets to Kafka and back."""

    name: str

    async def start(self) -> None:
        """Listen; ListenError when the address cannot be had."""

    @property
    def bound(self) -> str:
        """The address really bound, `HOST:PORT`."""

    @property
    def accepting(self) -> bool:
        """Whether new connections are accepted."""

    def departing(self) -> Iterable[Departing]:
        """All that are connected to it now."""
        ...

    def close_doors(self) -> None:
        """Accept nobody any more; who is connected is served on."""

    def stop_taking(self) -> None:
        """Take nothing new; what was taken is still answered."""

    async def stop(self, timeout: float) -> None:
        """Close every connection in its protocol's way, within `timeout` seconds."""

    def statistics(self) -> msgspec.Struct:
        """Counts for the metrics."""

    def flowing(self) -> list[Flowing]:
        """What can be asked for its flow."""
        ...

    def clients(self) -> Iterable[Connected]:
        """What operators see, trace and close."""
        ...


def make_listeners(process: Process, security: ListenerSecurity, log: Log, state: State) -> list[Listener]:
    """The listeners of all protocols, in the order in which they start; none of them listens yet."""
    config = process.config
    mqtt = make_mqtt(process, security, log, state)
    amqp = make_amqp(process, security, log, state)
    mqtt.proxies = security.proxies if config.mqtt.proxy_protocol else None
    amqp.proxies = security.proxies if config.amqp.proxy_protocol else None
    origins = Origins(config.security, login_in_protocol=True)
    mqtt_websockets = WebSocketEndpoint(dict.fromkeys(MQTT_SUBPROTOCOLS, mqtt), origins)
    amqp_websockets = WebSocketEndpoint({AMQP_SUBPROTOCOL: amqp}, origins)
    rest = make_rest(process, security, log, state, {"/mqtt": mqtt_websockets, "/amqp": amqp_websockets})
    rest.proxies = security.proxies if config.http.proxy_protocol else None
    listeners: list[Listener] = [mqtt, amqp, rest]
    for name, address, endpoint, limit_s, proxies in (
        ("mqtt", config.mqtt.websocket_address, mqtt_websockets, config.mqtt.connect_timeout_s, mqtt.proxies),
        ("amqp", config.amqp.websocket_address, amqp_websockets, config.amqp.open_timeout_s, amqp.proxies),
    ):
        if address is not None:
            websockets = WebSocketListener(
                name,
                address,
                endpoint,
                security.tls_context,
                Hosts(config.security),
                handshake_timeout_s=limit_s,
                strangers=security.strangers,
            )
            websockets.proxies = proxies
            listeners.append(websockets)
    return listeners


def make_mqtt(process: Process, security: ListenerSecurity, log: Log, state: State) -> MqttListener:
    """MQTT's listener."""
    log.topics.declare(refused_topic(log.kafka.max_request_bytes))
    services = MqttServices(
        config=process.config.mqtt,
        rules=security.rules,
        publisher=log.publisher,
        router=state.parts.router,
        sessions=state.sessions,
        opening=state.opening,
        retained=state.retained,
        login=Login(security.authenticator, wall_clock),
        place=security.tenants.at("mqtt"),
        access=security.access_list,
        refused_again=RefusedAgain(log.publisher, state.parts.counters),
        answers=Answers(),
        counters=state.parts.counters,
        rates=security.rates,
        self_delivery=state.parts.qos2.self_delivery,
        clock=process.loop.time,
        wall_clock=wall_clock,
    )
    listener = MqttListener(services, process.spawn, security.tls_context, security.strangers)
    log.live_reader.fan_out.written = listener.writes.written
    return listener


def make_amqp(process: Process, security: ListenerSecurity, log: Log, state: State) -> AmqpListener:
    """AMQP's listener; the producers of its transactions go on in the background until the process ends."""
    config = process.config.amqp
    producer_pool = TransactionalProducerPool(
        log.kafka,
        name=state.identity.name,
        limit=config.transaction_producers,
        timeout_s=config.transaction_timeout_s,
        marks=state.identity.beside("transactions"),
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
        transactions=Transactions(log.kafka, producer_pool, log.publisher, spawn=process.spawn, wall_clock=wall_clock),
        authenticator=security.authenticator,
        place=security.tenants.at("amqp"),
        access=security.access_list,
        rates=security.rates,
        wall_clock=wall_clock,
        random_id=partial(secrets.token_hex, 16),
    )
    return AmqpListener(services, process.spawn, security.tls_context, security.strangers)


def make_rest(
    process: Process,
    security: ListenerSecurity,
    log: Log,
    state: State,
    websockets: Mapping[str, WebSocketEndpoint] | None = None,
) -> RestListener:
    """HTTP's listener; `websockets`: what is served at these paths beside its own."""
    services = RestServices(
        config=process.config.http,
        publisher=log.publisher,
        topics=log.topics,
        lookup=log.lookup,
        live_reader=log.live_reader,
        catch_up_reader=log.catch_up_reader,
        groups=log.groups,
        names=state.groups,
        authenticator=security.authenticator,
        place=security.tenants.at("http"),
        access_list=security.access_list,
        origins=Origins(process.config.security, more=process.config.http.cors_origins),
        hosts=Hosts(process.config.security),
        rules=security.rules,
        keyed=KeyedRequests(
            state.requests,
            state.topics,
            log.publisher,
            log.lookup,
            consumer_settings(log.kafka, "requests"),
            delivery_timeout_s=log.kafka.delivery_timeout_s,
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
        rates=security.rates,
    )
    return RestListener(services, tls=security.tls_context, websockets=websockets)
