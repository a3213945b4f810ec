"""What `trivium doctor` reports, with Kafka and without it."""

from __future__ import annotations

import asyncio
import socket
import sys

from gateway.kafka.cluster.rights import NEEDS, NOT_REPORTED, Operation, Resource, lacking


def test_missing_rights_are_reported() -> None:
    need = next(one for one in NEEDS if one.resource is Resource.CLIENT_TOPICS and one.always)
    assert lacking(need, 1 << Operation.DESCRIBE | 1 << Operation.READ) == (Operation.WRITE,)
    assert lacking(need, 0) == need.operations
    assert lacking(need, NOT_REPORTED) == ()
    assert [str(operation) for operation in need.operations] == ["Describe", "Read", "Write"]


async def doctor(bootstrap: str) -> tuple[int, str]:
    """Run `trivium doctor`; return its exit code and output."""
    argv = ["-m", "gateway", "doctor", "--bootstrap-servers", bootstrap]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    printed, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, printed.decode()


async def test_a_good_kafka_passes(bootstrap: str) -> None:
    code, printed = await doctor(bootstrap)
    assert code == 0, printed
    assert f"ok   broker 1 at {bootstrap} answers, and is new enough" in printed
    assert "ok   clock: 0." in printed
    assert "ok   rights: Create on cluster" in printed
    assert "one broker: no topic is safe from its loss" in printed
    assert "BAD" not in printed
    assert "Traceback" not in printed


async def test_an_unreachable_kafka_is_reported() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        code, printed = await doctor(address)
    assert code == 1, printed
    assert f"BAD  Kafka at {address} does not answer" in printed
    assert "Traceback" not in printed
