"""While Kafka is away there is one log line a minute, however many clients try and however often."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from gateway.kafka.driver.outage import Outage
from tests.support.gateway import GatewayProcess
from tests.support.waiting import wait_until


def test_one_line_a_minute_names_who_has_noticed(logged: list[Any]) -> None:
    now = 1000.0
    outage = Outage(lambda: now)
    for second in range(150):
        now = 1000.0 + second
        outage.notice("tail", "refused")
        outage.notice("topics", "refused")
        assert outage.lasts
    assert {line["event"] for line in logged} == {"Kafka does not answer"}
    assert [(line["for_s"], line["parts"], line["reason"]) for line in logged] == [
        (0, "tail", "refused"),
        (60, "tail, topics", "refused"),
        (120, "tail, topics", "refused"),
    ]
    now += 121
    assert not outage.lasts


def test_a_frozen_kafka_is_one_outage_until_it_answers(logged: list[Any]) -> None:
    """Each attempt runs into its timeouts, so that failures are a minute apart."""
    now = 1000.0
    outage = Outage(lambda: now)
    outage.end()
    for second in (0, 62, 124):
        now = 1000.0 + second
        outage.notice("topics", "silent")
        assert outage.lasts
    now += 10
    outage.end()
    assert not outage.lasts
    outage.end()
    now += 10
    outage.notice("topics", "silent again")  # within the minute, so neither it nor its end is logged
    outage.end()
    *away, back = logged
    assert [(line["for_s"], line["parts"], line["reason"]) for line in away] == [
        (0, "topics", "silent"),
        (62, "topics", "silent"),
        (124, "topics", "silent"),
    ]
    assert (back["event"], back["after_s"]) == ("Kafka answers again", 134)


async def test_a_gateway_whose_kafka_is_away_logs_little_however_often_it_tries(
    new_gateway: Callable[..., GatewayProcess],
) -> None:
    attempts = 0

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    gateway = new_gateway(f"{host}:{port}")
    starting = asyncio.create_task(gateway.start())
    await wait_until(lambda: attempts > 25, 90)
    lines = [json.loads(line) for line in gateway.log.read_text().splitlines() if line.startswith("{")]
    bad = [line for line in lines if line["level"] != "info"]
    assert sum("Kafka does not answer" in line["event"] for line in bad) in (1, 2)
    assert len(bad) <= 6, bad
    await gateway.stop()
    assert isinstance((await asyncio.gather(starting, return_exceptions=True))[0], RuntimeError)
    server.close()
    await server.wait_closed()
