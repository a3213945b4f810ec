"""Which limits apply to which clients; invalid rules stop the start with an error."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.limits.limits import Limits
from gateway.security.identity import ANONYMOUS_NAME, Identity
from gateway.settings.config import ConfigError, LimitsConfig
from gateway.settings.limits import LimitRule, Per

LISTENERS = ("mqtt", "amqp", "http")
KINDS: tuple[Per, ...] = get_args(Per)
NAMES, TENANTS, GROUPS = ("ann", "bob"), ("acme", "zeta"), ("sensors", "jobs")
ADDRESSES = ("10.0.0.1", "10.0.0.2")

rules = st.lists(
    st.builds(
        LimitRule,
        per=st.sampled_from(KINDS),
        principal=st.sampled_from(("*", "anonymous", *NAMES, *(f"group:{group}" for group in GROUPS))),
        tenant=st.sampled_from((None, *TENANTS)),
        listener=st.sampled_from((None, *LISTENERS)),
    ),
    max_size=8,
)
identities = st.one_of(
    st.builds(
        Identity, name=st.just(ANONYMOUS_NAME), method=st.just("anonymous"), tenant=st.sampled_from((None, *TENANTS))
    ),
    st.builds(
        Identity,
        name=st.sampled_from(NAMES),
        method=st.just("password"),
        groups=st.lists(st.sampled_from(GROUPS), unique=True).map(tuple),
        tenant=st.sampled_from((None, *TENANTS)),
    ),
)


def limits(rules: list[LimitRule]) -> Limits:
    """Make limits of any rules, also of those that the configuration refuses because they are never reached."""
    return Limits(LimitsConfig.model_construct(rules=tuple(rules)), lambda: 0.0, LISTENERS)


def is_for(rule: LimitRule, who: Identity, listener: str) -> bool:
    """The example of the documentation."""
    if rule.per == "tenant" and who.tenant is None:
        return False
    if rule.principal == "anonymous":
        named = who.method == "anonymous"
    elif rule.principal.startswith("group:"):
        named = rule.principal.removeprefix("group:") in who.groups
    else:
        named = rule.principal == "*" or (who.method != "anonymous" and rule.principal == who.name)
    return named and rule.tenant in (None, who.tenant) and rule.listener in (None, listener)


@given(rules=rules, who=identities, address=st.sampled_from(ADDRESSES), listener=st.sampled_from(LISTENERS))
def test_of_each_kind_the_first_rule_holds(rules: list[LimitRule], who: Identity, address: str, listener: str) -> None:
    expected = []
    for per in KINDS:
        found = [(number, rule) for number, rule in enumerate(rules) if rule.per == per and is_for(rule, who, listener)]
        expected += found[:1]
    chosen = list(limits(rules).choose(who, address, listener))
    assert [rule for rule, _ in chosen] == [rule for _, rule in expected]
    for (_, key), (number, rule) in zip(chosen, expected, strict=True):
        assert (key is None) == (rule.per == "connection")
        assert key is None or key[0] == number


clients = st.tuples(identities, st.sampled_from(ADDRESSES), st.sampled_from(LISTENERS))


NOBODY = [Identity(ANONYMOUS_NAME, "anonymous", tenant=tenant) for tenant in TENANTS]


@given(rules=rules, one=clients, other=clients)
@example(rules=[LimitRule(per="principal")], one=(NOBODY[0], "10.0.0.1", "mqtt"), other=(NOBODY[1], "10.0.0.1", "mqtt"))
def test_who_shares_a_limit_is_the_same_as_the_rule_says(rules: list[LimitRule], one: Any, other: Any) -> None:
    made = limits(rules)
    keys = [{key for _, key in made.choose(*client) if key is not None} for client in (one, other)]
    (who, address, listener), (other_who, other_address, other_listener) = one, other
    anonymous = who.method == other_who.method == "anonymous"
    same = {
        "tenant": who.tenant == other_who.tenant,
        "listener": listener == other_listener,
        "principal": (who.name, who.method, who.tenant) == (other_who.name, other_who.method, other_who.tenant)
        and (not anonymous or address == other_address),
    }
    for number, _, _ in keys[0] & keys[1]:
        assert same[rules[number].per]
    for number, *_ in {key[0]: key for key in keys[0]}.items():
        if number in {key[0] for key in keys[1]} and same[rules[number].per]:
            assert any(key[0] == number for key in keys[0] & keys[1])


@given(rules=rules, who=identities, listener=st.sampled_from(LISTENERS))
def test_a_rule_that_is_said_to_be_never_reached_never_holds(
    rules: list[LimitRule], who: Identity, listener: str
) -> None:
    """Leaving such a rule out changes nothing."""
    chosen = limits(rules).choose(who, "10.0.0.1", listener)
    dead = [rule for at, rule in enumerate(rules) if any(earlier.covers(rule) for earlier in rules[:at])]
    assert not any(rule is one for rule, _ in chosen for one in dead)


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ([{"per": "connection", "connections": 2}], "cannot be per connection"),
        ([{"per": "connection", "connects_per_s": 2}], "cannot be per connection"),
        ([{"per": "tenant", "disconnect": True, "in_bytes_per_s": 9}], "disconnect cannot be per tenant"),
        ([{"per": "principal", "disconnect": True}], "disconnect needs in_messages_per_s"),
        ([{"per": "principal"}, {"per": "principal", "principal": "ann"}], r"rules\[2\] is never reached"),
        ([{"per": "client"}], "Input should be"),
        ([{"per": "principal", "in_bytes_per_s": -1}], "greater than or equal to 0"),
        ([{"connections": 3}], "Field required"),
    ],
)
def test_what_cannot_be_meant_is_refused(rules: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        LimitsConfig(rules=rules)


def test_a_rule_for_a_listener_that_there_is_not_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"limits\.rules\[1\]\.listener: there is no listener 'mqqt'; expected one of amqp, http, mqtt",
    ):
        limits([LimitRule(per="listener", listener="mqqt")])
