"""How many gateways, partitions and MB/s a fleet of devices needs, from what a message was measured to cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

BUSY: Final = 0.6
"""Of a processor: so far a gateway is planned to be used, so that bursts and the end of another find room."""
RECORD_BYTES: Final = 90
"""What a record has in Kafka beside its value: key, headers, framing."""
BATCHED: Final = 1.1
"""What requests, indices and acknowledgements add to the bytes of the records."""
PARTITION_MB: Final = 10.0
"""A second and partition, so that consumers and replicas keep up."""
MB: Final = 1e6


class Fleet(NamedTuple):
    """What there is to serve.

    Attributes:
        devices: connections that send.
        rate: messages a second of each.
        size: payload bytes.
        subscribers: connections that get messages.
        share: of all messages that each subscriber gets.
        replicas: of each partition.
    """

    devices: int
    rate: float
    size: int
    subscribers: int = 0
    share: float = 1.0
    replicas: int = 3


class Cost(NamedTuple):
    """What was measured.

    Attributes:
        message_us: of the gateway's processor for a message in.
        delivery_us: for a message out; 0: it was not measured.
        connection_bytes: of its memory for a connection.
        idle_mib: of its memory without any.
        size: payload bytes of what was measured.
        source: where the figures are from.
    """

    message_us: float
    delivery_us: float
    connection_bytes: float
    idle_mib: float
    size: int
    source: str


class Need(NamedTuple):
    """The answer."""

    messages: float
    deliveries: float
    processors: float
    gateways: int
    memory_mib: float
    kafka_in_mb: float
    kafka_disk_mb: float
    out_mb: float
    partitions: int

    def row(self) -> dict[str, Any]:
        """As lines of a report."""
        return {
            "messages a second": round(self.messages, 1),
            "deliveries a second": round(self.deliveries, 1),
            "gateway processors used": round(self.processors, 2),
            "gateways (one processor each)": self.gateways,
            "memory of all gateways, MiB": round(self.memory_mib),
            "into Kafka, MB/s": round(self.kafka_in_mb, 2),
            "onto Kafka's disks, MB/s": round(self.kafka_disk_mb, 2),
            "to subscribers, MB/s": round(self.out_mb, 2),
            "partitions": self.partitions,
        }


def size(fleet: Fleet, cost: Cost) -> Need:
    """What a fleet needs."""
    messages = fleet.devices * fleet.rate
    deliveries = messages * fleet.subscribers * fleet.share
    processors = (messages * cost.message_us + deliveries * cost.delivery_us) / 1e6
    gateways = max(1, math.ceil(processors / BUSY))
    memory = gateways * cost.idle_mib + (fleet.devices + fleet.subscribers) * cost.connection_bytes / 2**20
    kafka = messages * (fleet.size + RECORD_BYTES) * BATCHED / MB
    # Each gateway writes to every partition; a consumer of a partition has one reader.
    partitions = max(3, gateways, math.ceil(kafka / PARTITION_MB))
    out = deliveries * (fleet.size + RECORD_BYTES) / MB
    return Need(messages, deliveries, processors, gateways, memory, kafka, kafka * fleet.replicas, out, partitions)


def cost_of(sending: Mapping[str, Any], receiving: Mapping[str, Any] | None = None) -> Cost:
    """From results of runs: one that only sends, and one with readers beside.

    Raises:
        ValueError: the gateway was not on this machine, so its processor was not seen.
    """
    message = sending["summary"].get("cpu us")
    if message is None:
        raise ValueError("the result does not say what a message cost: run it on the gateway's machine")
    delivery = 0.0
    if receiving is not None:
        readers = sum(one["connections"] for one in receiving["scenario"]["receive"])
        delivery = max(0.0, receiving["summary"]["cpu us"] - message) / readers
    memory = sending["summary"].get("memory MiB", 0.0)
    each = max(0.0, sending["connection bytes"] or 0.0)
    sizes = [one["size"] for one in sending["scenario"]["send"]]
    return Cost(
        message, delivery, each, max(0.0, memory - sending["connections"] * each / 2**20), max(sizes),
        f"{sending['name']} of {sending['when']} on {sending['environment']['machine']}",
    )  # fmt: skip


def assumptions(fleet: Fleet, cost: Cost) -> list[str]:
    """What the answer takes for granted."""
    told = [
        (
            f"a message costs {cost.message_us:.1f} us of the gateway's processor, a connection"
            f" {cost.connection_bytes / 1024:.1f} KiB ({cost.source}, payloads of {cost.size} bytes)"
        ),
        f"a gateway uses one processor, and is planned to be {BUSY:.0%} busy; the load is spread evenly over all",
        (
            f"a record has {RECORD_BYTES} bytes beside its payload, and Kafka's protocol adds {BATCHED - 1:.0%};"
            f" nothing is compressed; {fleet.replicas} replicas"
        ),
        f"a partition takes {PARTITION_MB:g} MB/s; as many partitions as gateways, at least 3",
        "Kafka's own processors are not counted, and nor is TLS",
    ]
    if fleet.subscribers:
        told.append(
            f"each of the {fleet.subscribers:,} subscribers gets {fleet.share:.0%} of all messages; a delivery costs"
            f" {cost.delivery_us:.1f} us"
        )
    if max(fleet.size, cost.size) > 4 * min(fleet.size, cost.size):
        told.append(f"{fleet.size} bytes are far from the {cost.size} that were measured: measure again with these")
    return told
