"""Variables in the access list: their values, unusable values, and invalid rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.security.identity import ANONYMOUS, Identity
from gateway.security.rights.authorization import AccessList, Grant
from gateway.security.variables import check_logins
from gateway.settings.config import AccessRule, ConfigError, OauthConfig, SecurityConfig

CLAIMS = (("site", ("berlin", "oslo")), ("org.unit", ("7",)))
ANN = Identity("ann", "token", ("staff", "ops"), CLAIMS, "device-7")


def grant(*rules: dict[str, Any], identity: Identity = ANN, client: str | None = "c1") -> Grant:
    return AccessList([AccessRule.model_validate(rule) for rule in rules]).for_client(identity, client)


@pytest.mark.parametrize(
    ("topic", "good", "bad"),
    [
        ("t/{name}/#", ["t/ann", "t/ann/a/b"], ["t", "t/bob", "t/annx", "t/{name}", "t/anonymous"]),
        ("t/{client}", ["t/c1"], ["t/c1/x", "t/c2", "t/ann"]),
        ("t/{group}/+", ["t/staff/a", "t/ops/b"], ["t/staff", "t/guests/a"]),
        ("{claim:site}/{claim:org.unit}/#", ["berlin/7/x", "oslo/7"], ["berlin/8", "7/berlin"]),
        ("t/d.{cn}/x", ["t/d.device-7/x"], ["t/device-7/x", "t/d.device-8/x"]),
        ("{name}", ["ann", "ann/any/key"], ["bob", "ann2"]),
        ("t/{claim:none}/#", [], ["t", "t/", "t/none", "t/{claim:none}/x"]),
    ],
)
def test_what_a_variable_stands_for_in_each_protocol(topic: str, good: list[str], bad: list[str]) -> None:
    for key in ("topic", "kafka"):
        ann = grant({key: topic})
        for name, allowed in [*((name, True) for name in good), *((name, False) for name in bad)]:
            place, slash, rest = name.partition("/")
            assert ann.publish(place, rest if slash else None) is allowed, (key, name)
            assert ann.subscribe(place, rest.encode() if slash else None) is allowed, (key, name)
            assert ann.mqtt_publish(name, place, rest.encode() if slash else None) is allowed, (key, name)
            if "{" not in name:
                assert ann.mqtt_subscribe.filter(name) is allowed, (key, name)


@pytest.mark.parametrize("value", ["", "a/b", "+", "#", "x+", "/", "a#b", "\0"])
def test_a_value_that_could_widen_a_rule_allows_nothing_and_is_denied_with_the_rest(value: str) -> None:
    odd = Identity(value or "x", "password")
    allowing = grant({"topic": "t/{client}/#"}, identity=odd, client=value)
    for name in ("t", f"t/{value}", f"t/{value}/x", "t/x/y", "t/x"):
        topic, _, key = name.partition("/")
        assert not allowing.publish(topic, key), name
        assert not allowing.mqtt_publish(name, topic, key.encode()), name
    assert not allowing.mqtt_subscribe.filter("t/#")
    assert not allowing.subscribe.some("t")
    denying = grant({"topic": "t/{client}/#", "allow": False}, {"topic": "t/#"}, identity=odd, client=value)
    assert not denying.publish("t", "x/y"), "nobody escapes what is denied by an odd name"
    assert grant({"topic": "t/{client}/#", "allow": False}, {"topic": "t/#"}).publish("t", "c2")


def test_who_has_no_value_has_no_right() -> None:
    nobody = grant({"topic": "t/{name}/#"}, {"topic": "u/{cn}"}, {"topic": "v/{group}"}, identity=ANONYMOUS)
    assert not any(nobody.publish.some(topic) for topic in "tuv"), "anonymous clients are not a user of this name"
    over_http = grant({"topic": "t/{client}/#"}, client=None)
    assert not over_http.publish.some("t")


values = st.text(st.sampled_from("ab-/+#*. "), max_size=4)
RULES = ({"topic": "t/{client}/#"}, {"kafka": "k-{client}/x/#"}, {"group": "{client}-*"}, {"group": "own.{client}"})


@given(values, values)
def test_no_client_id_reaches_what_is_anothers(mine: str, other: str) -> None:
    me, them = grant(*RULES, client=mine), grant(*RULES, client=other)
    if mine == other:
        return
    for rest in ("", "/a", "/a/b"):
        assert not (me.publish("t", f"{other}{rest}") and them.publish("t", f"{other}{rest}"))
    assert not (me.publish(f"k-{other}", "x") and them.publish(f"k-{other}", "x"))
    for group in (f"{other}-a", f"{other}-a-b", f"own.{other}"):
        assert not (me.group("read", group) and them.group("read", group))


def test_groups_may_have_variables_too() -> None:
    ann = grant({"group": "{name}-*"}, {"group": "jobs.{group}", "action": "read"})
    assert [ann.group("read", name) for name in ("ann-1", "jobs.ops", "bob-1", "jobs.x")] == [True, True, None, None]
    dashed = grant({"group": "{name}-*"}, identity=Identity("an-n", "password"))
    assert dashed.group("read", "an-n-1") is None, "else the groups of an would be an-n's too"
    closed = grant({"group": "x-{cn}-*", "allow": False}, {"group": "*"}, identity=Identity("ann", "password"))
    assert [closed.group("read", name) for name in ("x-any-1", "y-1")] == [False, True]


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ({"topic": "a/{user}/#"}, r"\[2\]\.topic: \{user\} in '\{user\}' is not a variable; expected \{name\}"),
        ({"topic": "a/{}/#"}, r"\[2\]\.topic: \{\} in"),
        ({"topic": "a/{claim:}"}, r"\[2\]\.topic: \{claim:\} in"),
        ({"topic": "a/{name/#"}, r"\[2\]\.topic: '\{name' has unbalanced braces"),
        ({"kafka": "name}/#"}, r"\[2\]\.kafka: 'name\}' has unbalanced braces"),
        ({"topic": "a/{name}{client}"}, r"\[2\]\.topic: .* two variables"),
        ({"topic": "a/{name}-{client}"}, r"\[2\]\.topic: .* two variables"),
        ({"topic": "{name}#"}, r"\[2\]\.topic: '\{name\}#' is neither"),
        ({"kafka": "a b{name}"}, r"\[2\]\.kafka: .* is not a Kafka topic name"),
        ({"group": "{name}*"}, r"\[2\]\.group: .* needs a separator"),
        ({"group": "{user}"}, r"\[2\]\.group: \{user\}"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(rule: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=r"^security\.access" + complaint):
        AccessList([AccessRule(), AccessRule.model_validate(rule)])


KEYS = Path("keys")


@pytest.mark.parametrize(
    ("options", "rule", "why"),
    [
        ({}, {"topic": "{name}/#"}, "every client is anonymous"),
        ({"scram_file": KEYS}, {"topic": "{group}/#"}, "security.oauth is not set"),
        ({"scram_file": KEYS}, {"kafka": "{claim:site}"}, "security.oauth is not set"),
        ({"oauth": True}, {"group": "{group}"}, "security.oauth.groups_claim is not set"),
        ({"oauth": True}, {"topic": "{cn}/#"}, "security.tls_client_ca is not set"),
        (
            {"scram_file": KEYS},
            {"topic": "{name}/#", "principal": "anonymous"},
            "anonymous clients do not authenticate",
        ),
        ({"scram_file": KEYS}, {"topic": "{name}/{client}"}, None),
        ({"oauth": True}, {"topic": "{claim:site}/{name}/#"}, None),
        ({}, {"topic": "{client}/#", "principal": "anonymous"}, None),
    ],
)
def test_a_variable_that_no_login_says_is_told(options: dict[str, Any], rule: dict[str, str], why: str | None) -> None:
    if options.get("oauth"):
        options = {"oauth": OauthConfig(jwks_file=KEYS, issuer="i", audience=("a",))}
    config = SecurityConfig(**options, access=(AccessRule(), AccessRule.model_validate(rule)))
    if why is None:
        check_logins(config, config.logins)
        return
    with pytest.raises(ConfigError, match=r"^security\.access\[2\]: \{.*\} can never have a value: " + why):
        check_logins(config, config.logins)


def test_a_rule_is_found_by_its_principal_in_its_order() -> None:
    rules = [AccessRule(principal=f"u{number}", topic=f"t/{number}") for number in range(2000)]
    rules[1000:1000] = [AccessRule(principal="*", topic="t/7", allow=False), AccessRule(topic="open")]
    access = AccessList(rules)
    seven, late = (access.for_client(Identity(name, "password")) for name in ("u7", "u1500"))
    assert [seven.publish("t", "7"), seven.publish("t", "8"), seven.publish("open")] == [True, False, True]
    assert [late.publish("t", "1500"), late.publish("t", "7"), late.publish("open")] == [True, False, True]
    assert not access.for_client(Identity("u1", "password")).publish("t", "7")


def test_clients_that_the_same_rules_are_about_share_them() -> None:
    access = AccessList([AccessRule(topic="open/#"), AccessRule(principal="u1", topic="t/{name}")])
    grants = [access.for_client(Identity(f"user-{number}", "password"), f"c{number}") for number in range(2)]
    assert grants[0].publish._rules is grants[1].publish._rules
    assert access.for_client(Identity("u1", "password")).publish("t", "u1")
