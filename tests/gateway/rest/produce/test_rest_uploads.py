"""Uploads of lines over real sockets into a real broker: reports come while the request is still being sent."""

import asyncio
import gzip
import json
from collections.abc import Iterator
from typing import Any, Self

import aiohttp
import pytest

from gateway.rest.produce.line_uploads import LineUpload
from gateway.rest.produce.streamed_records import WINDOW
from gateway.settings.config import BudgetConfig
from mapping.rest.incoming import RUN
from tests.gateway.rest.conftest import Gateway, ask, raw_exchange, read_topic, running_gateway
from tests.support.waiting import wait_until

MEBIBYTE = 1 << 20
LINES = {"Content-Type": "application/x-ndjson"}


class Conversation:
    """A request whose body is sent piece by piece, and the lines of its answer as they come."""

    def __init__(self, gateway: Gateway, topic: str) -> None:
        self._address = gateway.listener.bound
        self._topic = topic
        self.head = b""
        self._text = b""

    async def __aenter__(self) -> Self:
        host, _, port = self._address.rpartition(":")
        self._reader, self.writer = await asyncio.open_connection(host, int(port))
        self.writer.write(
            f"POST /topics/{self._topic}/records HTTP/1.1\r\nHost: h\r\nContent-Type: application/x-ndjson\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data) if data else b"0\r\n\r\n")

    async def line(self) -> Any:
        """The next line of the answer; None after the last one."""
        async with asyncio.timeout(60):
            if not self.head:
                self.head = await self._reader.readuntil(b"\r\n\r\n")
            while b"\n" not in self._text:
                size = int(await self._reader.readline(), 16)
                self._text += (await self._reader.readexactly(size + 2))[:-2]
                if not size:
                    assert not self._text
                    return None
        first, _, self._text = self._text.partition(b"\n")
        return json.loads(first)


async def test_each_line_is_reported_before_the_next_is_sent(gateway: Gateway, new_topic: Any, bootstrap: str) -> None:
    topic = await new_topic(partitions=1)
    async with Conversation(gateway, topic) as talk:
        for number in range(3):
            talk.send(b'{"key":"k","value":%d}\n' % number)
            assert await talk.line() == {"partition": 0, "offset": number}
        assert talk.head.startswith(b"HTTP/1.1 200 ")
        talk.send(b'{"value":null,"key":"gone"}')  # without an end
        talk.send(b"")
        assert await talk.line() == {"partition": 0, "offset": 3}
        assert await talk.line() is None
    records = await read_topic(bootstrap, topic, 4)
    assert [(one.key, one.value) for one in records] == [(b"k", b"0"), (b"k", b"1"), (b"k", b"2"), (b"gone", None)]
    assert records[0].headers[0] == ("content-type", b"application/json")


async def test_the_lines_of_an_upload_without_keys_lie_in_one_partition(gateway: Gateway, new_topic: Any) -> None:
    topic = await new_topic(partitions=5)
    async with Conversation(gateway, topic) as talk:
        reports = []
        for number in range(12):
            talk.send(b'{"value":%d}\n' % number)
            reports.append(await talk.line())
        talk.send(b"")
        assert await talk.line() is None
    home = reports[0]["partition"]
    assert reports == [{"partition": home, "offset": number} for number in range(12)]


async def test_a_bad_line_costs_only_itself(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=2)
    async with (
        running_gateway(bootstrap, http={"max_line_bytes": 1024}) as gateway,
        Conversation(gateway, topic) as talk,
    ):
        talk.send(b'{"value":1,"partition":0}\n\n{"value":\n{"values":1}\n')
        talk.send(b'{"value":"' + b"x" * 3000)
        talk.send(b'"}\r\n{"value":2,"partition":7}\r\n{"value":"\xff"}\n{"value":3,"partition":1}\n')
        talk.send(b"")
        lines = [await talk.line() for _ in range(7)]
        assert await talk.line() is None
    assert lines[0] == {"partition": 0, "offset": 0}
    assert [line.get("error_code") for line in lines] == [None, 400, 400, 413, 404, 400, None]
    assert "value" in lines[2]["validation_errors"][0]
    assert lines[6] == {"partition": 1, "offset": 0}


async def test_many_records_over_partitions_are_reported_in_their_order(
    gateway: Gateway, new_topic: Any, bootstrap: str
) -> None:
    topic = await new_topic(partitions=3)
    count = 6000
    body = b"".join(b'{"key":"k%d","value":%d}\n' % (number % 50, number) for number in range(count))
    async with (
        aiohttp.ClientSession(gateway.url) as http,
        http.post(f"/topics/{topic}/records", data=body, headers=LINES) as response,
    ):
        assert response.status == 200
        places = [json.loads(line) async for line in response.content]
    stored = {(one.partition, one.offset): one.value for one in await read_topic(bootstrap, topic, count)}
    assert [stored[place["partition"], place["offset"]] for place in places] == [b"%d" % one for one in range(count)]


async def test_reading_stops_while_kafka_is_slower_than_the_client(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    budget = BudgetConfig(process_bytes=MEBIBYTE, topic_bytes=MEBIBYTE, connection_bytes=MEBIBYTE)
    async with running_gateway(bootstrap, budget=budget) as gateway, Conversation(gateway, topic) as talk:
        block = b"".join(b'{"value":"%b"}\n' % (b"x" * 10_000) for _ in range(50))
        shut: list[int] = []
        gateway.publisher.gate.subscribe(
            lambda is_open: None if is_open else shut.append(gateway.publisher.budget.bytes)
        )

        async def send() -> None:
            for _ in range(40):
                talk.send(block)
                await talk.writer.drain()
            talk.send(b"")

        sending = asyncio.create_task(send())
        most = 0
        for number in range(2000):
            assert (await talk.line())["offset"] == number
            most = max(most, gateway.publisher.budget.bytes)
        assert await talk.line() is None
        await sending
    assert shut
    assert most < 2 * MEBIBYTE


async def test_records_of_a_client_that_disconnects_are_stored(
    gateway: Gateway, new_topic: Any, bootstrap: str
) -> None:
    topic = await new_topic(partitions=1)
    async with Conversation(gateway, topic) as talk:
        talk.send(b'{"value":1}\n{"value":2}\n{"val')
        assert await talk.line() == {"partition": 0, "offset": 0}
        assert gateway.counts("uploads").active == 1
    await wait_until(lambda: gateway.counts("uploads").active == 0)
    assert [one.value for one in await read_topic(bootstrap, topic, 2)] == [b"1", b"2"]
    await wait_until(lambda: gateway.publisher.statistics().records_in_flight == 0)


async def test_the_end_of_the_gateway_ends_an_upload_in_words(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    async with running_gateway(bootstrap) as gateway, Conversation(gateway, topic) as talk:
        talk.send(b'{"value":1}\n')
        assert await talk.line() == {"partition": 0, "offset": 0}
        gateway.listener.stop_receiving()
        assert await talk.line() == {"error_code": 503, "message": "The gateway is shutting down", "ended": True}
        assert await talk.line() is None


async def test_a_pause_that_is_too_long_ends_an_upload(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    async with (
        running_gateway(bootstrap, http={"header_timeout_s": 0.3}) as gateway,
        Conversation(gateway, topic) as talk,
    ):
        talk.send(b'{"value":1}\n')
        assert await talk.line() == {"partition": 0, "offset": 0}
        ended = await talk.line()
        assert (ended["error_code"], ended["ended"]) == (408, True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 400),
        ({**LINES, "Accept": "image/png"}, 406),
        ({**LINES, "Expect": "more"}, 417),
    ],
)
async def test_refused_before_anything_is_read(
    http: aiohttp.ClientSession, new_topic: Any, headers: dict[str, str], status: int
) -> None:
    topic = await new_topic(partitions=1)
    assert (await ask(http, "POST", f"/topics/{topic}/records", b'{"value":1}\n', headers=headers))[0] == status


async def test_too_many_uploads_and_unknown_topics_are_refused(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    async with (
        running_gateway(bootstrap, http={"max_uploads": 1}, create=False) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        assert (await ask(http, "POST", "/topics/not-there/records", b"{}", headers=LINES))[0] == 404
        async with Conversation(gateway, topic) as talk:
            talk.send(b'{"value":1}\n')
            assert await talk.line() == {"partition": 0, "offset": 0}
            assert (await ask(http, "POST", f"/topics/{topic}/records", b"{}", headers=LINES))[0] == 503


async def test_the_client_gets_100_continue_before_it_sends(gateway: Gateway, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    body = b'{"value":1}\n'
    answer = await raw_exchange(
        gateway.listener.bound,
        f"POST /topics/{topic}/records HTTP/1.1\r\nHost: h\r\nContent-Type: application/x-ndjson\r\n"
        f"Expect: 100-continue\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body,
    )
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
    assert answer.count(b'"offset":0') == 1


async def test_an_upload_of_bad_lines_ends_and_earlier_lines_stay(bootstrap: str, new_topic: Any) -> None:
    """Two kilobytes of gzip that are a million bad lines cost a thousand errors (`http.max_upload_errors`)."""
    topic = await new_topic(partitions=1)
    body = gzip.compress(b'{"value":1}\n' + b"1\n" * 500_000 + b'{"value":2}\n' + b"1\n" * 500_000)
    async with running_gateway(bootstrap) as gateway, aiohttp.ClientSession(gateway.url) as http:
        headers = {**LINES, "Content-Encoding": "gzip", "Connection": "close"}
        async with http.post(f"/topics/{topic}/records", data=body, headers=headers) as answer:
            lines = [json.loads(line) for line in (await answer.text()).splitlines()]
        assert lines[0] == {"partition": 0, "offset": 0}
        assert [line["error_code"] for line in lines[1:-1]] == [400] * 1000
        assert lines[-1]["ended"] is True
        assert "1000 records were refused" in lines[-1]["message"]
        assert (await ask(http, "POST", f"/topics/{topic}/records", b'{"value":3}', headers=LINES))[0] == 200
    assert [record.value for record in await read_topic(bootstrap, topic, 2)] == [b"1", b"3"]


async def test_without_a_limit_bad_lines_let_others_work(
    bootstrap: str, new_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad lines are reported in slices of the loop, and the client's pace bounds the reports that wait."""
    topic = await new_topic(partitions=1)
    async with (
        running_gateway(bootstrap, http={"max_upload_errors": 0}) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        longest = most = 0
        steps = LineUpload.feed

        def feed(upload: LineUpload, part: bytes | None) -> Iterator[None]:
            nonlocal longest, most
            before = upload.taken
            for _ in steps(upload, part):
                longest, before = max(longest, upload.taken - before), upload.taken
                most = max(most, upload.taken - upload.reported)
                yield

        monkeypatch.setattr(LineUpload, "feed", feed)
        body = gzip.compress(b"1\n" * 100_000)
        headers = {**LINES, "Content-Encoding": "gzip"}
        async with http.post(f"/topics/{topic}/records", data=body, headers=headers) as answer:
            assert (await answer.text()).count("\n") == 100_000
        assert longest == RUN
        assert most <= WINDOW + RUN
