"""Write deploy/strimzi: the rights that the gateway needs as a `KafkaUser`, and its internal topics as `KafkaTopic`s.

Called as `python -m tools.strimzi` (`make tables`); a test fails if a file is out of date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from gateway.kafka.cluster.rights import ACL_PLACES, AclResource, needed
from gateway.kafka.cluster.topic_info import InternalTopic
from gateway.kafka.state import table_configs
from gateway.mqtt.connection.refused_again import refused_topic
from gateway.mqtt.registry import session_registry
from gateway.mqtt.routing.retained import RETAINED
from gateway.rest.produce.idempotency_table import REQUESTS, RETENTION_MARGIN_MS
from gateway.security.rights import group_names
from gateway.settings.config import MEBIBYTE, Config
from tools.tables import ROOT

DEPLOY: Final = ROOT / "deploy" / "strimzi"
API: Final = "kafka.strimzi.io/v1"
CLUSTER: Final = {"strimzi.io/cluster": "my-cluster"}
REPLICAS: Final = 3
USER_HEADER: Final = """\
# Written by `make tables` from the list that `trivium doctor` checks (gateway/kafka/cluster/rights.py).
# Replace my-cluster. If clients' topics or groups have a common prefix, use it instead of "*", with the pattern type
# prefix. Strimzi before 0.49 has the version v1beta2.
"""
TOPICS_HEADER: Final = """\
# Written by `make tables`: the gateway's internal topics as it creates them, for clusters where it may create none
# (or where the topic operator should manage them). Replace my-cluster. Never change an existing topic's partitions.
"""


def user() -> dict[str, Any]:
    """Return the gateway's Kafka user with all rights that it needs."""
    acls = [
        {
            "resource": resource_of(ACL_PLACES[resource]),
            "operations": [str(operation) for operation in operations],
            "host": "*",
        }
        for resource, operations in needed().items()
    ]
    return {
        "apiVersion": API,
        "kind": "KafkaUser",
        "metadata": {"name": "trivium", "labels": CLUSTER},
        "spec": {
            "authentication": {"type": "scram-sha-512"},
            "authorization": {"type": "simple", "acls": acls},
        },
    }


def resource_of(place: AclResource) -> dict[str, str]:
    """Return a resource as Strimzi describes it."""
    if place.kind == "cluster":
        return {"type": "cluster"}
    kind = "transactionalId" if place.kind == "transactional-id" else place.kind
    return {"type": kind, "name": place.name, "patternType": "prefix" if place.prefixed else "literal"}


def own_topics(config: Config) -> Iterator[InternalTopic]:
    """Yield the internal topics of a gateway with this configuration."""
    largest = config.mqtt.max_packet_bytes + MEBIBYTE
    kept_ms = int(config.http.idempotency_window_s * 1000) + RETENTION_MARGIN_MS
    tables = {session_registry.TOPIC: None, RETAINED: None, group_names.TOPIC: None, REQUESTS: kept_ms}
    for name, retention_ms in tables.items():
        yield InternalTopic(name, config.mqtt.state_partitions, table_configs(largest, retention_ms))
    yield refused_topic(config.kafka.max_request_bytes)


def topic(internal: InternalTopic) -> dict[str, Any]:
    """Return a internal as a manifest for the internal operator."""
    configs = {name: int(value) if value.isdecimal() else value for name, value in internal.configs}
    return {
        "apiVersion": API,
        "kind": "KafkaTopic",
        "metadata": {"name": internal.name.strip("_").replace("_", "-"), "labels": CLUSTER},
        "spec": {
            "topicName": internal.name,
            "partitions": internal.partitions,
            "replicas": REPLICAS,
            "config": {**configs, "min.insync.replicas": 2},
        },
    }


def files() -> Iterator[tuple[Path, str]]:
    """Yield each file with its text."""
    yield DEPLOY / "kafkauser.yaml", USER_HEADER + _text(user())
    yield DEPLOY / "kafkatopics.yaml", TOPICS_HEADER + "---\n".join(_text(topic(one)) for one in own_topics(Config()))


def _text(manifest: dict[str, Any]) -> str:
    return yaml.dump(manifest, Dumper=_Plain, sort_keys=False)


class _Plain(yaml.SafeDumper):
    """Writes no YAML aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def main() -> None:
    """Write all files."""
    for path, text in files():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
