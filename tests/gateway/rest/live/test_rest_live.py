"""Live WebSockets: every message is answered, records respect the credit, and unacknowledged records come again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.settings.config import AccessRule, OauthConfig, SecurityConfig
from tests.conftest import NewTopicFactory
from tests.gateway.rest.conftest import Gateway, ask, read_topic, running_gateway
from tests.support.oauth import oauth_options, token
from tests.support.waiting import wait_until
from tests.support.websocket import CLOSE, TEXT, frame, handshake, parse


class Talk:
    """One client."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def say(self, kind: str, name: str, **more: Any) -> None:
        await self.socket.send_str(json.dumps({"type": kind, "id": name, **more}))

    async def hear(self, kind: str | None = None) -> Any:
        async with asyncio.timeout(60):
            message = await self.socket.receive()
        assert message.type is aiohttp.WSMsgType.TEXT, message
        heard = json.loads(message.data)
        assert kind in (None, heard["type"]), heard
        return heard

    async def records(self, count: int) -> list[Any]:
        return [await self.hear("record") for _ in range(count)]

    async def is_silent(self) -> bool:
        """Whether nothing comes before the answer to a message that is always answered immediately."""
        await self.say("unsubscribe", "nothing")
        return bool((await self.hear())["id"] == "nothing")


@asynccontextmanager
async def talk(http: aiohttp.ClientSession, **options: Any) -> AsyncIterator[Talk]:
    async with http.ws_connect("/stream", protocols=["trivium.v1"], **options) as socket:
        assert socket.protocol == "trivium.v1"
        yield Talk(socket)


async def test_records_are_stored_and_each_is_answered(
    bootstrap: str, http: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=2)
    async with talk(http) as client:
        await client.say(
            "produce", "1", topic=topic, partition=0, records=[{"key": "a", "value": {"n": 1}}, {"value": None}]
        )
        await client.say("produce", "2", topic=topic, format="binary", records=[{"value": "/w==", "partition": 1}])
        await client.say("produce", "3", topic=topic, records=[])
        answers = {answer["id"]: answer["offsets"] for answer in [await client.hear("produced") for _ in range(3)]}
        assert answers == {
            "1": [{"partition": 0, "offset": 0}, {"partition": 0, "offset": 1}],
            "2": [{"partition": 1, "offset": 0}],
            "3": [],
        }
        await client.say(
            "produce", "4", topic=topic, records=[{"value": 1, "partition": 9}, {"value": 2, "partition": 0}]
        )
        bad, good = (await client.hear("produced"))["offsets"]
        assert bad["error_code"] == 404
        assert good == {"partition": 0, "offset": 2}
    stored = await read_topic(bootstrap, topic, 4)
    assert [(record.key, record.value) for record in stored] == [
        (b"a", b'{"n":1}'), (None, None), (None, b"2"), (None, b"\xff"),
    ]  # fmt: skip
    assert ("gw.protocol", b"http") in stored[0].headers


async def test_records_without_keys_from_one_socket_go_to_one_partition(
    bootstrap: str, http: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=5)
    async with talk(http) as client, talk(http) as other:
        homes: list[int] = []
        for number in range(10):
            for one in (client, other):
                await one.say("produce", "p", topic=topic, records=[{"value": number}])
            answers = [await one.hear("produced") for one in (client, other)]
            homes += [answer["offsets"][0]["partition"] for answer in answers]
    assert len({*homes[::2]}) == len({*homes[1::2]}) == 1
    assert homes[0] != homes[1]


