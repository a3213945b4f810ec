"""Foreign AMQP clients: the commands of their drivers (`tests/interop/driver.py`).

A client has one connection with one session; its links have names. Commands, with their fields beside `client`:

- `connect`: host, port, container, path (of a WebSocket), user, password, mechanism (none: the library decides; `NONE`:
  no SASL at all), tls (ca, cert, key: files), idle_ms (the client's idle time-out), frame_bytes (its largest frame).
- `attach`: link, role (`sender`, `receiver`), address, dynamic, settled (sender settle mode), durable, capabilities,
  filters (pairs of name and value), copy (distribution mode), only with go-amqp mixed (sender settle mode) and second
  (receiver settle mode), credit (of a receiver: a window that the library keeps
  full; 0: only the credit of `credit` and `drain`). The answer: address and filters of the gateway's attach.
- `send`: link, messages. The answer: outcomes, one for each, when all are settled.
- `receive`: link, count, seconds. The answer: `count` messages, or those that arrived in time.
- `settle`: link, deliveries (their numbers), outcome, and condition, failed, undeliverable.
- `credit`: link, count. `drain`: link; answered when the credit is used up.
- `detach`: link, close. `close`, `release`. `closed` is the event of a connection that ended by itself.

A message has id, correlation_id, user_id, to, subject, reply_to, content_type, content_encoding, expiry, creation,
group_id, group_sequence, reply_to_group_id, durable, priority, ttl, annotations, application, and one of data (a list
of sections), value and sequences; a received one has also delivery, delivery_count and settled. Values are JSON's own;
`{"@binary": base64}`, `@uuid`, `@symbol`, `@timestamp` (ms), `@ulong`, `@uint` and `@int` are of these types. A whole
number is a long, another one a double.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.interop.driver import Driver, encode

WAIT_S = 60
Message = dict[str, Any]


class Outcome(NamedTuple):
    """The outcome of a sent message."""

    name: str
    condition: str | None = None
    description: str | None = None


ACCEPTED = Outcome("accepted")


class Client:
    """One foreign client."""

    def __init__(self, driver: Driver, address: tuple[str, int], *, path: str | None = None) -> None:
        self.name = f"a-{uuid.uuid4().hex[:10]}"
        self.closed: list[dict[str, Any]] = []
        self.ended = asyncio.Event()
        self._driver, self._address, self._path = driver, address, path
        self._links = itertools.count()

    def __repr__(self) -> str:
        return f"{self._driver.name} {self._driver.version} {self.name}"

    def happened(self, said: dict[str, Any]) -> None:
        """Store an event."""
        self.closed.append(said)
        self.ended.set()

    async def do(self, verb: str, **fields: Any) -> Any:
        """Send one command and wait for its answer."""
        answer = self._driver.send(verb, self, **fields)
        try:
            return await asyncio.wait_for(answer, WAIT_S)
        except TimeoutError:
            raise AssertionError(f"{self}: no answer to {verb} {fields}") from None

    async def connect(self, *, container: str | None = None, **fields: Any) -> None:
        """Connect. Raises RefusedError when the gateway or the library refuses."""
        host, port = self._address
        await self.do("connect", host=host, port=port, path=self._path, container=container or self.name, **fields)

    async def sender(self, address: str | None = None, *, settled: bool = False, **fields: Any) -> Sender:
        """Attach a sender; no address is the anonymous relay."""
        return Sender(self, *(await self._attach("sender", address, settled=settled, **fields)))

    async def receiver(self, address: str | None = None, *, credit: int = 100, **fields: Any) -> Receiver:
        """Attach a receiver."""
        filters = list(fields.pop("filters", {}).items())
        return Receiver(self, *(await self._attach("receiver", address, credit=credit, filters=filters, **fields)))

    async def _attach(self, role: str, address: str | None, **fields: Any) -> tuple[str, dict[str, Any]]:
        link = fields.pop("name", None) or f"{self.name}-{next(self._links)}"
        return link, await self.do("attach", link=link, role=role, address=address, **fields)

    async def close(self) -> None:
        """Close the connection with an AMQP close."""
        await self.do("close")

    async def release(self) -> None:
        """End the connection if there is one, and let the driver forget the client."""
        if self._driver.knows(self):
            await self.do("release")


class Link:
    """One end of a link."""

    def __init__(self, client: Client, name: str, attached: dict[str, Any]) -> None:
        self.client, self.name = client, name
        self.address: str | None = attached["address"]
        self.filters: list[str] = sorted(attached.get("filters") or [])

    async def detach(self) -> None:
        """Detach, and keep the terminus."""
        await self.client.do("detach", link=self.name, close=False)

    async def close(self) -> None:
        """Detach with closed=true."""
        await self.client.do("detach", link=self.name, close=True)


class Sender(Link):
    """The sending end."""

    async def send(self, *messages: Message) -> list[Outcome]:
        """Send, wait until all are settled, and return their outcomes."""
        said = await self.client.do("send", link=self.name, messages=messages)
        return [Outcome(**outcome) for outcome in said["outcomes"]]


class Receiver(Link):
    """The receiving end."""

    async def receive(self, count: int = 1) -> list[Message]:
        """Wait for exactly `count` messages; later ones are for the next call."""
        messages = await self.received(count, WAIT_S - 5)
        assert len(messages) == count, f"{self.client}: {len(messages)} of {count} messages came: {messages}"
        return messages

    async def received(self, count: int, seconds: int) -> list[Message]:
        """Return up to `count` messages that arrive in time."""
        return list((await self.client.do("receive", link=self.name, count=count, seconds=seconds))["messages"])

    async def settle(self, messages: Sequence[Message], outcome: str = "accepted", **fields: Any) -> None:
        """Settle messages with an outcome."""
        await self.client.do(
            "settle", link=self.name, deliveries=[one["delivery"] for one in messages], outcome=outcome, **fields
        )

    async def credit(self, count: int) -> None:
        """Grant more credit."""
        await self.client.do("credit", link=self.name, count=count)

    async def drain(self) -> None:
        """Wait until the credit is used up, by messages or without."""
        await self.client.do("drain", link=self.name)


def text(value: str, **fields: Any) -> Message:
    """Make a message with one Data section."""
    return {"data": [encode(value.encode())], **fields}


def body(message: Message) -> str:
    """Return the text of a message's Data sections."""
    return b"".join(base64.b64decode(one) for one in message["data"]).decode()


def bodies(messages: Sequence[Message]) -> list[str]:
    """Return the texts of several messages."""
    return [body(message) for message in messages]
