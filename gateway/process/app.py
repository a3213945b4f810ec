"""The life cycle of a gateway process: start the parts from `assembly`, serve, and stop in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
import uvloop
from aiohttp import web

from gateway.audit.trail import Where, audit
from gateway.embedded.broker import STOP_LIMIT_S, EmbeddedBroker, embedded_broker
from gateway.embedded.jars import console_report
from gateway.embedded.java import SetupError
from gateway.embedded.open_files import BrokerCapacity
from gateway.embedded.storage import BrokerError
from gateway.kafka.cluster.topic_creation import any_capacity
from gateway.kafka.cluster.topic_safety import report
from gateway.kafka.driver.fetch.unreadable import unreadable
from gateway.kafka.driver.login import logins
from gateway.kafka.log import Log
from gateway.kafka.read.delays import delays
from gateway.mqtt.registry.session_views import SessionViews
from gateway.net.descriptors import descriptors
from gateway.net.listener import Listener, ListenError, Server, listen_error, listener_statistics, try_address
from gateway.observe.client_pages import ClientPages
from gateway.observe.clients import ClientList
from gateway.observe.collector import Collector
from gateway.observe.flow import FlowSnapshots, KafkaWatch
from gateway.observe.lag import LoopLag
from gateway.observe.logs import configure_logs
from gateway.observe.management import Management
from gateway.observe.trace_pages import TracePages
from gateway.process.assembly import (
    CLOSE_S,
    ListenerSecurity,
    Process,
    StateTables,
    compile_rules,
    load_certificates,
    open_audit,
    open_listener_security,
    open_log,
    open_state,
    parts_with_statistics,
)
from gateway.process.listeners import make_servers
from gateway.process.ports import addresses, check_exposure, check_ports, check_proxies, listeners
from gateway.runtime.failures import failures
from gateway.runtime.secret import secrets_in
from gateway.runtime.spawn import Tasks, on_loop_error
from gateway.runtime.version import statistics as build_statistics
from gateway.runtime.version import version
from gateway.security.login.authentication import Authenticator
from gateway.security.origins import Hosts, Origins
from gateway.security.rights.authorization import AccessList
from gateway.security.rights.kafka_acls import principal_template
from gateway.security.tenants import Tenants
from gateway.security.variables import check_logins
from gateway.security.watched_files import watch_files
from gateway.settings.config import Config, ConfigError, KafkaConfig
from gateway.views.drain import LEAD_S, Drain
from gateway.views.pauses import pauses
from mapping.rules import RuleError
from telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

SIGNAL: Final = Where("signal")
FILES: Final = Where("files")  # that have changed
READY_POLL_S: Final = 0.1
BROKER_STOP_S: Final = 1.0  # minimum time for the embedded broker to stop
NEEDED: Final = frozenset({"live reader", "state", "topics", "sessions"})  # not ready while one is retried
RESTART_S: Final = 1.0  # before the embedded broker is started again


class StartError(Exception):
    """The gateway cannot start; the text says why and which setting to change."""


class FatalError(Exception):
    """The gateway was serving, lost an essential part, and shut down cleanly; the text says why."""


def check(config: Config) -> None:
    """Check everything that can be checked without starting anything; raises StartError, which names the setting."""
    try:
        compile_rules(config)
        check_ports(config)
        check_exposure(config)
        check_proxies(config)
        AccessList(config.security.access)
        Tenants(config.security, listeners(config))
        principal_template(config.security)
        check_logins(config.security, {login for listener in listeners(config) for login in listener.logins})
        load_certificates(config)
        Authenticator(config.security, config.kafka)
        if config.security.access_source == "kafka" and config.kafka.bootstrap_servers is None:
            raise ConfigError('security.access_source = "kafka" needs your own Kafka: the embedded one has no ACLs')
        logins.of(config.kafka)
    except (ConfigError, RuleError) as error:
        raise StartError(str(error)) from error


def run(config: Config, ready_file: Path | None) -> None:
    """Run the gateway until SIGTERM, `POST /drain` or SIGINT; raises StartError or FatalError."""
    configure_logs(config.log, secrets=secrets_in(config))
    check(config)
    broker = None
    if config.kafka.bootstrap_servers is None:
        try:
            with console_report() as report:  # downloading the jars may take long: not in the event loop
                broker = embedded_broker(config.embedded, config.data_dir, report)
        except SetupError as error:
            raise StartError(str(error)) from error
    uvloop.run(App(config, ready_file, broker).run())


class App:
    """One gateway process."""

    def __init__(self, config: Config, ready_file: Path | None = None, broker: EmbeddedBroker | None = None) -> None:
        """Create the process's state; `run` opens everything. `broker` is started and stopped with the gateway."""
        self._config = config
        self._ready_file = ready_file
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()  # stop now: do not drain, or stop draining
        self._drain = Drain(
            config.drain,
            lambda: self._servers,
            settle_s=config.drain_timeout_s / 2,
            lead_s=LEAD_S if config.kafka.bootstrap_servers is not None else 0.0,
        )
        self._starting: asyncio.Task[Any] | None = None
        self._stopping_since = float("inf")  # by the loop's clock
        self._failure: BaseException | None = None
        self._served = False
        self._broker = broker
        self._room = None if broker is None else BrokerCapacity(lambda: broker.pid if broker.is_running else None)
        self._servers: list[Server] = []
        self._management: Management  # this and the next three: from the start on
        self._security: ListenerSecurity
        self._log: Log
        self._state: StateTables
        self._tasks = Tasks(self._give_up)

    async def run(self) -> None:
        """Start, serve until a signal, and stop.

        Raises:
            StartError: the gateway could not start.
            FatalError: an essential part failed; the connections have been closed.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(on_loop_error)
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        loop.add_signal_handler(signal.SIGINT, self._on_stop)
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)  # of a gateway that was killed
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._start_or_stop(stack)
                await self._stop.wait()
                if self._served and not self._hurry.is_set():
                    await self._drain.run(self._hurry)
                self._stopping_since = loop.time()
                log.info("stopping")
        except (ConfigError, ListenError, BrokerError) as error:
            raise StartError(str(error)) from error
        finally:
            await self._tasks.close()  # work for clients that have disconnected
            if self._ready_file is not None:
                self._ready_file.unlink(missing_ok=True)
        if self._failure is not None:
            kind = FatalError if self._served else StartError
            raise kind(str(self._failure) or repr(self._failure)) from self._failure

    def _on_sigterm(self) -> None:
        """Handle SIGTERM like `POST /drain`."""
        audit.act(SIGNAL, "", "drain")
        self._on_drain()

    def _on_drain(self) -> None:
        """Drain: disconnect the clients at a rate, then stop. A second call stops without draining."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()
        if self._starting is not None:
            self._starting.cancel()

    def _on_stop(self) -> None:
        """Stop without draining; only Kafka's answers are awaited."""
        self._hurry.set()
        self._on_drain()

    def _give_up(self, error: BaseException) -> None:
        """Shut down cleanly after the failure of an essential part; `run` raises the reason."""
        if self._failure is None and not self._hurry.is_set():
            log.error("the gateway stops after a fatal failure", reason=str(error) or repr(error))
            self._failure = error
        self._on_stop()

    async def _start_or_stop(self, stack: contextlib.AsyncExitStack) -> None:
        """Start. A signal cancels the start; the parts that were already started are stopped normally."""
        task = self._starting = asyncio.current_task()
        assert task is not None
        try:
            await self._start(stack)
            if self._stop.is_set():
                return
            self._served = True
            bound = {listener.name: listener.bound for listener in self._listeners}
            log.info("ready", **bound, console=f"{self._management.url}/console")
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise
            task.uncancel()
        finally:
            self._starting = None

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        """Start each part and push its stop onto the stack, so that the parts stop in reverse order."""
        config = self._config
        loop = asyncio.get_running_loop()
        descriptors.watch(self._tasks.spawn)
        log.info("starting", version=version())
        if "TRIVIUM_NATIVE" in os.environ:
            log.warning("TRIVIUM_NATIVE has no meaning any more: the C extensions are always in use")
        for warning in check_exposure(config):
            log.warning("exposed", detail=warning)
        process = Process(config, self._tasks, stack, loop)
        security = self._security = await open_listener_security(process)
        for warning in security.access_list.doubtful():
            log.warning("access list", detail=warning)
        for key, address in addresses(config):
            await try_address(key, address)
        kafka = await self._connect_kafka(process)
        kafka_log = self._log = await open_log(process, kafka, security, self._room or any_capacity)
        state = self._state = await open_state(process, kafka_log, security.rules, self._give_up)
        audit_file = open_audit(process, kafka_log, state.identity.name)
        self._servers = make_servers(process, security, kafka_log, state)
        stack.push_async_callback(self._stop_servers)
        for server in self._servers:
            await server.start()

        lag = LoopLag(loop)
        lag.start()
        stack.callback(lag.stop)
        metrics = Metrics()
        for server in self._servers:
            metrics.add_source(server.name, server.statistics)
        metrics.add_source("listener", lambda: listener_statistics(self._listeners, self._certificate_ends()))
        for name, statistics in parts_with_statistics(security, kafka_log, state):
            metrics.add_source(name, statistics)
        metrics.add_source("event_loop", lag.statistics)
        collector = Collector(loop)
        metrics.add_source("collector", collector.statistics)
        metrics.add_source("failures", failures.statistics)
        metrics.add_source("build", build_statistics)
        metrics.add_source("kafka_login", logins.statistics)
        metrics.add_source("unreadable", unreadable.statistics)
        metrics.add_source("delivery", delays.statistics)
        metrics.add_source("descriptors", descriptors.statistics)
        if self._room is not None:
            metrics.add_source("embedded_kafka", self._room.statistics)
        metrics.add_source("flow", pauses.statistics)
        metrics.add_source("drain", self._drain.statistics)
        metrics.add_source("audit", audit.statistics)
        watch = KafkaWatch(loop, kafka_log.publisher, pauses)
        watch.start()
        stack.callback(watch.stop)
        flow = FlowSnapshots([server.flowing for server in self._servers], kafka_log.publisher.budgets.flow, pauses)
        clients = ClientList(
            [server.clients for server in self._servers], SessionViews(state.mqtt.sessions, kafka_log.lookup), pauses
        )
        traces = TracePages(clients)
        routes = (*ClientPages(clients).routes(), *traces.routes())
        stack.push_async_callback(await self._open_management(metrics, flow, routes))
        stack.callback(traces.stop)  # runs first, because the management listener waits for the traces' readers

        def reload(where: Where) -> None:
            audit.act(where, "", "reload")
            if audit_file is not None:
                audit_file.reopen()
            security.certificates.reload()
            logins.reload()
            security.acls.refresh()
            self._tasks.spawn(security.authenticator.reload())

        loop.add_signal_handler(signal.SIGHUP, reload, SIGNAL)
        if config.security.reload_s:
            parts = [config.security, *config.listeners]
            watching = watch_files(parts, config.security.reload_s, partial(reload, FILES))
            process.end_by_cancelling(self._tasks.spawn(watching))
        await self._announce()
        collector.start()
        stack.callback(collector.stop)

    def _certificate_ends(self) -> dict[str, float]:
        """Return the ends of the listeners' certificates in use, by the listener's name."""
        used = {listener.name: listener.settings.tls for listener in self._listeners}
        if not self._config.management.address.is_loopback:
            used["management"] = self._config.security.tls
        ends = {name: self._security.certificates.end(tls) for name, tls in used.items() if tls is not None}
        return {name: end for name, end in ends.items() if end is not None}

    async def _connect_kafka(self, process: Process) -> KafkaConfig:
        """Return the effective Kafka settings; starts the embedded broker if no servers are configured."""
        config = self._config
        if config.kafka.bootstrap_servers is not None:
            return config.kafka
        broker = self._broker
        assert broker is not None
        await broker.start()
        process.stack.push_async_callback(self._stop_broker, broker)
        process.end_by_cancelling(self._tasks.essential(self._keep_broker(broker)))
        log.info("embedded broker ready", address=broker.bootstrap_servers, pid=broker.pid, log=str(broker.log_file))
        return config.kafka.model_copy(update={"bootstrap_servers": broker.bootstrap_servers})

    async def _keep_broker(self, broker: EmbeddedBroker) -> None:
        """Restart the embedded broker whenever it exits; clients wait meanwhile, as for any broker.

        Raises:
            BrokerError: the broker cannot be restarted.
        """
        while True:
            try:
                await broker.watch()
                return
            except BrokerError as error:
                log.error("restarting the embedded broker", reason=str(error))
            await asyncio.sleep(RESTART_S)
            await broker.start()
            if self._ready_file is not None and self._ready_file.exists():
                self._write_ready_file()

    async def _open_management(
        self, metrics: Metrics, flow: FlowSnapshots, routes: Sequence[web.RouteDef]
    ) -> Callable[[], Awaitable[None]]:
        """Open the management listener and return its stop."""
        security = self._security

        async def admit(user: str, password: str, peer: str) -> bool:
            identity = await security.authenticator.authenticate_password(user, password, peer=peer)
            if identity is None or not security.tenants.is_operator(identity):
                return False
            return security.access_list.for_client(identity, peer=peer).admin.whole("#")

        address = self._config.management.address
        # On loopback nothing can eavesdrop, and probes need no certificate.
        settings = self._config.security
        context = None if address.is_loopback else security.certificates.context(settings.tls)
        management = self._management = Management(
            metrics,
            self._readiness,
            flow,
            admit=admit,
            hosts=Hosts(settings, login_needed=not (address.is_loopback or settings.allow_anonymous)),
            origins=Origins(settings),
            ssl_context=context,
            spark_jobs=self._config.management.spark_jobs,
            drain=self._on_drain,
            topics=partial(report, self._log.topics.queries, required=self._config.kafka.require_safe_topics),
            more=routes,
        )
        try:
            await management.start(address)
        except OSError as error:
            raise ListenError(listen_error("management.address", address, error)) from error
        return management.stop

    @property
    def _can_serve(self) -> bool:
        """Whether Kafka answers and the state and access rules are loaded."""
        loaded = self._state.topics.loaded.is_set() and self._security.acls.has_rules
        return loaded and self._log.publisher.reachable

    def _readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether every listener accepts, Kafka answers and the state is loaded; and the details."""
        kafka = self._log.publisher.reachable
        listeners = {listener.name: listener.accepting for listener in self._listeners}
        state = self._state.topics.loaded.is_set()
        retrying = failures.retrying
        stopping = self._stop.is_set()
        ready = self._can_serve and all(listeners.values()) and not stopping and NEEDED.isdisjoint(retrying)
        details = {"kafka": kafka, "state": state, "listeners": listeners, "stopping": stopping}
        more: dict[str, Any] = {"version": version(), "kafka_acls": self._security.acls.problem}
        more |= {"kafka_login": logins.problem, "retrying": list(retrying), "open_files_used_up": descriptors.paused}
        return ready, details | more

    async def _announce(self) -> None:
        """Write the ready file once `_can_serve`."""
        while not self._can_serve and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), READY_POLL_S)
        if not self._stop.is_set():
            self._write_ready_file()

    def _write_ready_file(self) -> None:
        """Write all addresses and process ids. The file is moved into place, so that readers never see half of it."""
        if self._ready_file is None:
            return
        facts: dict[str, Any] = {listener.name: listener.bound for listener in self._listeners}
        facts["management"] = self._management.address
        facts["kafka"] = (
            self._broker.bootstrap_servers if self._broker is not None else self._config.kafka.bootstrap_servers
        )
        facts["pid"] = os.getpid()
        facts["kafka_pid"] = self._broker.pid if self._broker is not None else None
        temporary = self._ready_file.with_name(f".{self._ready_file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(facts) + "\n")
        temporary.replace(self._ready_file)

    async def _stop_broker(self, broker: EmbeddedBroker) -> None:
        """Stop the broker in the remaining time; a broker that does not react (it is frozen) is killed.

        No acknowledged record is lost by that.
        """
        spent = max(0.0, asyncio.get_running_loop().time() - self._stopping_since)
        left = self._config.drain_timeout_s - CLOSE_S - spent
        await broker.stop(min(STOP_LIMIT_S, max(BROKER_STOP_S, left)))

    @property
    def _listeners(self) -> list[Listener]:
        """The listeners of all protocols."""
        return [listener for server in self._servers for listener in server.listeners]

    async def _stop_servers(self) -> None:
        """Stop accepting, wait for Kafka's outstanding answers, and close all connections, within `drain_timeout_s`."""
        for server in self._servers:
            server.stop_receiving()
        await self._log.publisher.drain(self._config.drain_timeout_s / 2)
        ends = await asyncio.gather(*(server.stop(CLOSE_S) for server in self._servers), return_exceptions=True)
        for server, error in zip(self._servers, ends, strict=True):
            if error is not None:  # the other servers have closed normally
                failures.report("listener", error, server.name)