async def test_a_bad_message_gets_an_error_and_the_next_is_served(
    http: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    async with talk(http) as client:
        for message, code in (
            ("{", 400),
            ('{"type": "jump", "id": "x"}', 400),
            (json.dumps({"type": "produce", "id": "x", "topic": topic, "records": [{"wrong": 1}]}), 400),
            (
                json.dumps(
                    {"type": "produce", "id": "x", "topic": topic, "format": "binary", "records": [{"value": "?"}]}
                ),
                422,
            ),
            (json.dumps({"type": "produce", "id": "x", "topic": topic, "partition": -1, "records": []}), 422),
            (json.dumps({"type": "subscribe", "id": "x", "topic": "no such topic"}), 404),
            (json.dumps({"type": "subscribe", "id": "x", "topic": "__internal"}), 403),
            (json.dumps({"type": "subscribe", "id": "x", "topic": topic, "from": "0:5"}), 416),
            (json.dumps({"type": "subscribe", "id": "x", "topic": topic, "from": "y"}), 422),
            (json.dumps({"type": "subscribe", "id": "x", "topic": topic, "credit": -1}), 422),
            (json.dumps({"type": "subscribe", "id": "x", "topic": topic, "header": ["y"]}), 422),
            (json.dumps({"type": "subscribe", "id": "x", "topic": topic, "group": "g", "offset": 1}), 422),
            (json.dumps({"type": "credit", "id": "x", "credit": 1}), 404),
            (json.dumps({"type": "ack", "id": "x", "deliveries": [1]}), 404),
            (json.dumps({"type": "unsubscribe", "id": "x"}), 404),
        ):
            await client.socket.send_str(message)
            answer = await client.hear("error")
            assert (answer["error_code"], answer["id"]) == (code, None if message == "{" else "x"), message
            assert answer["message"]
        await client.say("produce", "good", topic=topic, records=[{"value": 1}])
        assert (await client.hear("produced"))["id"] == "good"


async def test_records_come_within_credit_and_go_on_where_it_ended(
    http: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    async with talk(http) as client:
        await client.say("produce", "p", topic=topic, records=[{"value": number} for number in range(10)])
        await client.hear("produced")
        await client.say("subscribe", "s", topic=topic, **{"from": "beginning"}, credit=2)
        assert await client.hear() == {"type": "subscribed", "id": "s", "position": "0:0"}
        found = await client.records(2)
        assert [record["record"]["value"] for record in found] == [0, 1]
        assert [record["position"] for record in found] == ["0:1", "0:2"]
        assert await client.is_silent()
        await client.say("credit", "s", credit=5)
        assert [record["record"]["value"] for record in await client.records(5)] == [2, 3, 4, 5, 6]
        assert await client.is_silent()
        for credit in (0, -1, 2**31):
            await client.say("credit", "s", credit=credit)
            assert (await client.hear("error"))["error_code"] == 422
        await client.say("credit", "s", credit=100)
        assert [record["record"]["value"] for record in await client.records(3)] == [7, 8, 9]
        await client.say("subscribe", "s", topic=topic)
        assert (await client.hear("error"))["error_code"] == 409
        await client.say("unsubscribe", "s")
        assert await client.hear() == {"type": "unsubscribed", "id": "s"}
        await client.say("produce", "p", topic=topic, records=[{"value": "later"}])
        await client.hear("produced")
        await client.say("subscribe", "s", topic=topic, **{"from": "0:9"}, key=["none"])
        await client.hear("subscribed")
        assert await client.is_silent()
        await client.say("credit", "s", credit=1)
        assert "does not use credit" in (await client.hear("error"))["message"]


async def test_subscriptions_with_the_same_name_get_the_same_records(
    http: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=2)
    async with talk(http) as one, talk(http) as two, talk(http) as other:
        for client, name, form in ((one, "s", "json"), (two, "s", "json"), (other, "t", "text")):
            await client.say("subscribe", name, topic=topic, format=form)
            await client.hear("subscribed")
        await one.say("produce", "p", topic=topic, partition=0, records=[{"value": {"n": n}} for n in range(20)])
        assert (await one.hear())["type"] in ("produced", "record")
        found = [await two.hear("record") for _ in range(20)]
        assert [record["record"]["value"]["n"] for record in found] == list(range(20))
        assert [record["position"] for record in found] == [f"0:{n},1:0" for n in range(1, 21)]
        texts = await other.records(20)
        assert [record["record"]["value"] for record in texts] == [
            json.dumps({"n": n}, separators=(",", ":")) for n in range(20)
        ]
        assert {record["id"] for record in texts} == {"t"}


async def test_released_records_return_immediately_and_in_their_places(
    http: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    async with talk(http) as client:
        await client.say("produce", "p", topic=topic, records=[{"value": number} for number in range(6)])
        await client.hear("produced")
        ask_for = {"topic": topic, "group": f"{topic}-group", "from": "beginning"}
        await client.say("subscribe", "g", **ask_for, credit=6)
        await client.hear("subscribed")
        began = time.monotonic()
        for _ in range(8):
            found = await client.records(6)
            assert [(record["record"]["value"], record["attempts"]) for record in found] == [(n, 0) for n in range(6)]
            deliveries = [record["delivery"] for record in found]
            await client.say("release", "g", deliveries=deliveries[::-1])
            await client.say("credit", "g", credit=6)
        assert time.monotonic() - began < 3  # with a back-off that doubles it was 13 s


async def test_unacknowledged_records_of_a_group_come_again(
    gateway: Gateway, http: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    ask_for = {"topic": topic, "group": f"{topic}-group", "from": "beginning"}
    async with talk(http) as client:
        await client.say("produce", "p", topic=topic, records=[{"value": number} for number in range(6)])
        await client.hear("produced")
        await client.say("subscribe", "g", **ask_for, credit=4)
        assert await client.hear() == {"type": "subscribed", "id": "g"}
        found = await client.records(4)
        assert [(record["delivery"], record["record"]["value"]) for record in found] == [(n + 1, n) for n in range(4)]
        await client.say("ack", "g", deliveries=[1, 2, 4])
        await client.say("release", "g", deliveries=[3], failed=True)
        await client.say("ack", "g", deliveries=[1, 3])
        error = await client.hear("error")
        assert (error["error_code"], error["id"]) == (404, "g")
        await client.say("credit", "g", credit=2)
        assert {record["record"]["value"] for record in await client.records(2)} <= {2, 4, 5}
    await wait_until(lambda: gateway.counts("live").open == 0)
    async with talk(http) as client:
        await client.say("subscribe", "g", **ask_for)
        await client.hear("subscribed")
        again: set[int] = set()
        while not again >= {2, 4, 5}:  # 3 comes too, since the committed offset is before 2
            (record,) = await client.records(1)
            again.add(record["record"]["value"])
            await client.say("ack", "g", deliveries=[record["delivery"]])
        assert again <= {2, 3, 4, 5}
        assert await client.is_silent()


async def test_a_slow_reader_misses_nothing(gateway: Gateway, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=1)
    async with aiohttp.ClientSession(gateway.url, read_bufsize=4096) as http, talk(http) as slow, talk(http) as quick:
        await slow.say("subscribe", "s", topic=topic)
        await slow.hear("subscribed")
        fell_behind = gateway.live_reader.statistics().fell_behind
        sent = 0
        while gateway.live_reader.statistics().fell_behind == fell_behind:
            await quick.say("produce", "p", topic=topic, records=[{"value": "x" * 60_000}] * 10)
            await quick.hear("produced")
            sent += 10
            assert sent < 2000
        found = await slow.records(sent)
        assert [record["record"]["offset"] for record in found] == list(range(sent))


async def test_byte_by_byte_through_the_pump(gateway: Gateway, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=1)
    host, _, port = gateway.listener.bound.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    message = {"type": "produce", "id": "b", "topic": topic, "records": [{"value": 1}]}
    said = handshake("/stream", Sec_WebSocket_Protocol="trivium.v1")
    said += frame(json.dumps(message).encode(), TEXT) + frame(b"\x03\xe8", CLOSE)
    for byte in said:
        writer.write(bytes((byte,)))
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        frames, rest = parse(await reader.read())
    writer.close()
    assert rest == b""
    assert frames[-1] == (CLOSE, b"\x03\xe8")
    heard = [json.loads(payload) for kind, payload in frames if kind == TEXT]
    # The close may overtake the answer; the record is stored anyway.
    assert heard in ([], [{"type": "produced", "id": "b", "offsets": [{"partition": 0, "offset": 0}]}])


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"Sec_WebSocket_Protocol": "mqtt"}, 400),
        ({"Sec_WebSocket_Protocol": None}, 400),
        ({"Upgrade": None, "Connection": "close"}, 426),
        ({"Origin": "https://elsewhere.example"}, 403),
    ],
)
async def test_clients_without_a_valid_login_are_refused(gateway: Gateway, fields: dict[str, Any], status: int) -> None:
    host, _, port = gateway.listener.bound.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(handshake("/stream", **{"Sec_WebSocket_Protocol": "trivium.v1", **fields}))
    async with asyncio.timeout(60):
        assert (await reader.readline()).split()[1] == str(status).encode()
    writer.close()


