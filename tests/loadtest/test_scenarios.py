"""Small runs of the scenarios on a running gateway, and what the clients report of good and bad servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from loadtest.clients.follower import Follower, Stream
from loadtest.clients.mqtt_wire import packet, text
from loadtest.numbering import Numbering
from loadtest.scenarios import many_topics
from loadtest.scenarios.fan_out import Fan, fan_out
from loadtest.scenarios.idle import Idle, Plan
from loadtest.scenarios.memory import Crowd, Scales, weigh
from loadtest.scenarios.steady import Load, send, verify_load
from loadtest.verify import Ledger
from tests.support.gateway import GatewayProcess

NewTopic = Callable[..., Awaitable[str]]


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_publishing_at_every_qos(gateway: GatewayProcess, bootstrap: str, new_topic: NewTopic, qos: int) -> None:
    numbering, ledger, topic = Numbering(), Ledger(), await new_topic()
    host, port = gateway.address("mqtt")
    load = Load("mqtt", f"{host}:{port}", topic, connections=3, window=20, messages=3000, qos=qos)
    measured = await send(load, numbering, ledger, gateway.pid)
    verdict = await verify_load(bootstrap, load, numbering, ledger)
    assert (measured.answered, measured.errors, measured.refused) == (3000, [], {})
    assert verdict.stored == 3000
    assert ledger.total == (3000 if qos else 3)
    assert (verdict.lost, verdict.duplicated, verdict.reordered) == (0, 0, 0)
    assert measured.latencies.count == (3000 if qos else 0)


async def test_fan_out_beside_filters_that_match_nothing(gateway: GatewayProcess, bootstrap: str) -> None:
    fan = Fan(subscribers=20, messages=100, extra=90, patience=20)
    spread = await fan_out(bootstrap, gateway.address("mqtt"), fan, gateway.pid)
    assert (spread.deliveries, spread.lost) == (2000, 0)
    assert 0 < spread.latencies.count <= 2000
    assert spread.seconds > 0


async def test_offline_sessions_get_their_backlog(gateway: GatewayProcess, bootstrap: str) -> None:
    scales = Scales(gateway.address("mqtt"), gateway.pid, bootstrap)
    said: list[str] = []
    crowd = Crowd(connections=30, sessions=20, backlog=50, returning=5, settle=0.01)
    weight = await weigh(scales, crowd, said.append)
    assert (weight.returned, weight.problems) == (5, [])
    assert len(said) == 3
    assert weight.row(crowd)["returned"] == 5


async def test_silent_clients_are_weighed_at_every_size(gateway: GatewayProcess, bootstrap: str) -> None:
    plan = Plan(connections=30, least=2, at_once=5, keep_alive=10, watch=0.2, messages=200, settle=0.01)
    scales = Scales(gateway.address("mqtt"), gateway.pid, bootstrap)
    rows = await Idle(scales, gateway.address("management"), plan, lambda _: None).measure()
    assert [row["connections"] for row in rows] == [2, 20, 30]
    assert all(row["gone"] == 0 and row["its KiB"] > 1 and row["messages per second"] > 0 for row in rows)


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)


async def test_a_follower_compares_every_byte_and_counts_what_is_missing() -> None:
    payloads = [b"%04d" % number for number in range(10)]
    packets = [packet(0x30, text("t") + b"\0" + payload) for payload in payloads]
    told: list[int] = []

    def follower() -> Follower:
        one = Follower("me", ["t"], Stream(payloads), 10, lambda number, _: told.append(number))
        one.connection_made(Wire())
        one.data_received(b"\x20\3\0\0\0" + b"\x90\4\0\1\0\0")
        return one

    whole = follower()
    stream = b"".join(packets)
    for piece in (stream[:5], stream[5:40], stream[40:41], stream[41:]):
        whole.data_received(piece)
    assert (whole.got, whole.position, whole.finished.done()) == (10, 10, True)

    gaps = follower()
    for piece in (packets[0], packets[1] + packets[4][:3], packets[4][3:], packets[7] + packets[8] + packets[9]):
        gaps.data_received(piece)
    assert (gaps.got, gaps.position) == (6, 10)
    assert told[-1] == 9

    wrong = follower()
    wrong.data_received(packets[0])
    with pytest.raises(ValueError, match="not in list"):
        wrong.data_received(packet(0x30, text("t") + b"\0" + b"9999"))


async def test_everything_beside_many_topics(new_gateway: Callable[..., GatewayProcess], bootstrap: str) -> None:
    gateway = await new_gateway(bootstrap).start()
    plan = many_topics.Plan(topics=20, others=2, filters=50, idle_s=0.1, settle_s=0)
    row = await many_topics.measure(many_topics.Measured(gateway.address("mqtt"), gateway.pid, bootstrap), plan)
    assert (row["topics"], row["absent_filters"]) == (20, 50)
    assert min(row["first_s"], row["next_s"], row["absent_s"]) > 0
