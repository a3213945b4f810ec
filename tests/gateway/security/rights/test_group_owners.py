"""Ownership of groups: several gateways with one Kafka, released names, group rules."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from gateway.kafka.groups.membership import Groups
from gateway.kafka.read.catch_up_reader import CatchUpReader
from gateway.security.identity import Identity
from gateway.security.rights.authorization import AccessList, Grant
from gateway.security.rights.group_names import TOPIC, YOUNG_MS, GroupNames
from gateway.settings.config import AccessRule, ConfigError
from mapping.outcomes import Outcome
from mapping.record import Received
from tests.support.state import state_process

ANN = AccessList().for_client(Identity("ann", "password"))
BOB = AccessList().for_client(Identity("bob", "password"))
WITHIN_S = 60


class Clock:
    """The time plus an offset that the test sets."""

    ahead_ms = 0

    def __call__(self) -> int:
        return time.time_ns() // 1_000_000 + self.ahead_ms


@asynccontextmanager
async def gateway_names(bootstrap: str, clock: Clock) -> AsyncIterator[GroupNames]:
    """The group names and their parts in one gateway process."""
    async with state_process(bootstrap) as process:
        kafka = process.kafka
        lookup = Lookup(kafka, spawn=process.spawn, ensure=process.topics.get, timeout_s=60.0)
        catch_up_reader = CatchUpReader(kafka, process.spawn, lookup, consumers=1)
        groups = Groups(kafka, process.spawn, lookup, catch_up_reader, random=random.random)
        names = GroupNames(
            process.state,
            groups,
            process.topics,
            anonymous=True,
            wall_clock=clock,
            random_id=lambda: secrets.token_hex(8),
        )
        await process.state.start()
        await asyncio.wait_for(process.state.loaded.wait(), WITHIN_S)
        yield names
        await groups.stop()
        await catch_up_reader.stop()
        await lookup.stop()


async def admitted(names: GroupNames, grant: Grant, group: str) -> bool:
    try:
        await names.admit(grant, group)
    except Refused as refused:
        if refused.outcome is not Outcome.DENIED:
            raise
        return False
    return True


async def test_of_two_who_claim_a_name_at_once_one_has_it_at_every_gateway(bootstrap: str) -> None:
    async with gateway_names(bootstrap, Clock()) as one, gateway_names(bootstrap, Clock()) as two:
        for group in (f"g-{uuid.uuid4().hex[:12]}" for _ in range(5)):
            first = await asyncio.gather(admitted(one, ANN, group), admitted(two, BOB, group))
            assert sorted(first) == [False, True]
            assert await asyncio.gather(admitted(two, ANN, group), admitted(one, BOB, group)) == first


async def test_a_name_goes_when_kafka_has_forgotten_its_group(bootstrap: str) -> None:
    clock, group = Clock(), f"g-{uuid.uuid4().hex[:12]}"
    async with gateway_names(bootstrap, clock) as names:
        assert await admitted(names, ANN, group)
        await names.sweep()
        assert not await admitted(names, BOB, group), "it is young"
        clock.ahead_ms = 2 * YOUNG_MS
        assert await admitted(names, ANN, group)
        await names.sweep()
        assert not await admitted(names, BOB, group), "it was used"
        clock.ahead_ms = 4 * YOUNG_MS
        await names.sweep()
        assert await admitted(names, BOB, group)
        assert not await admitted(names, ANN, group)
        assert names.statistics().forgotten_total >= 1


async def test_a_name_that_is_too_long_is_not_claimed(bootstrap: str) -> None:
    """An MQTT share name may have 65,000 bytes."""
    async with gateway_names(bootstrap, Clock()) as names:
        before = names.statistics()
        with pytest.raises(Refused) as refused:
            await names.admit(ANN, uuid.uuid4().hex + "x" * 60_000)
        assert refused.value.outcome is Outcome.UNFIT
        assert names.statistics() == before
        assert await admitted(names, ANN, uuid.uuid4().hex + "x" * 288)


async def test_what_no_gateway_has_written_is_ignored(bootstrap: str) -> None:
    async with gateway_names(bootstrap, Clock()) as names:
        before = names.statistics()
        not_text = b'{"principal":"\xff","claim":"x","since_ms":0}'
        deep = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        for value in (b"", b"{}", b"[1]", b'{"principal":1,"claim":"x","since_ms":0}', b"\xff", not_text, deep):
            for key in (None, b"", b"\xff"):
                names.apply(Received(TOPIC, key, value, (), 0, 0, 0))
        assert names.statistics().undecodable_total == before.undecodable_total + 21
        assert names.statistics().names == before.names


def test_the_first_rule_that_fits_decides_and_topics_stay_as_they_are() -> None:
    rules = (
        AccessRule(principal="group:staff", group="jobs-1", action="delete", allow=False),
        AccessRule(principal="ann", group="jobs-*"),
        AccessRule(group="*", action="read", allow=False),
    )
    access = AccessList(rules)
    ann, bob = (access.for_client(Identity(name, "password", ("staff",))) for name in ("ann", "bob"))
    assert [ann.group(action, "jobs-1") for action in ("read", "delete", "admin")] == [True, False, True]
    assert [ann.group(action, "jobs-2") for action in ("read", "delete", "admin")] == [True, True, True]
    assert [bob.group(action, "jobs-2") for action in ("read", "delete", "admin")] == [False, None, None]
    assert bob.publish("any", "key"), "without a rule about topics they are open"
    topics = AccessList((AccessRule(principal="ann"),)).for_client(Identity("ann", "password"))
    assert topics.group("read", "any") is None, "a rule about topics says nothing of groups"


@pytest.mark.parametrize(
    "rule",
    [
        {"group": ""},
        {"group": "a*b"},
        {"group": "a", "action": "publish"},
        {"group": "a", "topic": "t"},
        {"group": "a", "principal": ""},
        {"action": "read"},
        {"action": "delete", "topic": "t"},
    ],
)
def test_rules_that_cannot_be_meant_stop_the_start(rule: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^security\.access\[2\]"):
        AccessList([AccessRule(), AccessRule.model_validate(rule)])


names_of_groups = st.text(st.sampled_from("ab*"), max_size=4)


@given(names_of_groups, names_of_groups)
def test_a_star_at_the_end_is_the_beginning_of_names(pattern: str, name: str) -> None:
    try:
        said = AccessList((AccessRule(group=pattern),)).for_client(Identity("ann", "password")).group("read", name)
    except ConfigError:
        assert not pattern or "*" in pattern[:-1]
        return
    fits = name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
    assert said is (True if fits else None)
