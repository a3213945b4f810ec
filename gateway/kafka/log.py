"""The parts that read from and write to Kafka, as the protocols get them."""

from __future__ import annotations

import msgspec

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.groups.membership import Groups
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.read.catch_up_reader import CatchUpReader
from gateway.kafka.read.live_reader import LiveReader
from gateway.settings.config import KafkaConfig


class Log(msgspec.Struct, frozen=True):
    """Everything that reads from and writes to Kafka; it starts without a reachable Kafka, too."""

    kafka: KafkaConfig
    topics: Topics
    publisher: Publisher
    lookup: Lookup
    catch_up_reader: CatchUpReader
    live_reader: LiveReader
    groups: Groups
