"""Foreign MQTT clients: the commands of their drivers (`tests/interop/driver.py`).

Events are `{"client": "c7", "event": "message" | "closed", ...}`. Properties have the standard's names in snake case,
user properties are pairs; payloads and binary properties are in base64. A second `connect` of the same client resumes
its state.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from typing import Any, NamedTuple

from tests.interop.driver import Driver, RefusedError, encode

WAIT_S = 60


class Message(NamedTuple):
    """A message as the library passes it to its user."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    dup: bool | None
    properties: dict[str, Any]


class Connack(NamedTuple):
    """The answer to CONNECT, which may be a refusal."""

    reason: int
    session_present: bool
    properties: dict[str, Any]


class Client:
    """One foreign client: commands that wait for the answer, and the messages received so far."""

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
        """Connect, or reconnect with the client's state; the answer may be a refusal.

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
        """Subscribe; return SUBACK's codes."""
        chosen = {"qos": qos, "no_local": False, "retain_as_published": False, "retain_handling": 0, **options}
        wanted = [{"filter": one, **chosen} for one in filters]
        answer = self._driver.send("subscribe", self, filters=wanted, properties=properties or {})
        return list((await self._answer(answer))["reasons"])

    async def unsubscribe(self, *filters: str) -> list[int] | None:
        """Unsubscribe; return UNSUBACK's codes, if the version and the library have them."""
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
        """Publish and wait until the exchange is complete; return the reason code."""
        return int((await self._answer(self.send(topic, payload, qos, **options)))["reason"])

    async def flush(self) -> None:
        """Wait until the driver has executed all previous commands."""
        await self._answer(self._driver.send("flush", self))

    async def acknowledge(self, count: int) -> None:
        """Acknowledge the oldest messages, for a client that connected with `hold`."""
        await asyncio.wait_for(self._driver.send("acknowledge", self, count=count), WAIT_S)

    async def reauthenticate(self) -> None:
        """Re-authenticate."""
        await self._answer(self._driver.send("reauthenticate", self))

    async def disconnect(self, reason: int = 0, **properties: Any) -> None:
        """Disconnect."""
        await asyncio.wait_for(self._driver.send("disconnect", self, reason=reason, properties=properties), WAIT_S)

    async def release(self) -> None:
        """End the connection if there is one, and let the driver forget the client."""
        if self._driver.knows(self):
            await asyncio.wait_for(self._driver.send("release", self), WAIT_S)

    def happened(self, said: dict[str, Any]) -> None:
        """Record an event."""
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
        """Wait until `count` messages have arrived in total and return all; a failure lists what has arrived."""
        await self._until(lambda: len(self.messages) >= count, f"{count} messages", wait_s)
        return self.messages

    async def ended(self, count: int = 1, wait_s: float = WAIT_S) -> dict[str, Any]:
        """Wait until the connection was closed `count` times in total; return what is known about the last reason."""
        await self._until(lambda: len(self.closed) >= count, "the connection's end", wait_s)
        return self.closed[-1]

    async def _answer(self, answer: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
        """Wait for an answer, or until the connection ends."""
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
