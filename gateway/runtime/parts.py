"""The optional parts: what a gateway can be installed without (ADR 0118).

The core imports none of them; a contract of import-linter holds that. It loads a part by its name, and goes on without
one that is not installed. A setting of a part that is not installed stops the start (`gateway.settings.installed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Final

import msgspec


class PartError(Exception):
    """A part cannot start or go on; the text is one line that says what to do."""


class Part(msgspec.Struct, frozen=True):
    """One optional part."""

    entry: str  # the module that the core loads
    modules: tuple[str, ...]  # its packages and modules: without them it is not installed
    keys: tuple[str, ...] = ()  # settings that mean nothing without it
    contract: tuple[str, ...] = ()  # its files of the HTTP contract
    command: str = ""  # the module of its commands
    needs: tuple[str, ...] = ()  # other parts, without which it is not installed either


PARTS: Final = {
    "audit": Part("gateway.audit.opening", ("gateway.audit",), ("audit",)),
    "cloud events": Part(
        "gateway.rest.cloud_events",
        ("gateway.rest.cloud_events", "mapping.rest.events", "protocols.rest.cloud_events"),
        contract=("cloud-events.yaml",),
    ),
    "confluent": Part(
        "gateway.rest.confluent.operations",
        ("gateway.rest.confluent", "mapping.confluent", "protocols.rest.confluent", "protocols.rest.confluent_v3"),
        ("http.dialect",),
        ("confluent-v2.yaml", "confluent-v3.yaml"),
    ),
    "device requests": Part(
        "gateway.rest.device_requests",
        ("gateway.rest.device_requests", "mapping.rest_requests"),
        ("http.reply_topic", "http.max_requests", "http.max_requests_per_client", "http.max_request_wait_s"),
        ("devices.yaml",),
    ),
    "doctor": Part(
        "gateway.kafka.cluster.doctor",
        ("gateway.kafka.cluster.doctor", "gateway.kafka.cluster.rights_trials"),
        command="gateway.process.commands.doctor",
    ),
    "embedded kafka": Part("gateway.embedded.service", ("gateway.embedded",), ("embedded",)),
    "live websockets": Part(
        "gateway.rest.live.live_websockets",
        ("gateway.rest.live", "protocols.rest.streams.live_connection", "protocols.rest.streams.live_messages"),
        contract=("live.yaml",),
    ),
    "presence": Part("gateway.presence.presence", ("gateway.presence",), ("presence",)),
    "spark": Part("spark_sinks", ("spark_sinks",), command="gateway.process.commands.spark", needs=("embedded kafka",)),
    "tenants": Part("gateway.tenants.tenants", ("gateway.tenants", "mapping.tenant_rules"), ("security.tenants",)),
    "trace": Part("gateway.trace.pages", ("gateway.trace",), command="gateway.process.commands.trace"),
}
"""The parts, by the name that messages to people use."""


def load(name: str) -> ModuleType | None:
    """Import a part and return its entry module; None if it is not installed."""
    part = PARTS[name]
    try:
        return import_module(part.entry)
    except ModuleNotFoundError as error:
        if error.name in {part.entry, *part.modules}:
            return None
        raise  # the part is installed, but what it needs is not


def part_of(module: str) -> str | None:
    """Return the name of the part that a module belongs to; None for the core."""
    for name, part in PARTS.items():
        if any(module == own or module.startswith(f"{own}.") for own in (*part.modules, part.command) if own):
            return name
    return None


def commands() -> Iterator[ModuleType]:
    """Import the commands of the parts that are installed, without the parts themselves, which load slowly."""
    return (import_module(part.command) for part in PARTS.values() if part.command and _is_there(part))


def _is_there(part: Part) -> bool:
    """Whether a part, its commands and the parts that it needs are installed; imports none of them."""
    modules = (part.entry, *part.modules, *filter(None, [part.command]))
    try:
        there = all(find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:  # a package above one of them
        return False
    return there and all(_is_there(PARTS[name]) for name in part.needs)
