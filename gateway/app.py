"""Builds everything once, starts it in order, and stops it in the opposite order: the only place where parts meet."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import secrets
import signal
import ssl
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any, Final, Protocol

import msgspec
import structlog
import uvloop

from gateway.amqp.front import WEBSOCKET_SUBPROTOCOL as AMQP_SUBPROTOCOL
from gateway.amqp.front import AmqpFront
from gateway.amqp.services import Services as AmqpServices
from gateway.config import MEBIBYTE, Config, ConfigError, KafkaConfig
from gateway.identity import GatewayIdentity
from gateway.kafka.client import client_settings
from gateway.kafka.consumers import Lookup
from gateway.kafka.embedded import STOP_LIMIT_S, EmbeddedBroker, embedded_broker
from gateway.kafka.group import Groups
from gateway.kafka.jars import console_report
from gateway.kafka.java import SetupError
from gateway.kafka.publisher import Publisher
from gateway.kafka.replay import Replay
from gateway.kafka.state import StateTopics
from gateway.kafka.storage import BrokerError
from gateway.kafka.tail import Tail
from gateway.kafka.topics import Topics
from gateway.kafka.transactions import Transactions
from gateway.kafka.transactors import Transactors
from gateway.mqtt.accounting import Accounting
from gateway.mqtt.counters import Counters
from gateway.mqtt.echoes import Echoes
from gateway.mqtt.exchanges import Floors
from gateway.mqtt.front import WEBSOCKET_SUBPROTOCOLS as MQTT_SUBPROTOCOLS
from gateway.mqtt.front import MqttFront
from gateway.mqtt.login import Login
from gateway.mqtt.recovery import find_exchanges
from gateway.mqtt.retained import Retained
from gateway.mqtt.router import Router
from gateway.mqtt.services import Services
from gateway.mqtt.session import topics_changed
from gateway.mqtt.sessions import TOPIC as SESSIONS
from gateway.mqtt.sessions import Sessions
from gateway.mqtt.sharing import Sharing
from gateway.mqtt.wills import Wills
from gateway.net.listener import ListenError, listen_error
from gateway.net.upgrade import WebSocketEndpoint, WebSocketFront
from gateway.observe.lag import LoopLag
from gateway.observe.logs import configure_logs
from gateway.observe.management import Management
from gateway.observe.metrics import Metrics
from gateway.observe.sources import add_source
from gateway.observe.tracing import make_tracing
from gateway.rest.keyed import KeyedRequests
from gateway.rest.listener import RestListener
from gateway.rest.request_table import RequestTable
from gateway.rest.services import RestServices
from gateway.security.authentication import Authenticator
from gateway.security.authorization import AccessList
from gateway.security.exposure import check_exposure
from gateway.security.origins import Origins
from gateway.security.tls import make_tls
from mapping.rules import RuleError, Rules, RuleText

log = structlog.get_logger(__name__)

GOODBYE_S: Final = 1.0  # for the last bytes of every connection
GC_THRESHOLD: Final = 20_000  # allocations between two looks at the youngest objects; Python's default is 700
READY_POLL_S: Final = 0.1
CONNECT_WAIT_S: Final = 1.0  # for Kafka's first answer; then we listen without it and are not ready yet
BROKER_STOP_S: Final = 1.0  # what the embedded broker has at least
RESTART_S: Final = 1.0  # between a broker's end and its next start


class StartError(Exception):
    """The gateway cannot start; the text says why and which key to change."""


class Front(Protocol):
    """One protocol's side of the gateway."""

    name: str

    async def start(self) -> None:
        """Listen; ListenError when the address cannot be had."""
        ...

    @property
    def bound(self) -> str:
        """The address really bound, `HOST:PORT`."""
        ...

    @property
    def accepting(self) -> bool:
        """Whether new connections are accepted."""
        ...

    def stop_taking(self) -> None:
        """Take nothing new; what was taken is still answered."""
        ...

    async def stop(self, timeout: float) -> None:
        """Say goodbye in the protocol's own way and close, within `timeout` seconds."""
        ...

    def statistics(self) -> msgspec.Struct:
        """Counts for the metrics."""
        ...


