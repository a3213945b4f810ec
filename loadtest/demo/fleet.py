"""The demo's clients, all of them other people's: paho for MQTT, proton for AMQP, aiohttp for HTTP.

Each protocol has senders of readings and one receiver of results. Clients that block live in threads of their own;
what they see is handed to the event loop, which alone keeps the books.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import aiohttp
import paho.mqtt.client as paho
from aiokafka import AIOKafkaConsumer
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from proton import Message, Timeout
from proton.utils import BlockingConnection

from loadtest.demo.accounts import Accounts, Reading

SENSORS: Final = {
    "mqtt": ("kitchen/temp", "cellar/temp", "roof/temp"),
    "amqp": ("boiler/temp",),
    "http": ("attic/temp",),
}
PERIOD_S: Final = 0.2  # one reading per sensor
ANSWER_S: Final = 30.0
JSON_RECORDS: Final = "application/vnd.kafka.json.v2+json"


class Fleet:
    """All clients; `stop_sending` ends the readings, `close` the receivers."""

    def __init__(self, addresses: dict[str, Any], accounts: Accounts) -> None:
        self._addresses = addresses
        self._accounts = accounts
        self._stop_sending = threading.Event()
        self._stop = threading.Event()
        self._loop = asyncio.get_running_loop()
        self.errors: list[str] = []

    async def run(self, receiving: asyncio.Event) -> None:
        """Start the receivers, then the senders; returns when all are stopped."""
        ready = [asyncio.Event() for _ in range(4)]
        async with asyncio.TaskGroup() as group:
            group.create_task(self._guard("amqp receiver", asyncio.to_thread(self._amqp_receiver, ready[0])))
            group.create_task(self._guard("http receiver", self._http_receiver(ready[1])))
            group.create_task(self._guard("kafka reader", self._kafka_reader(ready[2])))
            group.create_task(self._guard("mqtt receiver", asyncio.to_thread(self._mqtt_receiver, ready[3])))
            for event in ready:
                await event.wait()
            receiving.set()
            for sensor in SENSORS["mqtt"]:
                group.create_task(self._guard("mqtt sensor", asyncio.to_thread(self._mqtt_sensor, sensor)))
            for sensor in SENSORS["amqp"]:
                group.create_task(self._guard("amqp service", asyncio.to_thread(self._amqp_service, sensor)))
            for sensor in SENSORS["http"]:
                group.create_task(self._guard("http client", self._http_client(sensor)))

    def stop_sending(self) -> None:
        """No further readings; what is under way is still answered."""
        self._stop_sending.set()

    def close(self) -> None:
        """Everybody goes home."""
        self._stop_sending.set()
        self._stop.set()

    async def _guard(self, who: str, work: Any) -> None:
        try:
            await work
        except (OSError, TimeoutError, aiohttp.ClientError, Timeout, RuntimeError) as error:
            self.errors.append(f"{who}: {type(error).__name__}: {error}")

    def _tell(self, what: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(what, *arguments)

    def _reading(self, sensor: str) -> Reading:
        return Reading(sensor, round(20 + random.gauss(0, 3), 2), time.time_ns() // 1_000_000)

    def _sent(self, protocol: str, reading: Reading) -> None:
        self._accounts.sent(protocol, reading)

    def _answered(self, protocol: str, well: bool) -> None:
        traffic = self._accounts.traffic[protocol]
        if well:
            traffic.acknowledged += 1
        else:
            traffic.failed += 1

    def _result(self, protocol: str, body: bytes, now_ms: float) -> None:
        self._accounts.traffic[protocol].result(json.loads(body), now_ms)

    # MQTT: paho

    def _paho(self, name: str) -> paho.Client:
        host, _, port = self._addresses["mqtt"].rpartition(":")
        client = paho.Client(CallbackAPIVersion.VERSION2, client_id=name, protocol=paho.MQTTv5)
        client.connect(host, int(port))
        return client

    def _mqtt_sensor(self, sensor: str) -> None:
        client = self._paho(f"sensor-{sensor.replace('/', '-')}")
        client.loop_start()
        try:
            while not self._stop_sending.wait(PERIOD_S):
                reading = self._reading(sensor)
                self._tell(self._sent, "mqtt", reading)
                answer = client.publish(f"sensors/{sensor}", reading.to_json(), qos=1)
                answer.wait_for_publish(ANSWER_S)
                self._tell(self._answered, "mqtt", answer.is_published())
        finally:
            client.disconnect()
            client.loop_stop()

    def _mqtt_receiver(self, ready: asyncio.Event) -> None:
        client = self._paho("dashboard")

        def on_message(_client: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
            self._tell(self._result, "mqtt", message.payload, time.time() * 1000)

        def on_subscribe(_c: paho.Client, _d: Any, _m: int, _codes: list[ReasonCode], _p: Properties | None) -> None:
            self._tell(ready.set)

        client.on_message = on_message
        client.on_subscribe = on_subscribe
        client.subscribe("maximum/#", qos=1)
        client.loop_start()
        try:
            self._stop.wait()
        finally:
            client.disconnect()
            client.loop_stop()

    # AMQP: proton's blocking client

    def _amqp_service(self, sensor: str) -> None:
        connection = BlockingConnection(f"amqp://{self._addresses['amqp']}", timeout=ANSWER_S)
        try:
            sender = connection.create_sender("sensors")
            while not self._stop_sending.wait(PERIOD_S):
                reading = self._reading(sensor)
                self._tell(self._sent, "amqp", reading)
                message = Message(body=reading.to_json(), inferred=True, content_type="application/json")
                message.annotations = {"x-opt-bridge.key": sensor}
                sender.send(message)
                self._tell(self._answered, "amqp", True)
        finally:
            connection.close()

    def _amqp_receiver(self, ready: asyncio.Event) -> None:
        connection = BlockingConnection(f"amqp://{self._addresses['amqp']}", timeout=ANSWER_S)
        try:
            receiver = connection.create_receiver("maximum", credit=100)
            self._tell(ready.set)
            while not self._stop.is_set():
                try:
                    message = receiver.receive(timeout=0.5)
                except Timeout:
                    continue
                receiver.accept()
                body = message.body
                assert isinstance(body, bytes | memoryview), "results are Data sections"
                self._tell(self._result, "amqp", bytes(body), time.time() * 1000)
        finally:
            connection.close()

    # HTTP: aiohttp

    async def _http_client(self, sensor: str) -> None:
        url = f"http://{self._addresses['http']}/topics/sensors"
        async with aiohttp.ClientSession(headers={"Content-Type": JSON_RECORDS}) as session:
            while not self._stop_sending.is_set():
                await asyncio.sleep(PERIOD_S)
                reading = self._reading(sensor)
                self._sent("http", reading)
                record = {"key": sensor, "value": json.loads(reading.to_json())}
                async with session.post(url, data=json.dumps({"records": [record]})) as response:
                    answer = await response.json()
                    well = response.status == 200 and "offset" in answer["offsets"][0]
                    self._answered("http", well)

    async def _http_receiver(self, ready: asyncio.Event) -> None:
        base = f"http://{self._addresses['http']}/consumers/demo-{time.time_ns()}"
        control = {"Content-Type": "application/vnd.kafka.v2+json"}
        binary = {"Accept": "application/vnd.kafka.binary.v2+json"}
        async with aiohttp.ClientSession() as session:
            create = {"name": "dashboard", "format": "binary", "auto.offset.reset": "latest"}
            async with session.post(base, json=create, headers=control) as response:
                response.raise_for_status()
            url = f"{base}/instances/dashboard"
            async with session.post(f"{url}/subscription", json={"topics": ["maximum"]}, headers=control) as response:
                response.raise_for_status()
            try:
                while not self._stop.is_set():
                    async with session.get(f"{url}/records", params={"timeout": 500}, headers=binary) as response:
                        response.raise_for_status()
                        for record in json.loads(await response.read()):
                            self._result("http", base64.b64decode(record["value"]), time.time() * 1000)
                    ready.set()
            finally:
                async with session.delete(url) as response:
                    await response.read()

    # Kafka itself: the judge of completeness reads Spark's topic without the gateway

    async def _kafka_reader(self, ready: asyncio.Event) -> None:
        consumer = AIOKafkaConsumer("maximum", bootstrap_servers=self._addresses["kafka"], auto_offset_reset="latest")
        await consumer.start()
        try:
            await consumer.getmany(timeout_ms=0)
            ready.set()
            while not self._stop.is_set():
                for records in (await consumer.getmany(timeout_ms=300)).values():
                    for record in records:
                        self._accounts.result(json.loads(record.value))
        finally:
            await consumer.stop()
