"""The files next to the embedded broker's data: settings, ports, lock, and the version that wrote the data."""

from __future__ import annotations

import base64
import fcntl
import os
import random
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from gateway.embedded.java import SetupError

LAYOUT = 1  # version of our own files; incremented when an older Trivium could not use them
HOST = "127.0.0.1"
NODE = "1"  # the node id of a single broker
LEAST_SPACE_BYTES = 64 * 1024 * 1024  # Kafka stops in the middle of a write when the disk is full: fail before

# Free ports are chosen below the kernel's ephemeral range (from 32768 on Linux). Within it, a client that keeps
# connecting to the port of a killed broker would eventually connect to itself, and the broker could not bind any more.
FREE_PORTS = (20_000, 32_000)


class BrokerError(SetupError):
    """The embedded broker cannot start or has ended."""


class PortTakenError(BrokerError):
    """Another program listens on a port that the broker was told to use."""


class Marker(msgspec.Struct, frozen=True):
    """`broker.json`: what the next start needs to know."""

    layout: int  # `LAYOUT`
    kafka: str  # the version that wrote the data
    cluster_id: str  # Kafka's
    port: int  # of the last start
    controller_port: int  # of the last start


def read_marker(directory: Path, kafka: str) -> Marker | None:
    """Return the last start's marker, or None when there was no start.

    Raises:
        BrokerError: the data were written by another version, or not by us.
    """
    try:
        marker = msgspec.json.decode((directory / "broker.json").read_bytes(), type=Marker)
    except FileNotFoundError:
        marker = None
    except msgspec.DecodeError as error:
        raise BrokerError(f"{directory / 'broker.json'} cannot be read ({error}): move {directory} away") from error
    if not (directory / "data").exists():
        return marker
    if marker is None:
        raise BrokerError(f"{directory / 'data'} was not written by Trivium: use another --data-dir or move it away")
    if (marker.layout, marker.kafka) != (LAYOUT, kafka):
        raise BrokerError(
            f"the data in {directory} were written by Kafka {marker.kafka} (layout {marker.layout}), this is"
            f" {kafka} (layout {LAYOUT}): use another --data-dir, or move the directory away and start empty"
        )
    return marker


def write_marker(directory: Path, marker: Marker) -> None:
    """Replace `broker.json` atomically."""
    fresh = directory / "broker.json.new"
    fresh.write_bytes(msgspec.json.encode(marker))
    fresh.replace(directory / "broker.json")


def new_cluster_id() -> str:
    """Return a random cluster id in Kafka's format: 16 bytes in URL-safe base64, not starting with a dash."""
    while True:
        text = base64.urlsafe_b64encode(secrets.token_bytes(16)).rstrip(b"=").decode()
        if not text.startswith("-"):
            return text


def lock(directory: Path) -> int:
    """Lock the data directory and return the lock's file descriptor, which the broker inherits.

    The lock is held until the descriptor is closed and the broker has ended.

    Raises:
        BrokerError: a running broker uses the directory.
    """
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise BrokerError(
            f"{directory} is in use by another running broker ({holder or 'just starting'}):"
            " stop it or use another --data-dir"
        ) from None
    return descriptor


def note_holder(descriptor: int, pid: int) -> None:
    """Write the holder's process id into the lock file, for the error message of another start."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {pid}\n".encode(), 0)


def check_space(directory: Path) -> None:
    """Raise BrokerError when the disk is nearly full."""
    free = shutil.disk_usage(directory).free
    if free < LEAST_SPACE_BYTES:
        raise BrokerError(
            f"the disk is full: {free // 1024 // 1024} MiB are left for {directory},"
            f" the broker needs {LEAST_SPACE_BYTES // 1024 // 1024} MiB at least"
        )


def is_free(port: int) -> bool:
    """Whether the broker could listen on `port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java: old connections do not matter
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def choose_port(wanted: int, last: int, key: str, taken: int, draw: Callable[[int, int], int] = random.randint) -> int:
    """Return the port to listen on, other than `taken`. `key` is its configuration key.

    If `wanted` is 0, it is the port of the last start, so that clients find the broker, or else a free one.

    Raises:
        PortTakenError: `wanted` is in use.
    """
    if wanted:
        if not is_free(wanted):
            raise PortTakenError(
                f"port {wanted} on {HOST} is taken ({key}): stop the program that uses it, or set {key}"
                " to another port (0: a free one)"
            )
        return wanted
    if last and last != taken and is_free(last):
        return last
    for _ in range(100):
        port = draw(*FREE_PORTS)
        if port != taken and is_free(port):
            return port
    raise PortTakenError(f"no free port found between {FREE_PORTS[0]} and {FREE_PORTS[1]}: set {key}")


def server_properties(port: int, controller_port: int, data: str, extra: Mapping[str, str]) -> str:
    """Return the broker's settings: a single node on this machine, with small internal topics.

    `data` is relative to the broker's working directory, so that no path needs quoting. `extra` overrides the defaults.
    """
    settings = {
        "process.roles": "broker,controller",
        "node.id": NODE,
        "controller.quorum.voters": f"{NODE}@{HOST}:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "log.dirs": data,
        "num.partitions": "3",
        "auto.create.topics.enable": "false",  # the gateway decides (kafka.create_topics)
        "compression.type": "producer",
        "message.max.bytes": "10485760",  # kafka.max_request_bytes: Kafka's 1 MiB is less than the protocols' limits
        "log.retention.hours": "168",  # by time only: a limit in bytes could delete what a load test has yet to read
        "log.cleaner.dedupe.buffer.size": "33554432",  # the default takes an eighth of the heap
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "share.coordinator.state.topic.num.partitions": "4",
        "group.initial.rebalance.delay.ms": "0",  # for members that start together; here they start one by one
        "broker.session.timeout.ms": "3000",  # a restart after a crash waits until the node's former session expires
        "broker.heartbeat.interval.ms": "500",
        **extra,
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


LOG4J2 = """\
status=error
appender.file.type=RollingFile
appender.file.name=file
appender.file.fileName=logs/broker.log
appender.file.filePattern=logs/broker.log.%i
appender.file.layout.type=PatternLayout
appender.file.layout.pattern=%d{yyyy-MM-dd'T'HH:mm:ss.SSS} %p %m (%c)%n
appender.file.policies.type=Policies
appender.file.policies.size.type=SizeBasedTriggeringPolicy
appender.file.policies.size.size=10MB
appender.file.strategy.type=DefaultRolloverStrategy
appender.file.strategy.max=3
rootLogger.level=info
rootLogger.appenderRef.file.ref=file
"""
