"""The job that compares the gateways' counts of acknowledged records with the records in the log."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from spark_sinks.spec.parts import Section, TopicSink
from spark_sinks.spec.replays import KafkaRun, Once
from spark_sinks.spec.values import Duration, TopicName


def _address(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError("expected the address of a gateway's management listener: http://127.0.0.1:8081")
    return text


Address = Annotated[str, AfterValidator(_address)]


class AuditSource(Section):
    """The topics and gateways to audit."""

    topics: Annotated[tuple[TopicName, ...], Field(min_length=1)]
    """Kafka topics that gateways write to"""
    gateways: Annotated[tuple[Address, ...], Field(min_length=1)]
    """addresses of the management listeners of **all** gateways that write to these topics;
    `http://USER:PASSWORD@HOST:PORT` if one requires a password"""


class AuditRun(KafkaRun):
    """How an audit runs."""

    interval: Duration = Duration("1m")
    """time between two comparisons, at its multiples by the clock; a finding names an interval of this length"""


class BridgeAudit(Once):
    """Compares the records that gateways acknowledged with the records in the log."""

    SUMMARY: ClassVar[str] = (
        "compares the records that gateways acknowledged with the log, by topic, partition and minute"
    )
    job: Literal["bridge-audit"] = "bridge-audit"
    WORK: ClassVar[str] = "audit"
    source: AuditSource
    sink: TopicSink
    run: AuditRun = AuditRun()
