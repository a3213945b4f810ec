"""CloudEvents over HTTP into a real broker, as the Kafka binding says."""

import json
from typing import Any

import aiohttp
import pytest

from tests.gateway.rest.conftest import ask, read_topic, running_gateway

EVENT = {"id": "1", "source": "/kitchen", "specversion": "1.0", "type": "t", "partitionkey": "k", "data": {"a": 1}}


async def test_the_three_modes(http: aiohttp.ClientSession, new_topic: Any, bootstrap: str) -> None:
    topic = await new_topic(partitions=1)
    path = f"/topics/{topic}/events"
    binary = {"ce-id": "0", "ce-source": "/s", "ce-specversion": "1.0", "ce-type": "t", "Content-Type": "image/png"}
    place = {"partition": 0, "offset": 0}
    assert await ask(http, "POST", path, b"\xff", headers=binary) == (200, {"offsets": [place]})
    structured = {"Content-Type": "application/cloudevents+json; charset=utf-8"}
    assert (await ask(http, "POST", path, EVENT, headers=structured))[0] == 200
    batch = {"Content-Type": "application/cloudevents-batch+json"}
    status, answer = await ask(http, "POST", path, [EVENT | {"id": str(number)} for number in (2, 3)], headers=batch)
    assert (status, [place["offset"] for place in answer["offsets"]]) == (200, [2, 3])
    assert await ask(http, "POST", path, [], headers=batch) == (200, {"offsets": []})
    records = await read_topic(bootstrap, topic, 4)
    assert (records[0].key, records[0].value) == (None, b"\xff")
    assert dict(records[0].headers) == {
        "ce_id": b"0",
        "ce_source": b"/s",
        "ce_specversion": b"1.0",
        "ce_type": b"t",
        "content-type": b"image/png",
        "gw.protocol": b"http",
        "gw.client": b"anonymous",
    }
    assert (records[1].key, records[1].value) == (b"k", b'{"a":1}')
    assert dict(records[1].headers)["content-type"] == b"application/json"
    assert [dict(record.headers)["ce_id"] for record in records] == [b"0", b"1", b"2", b"3"]


async def test_an_invalid_event_is_refused_and_nothing_is_stored(http: aiohttp.ClientSession, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    path = f"/topics/{topic}/events"
    status, error = await ask(http, "POST", path, b"x", headers={"Content-Type": "text/plain"})
    assert (status, error["validation_errors"]) == (400, ["The event has no `id` - at the event"])
    batch = {"Content-Type": "application/cloudevents-batch+json"}
    assert (await ask(http, "POST", path, [EVENT, {}], headers=batch))[0] == 400
    assert (await ask(http, "POST", path, [EVENT], headers=batch))[1]["offsets"] == [{"partition": 0, "offset": 0}]


@pytest.mark.parametrize("media", ["application/cloudevents+avro", "application/cloudevents-batch+protobuf; v=1"])
async def test_an_event_in_an_unknown_format_is_not_stored_as_data(
    http: aiohttp.ClientSession, new_topic: Any, media: str
) -> None:
    topic = await new_topic(partitions=1)
    fields = {"ce-id": "0", "ce-source": "/s", "ce-specversion": "1.0", "ce-type": "t", "Content-Type": media}
    status, error = await ask(http, "POST", f"/topics/{topic}/events", b"\x00", headers=fields)
    assert (status, error["error_code"]) == (415, 415)
    assert "application/cloudevents+json" in error["message"]


async def test_an_event_with_a_key_is_stored_once(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    headers = {"Content-Type": "application/cloudevents+json", "Idempotency-Key": "k"}
    async with running_gateway(bootstrap) as gateway, aiohttp.ClientSession(gateway.url) as http:
        body = json.dumps(EVENT).encode()
        answers = [await ask(http, "POST", f"/topics/{topic}/events", body, headers=headers) for _ in range(2)]
    assert answers == [(200, {"offsets": [{"partition": 0, "offset": 0}]})] * 2


async def test_a_key_is_refused_for_another_event_with_the_same_data(bootstrap: str, new_topic: Any) -> None:
    """In binary mode the event's attributes are header fields."""
    topic = await new_topic(partitions=1)
    event = {"ce-source": "/s", "ce-specversion": "1.0", "ce-type": "t", "Idempotency-Key": "k"}
    async with running_gateway(bootstrap) as gateway, aiohttp.ClientSession(gateway.url) as http:
        answers = [
            await ask(http, "POST", f"/topics/{topic}/events", b"x", headers=event | fields)
            for fields in ({"ce-id": "1"}, {"CE-ID": "1"}, {"ce-id": "2"})
        ]
    assert [status for status, _ in answers] == [200, 200, 422]
