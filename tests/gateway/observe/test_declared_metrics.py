"""Each metric is declared on its struct, a gateway exposes what the page lists, and no name is used twice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.kafka.groups.statistics import GroupsStatistics, GroupStatistics
from telemetry.metrics import Metrics, describe
from telemetry.statistics import Declared, Histogram, fields
from tests.support.gateway import GatewayProcess
from tools.tables import METRICS, SOURCES

STRUCTS = {name: struct for chapter in SOURCES.values() for name, struct in chapter.items()}
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.+) \|$", re.MULTILINE)


def documented() -> dict[str, tuple[str, set[str]]]:
    page = METRICS.read_text(encoding="utf-8")
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in ROW.findall(page)}


def below(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    yield struct
    for field in fields(struct):
        if field.struct is not None:
            yield from below(field.struct)


@pytest.mark.parametrize("name", STRUCTS)
def test_every_number_of_a_struct_is_declared_with_its_labels(name: str) -> None:
    for struct in below(STRUCTS[name]):
        for field, hint in get_type_hints(struct, include_extras=True).items():
            kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            declared = [note for note in notes if isinstance(note, Declared)]
            depth = 0
            while isinstance(get_origin(kind), type) and issubclass(get_origin(kind), Mapping):
                kind, depth = get_args(kind)[1], depth + 1
            if depth or kind in {int, float, Histogram}:
                (one,) = declared
                assert len(one.labels) == depth, (struct, field)
                assert (one.kind == "histogram") == (kind is Histogram), (struct, field)
                assert not (field.endswith("_total") and one.kind != "counter"), (struct, field)


def test_no_metric_has_two_meanings() -> None:
    names = Counter(metric.name for name, struct in STRUCTS.items() for metric in describe(name, struct))
    assert {name for name, count in names.items() if count > 1} == set()
    assert names.keys() == documented().keys()


async def test_a_gateway_tells_what_the_page_says(gateway: GatewayProcess) -> None:
    async with aiohttp.ClientSession() as http, http.get(f"http://{gateway.addresses['management']}/metrics") as answer:
        assert answer.status == 200
        text = await answer.text()
    found = {
        (f"{family.name}_total" if family.type == "counter" else family.name): (
            family.type,
            {label for sample in family.samples for label in sample.labels} - {"le"},
        )
        for family in text_string_to_metric_families(text)
        if family.name.startswith("trivium_") and family.samples
    }
    page = documented()
    assert {name: told for name, told in found.items() if page.get(name) != told} == {}
    sources = {name for name in STRUCTS if any(told.startswith(f"trivium_{name}_") for told in found)}
    assert sources >= STRUCTS.keys() - {
        "kafka",
        "failures",
        "embedded_kafka",
        "spark",
        "presence",
    }  # without groups, failures, a broker, jobs, presence


def test_the_metrics_of_groups_have_labels() -> None:
    first = GroupStatistics("g", ("a",), 1, {"a": {0: 7}}, {"a": {0: 5}}, {"a": 2}, 1, 0, 3, 0, 0, 1)
    second = GroupStatistics("h", ("b", "c"), 1, {}, {}, {}, 0, 0, 0, 0, 0, 0)
    metrics = Metrics()
    metrics.add_source("kafka", lambda: GroupsStatistics({"g": first, "h": second}))
    found: dict[tuple[str, tuple[str, ...]], Any] = {
        (sample.name, tuple(sorted(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }
    assert found["trivium_kafka_group_lag", ("a", "g")] == 2
    assert found["trivium_kafka_group_commits_total", ("g",)] == 3
    assert found["trivium_kafka_group_subscribers", ("h",)] == 1
