"""A load test as declared in a TOML file; `python -m loadtest run FILE`. docs/loadtest.md explains each key."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from loadtest.run.shapes import LEAST_BYTES, PROTOCOLS

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?")
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)(?:/(\d+(?:\.\d+)?)?\s*(ms|s|m|h))?")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(value: Any) -> Any:
    """Parse a duration to seconds: a number, or a text such as 500ms, 90s, 15m, 4h; ValueError for another text."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a duration such as 90, 500ms, 90s, 15m or 4h")
    return float(match[1]) * _UNITS[match[2] or "s"]


def rate(value: Any) -> Any:
    """Parse messages per second: a number, or a text such as 1/10s or 5/1m; ValueError for another text."""
    if not isinstance(value, str):
        return value
    match = _RATE.fullmatch(value.strip())
    if match is None or (time := float(match[2] or 1) * _UNITS[match[3] or "s"]) == 0:
        raise ValueError(f"{value!r} is not a rate such as 200, 200/s or 1/10s")
    return float(match[1]) / time


Seconds = Annotated[float, BeforeValidator(seconds), Field(gt=0)]
Rate = Annotated[float, BeforeValidator(rate), Field(gt=0)]
Protocol = Literal["mqtt", "amqp", "http"]
Messages = Literal["minimal", "typical", "jms", "random"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Target(_Table):
    """The gateway to test: a ready file of `trivium up --ready-file`, and addresses HOST:PORT, which override it."""

    ready_file: Path | None = None
    mqtt: str | None = None
    amqp: str | None = None
    http: str | None = None
    kafka: str | None = None
    ca: Path | None = None
    user: str | None = None
    password: str | None = Field(default=None, repr=False, exclude=True)
    pid: int | None = None

    def found(self) -> Target:
        """Return the target completed from the ready file; OSError or ValueError if that cannot be read."""
        if self.ready_file is None:
            return self
        ready = json.loads(self.ready_file.read_text())
        names = (*PROTOCOLS, "kafka", "pid")
        return self.model_copy(update={name: ready[name] for name in names if getattr(self, name) is None})

    def address(self, protocol: str) -> tuple[str, int]:
        """Return the host and port of a listener."""
        host, _, port = str(getattr(self, protocol)).rpartition(":")
        return host.strip("[]"), int(port)


class Send(_Table):
    """Connections that send messages."""

    protocol: Protocol
    connections: int = Field(default=10, ge=1)
    in_flight: int = Field(default=100, ge=1)
    messages: Messages = "typical"
    size: int = Field(default=100, ge=LEAST_BYTES)
    qos: Literal[1, 2] = 1
    batch: int = Field(default=1, ge=1)
    topics: int = Field(default=100, ge=1)
    share: float = Field(default=1.0, gt=0)


class Receive(_Table):
    """Connections that receive all messages."""

    protocol: Protocol
    connections: int = Field(default=1, ge=1)


class Ramp(_Table):
    """The search for the highest rate that is served well."""

    start: Rate = 1000.0
    p99_ms: float = Field(default=100.0, gt=0)
    step: Seconds = 8.0
    close: float = Field(default=0.1, gt=0, lt=1)


class Scenario(_Table):
    """A whole load test."""

    name: str = "load"
    target: Target = Target()
    duration: Seconds = 10.0
    warm_up: Seconds = 3.0
    rounds: int = Field(default=3, ge=1)
    rate: Rate | None = None
    ramp: Ramp | None = None
    every: Seconds = 10.0
    patience: Seconds = 30.0
    processes: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1)
    verify: bool = True
    topic: str | None = None
    partitions: int = Field(default=3, ge=1)
    seed: int = 1
    send: list[Send] = Field(min_length=1)
    receive: list[Receive] = []

    @property
    def parts(self) -> list[Send | Receive]:
        """All groups of connections."""
        return [*self.send, *self.receive]

    @model_validator(mode="after")
    def _whole(self) -> Scenario:
        if self.ramp is not None and self.rate is not None:
            raise ValueError("a ramp finds the rate: remove `rate`")
        return self

    def rate_of(self, part: int, total: float) -> float:
        """Return the rate of one connection of `send[part]` when all together send `total` per second."""
        whole = sum(one.share for one in self.send)
        return total * self.send[part].share / whole / self.send[part].connections


class ScenarioError(Exception):
    """A scenario cannot be run; the text is for the user."""


def read(path: Path, changes: dict[str, Any]) -> Scenario:
    """Read a scenario file; `changes` replace top-level keys, and `messages` is set in every `send`.

    Raises:
        ScenarioError: the file cannot be read, or is not valid.
    """
    try:
        table = tomllib.loads(path.read_text())
        shape = changes.pop("messages", None)
        target = {**table.pop("target", {}), **changes.pop("target", {})}
        if shape is not None:
            table["send"] = [{**one, "messages": shape} for one in table.get("send", [])]
        scenario = Scenario.model_validate({"name": path.stem, **table, **changes, "target": target})
        scenario = scenario.model_copy(update={"target": scenario.target.found()})
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, one['loc'])) or 'scenario'}: {one['msg']}" for one in error.errors()]
        raise ScenarioError(f"{path}: " + "; ".join(lines)) from None
    except (OSError, ValueError, KeyError) as error:
        raise ScenarioError(f"{path}: {error}") from None
    missing = {one.protocol for one in scenario.parts if getattr(scenario.target, one.protocol) is None}
    if missing:
        raise ScenarioError(f"{path}: target has no address for {', '.join(sorted(missing))}")
    if scenario.target.kafka is None and (scenario.verify or scenario.topic is None):
        raise ScenarioError(
            f"{path}: target has no kafka, so nothing can be verified: set verify = false and an existing topic"
        )
    return scenario
