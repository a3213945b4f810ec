"""Logs: format, level, libraries, secrets."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from gateway.kafka.driver.outage import outage
from gateway.observe.logs import BLANK, Fold, configure_logs
from gateway.settings.config import LogConfig
from gateway.views.clients import CONNECTION_LOG

Start = Callable[..., io.StringIO]


@pytest.fixture
def start() -> Iterator[Start]:
    """Configures logs to a text buffer and restores everything afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    before = structlog.get_config()
    names = ("aiokafka", "kafka", "aiohttp", "amqtt", "asyncio", "transitions", "sqlalchemy")
    levels = {name: logging.getLogger(name).level for name in names}

    def configure(stream: io.StringIO | None = None, **config: Any) -> io.StringIO:
        stream = stream or io.StringIO()
        configure_logs(LogConfig(**config), stream, cache=False)
        return stream

    yield configure
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)
    structlog.configure(**before)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_without_a_terminal(start: Start) -> None:
    out = start()
    structlog.get_logger("gateway.mqtt").info("connected", client="c1", peer=("::1", 5), odd=object)
    (line,) = lines(out)
    assert line["event"] == "connected"
    assert line["level"] == "info"
    assert line["logger"] == "gateway.mqtt"
    assert line["client"] == "c1"
    assert line["timestamp"].endswith("Z")


def test_console_on_a_terminal(start: Start) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = start(Terminal())
    structlog.get_logger("x").warning("look here", topic="sensors")
    assert "look here" in out.getvalue()
    assert "\x1b[" in out.getvalue()
    plain = start(io.StringIO(), format="console")
    structlog.get_logger("x").warning("look here", topic="sensors")
    assert "topic=sensors" in plain.getvalue()
    assert "\x1b[" not in plain.getvalue()


def test_level(start: Start) -> None:
    out = start(level="warning")
    structlog.get_logger("x").info("quiet")
    structlog.get_logger("x").warning("loud")
    assert [line["event"] for line in lines(out)] == ["loud"]


def test_libraries_speak_from_warning_on_and_once(start: Start) -> None:
    outage.end()  # another test's Kafka was away
    out = start(level="debug")
    kafka = logging.getLogger("aiokafka.client")
    kafka.info("hello")
    for node in range(5):
        kafka.error("Unable connect to node with id %s: %s", node, "refused")
    for _ in range(3):
        structlog.get_logger("gateway.x").info("ours, each time")
    found = lines(out)
    assert [line["event"] for line in found] == [
        "Unable connect to node with id 0: refused",
        *["ours, each time"] * 3,
    ]
    assert found[0]["level"] == "error"
    assert found[0]["logger"] == "aiokafka.client"


class Clock:
    """Records of one text at chosen times."""

    def __init__(self, logger: str) -> None:
        self.now = 0.0
        self._logger = logger
        self._fold = Fold(30.0, clock=lambda: self.now)

    def passed(self, number: int, level: int = logging.ERROR) -> str | None:
        """Log a line; return its text, or None if it was folded."""
        record = logging.LogRecord(self._logger, level, "f", 1, "node %s", (number,), None)
        return record.getMessage() if self._fold.filter(record) else None


def test_repeats_of_a_library_are_counted_and_become_rarer() -> None:
    outage.end()
    clock = Clock("aiokafka")
    assert [clock.passed(number) for number in range(4)] == ["node 0", None, None, None]
    clock.now = 31.0
    assert clock.passed(9) == "node 9 (3 more like this)"
    clock.now = 31.0 + 59.0
    assert clock.passed(10) is None
    clock.now = 31.0 + 61.0
    assert clock.passed(11) == "node 11 (1 more like this)"


def test_a_line_that_never_ends_is_written_each_hour() -> None:
    outage.end()
    clock = Clock("aiokafka")
    told = []
    for minute in range(24 * 60):
        clock.now = minute * 60.0
        clock.passed(0)
        if clock.passed(minute) or not minute:
            told.append(minute)
    assert len(told) < 24 + 8


def test_ours_are_folded_after_ten_and_at_once_while_kafka_is_away() -> None:
    outage.end()
    clock = Clock("gateway.x")
    assert len([number for number in range(30) if clock.passed(number)]) == 10
    assert len([number for number in range(30) if clock.passed(number, logging.INFO)]) == 30
    outage.notice("test", "away")
    clock = Clock("gateway.x")
    assert [number for number in range(30) if clock.passed(number)] == [0]
    outage.end()


def test_a_folded_line_of_structlog_has_a_number(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fold.__init__, "__defaults__", (0.02, time.monotonic))
    out = start()
    log = structlog.get_logger("gateway.x")
    while not any("more_like_this" in line for line in lines(out)):
        log.warning("again", client="c")
    assert lines(out)[-1]["client"] == "c"


def test_lines_about_connections_have_a_key(start: Start) -> None:
    out = start(connections=False)
    structlog.get_logger(CONNECTION_LOG).info("client connected", client="c")
    structlog.get_logger(CONNECTION_LOG).warning("told")
    structlog.get_logger("gateway.x").info("ready")
    assert [line["event"] for line in lines(out)] == ["told", "ready"]
    out = start()
    structlog.get_logger(CONNECTION_LOG).info("client connected", client="c")
    assert [line["event"] for line in lines(out)] == ["client connected"]


@pytest.mark.parametrize("format_", ["json", "console"])
def test_secrets_are_blanked_at_any_depth(start: Start, format_: str) -> None:
    out = start(format=format_)
    structlog.get_logger("x").error(
        "config",
        password="hunter2",
        sasl_password="hunter2",
        headers={"Authorization": "Basic hunter2", "Accept": "x"},
        plugins=[{"a": {"bind-password": "hunter2"}}],
        client_secret=b"hunter2",
    )
    assert "hunter2" not in out.getvalue()
    assert out.getvalue().count(BLANK) == 5
    assert "Accept" in out.getvalue()


def test_a_long_text_is_shortened(start: Start) -> None:
    out = start()
    structlog.get_logger("x").info("y" * 5000, client="c" * 65_535)
    (line,) = lines(out)
    assert line["client"] == "c" * 2048 + "…"
    assert line["event"] == "y" * 5000


@pytest.mark.parametrize("format_", ["json", "console"])
def test_tracebacks_show_no_local_variables(start: Start, format_: str) -> None:
    out = start(format=format_)

    def fail(password: str) -> None:
        raise ValueError("wrong")

    try:
        fail("".join(("hunter", "2")))
    except ValueError:
        structlog.get_logger("x").exception("failed")
        logging.getLogger("aiohttp.server").exception("failed too")
    text = out.getvalue()
    assert "ValueError: wrong" in text
    assert text.count("Traceback") == 2
    assert "hunter2" not in text
