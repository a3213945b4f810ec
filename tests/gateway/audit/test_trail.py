"""The audit trail: limits per client, counts of suppressed lines, a renamed or unwritable file."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gateway.audit.sinks import WAITING, FileSink
from gateway.audit.trail import AT_ONCE, CLIENTS, EVERY_S, PERIOD_S, TEXT, AuditTrail
from gateway.runtime.audited import Where
from gateway.runtime.secret import Redactor
from gateway.settings.config import ConfigError
from tests.support.waiting import wait_until

MQTT = Where("mqtt", "10.0.0.7:4711", "mqtt", "sensor-1")


class Lines:
    """A sink."""

    def __init__(self, *, takes: bool = True) -> None:
        self.all: list[dict[str, Any]] = []
        self.takes = takes

    def write(self, line: bytes) -> bool:
        self.all.append(json.loads(line))
        return self.takes


class NoLines:
    """A sink that keeps nothing."""

    def write(self, line: bytes) -> bool:
        return True


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def begun(*sinks: Any, secret: str = "s3cret-value") -> tuple[AuditTrail, Clock]:
    clock = Clock()
    audit = AuditTrail("gateway-1", Redactor([secret]), clock, lambda: 1_700_000_000.5)
    audit.sinks = tuple(sink.write for sink in sinks)
    return audit, clock


async def test_a_line_says_who_what_and_how_and_has_a_version() -> None:
    lines = Lines()
    audit, _ = begun(lines)
    audit.accepted(MQTT, "ann", "scram")
    audit.denied(MQTT, "ann", "publish", "orders/1", "not allowed")
    audit.act(Where("management", "127.0.0.1:9"), "root", "kick", "mqtt/sensor-1")
    common = {"v": 1, "at": "2023-11-14T22:13:20.500+00:00", "gateway": "gateway-1"}
    who = {"protocol": "mqtt", "listener": "mqtt", "address": "10.0.0.7:4711", "client": "sensor-1"}
    assert lines.all == [
        {**common, "event": "login", "result": "accepted", **who, "principal": "ann", "method": "scram"},
        {
            **common, "event": "right", "result": "refused", **who, "principal": "ann", "what": "publish",
            "on": "orders/1", "reason": "not allowed",
        },
        {
            **common, "event": "act", "result": "done", "protocol": "management", "address": "127.0.0.1:9",
            "principal": "root", "what": "kick", "on": "mqtt/sensor-1",
        },
    ]  # fmt: skip
    assert audit.statistics().lines_total == 3
    audit.end()


async def test_a_loop_of_refusals_is_counted_and_told_and_hides_nobody_else() -> None:
    lines = Lines()
    audit, clock = begun(lines)
    other = Where("mqtt", "10.0.0.8:1", client="sensor-2")
    for _ in range(1000):
        audit.denied(MQTT, "ann", "publish", "x")
    audit.denied(other, "bob", "publish", "x")
    assert [line["principal"] for line in lines.all] == ["ann"] * AT_ONCE + ["bob"]
    clock.now += PERIOD_S
    audit.denied(MQTT, "ann", "subscribe", "y")
    assert [line.get("more", 0) for line in lines.all[-2:]] == [1000 - AT_ONCE, 0]
    assert lines.all[-1]["what"] == "subscribe"
    for port in range(50):  # of logins, the address counts: the port is another one each time
        audit.refused(Where("amqp", f"10.0.0.9:{port}"), "wrong")
    assert len([line for line in lines.all if line["protocol"] == "amqp"]) == AT_ONCE
    audit.end()
    assert lines.all[-1]["more"] == 50 - AT_ONCE
    assert audit.statistics().left_out_total == 1000 - AT_ONCE + 50 - AT_ONCE


async def test_what_was_left_out_is_told_also_when_nothing_more_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.audit.trail.PERIOD_S", 0.05)
    lines = Lines()
    audit = AuditTrail("g", Redactor())
    audit.sinks = (lines.write,)
    for _ in range(AT_ONCE + 3):
        audit.refused(MQTT, "wrong")
    await wait_until(lambda: lines.all[-1].get("more") == 3)
    audit.end()


async def test_very_many_clients_do_not_flood_and_are_not_kept() -> None:
    lines = Lines()
    audit, _ = begun(lines)
    for number in range(CLIENTS + 500):
        audit.refused(Where("mqtt", f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:1"), "wrong")
    assert len([line for line in lines.all if "more" not in line]) == EVERY_S
    assert audit.statistics().left_out_total == CLIENTS + 500 - EVERY_S
    audit.end()
    assert sum(line.get("more", 0) for line in lines.all) == CLIENTS + 500 - EVERY_S


async def test_refused_clients_with_long_names_take_little_memory() -> None:
    audit, _ = begun(NoLines())
    tracemalloc.start()
    for number in range(200):
        where = Where("mqtt", "10.0.0.7:1", client=f"{number:04}" + "x" * 60_000)
        for _ in range(AT_ONCE + 1):
            audit.denied(where, "ann", "publish", f"{number:04}" + "y" * 60_000)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000
    audit.end()


async def test_no_line_has_a_secret_or_a_name_that_may_be_one() -> None:
    lines = Lines()
    audit, _ = begun(lines)
    audit.refused(MQTT, "wrong", name="hunter2-canary")
    audit.refused(MQTT, "wrong", name="hunter2-canary")
    audit.refused(MQTT, "it said s3cret-value", name="ann")
    audit.accepted(MQTT, "ann", "password")
    audit.refused(MQTT, "x" * 10_000, name="ann")
    assert "hunter2" not in str(lines.all)
    assert "s3cret-value" not in str(lines.all)
    first, second, third, _, known = lines.all
    assert first["name_digest"] == second["name_digest"] != third["name_digest"]
    assert (known["principal"], "name_digest" in known) == ("ann", False)
    assert len(known["reason"]) == TEXT + 1
    audit.end()


async def test_what_no_sink_takes_is_counted() -> None:
    audit, _ = begun(Lines(takes=False), Lines())
    audit.accepted(MQTT, "ann", "password")
    audit.accepted(Where("amqp", client="\ud800\x00"), "\udfff", "token")
    assert (audit.statistics().lines_total, audit.statistics().dropped_total) == (2, 2)
    audit.end()


def spawn(work: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


async def test_a_file_is_opened_anew_after_logrotate_and_lines_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit, _ = begun()
    sink = FileSink(path, audit, spawn)
    assert path.stat().st_mode & 0o777 == 0o600
    assert sink.write(b'{"n":1}')
    await wait_until(lambda: path.read_text() == '{"n":1}\n')
    path.rename(tmp_path / "audit.jsonl.1")
    sink.reopen()
    await wait_until(path.exists)
    for number in range(3):
        assert sink.write(b'{"n":%d}' % number)
    await sink.stop()
    assert path.read_text() == '{"n":0}\n{"n":1}\n{"n":2}\n'
    assert (tmp_path / "audit.jsonl.1").read_text() == '{"n":1}\n'
    again = FileSink(path, audit, spawn)  # it is appended to
    again.write(b"{}")
    await again.stop()
    assert path.read_text().endswith('{"n":2}\n{}\n')
    with pytest.raises(ConfigError, match=r"audit\.file"):
        FileSink(tmp_path / "nowhere" / "x", audit, spawn)


async def test_a_file_that_cannot_be_written_is_counted_and_tried_again(tmp_path: Path) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    audit, _ = begun()
    sink = FileSink(directory / "audit.jsonl", audit, spawn)
    (directory / "audit.jsonl").unlink()
    directory.rmdir()
    sink.reopen()
    sink.write(b"lost")
    await wait_until(lambda: audit.statistics().write_errors_total == 1)
    assert audit.statistics().dropped_total == 1
    directory.mkdir()
    sink.write(b"kept")
    await sink.stop()
    assert (directory / "audit.jsonl").read_text() == "kept\n"
    full = FileSink(Path("/dev/full"), audit, spawn)
    full.write(b"lost")
    await wait_until(lambda: audit.statistics().write_errors_total == 2)
    assert not full.write(bytes(WAITING + 1))
    await full.stop()
