"""Settings of optional parts: one of a part that is not installed stops the start, by its key."""

from __future__ import annotations

from types import ModuleType

from pydantic import BaseModel

from gateway.runtime.parts import PARTS, load
from gateway.settings.config import Config, ConfigError


def need(name: str, key: str) -> ModuleType:
    """Return the entry module of the part that a key needs; raises ConfigError if it is not installed."""
    part = load(name)
    if part is None:
        raise ConfigError(f"{key}: the part `{name}` is not installed")
    return part


def check_installed(config: Config) -> None:
    """Raise ConfigError for a configured key of a part that is not installed, or if Kafka would be one."""
    for name, part in PARTS.items():
        for key in part.keys:
            given = _given(config, key)
            if given:
                need(name, given)
    if config.kafka.bootstrap_servers is None:
        need("embedded kafka", "kafka.bootstrap_servers is not set")


def _given(config: Config, key: str) -> str:
    """Return the key, or the first one in the section of this name, that has another value than the default; or ""."""
    section: BaseModel = config
    *above, last = key.split(".")
    for step in above:
        section = getattr(section, step)
    value, default = getattr(section, last), type(section).model_fields[last].get_default(call_default_factory=True)
    if value == default:
        return ""
    if not isinstance(value, BaseModel):
        return key
    return next((key_given for name in type(value).model_fields if (key_given := _given(config, f"{key}.{name}"))), "")
