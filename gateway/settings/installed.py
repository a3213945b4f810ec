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
    """Raise ConfigError for a configured key of a part that is not installed."""
    for name, part in PARTS.items():
        for key in part.keys:
            if _is_given(config, key):
                need(name, key)


def _is_given(config: Config, key: str) -> bool:
    """Whether a key, or one in the section of this name, is in the file, the environment or the options."""
    section: BaseModel = config
    for step in key.split("."):
        if step not in section.model_fields_set:
            return False
        value = getattr(section, step)
        if not isinstance(value, BaseModel):
            return True
        section = value
    return bool(section.model_fields_set)
