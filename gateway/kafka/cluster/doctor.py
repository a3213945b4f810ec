"""`trivium doctor`: check whether Kafka and this machine meet the gateway's needs; read-only, with text output."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from aiokafka import errors
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.admin import ApiVersionRequest

from gateway.kafka.cluster.rights import CREATE, DESCRIBE, NEEDS, Resource, lacking
from gateway.kafka.cluster.rights_trials import OWN_TOPIC, denied
from gateway.kafka.cluster.topic_queries import TopicQueries
from gateway.kafka.cluster.topic_safety import ROUND, SAFE_COPIES, describe_topics, topics_to_check, why_unsafe
from gateway.kafka.contracts import Refused
from gateway.kafka.driver import wire
from gateway.kafka.driver.acl_requests import AclsUnknown, all_acls, read_acls
from gateway.kafka.driver.client_settings import client_settings
from gateway.kafka.driver.login import logins
from gateway.runtime.spawn import Tasks
from gateway.settings.config import Config, ConfigError

CONNECT_S: Final = 15.0
CLOCK_S: Final = 1.0
"""Largest acceptable clock difference: message expiry and timestamps depend on both clocks."""
FEW_FILES: Final = 4096
SHOWN: Final = 20  # topics listed by name
MS: Final = 1_000_000  # nanoseconds
REQUESTS: Final = (
    ("Fetch 11 (Kafka 2.4)", 1, 11),
    ("Metadata 9 (2.4)", 3, 9),
    ("CreateTopics 4 (2.4)", 19, 4),
    ("IncrementalAlterConfigs (2.3)", 44, 0),
)
"""Requests that an old broker may lack: name, API key and version."""
DENIED: Final = errors.TopicAuthorizationFailedError.errno


class Finding(NamedTuple):
    """One line of the report. `good` is True for ok, False for a problem to solve, None for a note."""

    good: bool | None
    text: str

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "BAD ", None: "note"}[self.good]
        return f"{mark} {self.text}"


async def examine(config: Config, say: Callable[[Finding], None]) -> bool:
    """Run all checks, pass each finding to `say`, and return whether there is no problem."""
    findings: list[Finding] = []

    def found(finding: Finding) -> None:
        findings.append(finding)
        say(finding)

    found(_files())
    if config.kafka.bootstrap_servers is None:
        found(Finding(None, "kafka.bootstrap_servers is not set: the gateway starts its own Kafka, one broker"))
    else:
        await _kafka(config, found)
    return all(finding.good is not False for finding in findings)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= FEW_FILES:
        return Finding(True, f"open files: {soft} (at most {hard}): a connection is one")
    return Finding(False, f"open files: {hard} at most: a connection is one; raise LimitNOFILE= or ulimit -Hn")


async def _kafka(config: Config, report: Callable[[Finding], None]) -> None:
    servers = config.kafka.bootstrap_servers
    try:
        client = AIOKafkaClient(**client_settings(config.kafka, "doctor"))
    except ConfigError as error:
        report(Finding(False, str(error)))
        return
    try:
        async with asyncio.timeout(CONNECT_S):
            await client.bootstrap()
            await client.force_metadata_update()
    except (errors.KafkaError, OSError, TimeoutError) as error:
        report(Finding(False, logins.problem or f"Kafka at {servers} does not answer: {error!r}"))
        await client.close()
        return
    try:
        await _brokers(client, report)
    finally:
        await client.close()
    tasks = Tasks(lambda error: None)
    queries = TopicQueries(config.kafka, tasks.spawn, asyncio.get_running_loop().time)
    try:
        await _clock(queries, report)
        await _topics(config, queries, report)
        if config.security.access_source == "kafka":
            await _acls(queries, report)
    except Refused as refused:
        report(Finding(False, refused.reason))
    finally:
        await queries.stop()
        await tasks.close()


async def _brokers(client: Any, report: Callable[[Finding], None]) -> None:
    """Check that each broker can be reached at its advertised address and is new enough."""
    for broker in sorted(client.cluster.brokers(), key=lambda one: one.nodeId):
        name = f"broker {broker.nodeId} at {broker.host}:{broker.port}"
        try:
            async with asyncio.timeout(CONNECT_S):
                if not await client.ready(broker.nodeId):
                    report(Finding(False, f"{name} cannot be reached from here"))
                    continue
                answer = await client.send(broker.nodeId, ApiVersionRequest())
        except (errors.KafkaError, OSError, TimeoutError) as error:
            report(Finding(False, f"{name} does not answer: {error!r}"))
            continue
        newest = {key: last for key, _, last in answer.api_versions}
        old = [what for what, key, version in REQUESTS if newest.get(key, -1) < version]
        if old:
            report(Finding(False, f"{name} is too old: it lacks {', '.join(old)}"))
        else:
            report(Finding(True, f"{name} answers, and is new enough"))


async def _clock(queries: TopicQueries, report: Callable[[Finding], None]) -> None:
    """Compare the clock of the cluster's controller with ours."""
    before, controller_ms = time.time_ns() // MS, None
    with contextlib.suppress(Refused):
        controller_ms = await queries.request(wire.controller_time_request())
    after = time.time_ns() // MS
    if controller_ms is None:
        report(Finding(None, "clock: Kafka does not report its time (needs Kafka 3.3 and Describe on the cluster)"))
        return
    apart = max(before - controller_ms, controller_ms - after, 0) / 1000
    report(Finding(apart <= CLOCK_S, f"clock: {apart:.1f} s from that of Kafka's controller"))


