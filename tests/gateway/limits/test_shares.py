"""No client can use up a limit of the whole gateway: each has a share, and the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proton.utils import BlockingConnection, LinkDetached

from flowcontrol.admission import client_share
from protocols.mqtt.packets import Suback, Subscribe, Subscription
from protocols.mqtt.reasons import ReasonCode
from tests.support.amqp_transactions import Transacted
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

pytestmark = pytest.mark.part("device requests")

NewTopic = Callable[..., Awaitable[str]]
GREEDY, OTHER = "127.0.0.2", "127.0.0.3"  # each address of anonymous clients is a client
SHARE = 2
CONFIG = """
[http]
header_timeout_s = 2
max_uploads = 3
max_uploads_per_client = 2
max_consumers = 3
max_consumers_per_client = 2
max_requests = 3
max_requests_per_client = 2
max_streams = 3
max_streams_per_client = 2
max_concurrent = 8
max_concurrent_per_client = 4
max_idempotency_keys = 50000  # the table is that of all gateways
max_idempotency_keys_per_client = 2
[amqp]
max_transactions = 3
max_transactions_per_client = 2
[kafka]
create_topics = true
max_groups = 3
max_groups_per_client = 2
"""
LINES = {"Content-Type": "application/x-ndjson"}
JSON = {"Content-Type": "application/vnd.kafka.json.v2+json"}
V2 = {"Content-Type": "application/vnd.kafka.v2+json"}
WAIT_S = 60


@pytest.fixture(scope="module")
async def gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    process = await GatewayProcess(tmp_path_factory.mktemp("shares"), bootstrap, config=CONFIG).start()
    yield process
    assert await process.stop() == 0


def session(gateway: GatewayProcess, address: str) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(local_addr=(address, 0), limit=0)
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    return aiohttp.ClientSession(f"http://{gateway.addresses['http']}", connector=connector, timeout=timeout)


@pytest.fixture
async def greedy(gateway: GatewayProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with session(gateway, GREEDY) as http:
        yield http


@pytest.fixture
async def other(gateway: GatewayProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with session(gateway, OTHER) as http:
        yield http


@contextlib.asynccontextmanager
async def raw(gateway: GatewayProcess, address: str, said: str) -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which a request was begun, with its answer."""
    reader, writer = await asyncio.open_connection(*gateway.address("http"), local_addr=(address, 0))
    writer.write(said.encode())
    try:
        yield reader
    finally:
        writer.close()


def begun_upload(topic: str) -> str:
    return (
        f"POST /topics/{topic}/records HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n"
        'Transfer-Encoding: chunked\r\n\r\nc\r\n{"value":1}\n\r\n2\r\n{"\r\n'
    )


async def status(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(WAIT_S):
        return int((await reader.readuntil(b"\r\n\r\n")).split()[1])


async def test_uploads(
    gateway: GatewayProcess, greedy: aiohttp.ClientSession, other: aiohttp.ClientSession, new_topic: NewTopic
) -> None:
    topic = await new_topic(partitions=1)
    async with raw(gateway, GREEDY, begun_upload(topic)) as one, raw(gateway, GREEDY, begun_upload(topic)) as two:
        assert (await status(one), await status(two)) == (200, 200)
        async with greedy.post(f"/topics/{topic}/records", data=b'{"value":1}', headers=LINES) as answer:
            assert answer.status == 429
            assert "2 uploads" in (await answer.json(content_type=None))["message"]
        async with other.post(f"/topics/{topic}/records", data=b'{"value":1}', headers=LINES) as answer:
            assert answer.status == 200


async def test_a_slow_upload_ends_when_others_wait_for_its_place(
    gateway: GatewayProcess, other: aiohttp.ClientSession, new_topic: NewTopic
) -> None:
    topic = await new_topic(partitions=1)
    async with contextlib.AsyncExitStack() as stack:
        slow = []
        for address in (GREEDY, GREEDY, "127.0.0.4"):
            reader, writer = await asyncio.open_connection(*gateway.address("http"), local_addr=(address, 0))
            stack.callback(writer.close)
            writer.write(begun_upload(topic).encode())
            assert await status(reader) == 200
            slow.append((asyncio.create_task(ended(reader)), writer))

        async def is_full() -> bool:
            for reading, writer in slow:
                if not reading.done():
                    writer.write(b"1\r\n \r\n")  # each sends now and then, so none is idle
            async with other.post(f"/topics/{topic}/records", data=b'{"value":1}', headers=LINES) as answer:
                return answer.status == 503

        async with asyncio.timeout(WAIT_S):
            while await is_full():
                pass
        done, waiting = await asyncio.wait(
            [reading for reading, _ in slow], timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED
        )
        assert [one.result()["error_code"] for one in done] == [408] * len(done)
        assert waiting  # the others go on
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)


