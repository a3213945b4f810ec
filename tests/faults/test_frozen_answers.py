"""When Kafka freezes, AMQP and HTTP clients get an error in time, lose nothing, and continue when Kafka does."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from proton import Message
from proton.utils import BlockingConnection, LinkDetached

from gateway.embedded.broker import EmbeddedBroker
from tests.support.amqp_transactions import Transacted
from tests.support.frozen import freeze
from tests.support.gateway import GatewayProcess

CONFIG = "drain_timeout_s = 2\n[kafka]\ncreate_topics = true\n"

BOUND_S = 26.0  # 8, or 10 for a commit, plus a slow machine; a request to Kafka waits 30
WAIT_S = 60  # with Kafka
CONTROL = {"Content-Type": "application/vnd.kafka.v2+json"}
RECORDS = {"Content-Type": "application/vnd.kafka.json.v2+json"}


class AmqpClient:
    """One connection, in a separate thread."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._url = f"amqp://{address[0]}:{address[1]}"
        self._connection: BlockingConnection

    async def __aenter__(self) -> AmqpClient:
        self._connection = await self.do(lambda: BlockingConnection(self._url, timeout=WAIT_S))
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.do(self._connection.close)
        self._thread.shutdown()

    async def do(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def sender(self, address: str) -> Any:
        return await self.do(lambda: self._connection.create_sender(address))

    async def receiver(self, address: str) -> Any:
        return await self.do(lambda: self._connection.create_receiver(address, credit=10))

    async def node(self, _address: str) -> Any:
        """Attach to a temporary queue."""
        return await self.do(lambda: self._connection.create_receiver(None, dynamic=True))

    async def declare(self) -> Transacted:
        """Declare a transaction."""
        return await self.do(lambda: Transacted(self._connection))

    async def refusal(self, attach: Callable[[str], Any], address: str) -> str:
        """Return the condition of the detach that refuses an attach, and check that the connection still works."""
        try:
            await attach(address)
        except LinkDetached as detached:
            await self.do(lambda: self._connection.create_sender(None, name="relay"))
            return str(detached.condition)
        return "attached"


async def test_each_fails_in_time(stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess]) -> None:
    gateway = await new_gateway(stoppable.bootstrap_servers, config=CONFIG).start()
    host, port = gateway.address("http")
    name = f"frozen-{uuid.uuid4().hex[:6]}"
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://{host}:{port}", timeout=aiohttp.ClientTimeout(WAIT_S))
        )
        links = [await stack.enter_async_context(AmqpClient(gateway.address("amqp"))) for _ in range(6)]
        at_sender, at_receiver, at_group, at_queue, at_node, at_coordinator = links

        async def ask(method: str, path: str, document: Any = None, headers: Any = CONTROL) -> tuple[int, bool, Any]:
            """Send a request; return the status, whether there is a `Retry-After`, and the document."""
            async with http.request(method, path, json=document, headers=headers) as answer:
                body = await answer.json(content_type=None) if answer.status != 204 else None
                return answer.status, "Retry-After" in answer.headers, body

        async def later(method: str, path: str, document: Any = None) -> tuple[int, bool, Any]:
            """Repeat a request while the answer is 503."""
            while (answer := await ask(method, path, document))[0] == 503:
                pass
            return answer

        async def consumer(named: str) -> str:
            """Create a consumer instance in a new group; return its path."""
            made = {"name": named, "format": "json", "auto.offset.reset": "earliest", "enable.auto.commit": False}
            assert (await ask("POST", f"/consumers/{name}-{named}", made))[0] == 200
            return f"/consumers/{name}-{named}/instances/{named}"

        async def produce(topic: str) -> tuple[int, bool, Any]:
            return await ask("POST", f"/topics/{topic}", {"records": [{"value": "after"}]}, RECORDS)

        assert (await produce(name))[0] == 200
        reading, subscribing = await consumer("reading"), await consumer("subscribing")
        partitions = {"partitions": [{"topic": name, "partition": number} for number in range(3)]}
        assert (await ask("POST", f"{reading}/assignments", partitions))[0] == 204
        place = {"topic": name, "partition": 0, "offset": 0}
        freeze(stoppable.pid)
        try:
            async with asyncio.timeout(BOUND_S):
                *answers, declared = await asyncio.gather(
                    ask("POST", f"/consumers/{name}-reading", {"name": "new"}),  # the gateway knows this group
                    ask("POST", f"/consumers/{name}-other", {"name": "new"}),
                    ask("POST", f"{subscribing}/subscription", {"topics": [f"{name}-subscribed"]}),
                    ask("GET", "/topics"),
                    ask("GET", f"/topics/{name}"),
                    ask("GET", f"/topics/{name}-looked-at"),
                    ask("POST", f"{reading}/offsets", {"offsets": [place]}),
                    ask("POST", f"{reading}/positions/end", partitions),
                    produce(f"{name}-produced"),
                    at_sender.refusal(at_sender.sender, f"{name}-sent"),
                    at_receiver.refusal(at_receiver.receiver, f"{name}-received"),
                    at_group.refusal(at_group.receiver, f"{name}/group.id/{name}"),
                    at_queue.refusal(at_queue.receiver, f"{name}/group.id/{name}-2"),  # Kafka must confirm the group
                    at_node.refusal(at_node.node, ""),
                    at_coordinator.declare(),
                )
                assert (await ask("POST", f"{reading}/positions", {"offsets": [place]}))[0] == 204  # needs no Kafka
            asked = [answer for answer in answers if not isinstance(answer, str)]
            assert [answer[:2] for answer in asked] == [(503, True)] * len(asked), asked
            told = answers[len(asked) :]
            assert told == ["amqp:internal-error"] * 5
            assert declared.ends.event == "declared"  # Kafka is involved from the first message on
        finally:
            os.kill(stoppable.pid, signal.SIGCONT)

        # The same connections and names work: nothing was left half done.
        async with asyncio.timeout(WAIT_S):
            for group in ("reading", "other"):
                assert (await later("POST", f"/consumers/{name}-{group}", {"name": "new"}))[0] == 200
            for topic in (name, f"{name}-produced", f"{name}-sent", f"{name}-received"):
                while (answer := await produce(topic))[0] == 503:
                    pass
                assert answer[0] == 200, answer
            subscription = {"topics": [f"{name}-subscribed"]}
            assert (await later("POST", f"{subscribing}/subscription", subscription))[0] == 204
            assert (await later("POST", f"{reading}/offsets", {"offsets": [place]}))[0] == 204
            assert name in (await later("GET", "/topics"))[2]
            await at_coordinator.do(declared.transaction.abort)
            await at_node.node("")
            sender = await at_sender.sender(f"{name}-sent")
            await at_sender.do(lambda: sender.send(Message(body=b"sent")))
            in_group = await at_group.receiver(f"{name}/group.id/{name}")
            bodies = [(await at_group.do(lambda: in_group.receive(WAIT_S))).body for _ in range(2)]
            assert len(bodies) == 2  # stored before and after the freeze
            await at_group.do(lambda: [in_group.accept() for _ in bodies])
    assert await gateway.stop() == 0
