"""Write the generated parts of the documents: settings, metrics, state diagrams, the ADRs' index and other tables.

Called as `python -m tools.tables` (`make tables`); tests/packaging/test_docs.py fails if a page is out of date.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from gateway.amqp.counters import AmqpStatistics
from gateway.audit.trail import AuditStatistics
from gateway.embedded.open_files import OpenFilesStatistics
from gateway.kafka.cluster.rights import ACL_PLACES, needed
from gateway.kafka.cluster.topic_creation import TopicCreationStatistics
from gateway.kafka.cluster.topic_safety import TopicSafetyStatistics
from gateway.kafka.driver.fetch.unreadable import UnreadableStatistics
from gateway.kafka.driver.login import KafkaLoginStatistics
from gateway.kafka.groups.statistics import GroupsStatistics
from gateway.kafka.publish import sending_states
from gateway.kafka.publish.budgets import BudgetStatistics
from gateway.kafka.publish.settlement import SettlementStatistics
from gateway.kafka.read.delays import DelayStatistics
from gateway.kafka.read.watched_topics import LiveStatistics
from gateway.kafka.state import StateStatistics
from gateway.limits.limits import LimitStatistics
from gateway.mqtt.routing.retained import RetainedStatistics
from gateway.mqtt.server import MqttServerStatistics
from gateway.mqtt.session import lifecycle, qos2_states
from gateway.net.descriptors import DescriptorStatistics
from gateway.net.http.upgrade import UpgradeStatistics
from gateway.net.listener import ListenerStatistics
from gateway.net.proxied import ProxyStatistics
from gateway.net.strangers import StrangersStatistics
from gateway.observe.collector import CollectorStatistics
from gateway.observe.lag import LagStatistics
from gateway.presence.ledger import PresenceStatistics
from gateway.rest.consume.instances import ConsumersStatistics
from gateway.rest.consume.record_pages import RecordPagesStatistics
from gateway.rest.device_requests import RequestsStatistics
from gateway.rest.live.live_websockets import LiveWebSocketStatistics
from gateway.rest.produce.line_uploads import UploadsStatistics
from gateway.rest.rest_server import RestStatistics
from gateway.rest.streams.server_sent_events import StreamsStatistics
from gateway.runtime.failures import FailureStatistics
from gateway.runtime.version import Build
from gateway.security.login.authentication import AuthenticationStatistics
from gateway.security.rights.acl_source import AclStatistics
from gateway.security.rights.group_names import GroupNamesStatistics
from gateway.settings.config import Config
from gateway.settings.limits import LimitRule
from gateway.settings.listeners import ListenerConfig, TlsConfig
from gateway.tenants.tenants import TenantsStatistics
from gateway.views.drain import DrainStatistics
from gateway.views.pauses import PauseStatistics
from spark_sinks.run.statistics import QueryStatistics
from spark_sinks.spec import audit, backfill, jobs, parts, replays
from spark_sinks.spec.values import AGGREGATES
from telemetry.metrics import describe
from tools import spark_manifests

ROOT: Final = Path(__file__).parents[1]
CONFIGURATION: Final = ROOT / "docs" / "configuration.md"
METRICS: Final = ROOT / "docs" / "metrics.md"
OPERATIONS: Final = ROOT / "docs" / "operations.md"
MQTT: Final = ROOT / "docs" / "mqtt.md"
KAFKA: Final = ROOT / "gateway" / "kafka" / "README.md"
DECISIONS: Final = ROOT / "docs" / "adr"
MODELS: Final = ROOT / "docs" / "spec"
SPARK: Final = ROOT / "docs" / "spark.md"
BEGIN: Final = "<!-- {}: written by `make tables` -->\n"
END: Final = "<!-- end of {} -->\n"
TITLE: Final = re.compile(r"# (\d{4}): ([^\n]+)\n\nDate: \d{4}-\d{2}-\d{2}\. Theme: (\w+)\.\n\n")
MOVED: Final = re.compile(r"# (\d{4}) is now part of \[(\d{4})\]\(\2-[a-z0-9-]+\.md\)\n\Z")
THEMES: Final = (
    "Structure", "Kafka", "Groups", "MQTT", "AMQP", "HTTP", "Mapping", "Limits", "Security", "Operation", "Spark"
)  # fmt: skip


SOURCES: Final[dict[str, dict[str, type[msgspec.Struct]]]] = {
    "MQTT": {"mqtt": MqttServerStatistics, "mqtt_websocket": UpgradeStatistics, "retained": RetainedStatistics},
    "AMQP": {"amqp": AmqpStatistics, "amqp_websocket": UpgradeStatistics},
    "HTTP": {
        "http": RestStatistics,
        "http_uploads": UploadsStatistics,
        "http_consumers": ConsumersStatistics,
        "http_reads": RecordPagesStatistics,
        "http_streams": StreamsStatistics,
        "http_devices": RequestsStatistics,
        "http_live": LiveWebSocketStatistics,
    },
    "Listeners": {"listener": ListenerStatistics, "proxy_protocol": ProxyStatistics},
    "Into Kafka": {
        "publisher": SettlementStatistics,
        "budget": BudgetStatistics,
        "topics": TopicCreationStatistics,
        "replication": TopicSafetyStatistics,
    },
    "From Kafka": {
        "live_reader": LiveStatistics,
        "kafka": GroupsStatistics,
        "state": StateStatistics,
        "unreadable": UnreadableStatistics,
        "delivery": DelayStatistics,
    },
    "Logins and rights": {
        "authentication": AuthenticationStatistics,
        "audit": AuditStatistics,
        "kafka_login": KafkaLoginStatistics,
        "kafka_acls": AclStatistics,
        "strangers": StrangersStatistics,
        "limits": LimitStatistics,
        "group_names": GroupNamesStatistics,
        "tenants": TenantsStatistics,
        "presence": PresenceStatistics,
    },
    "The process": {
        "build": Build,
        "event_loop": LagStatistics,
        "collector": CollectorStatistics,
        "failures": FailureStatistics,
        "flow": PauseStatistics,
        "drain": DrainStatistics,
        "descriptors": DescriptorStatistics,
        "embedded_kafka": OpenFilesStatistics,
    },
    "Spark jobs": {"spark": QueryStatistics},
}
"""The metric sources of a gateway and of Spark jobs, by chapter and name; tests compare them with real scrapes."""
DECODERS: Final[Mapping[str, tuple[str, str]]] = {
    "none": ("not decoded", "none: only the columns that every record has"),
    "json": ("one object", "fields by path (`at.lat`); a `string` takes any value as its JSON text"),
    "number": ("a bare number, as JSON has it", "one column"),
    "csv": ("one line", "by the names in `fields`"),
    "avro": (
        "one record, written with the schema in `schema_file`",
        "fields by path; numbers, booleans, texts and enums, each with or without null",
    ),
    "cbor": (
        "one map (RFC 8949)",
        "entries by path; a number in a path also matches an integer key. A `string` is a text string",
    ),
    "protobuf": (
        "one `message` of `schema_file`",
        "fields by path, none repeated; enums become text. A proto3 field without `optional` is never missing but 0",
    ),
    "senml": ("a pack (RFC 8428), in JSON or CBOR", "the resolved fields `n`, `u`, `v`, `vs`, `vb`, `vd`, `s`, `ut`"),
}
"""For each decoder: the form of a value, and what its columns are."""


def replace(page: str, name: str, table: str) -> str:
    """Insert `table` between its markers on a page; raises ValueError if they are missing."""
    begin, end = BEGIN.format(name), END.format(name)
    before, mark, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (mark and closed):
        raise ValueError(f"the page has no place for {name}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def decisions() -> str:
    """Return the ADRs by theme, then the numbers that are part of another; raises ValueError for a bad page."""
    rows: dict[str, list[str]] = {theme: [] for theme in THEMES}
    moved = []
    for path in sorted(DECISIONS.glob("[0-9]*.md")):
        number, text = path.name[:4], path.read_text(encoding="utf-8")
        if number == "0000":
            continue  # the template
        if (line := MOVED.match(text)) is not None and line[1] == number:
            moved.append(f"{number} in {line[2]}")
        elif (match := TITLE.match(text)) is not None and match[1] == number and match[3] in rows:
            rows[match[3]].append(f"- [{number}]({path.name}) {match[2]}\n")
        else:
            themes = ", ".join(THEMES)
            raise ValueError(f"{path.name}: expected '# {number}: ...' and 'Date: YYYY-MM-DD. Theme: ONE OF {themes}.'")
    lists = [f"## {theme}\n\n{''.join(lines)}\n" for theme, lines in rows.items()]
    return "".join([*lists, f"Now part of another page: {', '.join(moved)}.\n"])


def settings(section: str) -> str:
    """Return the table of a section, including nested ones; raises ValueError for a key without a description."""
    if section == "general":
        rows = [row for row in _settings(Config, "") if "." not in row.partition("`")[2].partition("`")[0]]
    else:
        rows = list(_settings(type(Config.model_fields[section].default), f"{section}."))
    return "".join(["| key | default | meaning and reason |\n|---|---|---|\n", *rows])


def _settings(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from _settings(type(default), f"{prefix}{name}.")
        elif name not in _descriptions(model):
            raise ValueError(f"{prefix}{name}: no description below the field")
        else:
            yield f"| `{prefix}{name}` | {_default(default)} | {_descriptions(model)[name]} |\n"


@functools.cache
def _descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the texts below a model's fields, one line each. Pydantic would parse them at every start of a process."""
    descriptions = {}
    for kind in reversed([kind for kind in model.__mro__ if issubclass(kind, BaseModel)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in itertools.pairwise(definition.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    descriptions[name] = " ".join(text.split())
    return descriptions


def _default(value: Any) -> str:
    if value is None:
        return "-"
    return f"`{value}`" if isinstance(value, str | Path) else f"`{json.dumps(value)}`"


def entry(model: type[BaseModel], prefix: str = "", omit: Collection[str] = ("job", "name")) -> str:
    """Return the table of a part of a job file, or of a list's entry, without the keys of `omit`.

    Raises:
        ValueError: a key without a description.
    """
    rows = ["| key | default | meaning |\n|---|---|---|\n"]
    for name, field in model.model_fields.items():
        if name not in _descriptions(model) or name in omit:
            continue  # a part with its own table, or a key that every kind has
        default = "needed" if field.is_required() else _default_of_part(field.get_default(call_default_factory=True))
        rows.append(f"| `{prefix}{name}` | {default} | {_descriptions(model)[name]} |\n")
    return "".join(rows)


def _default_of_part(value: Any) -> str:
    if isinstance(value, dict):
        return "`{ " + ", ".join(f'{name} = "{text}"' for name, text in value.items()) + " }`" if value else "-"
    return "-" if value == () else _default(list(value) if isinstance(value, tuple) else value)


def aggregates() -> str:
    """Return the table of a window's aggregate functions."""
    rows = (f"| `{name}` | {of} |\n" for name, of in AGGREGATES.items())
    return "".join(["| function | of |\n|---|---|\n", *rows])


def decoders() -> str:
    """Return the table of the decoders in job files."""
    rows = (
        f"| `{name}` | {value} | {columns} | {'micro-batch' if name in parts.PYTHON_DECODERS else 'both'} |\n"
        for name, (value, columns) in DECODERS.items()
    )
    return "".join(["| `decode` | a value is | columns | triggers |\n|---|---|---|---|\n", *rows])


def metrics() -> str:
    """Return the tables of all metrics, from the structs that declare them."""
    parts = []
    for chapter, sources in SOURCES.items():
        parts.append(f"## {chapter}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n")
        for name, struct in sources.items():
            for metric in describe(name, struct):
                labels = ", ".join(f"`{label}`" for label in metric.labels)
                parts.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.meaning} |\n")
        parts.append("\n")
    return "".join(parts).removesuffix("\n")


def acl_commands() -> str:
    """Return the commands that grant the gateway its rights."""
    lines = []
    for resource, operations in needed().items():
        kind, name, prefixed = ACL_PLACES[resource]
        where = f"--{kind}" if kind == "cluster" else f"--{kind} '{name}'"
        pattern = " --resource-pattern-type prefixed" if prefixed else ""
        words = " ".join(f"--operation {operation}" for operation in operations)
        lines.append(f"kafka-acls.sh $KAFKA --add --allow-principal User:gateway {where}{pattern} {words}\n")
    return f"\n```sh\n{''.join(lines)}```\n\n"


def mutations() -> str:
    """Return the table of the mutations that TLC finds in the models and tests find in the code."""
    rows = ["| model | mistake | property | the same in the code | found by |\n|---|---|---|---|---|\n"]
    for entry in tomllib.loads((MODELS / "mutations.toml").read_text(encoding="utf-8"))["mutation"]:
        tests = "<br>".join(f"`{test.rpartition('/')[2]}`" for test in entry["tests"])
        rows.append(f"| {entry['spec']} | {entry['mistake']} | {entry['breaks']} | {entry['code']} | {tests} |\n")
    return "".join(rows)


def diagram(table: Mapping[Any, Mapping[Any, tuple[Any, Any]]], first: str, *, idle: bool) -> str:
    """Return a state table as a Mermaid diagram; an action follows its event after a slash.

    `idle`: include events without an action.
    """
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    for state, row in table.items():
        for event, (action, after) in row.items():
            done = "" if action.name == "NOTHING" else f" / {action.name}"
            if done or idle:
                lines.append(f"    {state.name} --> {after.name}: {event.name}{done}")
    return "\n".join([*lines, "```"])


JOB_PARTS: Final[dict[str, type[BaseModel]]] = {
    "source": parts.Source,
    "column": parts.Column,
    "run": parts.Run,
    "window-stats": jobs.WindowStats,
    "window": parts.Window,
    "sink of results": parts.ResultSink,
    "sessionize": jobs.Sessionize,
    "session": parts.Session,
    "last-known": jobs.LastKnown,
    "sink of last values": parts.LastSink,
    "enrich": jobs.Enrich,
    "registry": parts.Registry,
    "anomalies": jobs.Anomalies,
    "threshold": parts.Threshold,
    "archive": parts.ArchiveSink,
    "replay": replays.LogSource,
    "sink of a replay": replays.ReplaySink,
    "dlq-replay": replays.LetterSource,
    "sink of letters": replays.LetterSink,
    "run of a replay": replays.ReplayRun,
    "maintain": parts.Maintain,
    "backfill": backfill.ArchiveSource,
    "run of a backfill": backfill.BackfillRun,
    "bridge-audit": audit.AuditSource,
    "run of an audit": audit.AuditRun,
}
"""Parts of a job file, by the names of their markers."""
SECTIONS: Final = [name for name, field in Config.model_fields.items() if isinstance(field.default, BaseModel)]
PLACES: Final[tuple[tuple[Path, str, Callable[[], str]], ...]] = (
    *((CONFIGURATION, section, functools.partial(settings, section)) for section in ("general", *SECTIONS)),
    (CONFIGURATION, "a listener", functools.partial(entry, ListenerConfig, "listeners.", ())),
    (CONFIGURATION, "TLS of a listener", functools.partial(entry, TlsConfig, "listeners.tls.")),
    (CONFIGURATION, "limit rule", functools.partial(entry, LimitRule, "rules[].", ())),
    (METRICS, "metrics", metrics),
    (OPERATIONS, "kafka-acls", acl_commands),
    (MQTT, "session", functools.partial(diagram, lifecycle.TABLE, "ABSENT", idle=False)),
    (KAFKA, "sending", functools.partial(diagram, sending_states.TABLE, "IDLE", idle=True)),
    (MQTT, "QoS 2", functools.partial(diagram, qos2_states.TABLE, "ENDED", idle=True)),
    *((SPARK, name, functools.partial(entry, model)) for name, model in JOB_PARTS.items()),
    (SPARK, "aggregates", aggregates),
    (SPARK, "decoders", decoders),
    (DECISIONS / "README.md", "decisions", decisions),
    (MODELS / "README.md", "mutations", mutations),
)
"""Page, name of the markers on it, and the function that returns the text."""


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page with its text."""
    for path in dict.fromkeys(path for path, _, _ in PLACES):
        page = path.read_text(encoding="utf-8")
        for place, name, table in PLACES:
            page = replace(page, name, table()) if place == path else page
        yield path, page
    yield from spark_manifests.pages()


def main() -> None:
    """Write all pages."""
    for path, page in pages():
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
