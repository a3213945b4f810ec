"""A short `python -m loadtest fuzz`: damaged AMQP conversations with a running gateway."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from loadtest.clients.hostile.amqp_damage import TOPIC, damaged, recordings
from loadtest.engine.stand import Stand
from loadtest.scenarios.hostile import Fuzz, fuzz


@pytest.mark.timeout(400)
async def test_damaged_conversations_are_answered_or_closed_without_leaks(bootstrap: str, tmp_path: Path) -> None:
    async with Stand(tmp_path, bootstrap) as stand:
        await fuzz(stand, Fuzz(seconds=5, at_once=6, seed=11, silent=0))
    assert stand.problems == []
    (row,) = stand.rows
    assert row["conversations"] > 50
    assert row["answered"] > row["conversations"] / 2
    assert row["honest"] > 30


def test_damage_is_reproducible_and_changes_the_bytes() -> None:
    topic = TOPIC.format(7)
    conversations = recordings(topic)
    assert all(pieces[0].startswith(b"AMQP") and topic.encode() in b"".join(pieces) for pieces in conversations)
    recording = conversations[0]
    said = b"".join(recording)
    found = [damaged([recording], random.Random(number)) for number in range(500)]
    assert found == [damaged([recording], random.Random(number)) for number in range(500)]
    assert recording == recordings(topic)[0]
    assert sum(b"".join(pieces) != said for pieces in found) > 400
