"""Reports whether the C extensions are in use, or the equivalent Python code (ADR 0088)."""

from __future__ import annotations

import importlib
from typing import Annotated, Final

import msgspec

from gateway.statistics import gauge

EXTENSIONS: Final = (
    "gateway.kafka.publish._native",
    "mapping.amqp._native",
    "protocols.amqp._native",
    "protocols.mqtt._native",
)


class NativeStatistics(msgspec.Struct):
    """Whether the C extensions run."""

    in_use: Annotated[int, gauge("1 if the C extensions are in use, 0 if the slower Python code is")]


def why_not() -> str:
    """Return why the C extensions are not in use, or "" if they are. Importing them decides."""
    for name in EXTENSIONS:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return str(error)
    return ""


def statistics() -> NativeStatistics:
    """Return the state, which is fixed at the start."""
    return NativeStatistics(in_use=int(not why_not()))
