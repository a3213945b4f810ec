"""Foreign MQTT clients as child processes: one driver program per library, one line protocol for all.

A driver reads commands from standard input, one JSON object a line: `{"n": 1, "do": "connect", "client": "c7", ...}`,
and answers `{"n": 1, "result": {...}}` or `{"n": 1, "error": "..."}`, in any order. What happens by itself is told as
`{"client": "c7", "event": "message" | "closed", ...}`; the first line is `{"event": "ready", ...}`. Payloads and binary
properties are in base64, properties have the standard's names in snake case, user properties are pairs. One driver
holds any number of clients by name; a second `connect` of a name goes on with that client's state.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

WAIT_S = 15
LINE_LIMIT = 2**24  # a message of 1 MB is a line of 1.4 MB


class RefusedError(Exception):
    """The library said no, or the connection ended before the answer."""


class Message(NamedTuple):
    """What a library hands to its user."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    dup: bool | None
    properties: dict[str, Any]


class Connack(NamedTuple):
    """A connection's first answer, a refusal included."""

    reason: int
    session_present: bool
    properties: dict[str, Any]


class Driver:
    """One driver process."""

    def __init__(self, argv: Sequence[str], directory: str) -> None:
        self.name = self.version = ""
        self._argv, self._directory = argv, directory
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._clients: dict[str, Client] = {}

    async def start(self) -> Driver:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            cwd=self._directory,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
        )
        assert self._process.stdout is not None
        ready = json.loads(await asyncio.wait_for(self._process.stdout.readline(), 60) or "{}")
        assert ready.get("event") == "ready", f"{self._argv} did not start: {ready}"
        self.name, self.version = ready["name"], ready["version"]
        self._reading = asyncio.get_running_loop().create_task(self._read())
        return self

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 5)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if "n" not in said:
                self._clients[said["client"]].happened(said)
                continue
            answer = self._answers.pop(said["n"])
            if answer.done():
                continue
            if "error" in said:
                answer.set_exception(RefusedError(said["error"]))
            else:
                answer.set_result(said["result"])
        for answer in self._answers.values():
            answer.cancel()

    def knows(self, client: Client) -> bool:
        """Whether the client was ever connected."""
        return client.name in self._clients

    def send(self, do: str, client: Client, **fields: Any) -> asyncio.Future[dict[str, Any]]:
        """Write one command; its answer is awaited by whoever wants it."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._clients[client.name] = client
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"n": number, "do": do, "client": client.name, **fields}).encode() + b"\n")
        return answer


class Client:
    """One foreign client: verbs that wait for the answer, and what was received so far."""

    def __init__(self, driver: Driver, address: tuple[str, int], *, version: int, path: str | None = None) -> None:
        self.name = f"f-{uuid.uuid4().hex[:10]}"
        self.version = version
        self.messages: list[Message] = []
        self.closed: list[dict[str, Any]] = []
        self._driver, self._address, self._path = driver, address, path
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"{self._driver.name} {self._driver.version} ({self.version}) {self.name}"

    async def connect(self, *, clean: bool = True, client_id: str | None = None, **fields: Any) -> Connack:
        """Connect, or connect again with the client's state; the answer may be a refusal.

        Fields: properties, will (topic, payload, qos, retain, properties), user, password, scram (user, password),
        keep_alive, hold (acknowledge by `acknowledge` only), send_aliases.
        """
        host, port = self._address
        will = fields.pop("will", None)
        if will is not None:
            fields["will"] = {"qos": 1, "retain": False, "properties": {}, **will, "payload": encode(will["payload"])}
        command = {"keep_alive": 60, "send_aliases": False, "properties": {}, **fields}
        answer = self._driver.send(
            "connect",
            self,
            host=host,
            port=port,
            path=self._path,
            version=self.version,
            id=self.name if client_id is None else client_id,
            clean=clean,
            **command,
        )
        return Connack(**await asyncio.wait_for(answer, WAIT_S))

    async def subscribe(
        self, *filters: str, qos: int = 2, properties: dict[str, Any] | None = None, **options: Any
    ) -> list[int]:
        """Subscribe; SUBACK's codes."""
        chosen = {"qos": qos, "no_local": False, "retain_as_published": False, "retain_handling": 0, **options}
        wanted = [{"filter": one, **chosen} for one in filters]
        answer = self._driver.send("subscribe", self, filters=wanted, properties=properties or {})
        return list((await self._answer(answer))["reasons"])

    async def unsubscribe(self, *filters: str) -> list[int] | None:
        """Unsubscribe; UNSUBACK's codes, where the version or the library has them."""
        return (await self._answer(self._driver.send("unsubscribe", self, filters=filters)))["reasons"]

    def send(
        self, topic: str, payload: bytes = b"", qos: int = 1, *, retain: bool = False, **properties: Any
    ) -> asyncio.Future[dict[str, Any]]:
        """Publish without waiting for the answer."""
        if "correlation_data" in properties:
            properties["correlation_data"] = encode(properties["correlation_data"])
        return self._driver.send(
            "publish", self, topic=topic, payload=encode(payload), qos=qos, retain=retain, properties=properties
        )

    async def publish(self, topic: str, payload: bytes = b"", qos: int = 1, **options: Any) -> int:
        """Publish and wait for the end of the exchange; the reason code."""
        return int((await self._answer(self.send(topic, payload, qos, **options)))["reason"])

    async def flush(self) -> None:
        """Wait until the driver has done what it was told before."""
        await self._answer(self._driver.send("flush", self))

    async def acknowledge(self, count: int) -> None:
        """Acknowledge the oldest messages of a client that holds its acknowledgements."""
        await asyncio.wait_for(self._driver.send("acknowledge", self, count=count), WAIT_S)

    async def reauthenticate(self) -> None:
        """Prove once more who it is."""
        await self._answer(self._driver.send("reauthenticate", self))

    async def disconnect(self, reason: int = 0, **properties: Any) -> None:
        """Say goodbye."""
        await asyncio.wait_for(self._driver.send("disconnect", self, reason=reason, properties=properties), WAIT_S)

    async def release(self) -> None:
        """End the connection if there is one, and let the driver forget the client."""
        if self._driver.knows(self):
            await asyncio.wait_for(self._driver.send("release", self), WAIT_S)

    def happened(self, said: dict[str, Any]) -> None:
        """Note an event."""
        if said["event"] == "closed":
            self.closed.append(said)
        else:
            properties = dict(said["properties"])
            if "correlation_data" in properties:
                properties["correlation_data"] = base64.b64decode(properties["correlation_data"])
            if "user_properties" in properties:
                properties["user_properties"] = [tuple(pair) for pair in properties["user_properties"]]
            payload = base64.b64decode(said["payload"])
            self.messages.append(Message(said["topic"], payload, said["qos"], said["retain"], said["dup"], properties))
        self._changed.set()

    async def received(self, count: int, wait_s: float = WAIT_S) -> list[Message]:
        """Wait until so many messages have come in all; fails with what has come."""
        await self._until(lambda: len(self.messages) >= count, f"{count} messages", wait_s)
        return self.messages

    async def ended(self, count: int = 1, wait_s: float = WAIT_S) -> dict[str, Any]:
        """Wait until the connection was closed so often in all; what is known of the last reason."""
        await self._until(lambda: len(self.closed) >= count, "the connection's end", wait_s)
        return self.closed[-1]

    async def _answer(self, answer: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
        """Wait for an answer, or for the end of the connection that would have brought it."""
        ends = len(self.closed)
        answer.add_done_callback(lambda _: self._changed.set())
        await self._until(lambda: answer.done() or len(self.closed) > ends, "an answer", WAIT_S)
        if not answer.done():
            raise RefusedError(f"{self}: closed before the answer: {self.closed[-1]}")
        return answer.result()

    async def _until(self, is_so: Any, what: str, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while not is_so():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            got = [(one.topic, one.payload[:40]) for one in self.messages[-20:]]
            came = f"{len(self.messages)} messages came, lately {got}; closed: {self.closed}"
            raise AssertionError(f"{self} waited for {what}: {came}") from None


def encode(data: bytes) -> str:
    """Write bytes as the line protocol does."""
    return base64.b64encode(data).decode()


class Wire:
    """A TCP way to the gateway that can be cut, as a client's network may be; its port stays the same."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def laid(self) -> AsyncIterator[Wire]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address: tuple[str, int] = server.sockets[0].getsockname()[:2]
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await server.wait_closed()

    def cut(self) -> None:
        """End all connections without a goodbye."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        ends = {writer, far_writer}
        self._writers |= ends
        async with asyncio.TaskGroup() as group:
            group.create_task(self._copy(reader, far_writer))
            group.create_task(self._copy(far_reader, writer))
        self._writers -= ends

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except (OSError, RuntimeError):  # cut: uvloop's transports say the latter
            pass
        finally:
            writer.close()
