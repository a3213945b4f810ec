"""The parts' own statistics as metrics: every name that the tables mention exists."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from gateway.amqp.services import AmqpStatistics
from gateway.kafka.groups.reader import GroupStatistics
from gateway.kafka.publish.publisher import LATENCY_MS, Statistics
from gateway.kafka.read.catch_up_reader import ReplayStatistics
from gateway.kafka.read.watched_topics import TailStatistics
from gateway.mqtt.counters import Counters
from gateway.observe.metrics import Metrics
from gateway.observe.sources import COUNTERS, add_source
from gateway.rest.listener import RestStatistics
from mapping.outcomes import Outcome

STRUCTS = {
    "mqtt": (Counters,),
    "amqp": (AmqpStatistics,),
    "http": (RestStatistics,),
    "publisher": (Statistics,),
    "tail": (TailStatistics, ReplayStatistics),
    "kafka": (GroupStatistics,),
}


def test_every_counter_is_a_field() -> None:
    for name, counters in COUNTERS.items():
        fields = {field for struct in STRUCTS[name] for field in struct.__struct_fields__}
        assert counters <= fields, name


def test_publisher_and_groups() -> None:
    metrics = Metrics()
    latency = (0, 3, *[0] * (len(LATENCY_MS) - 2), 1)
    published = Statistics(2, 200, dict.fromkeys(Outcome, 0) | {Outcome.STORED: 9}, {}, {}, 4, latency, 130_005.0, 1)
    add_source(metrics, "publisher", lambda: published)
    first = GroupStatistics("g", ("a",), 1, {"a": {0: 7}}, {"a": {0: 5}}, {"a": 2}, 1, 0, 3, 0, 0, 1)
    second = GroupStatistics("g", ("b", "c"), 1, {}, {}, {}, 0, 0, 0, 0, 0, 0)
    add_source(metrics, "kafka", lambda: (first, second))
    found = {
        (sample.name, tuple(sorted(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }
    assert found["trivium_publisher_records_total", ("stored",)] == 9
    assert found["trivium_publisher_records_in_flight", ()] == 2
    assert found["trivium_publisher_batch_latency_seconds_bucket", ("0.002",)] == 3
    assert found["trivium_publisher_batch_latency_seconds_count", ()] == 4
    assert found["trivium_publisher_batch_latency_seconds_sum", ()] == 130.005
    assert found["trivium_kafka_group_lag", ("a", "g")] == 2
    assert found["trivium_kafka_group_commits_total", ("g",)] == 3
    assert found["trivium_kafka_group_outlets", ("g:b,c",)] == 1


def test_a_gauge_and_its_counter_stand_side_by_side() -> None:
    metrics = Metrics()
    add_source(metrics, "http", lambda: {"connections": 2, "connections_total": 9})
    text = metrics.render().decode()
    assert "trivium_http_connections 2.0" in text
    assert "trivium_http_connections_total 9.0" in text