async def ended(reader: asyncio.StreamReader) -> Any:
    """Return the report that ends an upload."""
    while b'"ended"' not in (line := await reader.readline()):
        assert line, "it ended without a report"
    return json.loads(line)


async def test_consumers(greedy: aiohttp.ClientSession, other: aiohttp.ClientSession) -> None:
    group = uuid.uuid4().hex

    async def create(http: aiohttp.ClientSession, name: str) -> int:
        async with http.post(f"/consumers/{group}", json={"name": name, "format": "json"}, headers=V2) as answer:
            return answer.status

    async def delete(http: aiohttp.ClientSession, name: str) -> None:
        async with http.delete(f"/consumers/{group}/instances/{name}", headers=V2) as answer:
            assert answer.status == 204

    assert [await create(greedy, name) for name in ("a", "b", "c")] == [200, 200, 429]
    assert await create(other, "d") == 200
    await delete(greedy, "a")
    assert await create(greedy, "c") == 200
    for http, name in ((greedy, "b"), (greedy, "c"), (other, "d")):
        await delete(http, name)


async def test_requests_to_devices(
    gateway: GatewayProcess, greedy: aiohttp.ClientSession, other: aiohttp.ClientSession, new_topic: NewTopic
) -> None:
    topic = await new_topic(partitions=1)
    said = (
        f"POST /requests/{topic}%2Fdevice?timeout=60000 HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
        "Content-Length: 1\r\n\r\nx"
    )

    async def ask(http: aiohttp.ClientSession) -> int:
        async with http.post(f"/requests/{topic}%2Fdevice?timeout=1", data=b"x") as answer:
            return answer.status

    async with raw(gateway, GREEDY, said), raw(gateway, GREEDY, said):
        async with asyncio.timeout(WAIT_S):
            while await ask(greedy) != 429:
                pass
        assert await ask(other) == 504


async def test_streams(greedy: aiohttp.ClientSession, other: aiohttp.ClientSession, new_topic: NewTopic) -> None:
    topic = await new_topic(partitions=1)

    async def codes(open_one: Callable[[aiohttp.ClientSession], Awaitable[int]]) -> list[int]:
        return [await open_one(one) for one in (greedy, greedy, greedy, other)]

    async with contextlib.AsyncExitStack() as stack:

        async def events(http: aiohttp.ClientSession) -> int:
            return (await stack.enter_async_context(http.get(f"/topics/{topic}/stream"))).status

        async def socket(http: aiohttp.ClientSession) -> int:
            try:
                await stack.enter_async_context(http.ws_connect("/stream", protocols=["trivium.v1"]))
            except aiohttp.WSServerHandshakeError as error:
                return error.status
            return 101

        assert await codes(events) == [200, 200, 429, 200]
        assert await codes(socket) == [101, 101, 429, 101]

    async def again() -> bool:  # the places are given back
        async with greedy.get(f"/topics/{topic}/stream") as answer:
            return answer.status == 200

    async with asyncio.timeout(WAIT_S):
        while not await again():
            pass