async def test_rights_are_those_of_the_access_list(bootstrap: str, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=1)
    rules = (
        AccessRule(action="subscribe", topic=f"{topic}/open/#"),
        AccessRule(action="publish", topic=f"{topic}/open/#"),
    )
    async with (
        running_gateway(bootstrap, security=SecurityConfig(access=rules)) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
        talk(http) as client,
    ):
        await client.say("subscribe", "s", topic=topic)
        await client.hear("subscribed")
        await client.say("subscribe", "g", topic=topic, group="g")
        assert (await client.hear("error"))["error_code"] == 403
        await client.say("produce", "o", topic="other", records=[{"value": 1}])
        assert (await client.hear("error"))["error_code"] == 403
        await client.say(
            "produce", "p", topic=topic, records=[{"key": "open/a", "value": 1}, {"key": "shut", "value": 2}]
        )
        heard = [await client.hear() for _ in range(2)]
        answer = next(one for one in heard if one["type"] == "produced")["offsets"]
        assert (answer[0].get("offset"), answer[1].get("error_code")) == (0, 403)
        assert next(one for one in heard if one["type"] == "record")["record"]["key"] == "open/a"


async def test_a_gateway_that_stops_answers_and_closes(bootstrap: str, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=1)
    async with (
        running_gateway(bootstrap, http={"max_streams": 1}) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
        talk(http) as client,
    ):
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await http.ws_connect("/stream", protocols=["trivium.v1"])
        assert caught.value.status == 503
        await client.say("subscribe", "s", topic=topic)
        await client.hear("subscribed")
        await client.say("produce", "p", topic=topic, records=[{"value": 1}])
        await wait_until(lambda: gateway.counts("live").records_in_total == 1)
        gateway.listener.stop_receiving()
        async with asyncio.timeout(60):
            heard = [message async for message in client.socket]
        assert "produced" in [json.loads(message.data)["type"] for message in heard]
        assert client.socket.close_code == 1012
        await wait_until(lambda: gateway.counts("live").open == 0)


