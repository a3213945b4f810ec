"""Every answer to generated requests, valid and invalid, single and in sequences, conforms to the contract."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import GatewayProcess

from .contract_fuzzing import check_contract


@pytest.mark.timeout(300)
async def test_schemathesis_finds_no_answer_against_the_contract(
    new_gateway: Callable[..., GatewayProcess], bootstrap: str, new_topic: Any, tmp_path: Path
) -> None:
    topic = await new_topic(partitions=3)
    # Unknown topics are not created, since there would be hundreds.
    gateway = await new_gateway(bootstrap, config="[kafka]\ncreate_topics = false\n").start()
    host, port = gateway.address("http")
    # The same cases in every run; the script tries others, and the thousands of the coverage phase.
    short = ("--phases", "examples,fuzzing,stateful", "--max-examples", "2", "--generation-deterministic")
    status, printed = await check_contract(f"http://{host}:{port}", topic, *short, directory=tmp_path)
    assert status == 0, printed[-20_000:]
    assert await gateway.stop() == 0
