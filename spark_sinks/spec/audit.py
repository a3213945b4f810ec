"""The job that compares what gateways say with what the log holds."""

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
    """What is audited."""

    topics: Annotated[tuple[TopicName, ...], Field(min_length=1)]
    """Kafka topics that gateways write to"""
    gateways: Annotated[tuple[Address, ...], Field(min_length=1)]
    """addresses of the management listeners of **all** gateways that write to them; `http://USER:PASSWORD@HOST:PORT`
    where one wants a password"""


class AuditRun(KafkaRun):
    """How an audit runs."""

    interval: Duration = Duration("1m")
    """between two looks, at multiples of it by the clock: so small is the time that a finding names"""


class BridgeAudit(Once):
    """What gateways have acknowledged, beside what the log holds."""

    SUMMARY: ClassVar[str] = (
        "what gateways say they have stored beside what the log holds, by topic, partition and minute"
    )
    job: Literal["bridge-audit"] = "bridge-audit"
    source: AuditSource
    sink: TopicSink
    run: AuditRun = AuditRun()

    @property
    def topics(self) -> tuple[str, ...]:
        """See `Declaration`."""
        return (*self.source.topics, self.sink.kafka)

    @property
    def task(self) -> str:
        """See `Once`."""
        return f"audit of {', '.join(sorted(self.source.topics))} to {self.sink.kafka}"
