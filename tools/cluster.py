"""Run a cluster of three Kafka brokers on this machine: `make cluster`.

Each node is a broker and controller, a child process like the embedded broker. By default topics have three replicas
and min.insync.replicas=2. It is for testing what a single broker cannot show, such as moving leaders and missing
replicas. `python -m tools.cluster` prints the bootstrap servers and runs until Ctrl-C or SIGTERM. A broker
that ends meanwhile stays down until SIGHUP, which starts all missing brokers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from gateway.embedded import storage
from gateway.embedded.broker import EmbeddedBroker
from gateway.embedded.class_archive import archive_options, archive_path
from gateway.embedded.jars import cache_directory, console_report, ensure_jars, locked_version
from gateway.embedded.java import SetupError, find_java
from gateway.embedded.storage import HOST, BrokerError, Marker, PortTakenError
from gateway.runtime.spawn import Tasks
from tools.acls import allow_gateway
from tools.secured import LISTENERS, USER, Secured

NODES: Final = (1, 2, 3)
HEAP: Final = "256m"
SETTINGS: Final[Mapping[str, str]] = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
    "broker.session.timeout.ms": "9000",  # Kafka's default: three brokers on one machine may have to wait for a CPU
    "broker.heartbeat.interval.ms": "2000",
}
"""Settings of a cluster that differ from those of the single embedded broker."""
SINGLE_BROKER: Final[Mapping[str, str]] = dict.fromkeys(
    (name for name in SETTINGS if name.endswith(("replication.factor", "min.insync.replicas", "min.isr"))), "1"
)
"""Settings of a cluster with one broker that differ from these."""
START_ATTEMPTS: Final = 3  # another program may take a free port between the check and a broker's bind


class Cluster:
    """Three brokers, or those of `nodes`. `start` and `stop` may be called repeatedly; the data and the ports stay."""

    def __init__(
        self,
        directory: Path,
        *,
        java: Path,
        jars: Sequence[Path],
        heap: str = HEAP,
        settings: Mapping[str, str] | None = None,
        java_options: Sequence[str] = (),
        nodes: Sequence[int] = NODES,
        secured: Secured | None = None,
    ) -> None:
        """Describe the brokers; nothing happens before `start`. For the arguments see `EmbeddedBroker`.

        `heap` is for each broker. With `secured` they also have its listeners, which authenticate clients.
        """
        self.directory = directory.absolute()
        self.nodes = nodes
        self.secured = secured
        self.ports: dict[int, dict[str, int]] = {}  # of the secured listeners, by node and name
        self.brokers: dict[int, EmbeddedBroker] = {}  # by node; empty before the first start
        self._java = java
        self._jars = jars
        self._heap = heap
        self._settings = {**SETTINGS, **(SINGLE_BROKER if len(nodes) == 1 else {}), **(settings or {})}
        self._java_options = java_options

    @property
    def bootstrap_servers(self) -> str:
        """The addresses for Kafka clients."""
        return ",".join(broker.bootstrap_servers for broker in self.brokers.values())

    def servers(self, listener: str) -> str:
        """Return the addresses of a secured listener for Kafka clients."""
        return ",".join(f"{HOST}:{self.ports[node][listener]}" for node in self.nodes)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the brokers that do not run, and return when all of them serve clients.

        Raises:
            BrokerError: see `EmbeddedBroker.start`.
        """
        for attempt in range(START_ATTEMPTS):
            is_new = not any(broker.is_running for broker in self.brokers.values())
            if is_new:
                self.brokers = self._describe()
            try:
                await self._start_missing()
                return
            except PortTakenError:
                if not is_new or attempt + 1 == START_ATTEMPTS:
                    raise

    async def _start_missing(self) -> None:
        """Start them at the same time: none serves clients before a majority of the controllers runs."""
        missing = [broker for broker in self.brokers.values() if not broker.is_running]

        async def start(broker: EmbeddedBroker) -> None:
            try:
                await broker.start()
            except BrokerError:  # the others would wait for this one
                await asyncio.gather(*(other.kill() for other in missing))
                raise

        ended = await asyncio.gather(*map(start, missing), return_exceptions=True)
        errors = [error for error in ended if error is not None]
        if errors:
            raise min(errors, key=lambda error: not isinstance(error, PortTakenError))

    def _describe(self) -> dict[int, EmbeddedBroker]:
        """Describe the brokers, with the ports of the last start where these are free."""
        kafka = locked_version("kafka", "kafka_2.13")
        markers = {node: storage.read_marker(self._home(node), kafka) for node in self.nodes}
        ids = [marker.cluster_id for marker in markers.values() if marker is not None]
        cluster_id = ids[0] if ids else storage.new_cluster_id()
        ports: dict[int, tuple[int, int]] = {}
        taken: set[int] = set()
        for node, marker in markers.items():
            last = (marker.port, marker.controller_port) if marker is not None else (0, 0)
            port, controller = (_free(one, taken) for one in last)
            ports[node] = port, controller
            if marker is None:
                self._home(node).mkdir(parents=True, exist_ok=True)
                storage.write_marker(self._home(node), Marker(storage.LAYOUT, kafka, cluster_id, port, controller))
            if self.secured is not None:
                last_ports = self.ports.get(node, {})
                self.ports[node] = {name: _free(last_ports.get(name, 0), taken) for name in LISTENERS}
        secured = self.secured
        if secured is not None:
            secured.prepare()
        voters = ",".join(f"{node}@{HOST}:{controller}" for node, (_, controller) in ports.items())
        return {
            node: EmbeddedBroker(
                self._home(node),
                java=self._java,
                jars=self._jars,
                port=port,
                controller_port=controller,
                heap=self._heap,
                settings={
                    **self._settings,
                    "node.id": str(node),
                    "controller.quorum.voters": voters,
                    "broker.rack": f"rack-{node}",
                    "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
                    **({} if secured is None else secured.settings(port, controller, self.ports[node])),
                },
                java_options=(*self._java_options, *(() if secured is None else secured.java_options)),
                format_options=() if secured is None else secured.format_options,
            )
            for node, (port, controller) in ports.items()
        }

    def _home(self, node: int) -> Path:
        return self.directory / str(node)

    async def stop(self) -> None:
        """Stop all brokers, with SIGTERM first."""
        await asyncio.gather(*(broker.stop() for broker in self.brokers.values()))

    async def kill(self) -> None:
        """Kill all brokers at the same time, like a power failure."""
        await asyncio.gather(*(broker.kill() for broker in self.brokers.values()))


