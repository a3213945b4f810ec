"""`GET /flow`: messages in flight, paused connections and their reasons."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import msgspec
import pytest
from proton.utils import BlockingConnection

from gateway.observe.flow import FlowSnapshots
from gateway.runtime.turns import SLICE_S
from gateway.views.flow import ConnectionFlow, subject
from gateway.views.pauses import SHORTEST_S, SLOW_READER, Pauses
from protocols.mqtt import packets
from protocols.mqtt.properties import Properties
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until


class Connection:
    """A minimal connection, for large numbers."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.subject = subject("mqtt", f"sensor-{number}", "10.0.0.1:1")
        self.load = number

    def flow(self) -> ConnectionFlow:
        return ConnectionFlow(
            protocol="mqtt",
            client=f"sensor-{self.number}",
            peer="10.0.0.1:1",
            principal="ann",
            subject=self.subject,
            bytes=self.load,
            bytes_limit=10,
            records=1,
            unwritten=0,
            windows=[],
            windows_total=0,
        )


async def test_the_paused_and_the_greedy_come_first_and_others_are_served_meanwhile() -> None:
    pauses = Pauses()
    connections = [Connection(number) for number in range(50_000)]
    for number in (7, 4_711):
        pauses.begin(SLOW_READER, connections[number], connections[number].subject)
    flow = FlowSnapshots([lambda: connections[::2], lambda: connections[1::2]], lambda _: [], pauses)
    gc.disable()  # a look for cycles among all that other tests have made is a long turn, and nobody's fault here
    try:
        turns = [time.thread_time()]
        asking = asyncio.ensure_future(flow.snapshot(5))
        while not asking.done():
            await asyncio.sleep(0)
            turns.append(time.thread_time())
    finally:
        gc.enable()
    snapshot = await asking
    assert snapshot.connections_total == 50_000
    assert [found.bytes for found in snapshot.connections] == [4_711, 7, 49_999, 49_998, 49_997]
    assert [[pause.reason for pause in found.paused] for found in snapshot.connections[:3]] == [[SLOW_READER]] * 2 + [
        []
    ]
    assert [paused.subject for paused in snapshot.paused] == [connections[7].subject, connections[4_711].subject]
    assert max(after - before for before, after in itertools.pairwise(turns)) < 10 * SLICE_S
    named = await flow.snapshot(5, "sensor-4711 ")
    assert (named.connections_total, [found.client for found in named.connections]) == (1, ["sensor-4711"])


class AmqpClient:
    """A link in each direction; all of proton is used in one thread, as it must be."""

    def __init__(self, address: tuple[str, int], topic: str) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._url = f"amqp://{address[0]}:{address[1]}"
        self._topic = topic
        self._connection: BlockingConnection

    async def attach(self) -> None:
        def work() -> None:
            self._connection = BlockingConnection(self._url, timeout=60)
            self._connection.create_sender(self._topic)
            self._connection.create_receiver(f"{self._topic}-out", credit=5)

        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()


async def ask(gateway: GatewayProcess, query: str = "") -> dict[str, Any]:
    host, port = gateway.address("management")
    async with aiohttp.ClientSession() as http, http.get(f"http://{host}:{port}/flow{query}") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "application/json"
        return msgspec.json.decode(await answer.read())


@pytest.mark.part("live websockets")
async def test_every_protocol_tells_its_windows(gateway: GatewayProcess) -> None:
    name = f"flow-{uuid.uuid4().hex[:8]}"
    hostile = f"{name}<img src=x onerror=alert(1)>"
    mqtt = await RawClient.connect(gateway.address("mqtt"), hostile, properties=Properties(receive_maximum=2))
    amqp = AmqpClient(gateway.address("amqp"), name)
    host, port = gateway.address("http")
    try:
        await mqtt.subscribe(f"{name}/#")
        await amqp.attach()
        async with (
            aiohttp.ClientSession() as http,
            http.ws_connect(f"http://{host}:{port}/stream", protocols=["trivium.v1"]) as websocket,
        ):
            await websocket.send_json({"type": "subscribe", "id": "s1", "topic": f"{name}-out", "credit": 3})
            assert (await websocket.receive_json())["type"] == "subscribed"
            for number in range(3):  # one more than the client takes without an answer
                await mqtt.publish(f"{name}/x", b"%d" % number, qos=1)

            async def shown() -> bool:
                (found,) = (await ask(gateway, f"?client={name}%3Cimg"))["connections"]
                return found["windows"][1]["unsettled"] == 2

            await wait_until(shown)
            (found,) = (await ask(gateway, f"?client={name}%3Cimg"))["connections"]
            assert (found["protocol"], found["client"], found["principal"]) == ("mqtt", hostile, "anonymous")
            received, sent = found["windows"]
            assert (received["to_kafka"], received["granted"], received["unsettled"]) == (True, 256, 0)
            assert (sent["granted"], sent["outstanding"], sent["paused"]["reason"]) == (2, 0, "Receive Maximum")

            async def noted() -> bool:
                """Pause long enough to become an episode."""
                flow = await ask(gateway, f"?client={name}%3Cimg")
                (found,) = flow["connections"]
                paused = {pause["reason"]: flow["at"] - pause["since"] for pause in found["paused"]}
                return list(paused) == ["Receive Maximum"] and paused["Receive Maximum"] > SHORTEST_S

            await wait_until(noted)
            for message in await mqtt.messages(2):
                mqtt.send(packets.Puback(message.packet_id))

            async def over() -> bool:
                episodes = (await ask(gateway))["episodes"]
                return any(name in each["subject"] and each["reason"] == "Receive Maximum" for each in episodes)

            await wait_until(over)
            everything = await ask(gateway, "?limit=1000")
            windows = {
                (found["protocol"], window["to_kafka"]): window
                for found in everything["connections"]
                for window in found["windows"]
                if window["topic"] in (name, f"{name}-out")
            }
            assert windows["amqp", True]["outstanding"] > 0
            assert (windows["amqp", False]["outstanding"], windows["amqp", False].get("paused")) == (5, None)
            assert (windows["http", False]["name"], windows["http", False]["outstanding"]) == ("s1", 3)
            assert everything["budgets"][0]["name"] == "process"
            assert everything["budgets"][0]["bytes_limit"] == 256 * 1024 * 1024
    finally:
        await amqp.close()
        mqtt.drop()
