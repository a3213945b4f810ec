"""The demo's clients: paho for MQTT, proton for AMQP, aiohttp for HTTP.

Each protocol has senders of readings and one receiver of results.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

import aiohttp
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError

from loadtest.beside import beside
from loadtest.clients.kept.lasting import Messages
from loadtest.clients.kept.paho import PahoPublisher, PahoSubscriber
from loadtest.clients.kept.proton_links import ProtonReceiver, ProtonSender
from loadtest.demo.accounts import Accounts, Reading

SENSORS: Final = {
    "mqtt": ("kitchen/temp", "cellar/temp", "roof/temp"),
    "amqp": ("boiler/temp",),
    "http": ("attic/temp",),
}
PERIOD_S: Final = 0.2  # between two readings of a sensor
ANSWER_S: Final = 30.0
POLL_S: Final = 0.5  # how often a waiting client checks whether to stop
PUSH_S: Final = 0.01  # how often a sender looks for its answer
CONTROL: Final = "application/vnd.kafka.v2+json"
JSON_RECORDS: Final = "application/vnd.kafka.json.v2+json"
BINARY_RECORDS: Final = "application/vnd.kafka.binary.v2+json"
_FAILURES: Final = (OSError, TimeoutError, RuntimeError, aiohttp.ClientError, KafkaError)

Ready = Callable[[], None]
"""Called by a receiver from the moment on that it misses no results; may be called any number of times."""
Sender = PahoPublisher | ProtonSender
Receiver = PahoSubscriber | ProtonReceiver


class FleetError(Exception):
    """A client could not start. The message says which and why."""


class Fleet:
    """All clients. Call `listen`, `send`, `stop_sending` and `close`, in this order.

    A client that fails while sending or receiving is recorded in `errors`; the others continue.
    """

    def __init__(self, addresses: dict[str, Any], accounts: Accounts, group: asyncio.TaskGroup) -> None:
        self._addresses = addresses
        self._accounts = accounts
        self._group = group
        self._no_readings = asyncio.Event()
        self._closed = asyncio.Event()
        self._receivers: list[asyncio.Task[None]] = []
        self._senders: list[asyncio.Task[None]] = []
        self.errors: list[str] = []

    async def listen(self) -> None:
        """Start the receivers and wait until none can miss a result; raise FleetError if one cannot start."""
        waiting = []
        receivers: dict[str, Callable[[Ready], Coroutine[Any, Any, None]]] = {
            "MQTT receiver": self._mqtt_receiver,
            "AMQP receiver": self._amqp_receiver,
            "HTTP receiver": self._http_receiver,
            "reader of Kafka": self._kafka_reader,
        }
        for who, receive in receivers.items():
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            work = receive(_once(ready))
            self._receivers.append(self._group.create_task(self._guard(who, work, ready)))
            waiting.append(ready)
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.gather(*waiting)
        except TimeoutError as error:
            raise FleetError(f"the receivers were not ready within {ANSWER_S:g} s") from error

    def send(self) -> None:
        """Start the senders."""
        senders: dict[str, Callable[[str], Coroutine[Any, Any, None]]] = {
            "mqtt": self._mqtt_sensor,
            "amqp": self._amqp_service,
            "http": self._http_client,
        }
        for protocol, work in senders.items():
            for sensor in SENSORS[protocol]:
                sending = self._guard(f"{protocol.upper()} sender {sensor}", work(sensor))
                self._senders.append(self._group.create_task(sending))

    async def stop_sending(self) -> None:
        """Stop sending, and wait until every reading has its answer or its sender has failed."""
        self._no_readings.set()
        await _settled(self._senders)

    async def close(self, timeout: float) -> None:
        """Stop all clients. One that does not stop within `timeout` seconds is abandoned."""
        self._no_readings.set()
        self._closed.set()
        everybody = self._senders + self._receivers
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_settled(everybody), timeout)
        for one in everybody:
            one.cancel()

    async def _guard(self, who: str, work: Awaitable[None], ready: asyncio.Future[None] | None = None) -> None:
        try:
            await work
        except _FAILURES as error:
            text = f"{who}: {str(error) or type(error).__name__}"
            if ready is not None and not ready.done():
                ready.set_exception(FleetError(text))
            elif not self._closed.is_set():  # the gateway may be stopping
                self.errors.append(text)

    def _result(self, protocol: str, body: bytes) -> None:
        self._accounts.received(protocol, json.loads(body), time.time() * 1000)

    def _address(self, protocol: str) -> tuple[str, int]:
        host, _, port = self._addresses[protocol].rpartition(":")
        return host, int(port)

    # MQTT and AMQP

    async def _mqtt_sensor(self, sensor: str) -> None:
        def make(messages: Messages) -> Sender:
            name = f"sensor-{sensor.replace('/', '-')}"
            return PahoPublisher(self._address("mqtt"), name, "sensors", messages, qos=1, kept=False)

        await self._sensor("mqtt", sensor, make)

    async def _amqp_service(self, sensor: str) -> None:
        await self._sensor(
            "amqp", sensor, lambda messages: ProtonSender(self._address("amqp"), "demo", "sensors", messages)
        )

    async def _sensor(self, protocol: str, sensor: str, make: Callable[[Messages], Sender]) -> None:
        """Send one reading after the other."""
        readings: list[bytes] = []
        answered = self._accounts.answered
        client = make(Messages(sensor, readings.__getitem__, lambda _: answered(protocol, well=True), 1))
        async with _running(client):
            while not self._no_readings.is_set():
                await asyncio.sleep(PERIOD_S)
                reading = make_reading(sensor)
                self._accounts.sent(protocol, reading)
                readings.append(reading.to_json())
                client.total += 1
                async with asyncio.timeout(ANSWER_S):
                    while not (client.finished or client.faults or self._closed.is_set()):
                        client.push()
                        await asyncio.sleep(PUSH_S)
                if client.faults:
                    answered(protocol, well=False)
                    raise RuntimeError(client.faults[0])

    async def _mqtt_receiver(self, ready: Ready) -> None:
        client = PahoSubscriber(
            self._address("mqtt"), "dashboard", "maximum/#", 1, lambda body, _: self._result("mqtt", body), kept=False
        )
        await self._receive(client, client.subscribed, ready)

    async def _amqp_receiver(self, ready: Ready) -> None:
        client = ProtonReceiver(
            self._address("amqp"), "dashboard", "results", "maximum",
            on_delivery=lambda delivery: self._result("amqp", delivery.payload), on_accept=lambda *_: None,
            generation=lambda: 0,
        )  # fmt: skip
        await self._receive(client, client.attached, ready)

    async def _receive(self, client: Receiver, begun: asyncio.Event, ready: Ready) -> None:
        async with _running(client):
            while not self._closed.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for((self._closed if begun.is_set() else begun).wait(), POLL_S)
                if client.faults:
                    raise RuntimeError(client.faults[0])
                if begun.is_set():
                    ready()

    # HTTP

    async def _http_client(self, sensor: str) -> None:
        url = f"http://{self._addresses['http']}/topics/sensors"
        async with aiohttp.ClientSession(headers={"Content-Type": JSON_RECORDS}) as session:
            while not self._no_readings.is_set():
                await asyncio.sleep(PERIOD_S)
                reading = make_reading(sensor)
                self._accounts.sent("http", reading)
                record = {"key": sensor, "value": json.loads(reading.to_json())}
                async with session.post(url, data=json.dumps({"records": [record]})) as response:
                    answer = await response.json()
                    well = response.status == 200 and "offset" in answer["offsets"][0]
                    self._accounts.answered("http", well=well)

    async def _http_receiver(self, ready: Ready) -> None:
        base = f"http://{self._addresses['http']}/consumers/demo-{time.time_ns()}"
        control = {"Content-Type": CONTROL}
        create = {"name": "dashboard", "format": "binary", "auto.offset.reset": "latest"}
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            await session.post(base, json=create, headers=control)
            url = f"{base}/instances/dashboard"
            await session.post(f"{url}/subscription", json={"topics": ["maximum"]}, headers=control)
            poll = f"{url}/records?timeout={round(POLL_S * 1000)}"
            try:
                while not self._closed.is_set():
                    async with session.get(poll, headers={"Accept": BINARY_RECORDS}) as response:
                        for record in json.loads(await response.read()):
                            self._result("http", base64.b64decode(record["value"]))
                    ready()
            finally:
                await session.delete(url)

    # Kafka: Spark's results are checked without the gateway

    async def _kafka_reader(self, ready: Ready) -> None:
        consumer = AIOKafkaConsumer("maximum", bootstrap_servers=self._addresses["kafka"], auto_offset_reset="latest")
        await consumer.start()
        try:
            for partition in consumer.assignment():
                await consumer.position(partition)  # fixes the start position
            ready()
            while not self._closed.is_set():
                for records in (await consumer.getmany(timeout_ms=300)).values():
                    for record in records:
                        self._accounts.result(json.loads(record.value))
        finally:
            await consumer.stop()


@contextlib.asynccontextmanager
async def _running(client: Sender | Receiver) -> AsyncIterator[None]:
    """Run a client during the block, and stop it; raises what it fails by."""
    async with beside(client.run()) as (running,):
        try:
            yield
        finally:
            client.stop()
        await running


def make_reading(sensor: str) -> Reading:
    """Create a reading with the current time."""
    return Reading(sensor, round(20 + random.gauss(0, 3), 2), time.time_ns() // 1_000_000)


def _once(future: asyncio.Future[None]) -> Ready:
    def ready() -> None:
        if not future.done():
            future.set_result(None)

    return ready


async def _settled(tasks: list[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)
