"""Confluent's REST API version 3: streamed produce requests, batches, and lists of clusters and topics.

A produce request is a stream of JSON documents, and so is its answer: one report for each record, in order, as soon as
its outcome is known (`gateway.rest.produce.streamed_records`). There is no schema registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec
from aiohttp import web

from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.publish.sender_partitions import RememberedSender
from gateway.rest.confluent.v2 import refusal_answer
from gateway.rest.parts import RestParts
from gateway.rest.produce.streamed_records import Upload
from gateway.rest.produce.tickets import Ticket, denied_key, error_of
from gateway.rest.server.answers import control_answer, own_address
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.request_login import forbidden
from gateway.security.rights.authorization import Grant
from mapping.confluent import ReportData, to_record
from mapping.record import Headers, Record
from mapping.rest.incoming import RUN
from protocols.rest.confluent_v3 import (
    ErrorReport,
    ProducedRecord,
    Report,
    cluster_view,
    decode_batch,
    decode_entry,
    decode_produced,
    error_message,
    from_epoch,
    resource_list,
    topic_view,
)
from protocols.rest.errors import Fault, RestError, not_found
from protocols.rest.forwarded import base_uri
from protocols.rest.media import PLAIN_JSON_TYPE, body_type
from protocols.rest.responses import ErrorBody, encode
from protocols.rest.splitters import DocumentSplitter

BATCH_LIMIT: Final = 10  # entries of a batch, as in Confluent's default
STORED: Final = 200
_END: Final = b"\r\n"
_CLUSTERS: Final = "/v3/clusters"


class ProduceContext(msgspec.Struct, frozen=True):
    """The client and topic of a produce request, and the common parts of its records and reports."""

    cluster: str
    topic: str
    grant: Grant
    trace: Headers
    wall_clock: Callable[[], int]

    def record(self, produced: ProducedRecord) -> tuple[Record, ReportData]:
        """Return the record for Kafka, and the data for its report. Raises RestError."""
        record, data = to_record(produced, self.topic, self.grant.identity.name, self.trace, self.wall_clock())
        if not self.grant.publish(self.topic, record.key):
            raise denied_key(self.grant, self.topic)
        return record, data

    def report(
        self, data: ReportData, partition: int, offset: int, name: str | msgspec.UnsetType = msgspec.UNSET
    ) -> Report:
        """Return the report of a stored record."""
        moment = from_epoch(data.timestamp)
        topic = self.grant.names.own(self.topic)
        return Report(STORED, self.cluster, topic, partition, offset, moment, data.key, data.value, name)


class RecordStream(Upload):
    """One streamed produce request, with this API's reports."""

    def __init__(self, publisher: Publisher, writer: ProduceContext, limit: int, most_refused: int) -> None:
        """Accept documents of up to `limit` bytes, and `most_refused` bad ones (0: any number)."""
        super().__init__(publisher, writer.topic, most_refused)
        self._writer = writer
        self._splitter = DocumentSplitter(limit)
        self._report_data: dict[int, ReportData] = {}  # by token, of records that are not settled

    def feed(self, part: bytes | None) -> Iterator[None]:
        """Take a part of the body, None at its end; yields where other work may run."""
        splitter = self._splitter
        if part is None:
            splitter.finish()
            return
        documents = splitter.feed(part)
        for start in range(0, len(documents), RUN):
            self.take(map(self._record, documents[start : start + RUN]))
            yield
        if splitter.fault is not None:
            raise error_of(splitter.fault)

    def _record(self, document: bytes) -> Record | ErrorBody:
        try:
            record, self._report_data[self.taken] = self._writer.record(decode_produced(document))
        except RestError as error:
            return ErrorBody(error.status, error_message(error))
        return record

    def stored(self, tokens: Sequence[int], partition: int, offsets: Sequence[int]) -> list[bytes]:
        """Return the reports of stored records."""
        report, pop = self._writer.report, self._report_data.pop
        return [
            encode(report(pop(token), partition, offset)) + _END for token, offset in zip(tokens, offsets, strict=True)
        ]

    def failed(self, token: int, status: int, message: str, errors: Sequence[str] = ()) -> bytes:
        """Return the report of a record that was not stored."""
        self._report_data.pop(token, None)
        return encode(ErrorReport(status, message)) + _END

    def ended(self, status: int, message: str) -> bytes:
        """Return the final report of a stream that is broken off; it is not about a record."""
        return encode(ErrorReport(status, message)) + _END


