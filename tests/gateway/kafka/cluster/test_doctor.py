"""What `trivium doctor` reports, with Kafka and without it."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator

import pytest

from gateway.kafka.cluster.doctor import Finding, examine
from gateway.kafka.cluster.rights import (
    ACL_PLACES,
    NEEDS,
    NOT_REPORTED,
    AclOperation,
    AclResource,
    Need,
    Resource,
    lacking,
)
from gateway.settings.config import Config
from tests.support.secured import kafka_of
from tools.acls import Acls, allow_gateway, right
from tools.cluster import Cluster, new_cluster
from tools.secured import USER


def test_missing_rights_are_reported() -> None:
    need = next(one for one in NEEDS if one.resource is Resource.CLIENT_TOPICS and one.always)
    assert lacking(need, 1 << AclOperation.DESCRIBE | 1 << AclOperation.READ) == (AclOperation.WRITE,)
    assert lacking(need, 0) == need.operations
    assert lacking(need, NOT_REPORTED) == ()
    assert [str(operation) for operation in need.operations] == ["Describe", "Read", "Write"]


async def doctor(bootstrap: str, *options: str) -> tuple[int, str]:
    """Run `trivium doctor`; return its exit code and output."""
    argv = ["-m", "gateway", "doctor", "--bootstrap-servers", bootstrap, *options]
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


FEW = {**ACL_PLACES, Resource.CLIENT_TOPICS: AclResource("topic", "orders")}
"""Rights on one topic of clients, so that they are none on the gateway's own."""


@pytest.fixture(scope="module")
async def empty(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A secured cluster without topics, whose user has every right that the gateway needs."""
    cluster = new_cluster(tmp_path_factory.mktemp("empty"), nodes=(1,), secured=True)
    await cluster.start()
    await allow_gateway(cluster.bootstrap_servers, USER, FEW)
    yield cluster
    await cluster.stop()


async def findings(empty: Cluster, *without: tuple[Resource, AclOperation]) -> tuple[bool, list[str]]:
    """Return whether the doctor is content without some rights, and which it names as missing."""
    said: list[Finding] = []
    rights = [right(resource, operation, USER, FEW) for resource, operation in without]
    async with Acls(empty.bootstrap_servers) as acls:
        await acls.delete(*rights)
        try:
            good = await examine(Config(kafka=kafka_of(empty, USER)), said.append)
        finally:
            await acls.create(*rights)
    return good, [one.text for one in said if "is missing" in one.text]


@pytest.mark.parametrize(
    ("need", "operation"),
    [(need, one) for need in NEEDS for one in need.operations if need.resource is not Resource.CLIENT_TOPICS],
    ids=lambda one: str(getattr(one, "resource", one)),
)
async def test_on_an_empty_cluster_each_missing_right_is_named(
    empty: Cluster, need: Need, operation: AclOperation
) -> None:
    good, missing = await findings(empty, (need.resource, operation))
    if operation is AclOperation.DESCRIBE and AclOperation.READ in need.operations:
        assert (good, missing) == (True, [])  # Read and Write imply Describe
    elif operation is AclOperation.DESCRIBE and AclOperation.WRITE in need.operations:
        assert (good, missing) == (True, [])
    elif operation is AclOperation.CREATE:
        assert f"rights: Create on {need.resource.value} is missing" in missing[-1]
        assert not good  # the gateway's own topics
    else:
        assert [text for text in missing if f"rights: {operation} on {need.resource.value}" in text] == missing != []
        assert good is not (need.always and need.resource is not Resource.GROUPS)


async def test_an_empty_cluster_with_all_rights_is_good(empty: Cluster) -> None:
    assert await findings(empty) == (True, [])


async def test_without_any_right_the_gateway_s_own_topics_are_named(empty: Cluster) -> None:
    good, missing = await findings(empty, *((need.resource, one) for need in NEEDS for one in need.operations))
    assert not good
    for word in ("Read", "Write", "Create"):
        assert any(word in text and "__trivium_sessions" in text for text in missing)


async def test_findings_as_json(bootstrap: str) -> None:
    code, printed = await doctor(bootstrap, "--json")
    assert code == 0
    found = [json.loads(line) for line in printed.splitlines()]
    assert {"good": True, "text": "rights: Create on cluster"} in found


async def test_an_unreachable_kafka_is_reported() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        code, printed = await doctor(address)
    assert code == 1, printed
    assert f"BAD  Kafka at {address} does not answer" in printed
    assert "Traceback" not in printed
