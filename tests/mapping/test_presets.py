"""Presets are rules like any other: they compile, and do what their page says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapping.presets import PRESETS
from mapping.rules import Rules

LEVELS = st.text(st.sampled_from("ab.-_0 "), min_size=1, max_size=6)
TYPES = ["NBIRTH", "NDEATH", "NDATA", "NCMD", "DBIRTH", "DDEATH", "DDATA", "DCMD"]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dotted", [None, ()])
def test_a_preset_compiles(name: str, dotted: tuple[str, ...] | None) -> None:
    Rules(PRESETS[name], dotted=dotted)


@given(LEVELS, LEVELS, LEVELS, st.sampled_from([None, ()]))
def test_everything_of_a_sparkplug_node_has_one_key(
    group: str, node: str, device: str, dotted: tuple[str, ...] | None
) -> None:
    rules = Rules(PRESETS["sparkplug"], dotted=dotted)
    names = [f"spBv1.0/{group}/{kind}/{node}" + (f"/{device}" if kind[0] == "D" else "") for kind in TYPES]
    assert {rules.destination(name)[:2] for name in names} == {("sparkplug", f"{group}/{node}".encode())}


def test_a_hosts_state_has_a_key_of_its_own() -> None:
    assert Rules(PRESETS["sparkplug"]).destination("spBv1.0/STATE/scada")[:2] == ("sparkplug", b"STATE/scada")
