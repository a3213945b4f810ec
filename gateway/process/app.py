"""The life cycle of a gateway process: start the parts from `assembly`, serve, and stop in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import structlog
import uvloop
from aiohttp import web

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
from gateway.process import own_kafka
from gateway.process.assembly import (
    CLOSE_S,
    ListenerSecurity,
    Process,
    StateTables,
    compile_rules,
    load_certificates,
    open_listener_security,
    open_log,
    open_state,
    parts_with_statistics,
)
from gateway.process.listeners import make_servers
from gateway.process.own_kafka import OwnKafka
from gateway.process.ports import addresses, check_exposure, check_ports, check_proxies, listeners
from gateway.runtime.audited import Where, audit
from gateway.runtime.failures import failures
from gateway.runtime.parts import PartError, load
from gateway.runtime.secret import secrets_in
from gateway.runtime.spawn import Tasks, on_loop_error
from gateway.runtime.version import statistics as build_statistics
from gateway.runtime.version import version
from gateway.security.login.authentication import Authenticator
from gateway.security.origins import Hosts, Origins
from gateway.security.rights.authorization import AccessList
from gateway.security.rights.kafka_acls import principal_template
from gateway.security.tenancy import tenant_source
from gateway.security.variables import check_logins
from gateway.security.watched_files import watch_files
from gateway.settings.config import Config, ConfigError, KafkaConfig
from gateway.settings.installed import check_installed
from gateway.views.drain import LEAD_S, Drain
from gateway.views.pauses import pauses
from mapping.rules import RuleError
from telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

SIGNAL: Final = Where("signal")
FILES: Final = Where("files")  # that have changed
READY_POLL_S: Final = 0.1
NEEDED: Final = frozenset({"live reader", "state", "topics", "sessions"})  # not ready while one is retried


class StartError(Exception):
    """The gateway cannot start; the text says why and which setting to change."""


class FatalError(Exception):
    """The gateway was serving, lost an essential part, and shut down cleanly; the text says why."""


def check(config: Config) -> None:
    """Check everything that can be checked without starting anything; raises StartError, which names the setting."""
    try:
        check_installed(config)
        compile_rules(config)
        check_ports(config)
        check_exposure(config)
        check_proxies(config)
        AccessList(config.security.access)
        tenant_source(config, listeners(config))
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
    try:
        kafka = own_kafka.prepare(config)  # before the event loop runs: it may download jars
    except (ConfigError, PartError) as error:
        raise StartError(str(error)) from error
    uvloop.run(App(config, ready_file, kafka).run())


class App:
    """One gateway process."""

    def __init__(self, config: Config, ready_file: Path | None = None, kafka: OwnKafka | None = None) -> None:
        """Create the process's state; `run` opens everything. `kafka` is started and stopped with the gateway."""
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
        self._own_kafka = kafka
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
        except (ConfigError, ListenError, PartError) as error:
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
        kafka_log = self._log = await open_log(
            process, kafka, security, own.capacity if (own := self._own_kafka) is not None else any_capacity
        )
        state = self._state = await open_state(process, kafka_log, security.rules, self._give_up)
        trail = None
        if (audit_part := load("audit")) is not None:
            trail = audit_part.open_trail(
                config, state.identity.name, kafka_log.publisher, kafka_log.topics, spawn=process.spawn, stack=stack
            )
        self._servers = make_servers(process, security, kafka_log, state)
        stack.push_async_callback(self._stop_servers)
        for server in self._servers:
            await server.start()

        lag = LoopLag(loop)
        lag.start()
        stack.callback(lag.stop)
        metrics = Metrics()
        for name, statistics in chain.from_iterable(server.sources() for server in self._servers):
            metrics.add_source(name, statistics)
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
        if self._own_kafka is not None:
            metrics.add_source("embedded_kafka", self._own_kafka.capacity.statistics)
        metrics.add_source("flow", pauses.statistics)
        metrics.add_source("drain", self._drain.statistics)
        if trail is not None:
            metrics.add_source("audit", trail.statistics)
        watch = KafkaWatch(loop, kafka_log.publisher, pauses)
        watch.start()
        stack.callback(watch.stop)
        flow = FlowSnapshots([server.flowing for server in self._servers], kafka_log.publisher.budgets.flow, pauses)
        clients = ClientList(
            [server.clients for server in self._servers], SessionViews(state.mqtt.sessions, kafka_log.lookup), pauses
        )
        routes = [*ClientPages(clients).routes()]
        traces = None if (trace_part := load("trace")) is None else trace_part.TracePages(clients)
        if traces is not None:
            routes += traces.routes()
        stack.push_async_callback(await self._open_management(metrics, flow, routes))
        if traces is not None:
            stack.callback(traces.stop)  # runs first, because the management listener waits for the traces' readers

        def reload(where: Where) -> None:
            audit.act(where, "", "reload")
            if trail is not None:
                trail.reopen()
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
        own = self._own_kafka
        if own is None:
            return self._config.kafka
        await own.start()
        process.stack.push_async_callback(self._stop_kafka, own)
        process.end_by_cancelling(self._tasks.essential(own.keep(self._restarted)))
        return self._config.kafka.model_copy(update={"bootstrap_servers": own.address})

    def _restarted(self) -> None:
        """Tell the new process id."""
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
        own = self._own_kafka
        facts["kafka"] = own.address if own is not None else self._config.kafka.bootstrap_servers
        facts["pid"] = os.getpid()
        facts["kafka_pid"] = own.pid if own is not None else None
        temporary = self._ready_file.with_name(f".{self._ready_file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(facts) + "\n")
        temporary.replace(self._ready_file)

    async def _stop_kafka(self, own: OwnKafka) -> None:
        """Stop the embedded Kafka in the time that is left."""
        spent = max(0.0, asyncio.get_running_loop().time() - self._stopping_since)
        await own.stop(self._config.drain_timeout_s - CLOSE_S - spent)

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
