"""Bodies of requests that change topics and their configuration."""

from __future__ import annotations

from typing import Final

import msgspec

from protocols.rest.requests import decode


class NewTopic(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A topic to create; None means the gateway's configured number."""

    name: str = msgspec.field(name="topic_name")
    partitions: int | None = msgspec.field(name="partitions_count", default=None)
    replication: int | None = msgspec.field(name="replication_factor", default=None)


class _Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    configs: dict[str, str | None]


_CHANGES: Final = msgspec.json.Decoder(_Changes)
_TOPIC: Final = msgspec.json.Decoder(NewTopic, strict=False)  # 1.0 is an integer for the contract


def decode_topic(body: bytes) -> NewTopic:
    """Decode the topic to create. RestError 400."""
    return decode(_TOPIC, body)


def decode_changes(body: bytes) -> dict[str, str | None]:
    """Decode new values of a topic's configuration by name; None means the default. RestError 400."""
    return decode(_CHANGES, body).configs
