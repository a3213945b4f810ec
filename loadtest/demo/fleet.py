"""The demo's clients: paho for MQTT, proton for AMQP, aiohttp for HTTP.

Each protocol has senders of readings and one receiver of results. Blocking clients run in their own threads and hand
what they see to the event loop, the only place that updates `Accounts`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from queue import Empty, SimpleQueue
from typing import Any, Final

import aiohttp
import paho.mqtt.client as paho
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from proton import Message, ProtonException, Timeout
from proton.utils import BlockingConnection, SendException

from loadtest.demo.accounts import Accounts, Reading

SENSORS: Final = {
    "mqtt": ("kitchen/temp", "cellar/temp", "roof/temp"),
    "amqp": ("boiler/temp",),
    "http": ("attic/temp",),
}
PERIOD_S: Final = 0.2  # between two readings of a sensor
ANSWER_S: Final = 30.0
POLL_S: Final = 0.5  # how often a waiting client checks whether to stop
CONTROL: Final = "application/vnd.kafka.v2+json"
JSON_RECORDS: Final = "application/vnd.kafka.json.v2+json"
BINARY_RECORDS: Final = "application/vnd.kafka.binary.v2+json"
_FAILURES: Final = (OSError, TimeoutError, RuntimeError, aiohttp.ClientError, ProtonException, KafkaError)

Ready = Callable[[], None]
"""Called by a receiver from the moment on that it misses no results; may be called any number of times."""


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
        self._loop = asyncio.get_running_loop()
        self._no_readings = threading.Event()
        self._closed = threading.Event()
        self._receivers: list[asyncio.Task[None]] = []
        self._senders: list[asyncio.Task[None]] = []
        self.errors: list[str] = []

    async def listen(self) -> None:
        """Start the receivers and wait until none can miss a result; raise FleetError if one cannot start."""
        waiting = []
        receivers: dict[str, Callable[[Ready], Coroutine[Any, Any, None]]] = {
            "MQTT receiver": lambda ready: in_thread(self._mqtt_receiver, ready),
            "AMQP receiver": lambda ready: in_thread(self._amqp_receiver, ready),
            "HTTP receiver": self._http_receiver,
            "reader of Kafka": self._kafka_reader,
        }
        for who, receive in receivers.items():
            ready: asyncio.Future[None] = self._loop.create_future()
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
            "mqtt": lambda sensor: in_thread(self._mqtt_sensor, sensor),
            "amqp": lambda sensor: in_thread(self._amqp_service, sensor),
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
        """Stop all clients. One that does not stop within `timeout` seconds is abandoned in its thread."""
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

    def _call_soon(self, what: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Call a function in the event loop, from a client's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing is counted any more
            self._loop.call_soon_threadsafe(lambda: what(*arguments, **options))

    def _result(self, protocol: str, body: bytes, now_ms: float) -> None:
        self._accounts.received(protocol, json.loads(body), now_ms)

    # MQTT: paho

    def _paho(self, name: str) -> paho.Client:
        host, _, port = self._addresses["mqtt"].rpartition(":")
        client = paho.Client(CallbackAPIVersion.VERSION2, client_id=name, protocol=paho.MQTTv5)
        client.connect(host, int(port), clean_start=True)
        return client

    def _mqtt_sensor(self, sensor: str) -> None:
        client = self._paho(f"sensor-{sensor.replace('/', '-')}")
        answers: SimpleQueue[bool] = SimpleQueue()

        def on_publish(_c: paho.Client, _d: Any, _m: int, code: ReasonCode, _p: Properties | None) -> None:
            answers.put(not code.is_failure)

        client.on_publish = on_publish
        client.loop_start()
        try:
            while not self._no_readings.wait(PERIOD_S):
                reading = make_reading(sensor)
                self._call_soon(self._accounts.sent, "mqtt", reading)
                client.publish(f"sensors/{sensor}", reading.to_json(), qos=1)
                self._call_soon(self._accounts.answered, "mqtt", well=self._next(answers))
        finally:
            client.disconnect()
            client.loop_stop()

    def _next(self, answers: SimpleQueue[bool]) -> bool:
        deadline = time.monotonic() + ANSWER_S
        while not self._closed.is_set() and time.monotonic() < deadline:
            with contextlib.suppress(Empty):
                return answers.get(timeout=POLL_S)
        raise TimeoutError("no PUBACK")

    def _mqtt_receiver(self, ready: Ready) -> None:
        client = self._paho("dashboard")
        refused = SimpleQueue[str]()

        def on_connect(client: paho.Client, _d: Any, _f: Any, _code: ReasonCode, _p: Properties | None) -> None:
            client.subscribe("maximum/#", qos=1)

        def on_subscribe(_c: paho.Client, _d: Any, _m: int, codes: list[ReasonCode], _p: Properties | None) -> None:
            if codes[0].is_failure:
                refused.put(f"SUBACK {codes[0]}")
            else:
                self._call_soon(ready)

        def on_message(_c: paho.Client, _d: Any, message: paho.MQTTMessage) -> None:
            self._call_soon(self._result, "mqtt", message.payload, time.time() * 1000)

        client.on_connect, client.on_subscribe, client.on_message = on_connect, on_subscribe, on_message
        client.loop_start()
        try:
            while not self._closed.wait(POLL_S):
                if not refused.empty():
                    raise RuntimeError(refused.get())
        finally:
            client.disconnect()
            client.loop_stop()

    # AMQP: proton's blocking client

    def _proton(self) -> BlockingConnection:
        return BlockingConnection(f"amqp://{self._addresses['amqp']}", timeout=ANSWER_S)

    def _amqp_service(self, sensor: str) -> None:
        connection = self._proton()
        try:
            sender = connection.create_sender("sensors")
            while not self._no_readings.wait(PERIOD_S):
                reading = make_reading(sensor)
                self._call_soon(self._accounts.sent, "amqp", reading)
                message = Message(body=reading.to_json(), inferred=True, content_type="application/json")
                message.annotations = {"x-opt-bridge.key": sensor}
                try:
                    sender.send(message)
                except SendException:  # not accepted
                    self._call_soon(self._accounts.answered, "amqp", well=False)
                else:
                    self._call_soon(self._accounts.answered, "amqp", well=True)
        finally:
            connection.close()

    def _amqp_receiver(self, ready: Ready) -> None:
        connection = self._proton()
        try:
            receiver = connection.create_receiver("maximum", credit=100)
            self._call_soon(ready)
            while not self._closed.is_set():
                try:
                    message = receiver.receive(timeout=POLL_S)
                except Timeout:
                    continue
                receiver.accept()
                body = message.body
                assert isinstance(body, bytes | memoryview), "results are Data sections"
                self._call_soon(self._result, "amqp", bytes(body), time.time() * 1000)
        finally:
            connection.close()

    # HTTP: aiohttp

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
                            self._result("http", base64.b64decode(record["value"]), time.time() * 1000)
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


def in_thread(work: Callable[..., None], *arguments: Any) -> Coroutine[Any, Any, None]:
    """Run a function in a daemon thread. Threads of `asyncio.to_thread` would keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work(*arguments)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, error)

    async def wait() -> None:
        threading.Thread(target=run, daemon=True).start()
        await done

    return wait()