async def test_produce_requests(
    gateway: GatewayProcess, greedy: aiohttp.ClientSession, other: aiohttp.ClientSession, new_topic: NewTopic
) -> None:
    topic = await new_topic(partitions=1)
    head = (
        f"POST /topics/{topic} HTTP/1.1\r\nHost: x\r\nContent-Type: application/vnd.kafka.json.v2+json\r\n"
        "Content-Length: 30\r\nExpect: 100-continue\r\n\r\n"
    )

    async def produce(http: aiohttp.ClientSession) -> int:
        async with http.post(f"/topics/{topic}", data=b'{"records":[{"value":1}]}', headers=JSON) as answer:
            return answer.status

    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(raw(gateway, GREEDY, head)) for _ in range(4)]
        assert [await status(one) for one in held] == [100] * 4
        assert await produce(greedy) == 429
        assert await produce(other) == 200


async def test_idempotency_keys(
    greedy: aiohttp.ClientSession, other: aiohttp.ClientSession, new_topic: NewTopic
) -> None:
    topic = await new_topic(partitions=1)

    async def produce(http: aiohttp.ClientSession, key: str) -> int:
        headers = {**JSON, "Idempotency-Key": f'"{key}"'}
        async with http.post(f"/topics/{topic}", data=b'{"records":[{"value":1}]}', headers=headers) as answer:
            return answer.status

    names = [uuid.uuid4().hex for _ in range(4)]
    assert [await produce(greedy, name) for name in names[:3]] == [200, 200, 429]
    assert await produce(greedy, names[0]) == 200  # a repeated request takes no place
    assert await produce(other, names[3]) == 200


async def test_groups_of_every_protocol(
    gateway: GatewayProcess, greedy: aiohttp.ClientSession, other: aiohttp.ClientSession, new_topic: NewTopic
) -> None:
    """Each costs a Kafka consumer: share names of MQTT, group addresses of AMQP and streams in a group."""
    topic, name = await new_topic(partitions=1), uuid.uuid4().hex
    client = await RawClient.connect(gateway.address("mqtt"), local_address=GREEDY)

    async def subscribe(number: int) -> int:
        client.send(Subscribe(client.new_id(), (Subscription(f"$share/{name}{number}/{topic}/#", 1),)))
        return int((await client.expect(Suback)).reason_codes[0])

    assert [await subscribe(number) for number in range(3)] == [1, 1, ReasonCode.QUOTA_EXCEEDED]
    assert await subscribe(0) == 1  # it has this group already
    async with greedy.get(f"/topics/{topic}/stream?group={name}3") as answer:
        assert answer.status == 429

    def attach() -> str | None:
        connection = BlockingConnection(f"amqp://{gateway.addresses['amqp']}", timeout=WAIT_S)
        try:
            connection.create_receiver(f"{topic}/group.id/{name}4", credit=1)
            connection.create_receiver(f"{topic}/group.id/{name}5", credit=1)
        except LinkDetached as refused:
            return refused.condition
        finally:
            connection.close()
        return None

    assert await asyncio.to_thread(attach) == "amqp:resource-limit-exceeded"  # a third client, and the last place
    client.drop()

    async def free() -> bool:
        async with other.get(f"/topics/{topic}/stream?group={name}6") as answer:
            return answer.status == 200

    async with asyncio.timeout(WAIT_S):
        while not await free():
            pass


async def test_transactions(gateway: GatewayProcess) -> None:
    def declare(connection: BlockingConnection) -> list[str]:
        made = [Transacted(connection) for _ in range(SHARE + 1)]
        for one in made[:SHARE]:
            one.end(commit=False)
        again = Transacted(connection)  # the places are given back
        again.end(commit=False)
        return [one.ends.condition for one in made]

    def work() -> list[str]:
        connection = BlockingConnection(f"amqp://{gateway.addresses['amqp']}", timeout=WAIT_S)
        try:
            return declare(connection)
        finally:
            connection.close()

    assert await asyncio.to_thread(work) == [*[""] * SHARE, "amqp:resource-limit-exceeded"]


@given(st.integers(1, 10**6), st.none() | st.integers(1, 10**6))
def test_a_share_is_never_more_than_the_limit(limit: int, given_share: int | None) -> None:
    share = client_share(limit, given_share)
    assert 1 <= share <= limit
    if given_share is not None:
        assert share == min(limit, given_share)
    elif limit >= 64:
        assert share == limit // 4