def check(config: Config) -> None:
    """Check all that can be checked without starting anything.

    Raises:
        StartError: what is wrong, with the key.
    """
    try:
        compile_rules(config)
        check_exposure(config)
        AccessList(config.security.access)
        make_tls(config.security)
        Authenticator(config.security)
    except (ConfigError, RuleError) as error:
        raise StartError(str(error)) from error


def compile_rules(config: Config) -> Rules:
    """The mapping rules; RuleError names a bad one."""
    texts = (RuleText(rule.mqtt, rule.topic, rule.key) for rule in config.mapping.rules)
    return Rules(texts, catch_all=config.mapping.catch_all_topic)


def run(config: Config, ready_file: Path | None) -> None:
    """Run the gateway until SIGTERM or SIGINT; StartError when it cannot start."""
    configure_logs(config.log)
    check(config)
    _calm_collector()
    broker = None
    if config.kafka.bootstrap_servers is None:
        try:
            with console_report() as report:  # fetching the jars may take its time: not in the event loop
                broker = embedded_broker(config.embedded, config.data_dir, report)
        except SetupError as error:
            raise StartError(str(error)) from error
    uvloop.run(App(config, ready_file, broker).run())


class App:
    """One gateway process."""

    def __init__(self, config: Config, ready_file: Path | None = None, broker: EmbeddedBroker | None = None) -> None:
        """Nothing is opened before `run`; `broker` is started and stopped with the gateway."""
        self._config = config
        self._ready_file = ready_file
        self._stop = asyncio.Event()
        self._starting: asyncio.Task[Any] | None = None
        self._stopping_since = float("inf")  # of the loop's clock
        self._failure: ConfigError | None = None
        self._broker = broker
        self._fronts: list[Front] = []
        self._management: Management | None = None
        self._publisher: Publisher | None = None
        self._state: StateTopics | None = None
        self._stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Start, serve until a signal, stop; every task lives in one group."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop)
        try:
            async with asyncio.TaskGroup() as group:
                async with contextlib.AsyncExitStack() as stack:
                    await self._start_or_stop(group, stack)
                    await self._stop.wait()
                    log.info("stopping")
                for task in tuple(self._tasks):  # what a lost client still waited for
                    task.cancel()
        except* (ConfigError, ListenError, BrokerError) as errors:
            raise StartError(str(errors.exceptions[0])) from errors
        finally:
            if self._ready_file is not None:
                self._ready_file.unlink(missing_ok=True)
        if self._failure is not None:
            raise StartError(str(self._failure))

    def _on_stop(self) -> None:
        if not self._stop.is_set():
            self._stopping_since = asyncio.get_running_loop().time()
            self._stop.set()
        if self._starting is not None:
            self._starting.cancel()

    def _give_up(self, error: ConfigError) -> None:
        """What Kafka says forbids to go on: stop in order, and end with the reason."""
        self._failure = error
        self._on_stop()

    async def _start_or_stop(self, group: asyncio.TaskGroup, stack: contextlib.AsyncExitStack) -> None:
        """Start; a signal meanwhile ends the start, and what was started already is stopped as ever."""
        task = self._starting = asyncio.current_task()
        assert task is not None
        try:
            await self._start(group, stack)
            log.info("ready", **{front.name: front.bound for front in self._fronts})
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise
            task.uncancel()
        finally:
            self._starting = None

    async def _start(self, group: asyncio.TaskGroup, stack: contextlib.AsyncExitStack) -> None:
        """Start each part and put its end on the stack, so that the ends come in the opposite order."""
        config = self._config
        loop = asyncio.get_running_loop()

        def spawn(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
            task = group.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return task

        for warning in check_exposure(config):
            log.warning("exposed", detail=warning)
        tls = make_tls(config.security)
        context = tls.context if tls is not None else None
        authenticator = Authenticator(config.security)
        await authenticator.start()
        stack.push_async_callback(authenticator.stop)
        stack.push_async_callback(_end, spawn(authenticator.run()))
        tracing = make_tracing(config.observe)
        if tracing is not None:
            stack.push_async_callback(tracing.stop)
        access = AccessList(config.security.access)
        rules = compile_rules(config)
        kafka = await self._connect_kafka(spawn, stack)

        topics = Topics(kafka, create=config.creates_topics, spawn=spawn, clock=loop.time)
        refreshing = spawn(topics.run())
        stack.push_async_callback(_end, refreshing)
        stack.push_async_callback(topics.stop)
        publisher = self._publisher = Publisher(
            kafka, config.budget, topics, spawn=spawn, clock=loop.time, wall_clock=wall_clock, chance=SystemRandom()
        )
        stack.push_async_callback(publisher.stop)
        connecting = spawn(publisher.start())
        stack.push_async_callback(_end, connecting)
        await asyncio.wait([connecting], timeout=CONNECT_WAIT_S)
        lookup = Lookup(client_settings(kafka, "lookup"), ensure=topics.get)
        stack.push_async_callback(lookup.stop)
        replay = Replay(client_settings(kafka, "replay"), spawn, lookup)
        stack.push_async_callback(replay.stop)
        tail = Tail(client_settings(kafka, "tail"), spawn, lookup, replay)
        await tail.start()
        stack.push_async_callback(tail.stop)
        groups = Groups(client_settings(kafka, "group"), spawn, lookup, random=SystemRandom().random)
        stack.push_async_callback(groups.stop)

        router = Router(rules, topics, tail, spawn)
        state = self._state = StateTopics(
            client_settings(kafka, "state"),
            topics,
            publisher,
            spawn=spawn,
            partitions=config.mqtt.state_partitions,
            largest_bytes=config.mqtt.max_packet_bytes + MEBIBYTE,
            failed=self._give_up,
        )
        retained = Retained(
            state,
            publisher,
            rules,
            limit=config.mqtt.max_retained,
            limit_bytes=config.mqtt.max_retained_bytes,
            spawn=spawn,
            wall_clock=wall_clock,
        )
        identity = GatewayIdentity(config.data_dir)
        stack.callback(identity.close)
        sessions = Sessions(
            identity,
            Wills(rules, publisher, retained, wall_clock),
            Accounting(partial(find_exchanges, client_settings(kafka, "recovery"), lookup), lookup),
            clock=loop.time,
            wall_clock=wall_clock,
            nonce=partial(secrets.token_hex, 6),
            follow=lambda client_id: state.follow(SESSIONS, client_id.encode(), lookup),
        )
        sessions.bind(state.open(SESSIONS, sessions.apply, sessions.restarted))
        requests = RequestTable(
            gateway=identity.name,
            window_s=config.http.idempotency_window_s,
            max_keys=config.http.max_idempotency_keys,
            wall_clock=wall_clock,
        )
        requests.bind(state)
        topics.watch(partial(topics_changed, sessions.live))
        await state.start()
        stack.push_async_callback(state.stop)
        await retained.start()
        stack.push_async_callback(retained.stop)
        keeping = spawn(sessions.run(state.loaded))
        stack.push_async_callback(_end, keeping)
        stack.push_async_callback(self._stop_sessions, sessions, publisher)
        services = Services(
            config=config.mqtt,
            rules=rules,
            publisher=publisher,
            tail=tail,
            router=router,
            sessions=sessions,
            retained=retained,
            sharing=Sharing(groups, rules, topics, router.delivery),
            floors=Floors(lookup),
            login=Login(authenticator, wall_clock),
            access=access,
            counters=Counters(),
            echoes=Echoes(tail, config.mqtt.echo_wait_ms / 1000, loop.time) if config.mqtt.echo_wait_ms else None,
            clock=loop.time,
            wall_clock=wall_clock,
            spawn=spawn,
        )
        transactors = Transactors(
            kafka,
            name=identity.name,
            limit=config.amqp.transaction_producers,
            timeout_s=config.amqp.transaction_timeout_s,
            marks=identity.beside("transactions"),
            spawn=spawn,
            clock=loop.time,
        )
        transactors.start()
        stack.push_async_callback(transactors.stop)
        amqp = AmqpServices(
            config.amqp,
            container_id=f"trivium-{os.getpid()}",
            publisher=publisher,
            tail=tail,
            groups=groups,
            transactions=Transactions(
                kafka, transactors, publisher, spawn=spawn, wall_clock=wall_clock, chance=SystemRandom()
            ),
            authenticator=authenticator,
            access=access,
            wall_clock=wall_clock,
            unguessable=lambda: secrets.token_hex(16),
        )
        mqtt = MqttFront(services, spawn, context)
        amqp_front = AmqpFront(amqp, spawn, context)
        origins = Origins(config.security)
        mqtt_websockets = WebSocketEndpoint(dict.fromkeys(MQTT_SUBPROTOCOLS, mqtt.listener), origins)
        amqp_websockets = WebSocketEndpoint({AMQP_SUBPROTOCOL: amqp_front.listener}, origins)
        http = RestServices(
            config=config.http,
            publisher=publisher,
            topics=topics,
            lookup=lookup,
            tail=tail,
            replay=replay,
            groups=groups,
            authenticator=authenticator,
            access=access,
            origins=origins,
            rules=rules,
            keyed=KeyedRequests(
                requests,
                state,
                publisher,
                lookup,
                client_settings(kafka, "requests"),
                delivery_timeout_s=kafka.delivery_timeout_s,
                spawn=spawn,
                wall_clock=wall_clock,
                unguessable=partial(secrets.token_hex, 8),
            ),
            kafka=client_settings(kafka, "http"),
            spawn=spawn,
            clock=loop.time,
            wall_clock=wall_clock,
            unguessable=partial(secrets.token_hex, 16),
            tracing=tracing,
        )
        rest = RestListener(http, tls=context, websockets={"/mqtt": mqtt_websockets, "/amqp": amqp_websockets})
        self._fronts = [mqtt, amqp_front, rest]
        for name, address, endpoint, limit_s in (
            ("mqtt", config.mqtt.websocket_address, mqtt_websockets, config.mqtt.connect_timeout_s),
            ("amqp", config.amqp.websocket_address, amqp_websockets, config.amqp.open_timeout_s),
        ):
            if address is not None:
                self._fronts.append(WebSocketFront(name, address, endpoint, context, handshake_timeout_s=limit_s))
        stack.push_async_callback(self._stop_fronts)
        for front in self._fronts:
            await front.start()

        lag = LoopLag(loop)
        lag.start()
        stack.callback(lag.stop)
        metrics = Metrics()
        for front in self._fronts:
            add_source(metrics, front.name, front.statistics)
        add_source(metrics, "publisher", publisher.statistics)
        add_source(metrics, "tail", tail.statistics)
        add_source(metrics, "state", state.statistics)
        add_source(metrics, "retained", retained.statistics)
        add_source(metrics, "kafka", groups.statistics)
        add_source(metrics, "authentication", authenticator.statistics)
        add_source(metrics, "event_loop", lag.statistics)
        await self._open_management(metrics, authenticator, access, context, stack)

        def on_hangup() -> None:
            if tls is not None:
                tls.reload()
            spawn(authenticator.reload())

        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        await self._announce(publisher)

    async def _connect_kafka(self, spawn: Any, stack: contextlib.AsyncExitStack) -> KafkaConfig:
        """The Kafka settings in force; starts the embedded broker where none is named."""
        config = self._config
        if config.kafka.bootstrap_servers is not None:
            return config.kafka
        broker = self._broker
        assert broker is not None
        await broker.start()
        stack.push_async_callback(self._stop_broker, broker)
        watching = spawn(self._keep_broker(broker))
        stack.push_async_callback(_end, watching)
        log.info("embedded broker ready", address=broker.bootstrap_servers, pid=broker.pid, log=str(broker.log_file))
        return config.kafka.model_copy(update={"bootstrap_servers": broker.bootstrap_servers})

    async def _keep_broker(self, broker: EmbeddedBroker) -> None:
        """Start the embedded broker again when it ends by itself; clients wait meanwhile, as for any broker."""
        while True:
            try:
                await broker.watch()
                return
            except BrokerError as error:
                log.error("starting the embedded broker again", reason=str(error))
            await asyncio.sleep(RESTART_S)
            try:
                await broker.start()
                if self._ready_file is not None and self._ready_file.exists():
                    self._write_ready_file()
            except BrokerError as error:
                log.error("the embedded broker cannot be started again", reason=str(error))
                self._stop.set()
                return

    async def _open_management(
        self,
        metrics: Metrics,
        authenticator: Authenticator,
        access: AccessList,
        tls: ssl.SSLContext | None,
        stack: contextlib.AsyncExitStack,
    ) -> None:
        async def admit(user: str, password: str, peer: str) -> bool:
            identity = await authenticator.authenticate_password(user, password, peer=peer)
            return identity is not None and access.for_identity(identity).admin.filter("#")

        address = self._config.management.address
        # On loopback nothing can listen in, and probes need no certificate.
        context = None if address.is_loopback else tls
        management = self._management = Management(metrics, self._readiness, admit=admit, ssl_context=context)
        try:
            await management.start(address)
        except OSError as error:
            raise ListenError(listen_error("management.address", address, error)) from error
        stack.push_async_callback(management.stop)

    def _readiness(self) -> tuple[bool, dict[str, Any]]:
        """Ready: every listener accepts, Kafka answers, and the sessions and retained messages are loaded."""
        kafka = self._publisher is not None and self._publisher.reachable
        listeners = {front.name: front.accepting for front in self._fronts}
        state = self._state is not None and self._state.loaded.is_set()
        ready = kafka and state and all(listeners.values()) and not self._stopping
        return ready, {"kafka": kafka, "state": state, "listeners": listeners, "stopping": self._stopping}

    async def _announce(self, publisher: Publisher) -> None:
        """Write the ready file once everything answers."""
        assert self._state is not None
        while not (publisher.reachable and self._state.loaded.is_set()) and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), READY_POLL_S)
        if not self._stop.is_set():
            self._write_ready_file()

    def _write_ready_file(self) -> None:
        """Say where everything is; moved into place, so that nobody reads half of it."""
        if self._ready_file is None:
            return
        assert self._management is not None
        facts: dict[str, Any] = {front.name: front.bound for front in self._fronts}
        facts["management"] = f"{self._config.management.address.host}:{self._management.port}"
        facts["kafka"] = (
            self._broker.bootstrap_servers if self._broker is not None else self._config.kafka.bootstrap_servers
        )
        facts["pid"] = os.getpid()
        facts["kafka_pid"] = self._broker.pid if self._broker is not None else None
        temporary = self._ready_file.with_name(f".{self._ready_file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(facts) + "\n")
        temporary.replace(self._ready_file)

    async def _stop_broker(self, broker: EmbeddedBroker) -> None:
        """Stop the broker in what is left of the time; one that does not follow (it is frozen) is killed.

        Nothing that was acknowledged is lost by that.
        """
        spent = max(0.0, asyncio.get_running_loop().time() - self._stopping_since)
        left = self._config.drain_timeout_s - GOODBYE_S - spent
        await broker.stop(min(STOP_LIMIT_S, max(BROKER_STOP_S, left)))

    async def _stop_sessions(self, sessions: Sessions, publisher: Publisher) -> None:
        """Write down what is left of the sessions, and the wills of those that the stop has ended."""
        await sessions.stop()
        await publisher.drain(GOODBYE_S)

    async def _stop_fronts(self) -> None:
        """Stop accepting, let Kafka answer what was taken, say goodbye; all within `drain_timeout_s`."""
        self._stopping = True
        for front in self._fronts:
            front.stop_taking()
        if self._publisher is not None:
            await self._publisher.drain(self._config.drain_timeout_s / 2)
        await asyncio.gather(*(front.stop(GOODBYE_S) for front in self._fronts))


def _calm_collector() -> None:
    """What was imported lives for ever, and messages are freed by counting: look for cycles less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)


def wall_clock() -> int:
    """Epoch milliseconds."""
    return time.time_ns() // 1_000_000


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
