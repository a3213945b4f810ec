"""Estimates the gateways, partitions and MB/s that a fleet of devices needs from the measured costs of a message."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

BUSY: Final = 0.6
"""The planned use of a processor, which leaves room for bursts and for the loss of a gateway."""
RECORD_BYTES: Final = 90
"""Bytes of a record in Kafka besides its value: key, headers, framing."""
BATCHED: Final = 1.1
"""The overhead of requests, indexes and acknowledgements over the records' bytes."""
PARTITION_MB: Final = 10.0
"""The most MB per second of a partition that consumers and replicas can follow."""
MB: Final = 1e6


class Fleet(NamedTuple):
    """The clients to serve.

    Attributes:
        devices: connections that send.
        rate: messages per second of each device.
        size: payload bytes.
        subscribers: connections that receive.
        share: share of all messages that each subscriber receives.
        replicas: of each partition.
    """

    devices: int
    rate: float
    size: int
    subscribers: int = 0
    share: float = 1.0
    replicas: int = 3


class Cost(NamedTuple):
    """The measured costs.

    Attributes:
        message_us: CPU of the gateway per inbound message.
        delivery_us: CPU per delivery; 0 if it was not measured.
        connection_bytes: memory per connection.
        idle_mib: memory without connections.
        size: payload bytes of the measured messages.
        source: where the figures come from.
    """

    message_us: float
    delivery_us: float
    connection_bytes: float
    idle_mib: float
    size: int
    source: str


class Need(NamedTuple):
    """The estimate."""

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
        """Return the lines of a report."""
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
    """Estimate what a fleet needs."""
    messages = fleet.devices * fleet.rate
    deliveries = messages * fleet.subscribers * fleet.share
    processors = (messages * cost.message_us + deliveries * cost.delivery_us) / 1e6
    gateways = max(1, math.ceil(processors / BUSY))
    memory = gateways * cost.idle_mib + (fleet.devices + fleet.subscribers) * cost.connection_bytes / 2**20
    kafka = messages * (fleet.size + RECORD_BYTES) * BATCHED / MB
    # Each gateway writes to every partition; each partition has one consumer.
    partitions = max(3, gateways, math.ceil(kafka / PARTITION_MB))
    out = deliveries * (fleet.size + RECORD_BYTES) / MB
    return Need(messages, deliveries, processors, gateways, memory, kafka, kafka * fleet.replicas, out, partitions)


def cost_of(sending: Mapping[str, Any], receiving: Mapping[str, Any] | None = None) -> Cost:
    """Return the costs from one result that only sends, and one with readers as well.

    Raises:
        ValueError: the gateway was on another machine, so its CPU was not measured.
    """
    message = sending["summary"].get("cpu us")
    if message is None:
        raise ValueError("the result has no CPU cost per message: run it on the gateway's machine")
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
    """Return the assumptions of the estimate."""
    found = [
        (
            f"a message costs {cost.message_us:.1f} us of the gateway's CPU, a connection"
            f" {cost.connection_bytes / 1024:.1f} KiB ({cost.source}, payloads of {cost.size} bytes)"
        ),
        f"a gateway uses one processor, planned to be {BUSY:.0%} busy, and the load is spread evenly",
        (
            f"a record has {RECORD_BYTES} bytes besides its payload, and Kafka's protocol adds {BATCHED - 1:.0%};"
            f" nothing is compressed; {fleet.replicas} replicas"
        ),
        f"a partition carries {PARTITION_MB:g} MB/s; there are as many partitions as gateways, at least 3",
        "the CPU of Kafka and of TLS is not included",
    ]
    if fleet.subscribers:
        found.append(
            f"each of the {fleet.subscribers:,} subscribers gets {fleet.share:.0%} of all messages; a delivery costs"
            f" {cost.delivery_us:.1f} us"
        )
    if max(fleet.size, cost.size) > 4 * min(fleet.size, cost.size):
        found.append(f"{fleet.size} bytes differ much from the measured {cost.size}: measure again with this size")
    return found
