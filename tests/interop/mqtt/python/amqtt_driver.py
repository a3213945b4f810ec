"""amqtt's client under the line protocol of drivers.py: commands on standard input, answers and events on output."""

from __future__ import annotations

import asyncio
import base64
import logging
import sys
from importlib.metadata import version
from typing import Any

from amqtt.client import MQTTClient
from amqtt.errors import ConnectError

from tests.interop.mqtt.python.observer import present
from tests.interop.python.lines import decode, say


class Client:
    """One amqtt client, which keeps its session from connection to connection."""

    def __init__(self, name: str, command: dict[str, Any]) -> None:
        self.name = name
        config: dict[str, Any] = {
            "auto_reconnect": False,
            "reconnect_retries": 0,
            "keep_alive": command["keep_alive"],
            "plugins": {"tests.interop.mqtt.python.observer.Observer": {}},
        }
        will = command.get("will")
        if will is not None:
            message = base64.b64decode(will["payload"]).decode()
            config["will"] = {"topic": will["topic"], "message": message, "qos": will["qos"], "retain": will["retain"]}
        self.client = MQTTClient(client_id=command["id"], config=config)
        self.tasks: list[asyncio.Task[None]] = []

    async def connect(self, command: dict[str, Any]) -> dict[str, Any]:
        scheme = "ws" if command.get("path") else "mqtt"
        login = f"{command['user']}:{command['password']}@" if command.get("user") else ""
        uri = f"{scheme}://{login}{command['host']}:{command['port']}{command.get('path') or '/'}"
        try:
            if self.client.session is None:
                reason = await self.client.connect(uri, cleansession=command["clean"])
            else:
                self.client._no_more_connections.clear()
                reason = await self.client.reconnect(cleansession=command["clean"])
        except ConnectError as error:
            if getattr(error, "return_code", None) is None:
                raise
            return {"reason": error.return_code, "session_present": False, "properties": {}}
        self.tasks = [asyncio.create_task(self.deliver()), asyncio.create_task(self.watch())]
        return {"reason": reason, "session_present": present[self.client.session.client_id], "properties": {}}

    async def deliver(self) -> None:
        while True:
            message = await self.client.deliver_message()
            if message is None:
                return
            packet = message.publish_packet
            say(
                client=self.name,
                event="message",
                topic=message.topic,
                payload=base64.b64encode(bytes(message.data)).decode(),
                qos=message.qos,
                retain=bool(packet.retain_flag),
                dup=bool(packet.dup_flag),
                properties={},
            )

    async def watch(self) -> None:
        """Report the end of the connection."""
        task = self.client._disconnect_task
        if task is not None:
            await asyncio.wait([task])
        say(client=self.name, event="closed")

    async def subscribe(self, command: dict[str, Any]) -> dict[str, Any]:
        codes = await self.client.subscribe([(one["filter"], one["qos"]) for one in command["filters"]])
        return {"reasons": codes, "properties": {}}

    async def unsubscribe(self, command: dict[str, Any]) -> dict[str, Any]:
        await self.client.unsubscribe(command["filters"])
        return {"reasons": None, "properties": {}}

    async def publish(self, command: dict[str, Any]) -> dict[str, Any]:
        payload = base64.b64decode(command["payload"])
        await self.client.publish(command["topic"], payload, qos=command["qos"], retain=command["retain"])
        return {"reason": 0, "properties": {}}

    async def flush(self, _command: dict[str, Any]) -> dict[str, Any]:
        return {}

    async def release(self, _command: dict[str, Any]) -> dict[str, Any]:
        if self.client._connected_state.is_set():
            await self.client.disconnect()
        for task in self.tasks:
            task.cancel()
        return {}

    async def disconnect(self, _command: dict[str, Any]) -> dict[str, Any]:
        await self.client.disconnect()
        for task in self.tasks:
            task.cancel()
        return {}


async def answer(client: Client, command: dict[str, Any]) -> None:
    try:
        result = await getattr(client, command["do"])(command)
    except Exception as error:  # report any error to the test
        say(n=command["n"], error=repr(error))
    else:
        say(n=command["n"], result=result)


async def main() -> None:
    logging.basicConfig(level=logging.ERROR)
    reader = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    clients: dict[str, Client] = {}
    tasks: set[asyncio.Task[None]] = set()
    say(event="ready", name="amqtt", version=version("amqtt"))
    while line := await reader.readline():
        command = decode(line)
        name = command["client"]
        if name not in clients:
            clients[name] = Client(name, command)
        client = clients.pop(name) if command["do"] == "release" else clients[name]
        task = asyncio.create_task(answer(client, command))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    asyncio.run(main())
