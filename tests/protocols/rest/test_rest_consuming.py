import json
from typing import Any

import pytest

from gateway.rest.server.openapi_pages import load_contract
from gateway.settings.config import HttpConfig
from gateway.settings.protocols import ConsumerDefaults
from protocols.rest.consuming import (
    PollLimits,
    decode_create,
    decode_offsets,
    decode_partitions,
    decode_subscription,
    poll_limits,
)
from protocols.rest.contract import check_body
from protocols.rest.errors import RestError
from protocols.rest.media import CONTROL_TYPE, Format

OPERATIONS = load_contract().operations


def status_of(operation: str, decode: Any, body: Any) -> int:
    """Return the status of a refused body: by the contract first, then by its decoder."""
    declared = OPERATIONS[operation].body
    assert declared is not None
    text = json.dumps(body).encode()
    try:
        check_body(declared.media[CONTROL_TYPE], text)
        decode(text)
    except RestError as error:
        return error.status
    return 200


def test_missing_settings_of_a_consumer_stay_unset() -> None:
    for body in (b"", b"{}"):
        create = decode_create(body)
        assert create.embedded is Format.BINARY
        said = (create.enable_auto_commit, create.auto_offset_reset, create.fetch_min_bytes, create.isolation_level)
        assert said == (None,) * 4
        assert create.name is None
    assert HttpConfig().consumer == ConsumerDefaults(
        auto_offset_reset="latest", enable_auto_commit=True, fetch_min_bytes=1, isolation_level="read_committed"
    )  # Kafka's and Strimzi's


def test_a_consumer_takes_kafkas_names() -> None:
    create = decode_create(
        b'{"name":"c","format":"json","auto.offset.reset":"earliest","enable.auto.commit":false,'
        b'"fetch.min.bytes":10,"consumer.request.timeout.ms":30000,"isolation.level":"read_committed"}'
    )
    assert (create.name, create.embedded, create.auto_offset_reset) == ("c", Format.JSON, "earliest")
    assert (create.enable_auto_commit, create.fetch_min_bytes, create.request_timeout_ms) == (False, 10, 30000)
    assert create.isolation_level == "read_committed"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"enable.auto.commit": "true"}, 400),
        ({"fetch.min.bytes": "100"}, 400),
        ({"foo": 1}, 400),
        ({"name": 7}, 400),
        ([], 400),
        ({"format": "avro"}, 422),
        ({"auto.offset.reset": "middle"}, 422),
        ({"isolation.level": "x"}, 422),
        ({"fetch.min.bytes": -1}, 422),
        ({"consumer.request.timeout.ms": 0}, 422),
        ({"name": ""}, 422),
        ({"name": "n" * 256}, 422),
    ],
)
def test_wrong_types_are_a_400_and_wrong_values_a_422(body: Any, status: int) -> None:
    assert status_of("createConsumer", decode_create, body) == status


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 422),
        ({"topics": ["a"], "topic_pattern": "b.*"}, 409),
        ({"topic_pattern": "b" * 1025}, 422),
        ({"topics": "a"}, 400),
        ({"topics": [1]}, 400),
        ({"topic": ["a"]}, 400),
    ],
)
def test_a_subscription_names_topics(body: Any, status: int) -> None:
    assert status_of("subscribe", decode_subscription, body) == status


def test_a_subscription_is_topics_or_a_pattern() -> None:
    assert decode_subscription(b'{"topics":["b","a","b"]}').topics == ["b", "a", "b"]
    assert decode_subscription(b'{"topic_pattern":"a.*"}').topic_pattern == "a.*"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"offsets": [{"topic": "t", "partition": 0, "offset": -1}]}, 422),
        ({"offsets": [{"topic": "t", "partition": -1, "offset": 0}]}, 422),
        ({"offsets": [{"topic": "t", "partition": 0, "offset": 2**63}]}, 422),
        ({"offsets": [{"topic": "t", "partition": 0}]}, 400),
        ({"offsets": [{"topic": "t", "partition": "0", "offset": 0}]}, 400),
        ({}, 400),
    ],
)
def test_offsets_are_checked(body: Any, status: int) -> None:
    assert status_of("seek", decode_offsets, body) == status


def test_offsets_and_partitions() -> None:
    (offset,) = decode_offsets(b'{"offsets":[{"topic":"t","partition":1.0,"offset":5,"metadata":"m"}]}')
    assert (offset.topic, offset.partition, offset.offset, offset.metadata) == ("t", 1, 5, "m")
    (partition,) = decode_partitions(b'{"partitions":[{"topic":"t","partition":1}]}')
    assert (partition.topic, partition.partition) == ("t", 1)


def test_a_poll_waits_and_takes_at_most_what_is_allowed() -> None:
    default, largest = PollLimits(100, 1000), PollLimits(5000, 2000)
    assert poll_limits({}, default, largest) == default
    assert poll_limits({"timeout": 3000, "max_bytes": 0}, default, largest) == PollLimits(3000, 0)
    assert poll_limits({"timeout": 10**18, "max_bytes": 99999}, default, largest) == largest
