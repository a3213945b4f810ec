"""Qpid JMS: the commands of its driver (`tests/interop/driver.py`).

A client is a JMS Connection; its sessions, producers, consumers and temporary destinations have names. A destination is
`queue:T`, `topic:T`, `temporary:NAME` or `reply:NUMBER`, the JMSReplyTo of the message received with it. A message
has kind (`text`, `bytes`, `map`, `stream`, `object`, `plain`), body, properties, correlation_id, type, reply_to,
priority, ttl, persistent and, of a producer without a destination, to; a received one has also held (its number), id,
expiration, timestamp, redelivered, delivery_count and destination.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from typing import Any

from tests.interop.driver import Driver

WAIT_S = 60
RECEIVE_MS = 30_000
Message = dict[str, Any]


class JmsClient:
    """One JMS Connection."""

    def __init__(self, driver: Driver, uri: str) -> None:
        self.name = f"j-{uuid.uuid4().hex[:10]}"
        self.closed: list[dict[str, Any]] = []
        self.uri = uri
        self._driver = driver
        self._names = (f"{number}" for number in itertools.count())

    def __repr__(self) -> str:
        return f"{self._driver.name} {self._driver.version} {self.name}"

    def happened(self, said: dict[str, Any]) -> None:
        """Store an event."""
        self.closed.append(said)

    async def do(self, verb: str, **fields: Any) -> Any:
        """Send one command and wait for its answer; RefusedError holds the library's exception."""
        try:
            return await asyncio.wait_for(self._driver.send(verb, self, **fields), WAIT_S)
        except TimeoutError:
            raise AssertionError(f"{self}: no answer to {verb} {fields}") from None

    async def connect(self, uri: str | None = None, **fields: Any) -> JmsClient:
        """Connect; id is JMS's ClientID."""
        await self.do("connect", uri=uri or self.uri, **fields)
        return self

    async def session(self, mode: str = "auto") -> JmsSession:
        """Open a session: auto, client, dups_ok, transacted."""
        name = next(self._names)
        await self.do("session", name=name, mode=mode)
        return JmsSession(self, name, self._names)

    async def close(self) -> None:
        """Close the connection."""
        await self.do("close")

    async def release(self) -> None:
        """End the connection if there is one, and let the driver forget the client."""
        if self._driver.knows(self):
            await self.do("release")


class JmsSession:
    """One JMS Session."""

    def __init__(self, client: JmsClient, name: str, names: Any) -> None:
        self.client, self.name, self._names = client, name, names

    async def do(self, verb: str, **fields: Any) -> Any:
        """Send a command for this session."""
        return await self.client.do(verb, session=self.name, **fields)

    async def producer(self, destination: str | None = None) -> JmsProducer:
        """Make a producer; without a destination each message has its own."""
        name = next(self._names)
        await self.do("producer", name=name, destination=destination)
        return JmsProducer(self, name)

    async def consumer(self, destination: str, **fields: Any) -> JmsConsumer:
        """Make a consumer; kind: plain, durable, shared, shared durable (their name: `as_`); selector, no_local."""
        name = next(self._names)
        if "as_" in fields:
            fields["as"] = fields.pop("as_")
        await self.do("consumer", name=name, destination=destination, **fields)
        return JmsConsumer(self, name)

    async def temporary(self, *, topic: bool = False) -> tuple[str, str]:
        """Make a temporary destination; return its name here and its address."""
        name = next(self._names)
        return f"temporary:{name}", (await self.do("temporary", name=name, topic=topic))["address"]

    async def browse(self, destination: str, **fields: Any) -> list[Message]:
        """Browse a queue."""
        return list((await self.do("browse", destination=destination, **fields))["messages"])

    async def close(self) -> None:
        """Close the session."""
        await self.client.do("close session", name=self.name)


class JmsProducer:
    """One JMS MessageProducer."""

    def __init__(self, session: JmsSession, name: str) -> None:
        self.session, self.name = session, name

    async def send(self, *messages: Message) -> list[str]:
        """Send messages, wait until each is accepted, and return their JMSMessageIDs."""
        return list((await self.session.do("send", name=self.name, messages=messages))["ids"])

    async def texts(self, *bodies: str, **fields: Any) -> list[str]:
        """Send text messages."""
        return await self.send(*({"body": body, **fields} for body in bodies))


class JmsConsumer:
    """One JMS MessageConsumer."""

    def __init__(self, session: JmsSession, name: str) -> None:
        self.session, self.name = session, name

    async def some(self, count: int, ms: int) -> list[Message]:
        """Return up to `count` messages that arrive in time."""
        return list((await self.session.do("receive", name=self.name, count=count, ms=ms))["messages"])

    async def receive(self, count: int = 1) -> list[Message]:
        """Wait for exactly `count` messages."""
        messages = await self.some(count, RECEIVE_MS)
        assert len(messages) == count, f"{self.session.client}: {len(messages)} of {count} messages came: {messages}"
        return messages

    async def close(self) -> None:
        """Close the consumer."""
        await self.session.do("close consumer", name=self.name)


def bodies(messages: list[Message]) -> list[Any]:
    """Return the bodies of several messages."""
    return [message["body"] for message in messages]
