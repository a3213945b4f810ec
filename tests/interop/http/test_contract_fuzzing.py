"""Requests made from the contract, good ones and bad ones, single and in sequences: every answer is as it says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import GatewayProcess

from .contract_fuzzing import judge


@pytest.mark.timeout(300)
async def test_schemathesis_finds_no_answer_against_the_contract(
    new_gateway: Callable[..., GatewayProcess], bootstrap: str, new_topic: Any, tmp_path: Path
) -> None:
    topic = await new_topic(partitions=3)
    # No topic is created by naming one: those would be hundreds.
    gateway = await new_gateway(bootstrap, config="[kafka]\ncreate_topics = false\n").start()
    host, port = gateway.address("http")
    # The same cases in every run: the script looks for others, and runs the coverage phase's thousands.
    short = ("--phases", "examples,fuzzing,stateful", "--max-examples", "2", "--generation-deterministic")
    status, printed = await judge(f"http://{host}:{port}", topic, *short, directory=tmp_path)
    assert status == 0, printed[-20_000:]
    assert await gateway.stop() == 0
