"""Small runs of the measuring scenarios, and what a follower reports of good and bad servers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.clients.crowd.follower import Follower, Stream
from loadtest.clients.mqtt_wire import packet, text
from loadtest.engine.fan_out import Fan, fan_out
from loadtest.engine.stand import Stand
from loadtest.engine.steady import Steady, send_and_verify
from loadtest.scenarios import memory, tables


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_publishing_at_every_qos(bootstrap: str, tmp_path: Path, qos: int) -> None:
    async with Stand(tmp_path, bootstrap) as stand, stand.gateway() as gateway:
        measured, verdict = await send_and_verify(Steady("mqtt", 3, 20, 3000, qos=qos), gateway)
    assert (measured.answered, measured.errors, measured.refused) == (3000, [], {})
    assert verdict.stored == 3000
    assert verdict.acknowledged == (3000 if qos else 3)
    assert (verdict.lost, verdict.duplicated, verdict.reordered) == (0, 0, 0)
    assert measured.latencies.count == (3000 if qos else 0)


@pytest.mark.parametrize("events", [False, True])
async def test_fan_out_to_subscribers_and_to_listeners(bootstrap: str, tmp_path: Path, events: bool) -> None:
    fan = Fan(subscribers=20, messages=100, extra=90, patience=20, events=events)
    async with Stand(tmp_path, bootstrap) as stand, stand.gateway() as gateway:
        spread = await fan_out(gateway, fan)
    assert (spread.deliveries, spread.lost, spread.wrong) == (2000, 0, 0)
    assert 0 < spread.latencies.count <= 2000
    assert spread.seconds > 0


async def test_every_row_of_the_tables_is_measured(bootstrap: str, tmp_path: Path) -> None:
    async with Stand(tmp_path, bootstrap) as stand, stand.gateway() as gateway:
        for row in (
            tables.Draining(3, 300),
            tables.Draining(3, 300, queue=True),
            tables.Through(300, 9),
        ):
            found = await tables.measure(row, gateway, 1.0)
            assert found["cpu us"] >= 0
            assert not any(found.get(bad) for bad in tables.BAD)


async def test_offline_sessions_get_their_backlog(bootstrap: str, tmp_path: Path) -> None:
    plan = memory.Crowd(connections=30, warm_up=5, sessions=20, backlog=50, returning=5, settle=0.01)
    async with Stand(tmp_path, bootstrap) as stand:
        await memory.memory(stand, plan)
    assert stand.problems == []
    kinds = ["connection", "connection, WebSocket", "offline session", "with its backlog", "after 5 returned"]
    assert [row[""] for row in stand.rows] == kinds


async def test_idle_amqp_connections_of_every_kind_are_weighed(bootstrap: str, tmp_path: Path) -> None:
    async with Stand(tmp_path, bootstrap) as stand:
        await memory.memory(stand, memory.Crowd("amqp", connections=5, settle=0.01, warm_up=2))
    assert [row["count"] for row in stand.rows] == [5] * 4


async def test_silent_clients_are_weighed_at_every_size(bootstrap: str, tmp_path: Path) -> None:
    plan = memory.Silence(connections=30, least=2, at_once=5, keep_alive=10, watch=0.2, messages=200, settle=0.01)
    async with Stand(tmp_path, bootstrap) as stand:
        await memory.idle(stand, plan)
    assert stand.problems == []
    assert [row["connections"] for row in stand.rows] == [2, 20, 30]
    assert all(row["its KiB"] > 1 and row["messages per second"] > 0 for row in stand.rows)


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return False


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