def _free(last: int, taken: set[int]) -> int:
    """Choose a port that no other node has."""
    while (port := storage.choose_port(0, last, "the cluster's ports", 0)) in taken:
        last = 0
    taken.add(port)
    return port


def new_cluster(
    directory: Path,
    heap: str = HEAP,
    settings: Mapping[str, str] | None = None,
    *,
    nodes: Sequence[int] = NODES,
    secured: bool = False,
) -> Cluster:
    """Find Java, fetch the jars, and describe a cluster in `directory`. Raises SetupError."""
    java = find_java()
    with console_report() as report:
        jars = ensure_jars("kafka", report=report)
    archive = archive_options(archive_path("kafka", java, jars, cache_directory()))
    return Cluster(
        directory, java=java.path, jars=jars, heap=heap, settings=settings, java_options=archive, nodes=nodes,
        secured=Secured(directory / "secured") if secured else None,
    )  # fmt: skip


class Command:
    """The command: reports the running brokers, restarts missing ones on SIGHUP, ends on SIGTERM and Ctrl-C."""

    def __init__(self, cluster: Cluster, ready_file: Path | None) -> None:
        self._cluster = cluster
        self._ready_file = ready_file
        self._changed = asyncio.Event()  # a signal was received, or a broker has ended
        self._is_ending = self._starts_again = False
        self._starting: asyncio.Task[None] | None = None
        self._tasks = Tasks(lambda _: None)

    async def run(self) -> None:
        """Run until a signal. Raises BrokerError when the cluster cannot start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGHUP, self._start_again)
        try:
            await self._start()
            if not self._is_ending:
                _print(f"bootstrap servers: {self._cluster.bootstrap_servers}")
                await self._print_secured()
                await self._watch()
        finally:
            await self._cluster.stop()
            await self._tasks.close()
            if self._ready_file is not None:
                self._ready_file.unlink(missing_ok=True)

    async def _start(self) -> None:
        """Start the brokers that do not run; SIGTERM and Ctrl-C cancel that."""
        task = self._starting = asyncio.current_task()
        assert task is not None
        try:
            await self._cluster.start()
        except asyncio.CancelledError:
            if not self._is_ending:
                raise
            task.uncancel()
        finally:
            self._starting = None

    async def _print_secured(self) -> None:
        """Give the gateway's user its rights, and print how to use them."""
        secured = self._cluster.secured
        if secured is not None:
            await allow_gateway(self._cluster.bootstrap_servers, USER)
            for name in LISTENERS:
                _print(f"{name}: {self._cluster.servers(name)}")
            _print(f"keys, certificates and the password of {USER}: {secured.ca.parent}")
            _print(f"a gateway that logs in: trivium up --config {secured.write_config(self._cluster.servers('SASL'))}")

    async def _watch(self) -> None:
        watched: set[int] = set()  # process ids
        while not self._is_ending:
            for node, broker in self._cluster.brokers.items():
                if broker.is_running and broker.pid not in watched:
                    watched.add(broker.pid)
                    _print(f"node {node}: {broker.bootstrap_servers}, process {broker.pid}")
                    self._tasks.spawn(self._report_end(node, broker))
            self._write_ready_file()
            await self._changed.wait()
            self._changed.clear()
            if self._starts_again and not self._is_ending:
                self._starts_again = False
                try:
                    await self._start()
                except BrokerError as error:
                    _print(f"not all nodes could be started: {error}")

    async def _report_end(self, node: int, broker: EmbeddedBroker) -> None:
        try:
            await broker.watch()
        except BrokerError as error:
            _print(f"node {node} is down: {error}; kill -HUP {os.getpid()} starts it again")
        self._changed.set()

    def _write_ready_file(self) -> None:
        """Write the ready file with the running brokers. It is replaced atomically."""
        if self._ready_file is None:
            return
        brokers = sorted(self._cluster.brokers.items())
        secured = self._cluster.secured
        facts: dict[str, Any] = {
            "pid": os.getpid(),
            "bootstrap_servers": self._cluster.bootstrap_servers,
            "nodes": {node: broker.pid for node, broker in brokers if broker.is_running},
            "addresses": {node: broker.bootstrap_servers for node, broker in brokers},
            "secured": {name: self._cluster.servers(name) for name in LISTENERS if secured is not None},
            "secrets": None if secured is None else str(secured.ca.parent),
        }
        fresh = self._ready_file.with_name(f".{self._ready_file.name}.new")
        fresh.write_text(json.dumps(facts) + "\n")
        fresh.replace(self._ready_file)

    def _end(self) -> None:
        self._is_ending = True
        self._changed.set()
        if self._starting is not None:
            self._starting.cancel()

    def _start_again(self) -> None:
        self._starts_again = True
        self._changed.set()


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Run `python -m tools.cluster`."""
    parser = argparse.ArgumentParser(prog="python -m tools.cluster", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(".trivium/cluster"), help="where the data are kept")
    parser.add_argument("--heap", default=HEAP, help="heap of each broker (default: %(default)s)")
    parser.add_argument(
        "--ready-file", type=Path, help="JSON file, written when all brokers serve, and when one ends or is back"
    )
    parser.add_argument(
        "--secured", action="store_true", help="add listeners with TLS, SASL and ACLs; uses its own data directory"
    )
    options = parser.parse_args()
    directory = options.directory / "with-logins" if options.secured else options.directory
    try:
        cluster = new_cluster(directory, options.heap, secured=options.secured)
        asyncio.run(Command(cluster, options.ready_file).run())
    except (SetupError, BrokerError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
