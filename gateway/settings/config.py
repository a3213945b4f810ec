"""The configuration: one frozen object, read in one place and validated at the start.

Sources in rising precedence: defaults, `trivium.toml`, environment (`TRIVIUM_<SECTION>__<KEY>`), flags. A bad value
stops the start with the key's name. The sections are in `gateway/settings`. The text below each field gives its meaning
and reason, and `make tables` generates docs/configuration.md from it.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, get_origin

from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from gateway.runtime.secret import is_secret_name
from gateway.settings.kafka import BudgetConfig, EmbeddedConfig, KafkaConfig, MappingConfig
from gateway.settings.limits import LimitsConfig
from gateway.settings.listeners import ListenerConfig
from gateway.settings.protocols import (
    AmqpConfig,
    DrainConfig,
    HttpConfig,
    ManagementConfig,
    MqttConfig,
    PresenceConfig,
)
from gateway.settings.security import (
    AccessRule,
    AuditConfig,
    LogConfig,
    OauthConfig,
    ObserveConfig,
    SecurityConfig,
)
from gateway.settings.values import MEBIBYTE, Address, ConfigError

PREFIX: Final = "TRIVIUM_"
DELIMITER: Final = "__"
NOT_SETTINGS: Final = re.compile(r"TRIVIUM_(CACHE$|NATIVE$|TEST_|SERVICE_|PORT$|PORT_)")
"""Variables with our prefix that are not settings: the jars' cache, what 0.1 ignores and later versions refuse, tests,
and the variables that Kubernetes sets for a service named trivium."""


def fields(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and annotation of all keys below a section, including those of sections."""
    for name, field in model.model_fields.items():
        path = (*above, name)
        yield path, field.annotation
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, path)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` with the most similar name, or "" if there is none."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def unknown_variables(model: type[BaseModel], environment: Mapping[str, str]) -> list[str]:
    """Return a line for each of our variables that names no key, with the most similar key and without its value.

    A variable is ours if it has our prefix, or a misspelt prefix before an existing key.
    """
    kinds = {PREFIX + DELIMITER.join(path).upper(): get_origin(annotation) for path, annotation in fields(model)}
    known = kinds.keys()
    open_ended = [name + DELIMITER for name, kind in kinds.items() if kind is Mapping]
    lines = []
    for variable in sorted(environment):
        name = variable.upper()
        if not name.startswith(PREFIX):
            beginning, _, rest = name.partition("_")
            ours = difflib.get_close_matches(beginning, [PREFIX.removesuffix("_")], cutoff=0.75)
            if DELIMITER in rest and PREFIX + rest in known and ours:
                lines.append(f"{variable}: there is no such key (did you mean {PREFIX + rest}?)")
            continue
        if name in known or NOT_SETTINGS.match(name):
            continue
        if not any(name.startswith(beginning) for beginning in open_ended):
            lines.append(f"{variable}: there is no such key{nearest(name, known)}")
    return lines


__all__ = [
    "MEBIBYTE",
    "AccessRule",
    "Address",
    "AmqpConfig",
    "BudgetConfig",
    "Config",
    "ConfigError",
    "DrainConfig",
    "EmbeddedConfig",
    "HttpConfig",
    "KafkaConfig",
    "LimitsConfig",
    "LogConfig",
    "ManagementConfig",
    "MqttConfig",
    "OauthConfig",
    "ObserveConfig",
    "SecurityConfig",
    "load",
]


class Config(BaseSettings):
    """The whole configuration."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter=DELIMITER, frozen=True, extra="forbid")

    data_dir: Path = Path(".trivium")
    """directory for the embedded Kafka's data and the gateway's name"""
    drain_timeout_s: Annotated[float, Field(gt=0, le=10)] = 8.0
    """longest time for stopping, after Ctrl-C or after draining (`drain`); at most 10. Half of it is for Kafka's
    answers to records in flight"""
    listeners: tuple[ListenerConfig, ...] = ()
    """all listeners except management, instead of the addresses in the sections; see [below](#listeners)"""
    kafka: KafkaConfig = KafkaConfig()
    embedded: EmbeddedConfig = EmbeddedConfig()
    budget: BudgetConfig = BudgetConfig()
    limits: LimitsConfig = LimitsConfig()
    mqtt: MqttConfig = MqttConfig()
    amqp: AmqpConfig = AmqpConfig()
    http: HttpConfig = HttpConfig()
    management: ManagementConfig = ManagementConfig()
    drain: DrainConfig = DrainConfig()
    presence: PresenceConfig = PresenceConfig()
    mapping: MappingConfig = MappingConfig()
    security: SecurityConfig = SecurityConfig()
    log: LogConfig = LogConfig()
    audit: AuditConfig = AuditConfig()
    observe: ObserveConfig = ObserveConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: PydanticBaseSettingsSource,
        **__: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use only the given values: `load` merges the sources."""
        return (init_settings,)

    @property
    def creates_topics(self) -> bool:
        """Whether unknown topics are created: as configured, else only on the embedded broker."""
        if self.kafka.create_topics is not None:
            return self.kafka.create_topics
        return self.kafka.bootstrap_servers is None


def load(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Config:
    """Read the configuration from `file` (default: `trivium.toml` if it exists), the environment and `flags`.

    `flags` are nested values such as `{"mqtt": {"address": "127.0.0.1:0"}}`; None values are ignored.

    Raises:
        ConfigError: the file is not TOML, or a key is bad; the text has one line per bad key.
    """
    path = file if file is not None else Path("trivium.toml")
    data: dict[str, Any] = {}
    if file is not None or path.is_file():
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from error
    misspelled = unknown_variables(Config, os.environ)
    if misspelled:
        raise ConfigError("\n".join(misspelled))
    try:
        return Config(**_merge(_merge(data, EnvSettingsSource(Config)()), _without_none(flags or {})))
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None  # pydantic's own text would repeat the input
    except SettingsError as error:  # names the section
        raise ConfigError(f"environment, TRIVIUM_...: not valid JSON: {error}") from None


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: _without_none(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    return {key: value for key, value in kept.items() if value is not None and value != {}}


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _describe(error: ValidationError) -> str:
    lines = []
    for fault in error.errors(include_url=False):
        key = key_of(fault["loc"])
        # The input is not repeated if it may be a secret: by the key's type or name, or because the key is unknown.
        hidden = fault["type"] == "extra_forbidden" or is_secret_name(key) or _is_secret(fault["loc"])
        plain = isinstance(fault["input"], str | int | float) and not hidden
        text = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            text += nearest(key, (".".join(known) for known, _ in fields(Config)))
        lines.append(f"{key}: {text}, got {fault['input']!r}" if plain else f"{key}: {text}")
    return "\n".join(lines)


def key_of(path: Sequence[int | str]) -> str:
    """Return a key as it is shown: entries of an array are counted from 1, as `limits.rules[1].listener`."""
    shown = "".join(f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in path)
    return shown.removeprefix(".")


def _is_secret(place: tuple[int | str, ...]) -> bool:
    """Return whether the key at `place`, or one above it, has a secret's type."""
    return any("Secret" in repr(annotation) and place[: len(path)] == path for path, annotation in fields(Config))
