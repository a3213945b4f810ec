"""The scenario `idle` without sockets, for more connections than the limit of open files allows: 50,000 in one process.

    python -m loadtest.bench.idle_in_memory BOOTSTRAP [--connections 50000]

The gateway's MQTT server runs in this process, and each client is connected to its pump by a pair of in-memory
transports. CPU time and memory are therefore those of the gateway and the clients together, without the cost of sockets
in the kernel and uvloop. Compare how they grow rather than their absolute values.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import gc
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from gateway.mqtt.server import MqttServer
from gateway.observe.collector import Collector
from gateway.observe.logs import configure_logs
from gateway.process.assembly import Process, open_listener_security, open_log, open_state, parts_with_statistics
from gateway.process.listeners import make_mqtt
from gateway.runtime.spawn import Tasks
from gateway.settings.config import Address, Config, KafkaConfig, LogConfig, MqttConfig
from loadtest.clients.joining import C
from loadtest.report import Report
from loadtest.scenarios.idle import Idle, Plan
from loadtest.scenarios.memory import Scales
from telemetry.metrics import Metrics


class End(asyncio.Transport):
    """One end of an in-memory transport. Data written to it reaches the other end in the loop's next iteration."""

    __slots__ = ("_closed", "_loop", "_paused", "_unread", "other", "protocol")

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop = loop
        self.protocol = protocol
        self.other: End | None = None
        self._closed = self._paused = False
        self._unread: collections.deque[bytes] | None = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return a loopback address as peer name and socket name."""
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Ignored; nothing is buffered."""

    def get_write_buffer_size(self) -> int:
        """Always 0; nothing is buffered."""
        return 0

    def can_write_eof(self) -> bool:
        """Always False; the transport only closes as a whole."""
        return False

    def is_closing(self) -> bool:
        """True if closed."""
        return self._closed

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Pass data to the other end."""
        if self.other is not None and not self._closed:
            self._loop.call_soon(self.other.take, bytes(data))

    def take(self, data: bytes) -> None:
        """Receive data from the other end."""
        if self._closed:
            return
        if self._paused:
            self._unread = self._unread or collections.deque()
            self._unread.append(data)
        else:
            self.protocol.data_received(data)

    def pause_reading(self) -> None:
        """Hold back received data from now on."""
        self._paused = True

    def resume_reading(self) -> None:
        """Deliver the data held back."""
        self._paused = False
        unread, self._unread = self._unread, None
        for data in unread or ():
            self._loop.call_soon(self.take, data)

    def close(self) -> None:
        """Close both ends."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon(self.protocol.connection_lost, None)
            if self.other is not None:
                self._loop.call_soon(self.other.close)

    abort = close


class InMemory(Idle):
    """The scenario `idle` without sockets."""

    def __init__(self, server: MqttServer, metrics: Metrics, kafka: str, plan: Plan) -> None:
        super().__init__(Scales(("", 0), os.getpid(), kafka), ("", 0), plan, print)
        self._server = server
        self._metrics = metrics

    async def open(self, client: C, number: int) -> C:
        """Connect a client to a new pump."""
        loop = asyncio.get_running_loop()
        pump = self._server.accept(self._server.listeners[0].entrance)
        here, there = End(loop, client), End(loop, pump)
        here.other, there.other = there, here
        pump.connection_made(there)
        client.connection_made(here)
        return client

    async def metrics(self) -> bytes:
        """Render the metrics in Prometheus' text format."""
        return self._metrics.render()


async def run(bootstrap: str, plan: Plan) -> Report:
    """Start the parts of the gateway that MQTT needs, and measure."""
    tasks = Tasks(lambda error: print(f"failed: {error!r}"))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(tasks.close)
        config = Config(
            data_dir=Path(stack.enter_context(tempfile.TemporaryDirectory())),
            kafka=KafkaConfig(bootstrap_servers=bootstrap, create_topics=False),
            mqtt=MqttConfig(address=Address("127.0.0.1:0")),
            log=LogConfig(level="warning"),
        )
        configure_logs(config.log)
        loop = asyncio.get_running_loop()
        process = Process(config, tasks, stack, loop, random.Random(7))
        security = await open_listener_security(process)
        log = await open_log(process, config.kafka, security)
        state = await open_state(process, log, security.rules, lambda error: print(f"failed: {error!r}"))
        await state.topics.loaded.wait()
        server = make_mqtt(process, security, state)
        await server.start()
        stack.push_async_callback(server.stop, 10.0)
        metrics = Metrics()
        metrics.add_source("mqtt", server.statistics)
        for name, statistics in parts_with_statistics(security, log, state):
            metrics.add_source(name, statistics)
        collector = Collector(loop)
        collector.start()
        stack.callback(collector.stop)
        gc.collect()
        report = Report("idle connections in memory, MQTT", lines=True)
        for row in await InMemory(server, metrics, bootstrap, plan).measure():
            report.add(**row)
        return report


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bootstrap", help="HOST:PORT of the broker")
    plan = Plan()
    for name in plan._fields:
        value = getattr(plan, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args())
    uvloop.run(run(options.pop("bootstrap"), Plan(**options))).print()


if __name__ == "__main__":
    main()