async def _topics(config: Config, queries: TopicQueries, report: Callable[[Finding], None]) -> None:
    """Check our rights, and which topics are unsafe (`topic_safety`)."""
    metadata = await queries.all_topics()
    kafkas, own, of_clients = topics_to_check(metadata)
    await _rights(queries, own, of_clients, report)
    if len(metadata.brokers) < SAFE_COPIES:
        required = config.kafka.require_safe_topics
        text = "one broker: no topic is safe from its loss"
        report(Finding(not required and None, f"{text}, and kafka.require_safe_topics is set" if required else text))
        return
    names = [*kafkas, *own, *of_clients]
    unsafe = [why for info in await describe_topics(queries, names) if (why := why_unsafe(info)) is not None]
    for why in unsafe[:SHOWN]:
        report(Finding(False, why))
    if len(unsafe) > SHOWN:
        report(Finding(False, f"and {len(unsafe) - SHOWN} more topics that are not safe"))
    if not unsafe:
        report(Finding(True, f"{len(names)} topics have at least two replicas and min.insync.replicas=2"))


async def _acls(queries: TopicQueries, report: Callable[[Finding], None]) -> None:
    """Check that Kafka's ACLs, which authorize the clients, can be read."""
    try:
        acls = read_acls(await queries.request(all_acls()))
    except AclsUnknown as unknown:
        report(Finding(False, f"ACLs: {unknown}"))
    else:
        report(Finding(True, f"ACLs: {len(acls)} can be read"))


async def _rights(
    queries: TopicQueries, own: Sequence[str], of_clients: Sequence[str], report: Callable[[Finding], None]
) -> None:
    """Check our rights: on existing topics and the cluster Kafka reports them, the others are tried."""
    allowed: dict[Resource, list[tuple[str, int]]] = {}
    for kind, names in ((Resource.OWN_TOPICS, own), (Resource.CLIENT_TOPICS, of_clients)):
        allowed[kind] = []
        for at in range(0, max(1, len(names)), ROUND):
            answer = await queries.request(wire.rights_request(names[at : at + ROUND]))
            allowed[kind] += [
                (name, 0 if topic.error == DENIED else topic.operations)
                for name, topic in answer.topics.items()
                if topic.error in {0, DENIED}
            ]
            allowed[Resource.CLUSTER] = [("", answer.operations)]
    tried = await denied(queries, own_topics=not own)
    if CREATE in tried.get((Resource.OWN_TOPICS, OWN_TOPIC), ()):
        text = f"rights: Create on {Resource.OWN_TOPICS.value} ({OWN_TOPIC}), or on the cluster, is missing"
        report(Finding(False, f"{text}: the gateway is never ready"))
    for (kind, name), missed in tried.items():
        allowed.setdefault(kind, []).append((name, ~sum(1 << one for one in missed)))
    [(_, on_cluster)] = allowed[Resource.CLUSTER]
    for need in NEEDS:
        if need.resource is Resource.CLUSTER and not on_cluster and DESCRIBE not in need.operations:
            continue  # Kafka reports none of them without Describe
        words = ", ".join(map(str, need.operations))
        bad = [(name, missing) for name, operations in allowed[need.resource] if (missing := lacking(need, operations))]
        for name, missing in bad[:SHOWN]:
            resource = f"{need.resource.value}{name and f' ({name})'}"
            # Rights on groups may be for some names only, and this one is ours.
            verdict = False if need.always and need.resource is not Resource.GROUPS else None
            report(Finding(verdict, f"rights: {', '.join(map(str, missing))} on {resource} is missing: {need.without}"))
        if not bad and allowed[need.resource]:
            report(Finding(True, f"rights: {words} on {need.resource.value}"))