async def test_a_token_in_the_query_is_believed_where_tokens_are(gateway: Gateway, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=1)
    async with aiohttp.ClientSession(gateway.url) as http:  # no tokens here: like any unsupported scheme
        for path in (f"/topics/{topic}/stream?duration=0&access_token=x", "/stream?access_token=x"):
            assert (await ask(http, "GET", path))[0] == 401
        async with http.get(f"/topics/{topic}/records?access_token=x") as response:
            assert response.status == 200, "only where a browser can set no field"


async def test_a_token_may_come_in_the_query_and_with_its_end_streams_end(
    bootstrap: str, new_topic: NewTopicFactory, tmp_path: Path
) -> None:
    topic = await new_topic(partitions=1)
    oauth = OauthConfig(**oauth_options(tmp_path / "keys.json", leeway_s=0))
    async with (
        running_gateway(bootstrap, security=SecurityConfig(allow_anonymous=False, oauth=oauth)) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        shown = token(expires_s=time.time() + 6)
        assert (await ask(http, "GET", "/stream"))[0] == 401
        async with http.get(f"/topics/{topic}/stream?access_token={shown}") as events:
            assert events.status == 200
            async with http.ws_connect(f"/stream?access_token={shown}", protocols=["trivium.v1"]) as socket:
                async with asyncio.timeout(60):
                    message = await socket.receive()
                    assert message.type is aiohttp.WSMsgType.CLOSE
                    assert socket.close_code == 1008
                    assert await events.content.read() == b"retry: 2000\n\n"
        assert (await ask(http, "GET", f"/topics/{topic}/stream?access_token={shown}"))[0] == 401


@pytest.mark.parametrize("start", [{"timestamp": 2**63}, {"timestamp": -1}, {"partition": 0, "offset": -1}])
async def test_a_start_that_no_log_has_is_refused_and_the_connection_stays(
    gateway: Gateway, new_topic: NewTopicFactory, start: dict[str, int]
) -> None:
    topic = await new_topic(partitions=1)
    async with aiohttp.ClientSession(gateway.url) as http, talk(http) as client:
        await client.say("subscribe", "s", topic=topic, **start)
        refused = await client.hear("error")
        assert (refused["id"], refused["error_code"]) == ("s", 400)
        await client.say("subscribe", "t", topic=topic)
        await client.hear("subscribed")