class ConfluentV3(OperationSet):
    """The operations below `/v3`."""

    def __init__(self, rest: RestParts) -> None:
        """Streamed requests count against the limit of uploads."""
        self._config = rest.services.config
        self._publisher = rest.services.publisher
        self._wall_clock = rest.services.wall_clock
        self._overload = rest.overload
        self._uploads = rest.uploads
        self._topics = rest.topics
        self._cluster = ""  # Kafka's cluster id, cached by `_cluster_id`
        self.operations = {
            "v3ListClusters": self.list_clusters,
            "v3GetCluster": self.get_cluster,
            "v3ListTopics": self.list_topics,
            "v3GetTopic": self.get_topic,
            "v3Produce": self.produce,
            "v3ProduceBatch": self.produce_batch,
        }

    def refuse(self, error: RestError) -> web.Response:
        """Return the answer to a refused request, in JSON with an error code of five digits."""
        return refusal_answer(error, PLAIN_JSON_TYPE)

    # Producing

    async def produce(self, call: Call, cluster: str, topic: str) -> web.StreamResponse:
        """`POST /v3/clusters/{cluster_id}/topics/{topicname}/records`."""
        writer = await self._writer(call, cluster, topic)
        limit, most_refused = self._config.max_line_bytes, self._config.max_upload_errors
        return await self._uploads.run(
            call, topic, lambda: RecordStream(self._publisher, writer, limit, most_refused), PLAIN_JSON_TYPE
        )

    async def produce_batch(self, call: Call, cluster: str, topic: str) -> web.StreamResponse:
        """`POST /v3/clusters/{cluster_id}/topics/{topicname}/records:batch`."""
        writer = await self._writer(call, cluster, topic)
        with call.enter(self._overload, topic) as slot:
            await self._publisher.topic(topic, principal=call.grant.identity.name)
            body = await call.body()
            entries = decode_batch(body, BATCH_LIMIT)
            slot.count_records(len(entries), len(body))
            ticket = Ticket(len(entries), call.grant.identity.name)
            report_data: dict[int, ReportData] = {}
            sender = RememberedSender()
            for index, (_, entry) in enumerate(entries):
                try:
                    record, report_data[index] = writer.record(decode_entry(entry))
                except RestError as error:
                    ticket.refuse(index, ErrorBody(error.status, error_message(error)))
                else:
                    self._publisher.submit(record, ticket, index, sender)
            await ticket.done
        successes: list[Report] = []
        failures: list[ErrorReport] = []
        for index, ((name, _), result) in enumerate(zip(entries, ticket.results, strict=True)):
            if isinstance(result, ErrorBody):
                failures.append(ErrorReport(result.error_code, result.message, name))
            else:
                successes.append(writer.report(report_data[index], result.partition, result.offset, name))
        return _answer({"successes": successes, "failures": failures}, 207)

    async def _writer(self, call: Call, cluster: str, topic: str) -> ProduceContext:
        """Check the request before its body is read."""
        fields, grant = call.request.headers, call.grant
        body_type(fields.get("Content-Type"), (PLAIN_JSON_TYPE,))
        await self._check_cluster(cluster)
        if not grant.publish.some(topic):
            raise forbidden(f"publish to {topic}")
        return ProduceContext(
            cluster=cluster,
            topic=topic,
            grant=grant,
            trace=call.begin_publish(topic),
            wall_clock=self._wall_clock,
        )

    # Clusters and topics

    async def list_clusters(self, call: Call) -> web.StreamResponse:
        """`GET /v3/clusters`: a list of the one cluster that this gateway serves."""
        cluster = await self._cluster_id()
        address = _address(call, _CLUSTERS)
        views = [cluster_view(cluster, f"{address}/{quote(cluster, safe='')}")]
        return _answer(resource_list("KafkaClusterList", address, views))

    async def get_cluster(self, call: Call, cluster: str) -> web.StreamResponse:
        """`GET /v3/clusters/{cluster_id}`."""
        await self._check_cluster(cluster)
        return _answer(cluster_view(cluster, _address(call, _CLUSTERS, cluster)))

    async def list_topics(self, call: Call, cluster: str) -> web.StreamResponse:
        """`GET /v3/clusters/{cluster_id}/topics`: the topics that this client may read or write."""
        await self._check_cluster(cluster)
        address = _address(call, _CLUSTERS, cluster, "topics")
        own = call.grant.names.own
        views = [
            topic_view(cluster, own(topic), f"{address}/{own(topic)}", partitions, replicas)
            for topic, partitions, replicas in await self._topics.overview(call.grant)
        ]
        return _answer(resource_list("KafkaTopicList", address, views))

    async def get_topic(self, call: Call, cluster: str, topic: str) -> web.StreamResponse:
        """`GET /v3/clusters/{cluster_id}/topics/{topicname}`."""
        await self._check_cluster(cluster)
        partitions = await self._topics.partitions(call.grant, topic)
        own = call.grant.names.own(topic)
        address = _address(call, _CLUSTERS, cluster, "topics", own)
        return _answer(topic_view(cluster, own, address, len(partitions), len(partitions[0]["replicas"])))

    async def _check_cluster(self, cluster: str) -> None:
        if cluster != await self._cluster_id():
            raise not_found(f"Cluster {cluster[:64]} cannot be found.", Fault.CLUSTER)

    async def _cluster_id(self) -> str:
        if not self._cluster:
            self._cluster = (await self._topics.cluster())["cluster_id"]
        return self._cluster


def _answer(body: Any, status: int = 200) -> web.Response:
    answer = control_answer(encode(body), status)
    answer.headers["Content-Type"] = PLAIN_JSON_TYPE
    return answer


def _address(call: Call, root: str, *segments: str) -> str:
    """Return the absolute URL of a resource as the client sees it."""
    request = call.request
    path = "/".join((root, *(quote(segment, safe="") for segment in segments)))
    return base_uri(request.headers, path, secure=request.secure, bound=own_address(request))
