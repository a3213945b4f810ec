"""A short `python -m loadtest fuzz`: damaged AMQP conversations with a running gateway."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from loadtest.clients.amqp_damage import damaged
from loadtest.clients.amqp_record import cut
from loadtest.clients.amqp_wire import GREETING, IDLE, attach_sender, opening
from loadtest.gateway import GatewayProcess
from loadtest.scenarios.fuzz import SETTINGS, Fuzz, Plan


@pytest.mark.timeout(400)
async def test_damaged_conversations_are_answered_or_closed_without_leaks(bootstrap: str, tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, bootstrap, environment=SETTINGS)
    try:
        await gateway.start()
        outcome = await Fuzz(gateway, Plan(seconds=5, at_once=6, seed=11, warm_up=0.5, silent=0), print).run()
    finally:
        await gateway.stop()
    assert outcome.problems == []
    assert outcome.conversations > 50
    assert outcome.answered > outcome.conversations / 2
    assert outcome.honest > 10


def test_damage_is_reproducible_and_changes_the_bytes() -> None:
    said = GREETING + opening("me") + attach_sender("link", "me", "t") + IDLE
    recording = cut(said)
    assert b"".join(recording) == said
    assert [piece[:4] == b"AMQP" for piece in recording] == [True, False, True, False, False, False, False]
    found = [damaged([recording], random.Random(number)) for number in range(500)]
    assert found == [damaged([recording], random.Random(number)) for number in range(500)]
    assert recording == cut(said)
    assert sum(b"".join(pieces) != said for pieces in found) > 400
