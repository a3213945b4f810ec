"""Requests with an `Idempotency-Key`: executed once, even if the client repeats them.

A repeated request gets the first one's answer. A gateway may crash after it has stored the records and before it has
stored the answer. ADR 0026 says how that is handled: an attempt is announced before its records, the records carry the
request's name and their index, and the next attempt reads the stored records from the log and stores the missing ones.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web
from aiokafka import TopicPartition

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Refused
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.read.log_scan import scan_log
from gateway.kafka.state import PendingWrite, StateTopics
from gateway.rest.produce.idempotency_table import REQUESTS, KeptRequest, RequestTable
from gateway.rest.produce.tickets import Ticket, common_failure, error_of, submit_allowed
from gateway.rest.server.answers import control_answer
from gateway.rest.server.call import Call
from gateway.runtime.failures import failures
from gateway.runtime.spawn import Spawn
from gateway.security.rights.authorization import Grant
from mapping.outcomes import Outcome
from mapping.record import GW_REQUEST, Received, Record
from protocols.rest.errors import INTERNAL_ERROR, RestError, busy, too_many, unprocessable
from protocols.rest.responses import ErrorBody, Stored, encode, encode_results
from telemetry.statistics import counter, gauge

KEY_FIELD: Final = "Idempotency-Key"
REPLAYED_FIELD: Final = "Idempotency-Replayed"
LONGEST_KEY: Final = 255
PREPARE_S: Final = 20.0
"""The longest time from an attempt's announcement to its records; an attempt that takes longer gives up."""


class KeyedStatistics(msgspec.Struct, frozen=True):
    """Keys that are kept, and counts of requests with a key since the start."""

    kept: Annotated[int, gauge("idempotency keys kept")]
    kept_bytes: Annotated[int, gauge("memory of kept answers in bytes")]
    replayed_total: Annotated[int, counter("requests answered from the first result")]
    resumed_total: Annotated[int, counter("requests whose first attempt was found in the log")]


class KeyedRequests:
    """Executes each request with a key once within the window."""

    def __init__(
        self,
        table: RequestTable,
        state: StateTopics,
        publisher: Publisher,
        lookup: Lookup,
        kafka: Mapping[str, Any],
        *,
        delivery_timeout_s: float,
        max_running: int,
        spawn: Spawn,
        wall_clock: Callable[[], int],
        random_id: Callable[[], str],
    ) -> None:
        """Keep keys in `table`, which `state` fills from Kafka.

        `kafka` has the connection arguments of a consumer for `find_records`. No record is stored later than
        `delivery_timeout_s` after it was submitted. At most `max_running` requests are executed at once: they go on in
        memory when their clients have disconnected. `wall_clock` returns epoch milliseconds, `random_id` the id of an
        attempt.
        """
        self.replayed = 0
        self.resumed = 0
        self._table = table
        self._state = state
        self._publisher = publisher
        self._lookup = lookup
        self._kafka = dict(kafka)
        self._delivery_timeout_ms = int(delivery_timeout_s * 1000)
        self._spawn = spawn
        self._wall_clock = wall_clock
        self._random_id = random_id
        self._running: set[str] = set()
        self._max_running = max_running
        self._scanning = asyncio.Lock()  # one scan at a time: after a crash all clients may need one

    def statistics(self) -> KeyedStatistics:
        """Return the counts so far."""
        return KeyedStatistics(self._table.count, self._table.bytes, self.replayed, self.resumed)

    async def store(self, call: Call, records: list[Record], body: bytes, key: str) -> web.Response:
        """Like `Storing.store`, for a request with a key. Continues if the client disconnects, as it will retry."""
        name = _name(call, key)
        media = call.request.headers.get("Content-Type", "").encode("utf-8", "surrogateescape")
        digest = hashlib.sha256(media + b"\0" + body).hexdigest()
        if not self._state.loaded.is_set():
            raise busy("Earlier requests are still being read; try again")
        if name in self._running:
            raise _in_progress(1)
        if len(self._running) >= self._max_running:
            raise busy("Too many requests with a key are in progress; try again")
        self._running.add(name)
        outcome: web.Response | RestError | Refused
        outcome = await asyncio.shield(self._spawn(self._run(name, digest, call, records)))
        if isinstance(outcome, Exception):
            try:
                raise outcome
            finally:
                del outcome  # its traceback refers to this frame: avoids a reference cycle
        return outcome

    async def _run(
        self, name: str, digest: str, call: Call, records: list[Record]
    ) -> web.Response | RestError | Refused:
        """Execute a request independently of its client, and return its answer or error. Never raises."""
        try:
            return await self._once(name, digest, call.grant, _client(call), records)
        except (RestError, Refused) as error:
            return error.with_traceback(None)
        except Exception as error:  # contained, so that the client gets an answer
            failures.report("request", error, "with a key")
            return RestError(500, INTERNAL_ERROR, close=True)
        finally:
            self._running.discard(name)

    async def _once(self, name: str, digest: str, grant: Grant, client: str, records: list[Record]) -> web.Response:
        now = self._wall_clock()
        attempt = KeptRequest(
            digest,
            self._random_id(),
            self._table.gateway,
            until_ms=now + self._table.window_ms,
            lease_ms=now + int(PREPARE_S * 1000) + self._delivery_timeout_ms,
            scan={},
            client=client,
        )
        before = self._table.find(name)
        if before is not None:
            answer = self._kept_answer(before, digest)
            if answer is not None:
                return answer
            attempt = msgspec.structs.replace(attempt, scan=before.scan, after=before.attempt)
        elif self._table.full:
            raise busy("Too many idempotency keys are kept; try again later, or without one")
        elif self._table.is_greedy(client):
            raise too_many(f"You have {self._table.most_of_client} idempotency keys; try again later, or without one")
        else:
            attempt = msgspec.structs.replace(attempt, scan=await self._ends(records[0].topic, grant.identity.name))
        await self._write(name, attempt)
        await self._state.read_to_end(REQUESTS, name.encode())
        first = self._table.find(name)
        if first is None or first.attempt != attempt.attempt:
            if first is None:
                raise busy("Earlier requests are being read again; try again")
            self._table.write(name, first, None)  # compaction keeps the last record of a key: it must be the first's
            answer = self._kept_answer(first, digest)
            if answer is not None:
                return answer
            raise _in_progress(1)
        stored: dict[int, Stored] = {}
        if before is not None:
            self.resumed += 1
            async with self._scanning:
                stored = await find_records(
                    self._kafka, self._lookup, self._spawn, records, scan=attempt.scan, name=name
                )
        if self._wall_clock() - now > PREPARE_S * 1000:
            self._release(name, attempt)
            raise busy("Kafka is slow; try again")
        return await self._finish(name, attempt, await self._send(name, grant, records, stored))

    def _kept_answer(self, kept: KeptRequest, digest: str) -> web.Response | None:
        """Return the kept answer; None if there is none yet and this attempt may take over. RestError 409 or 422."""
        if kept.digest != digest:
            raise unprocessable("This Idempotency-Key was used with another request")
        if kept.status:
            self.replayed += 1
            answer = control_answer(kept.body.encode(), kept.status)
            answer.headers[REPLAYED_FIELD] = "true"
            return answer
        left_ms = kept.lease_ms - self._wall_clock()
        if left_ms > 0 and kept.gateway != self._table.gateway:  # an attempt of our own earlier process has ended
            raise _in_progress(left_ms // 1000 + 1)
        return None

    async def _ends(self, topic: str, principal: str) -> dict[int, int]:
        info = await self._publisher.topic(topic, principal=principal)
        partitions = [TopicPartition(topic, number) for number in range(info.partitions)]
        return {partition.partition: end for partition, end in (await self._lookup.ends(partitions)).items()}

    async def _send(self, name: str, grant: Grant, records: Sequence[Record], earlier: Mapping[int, Stored]) -> Ticket:
        """Store the records that are not in `earlier`, each with its index in the request as a header."""
        ticket = Ticket(len(records), grant.identity.name)
        missing = []
        for index, record in enumerate(records):
            stored = earlier.get(index)
            if stored is not None:
                ticket.stored_before(index, stored)
            else:
                header = (GW_REQUEST, f"{name}/{index}".encode())
                missing.append((index, msgspec.structs.replace(record, headers=(*record.headers, header))))
        if missing:
            submit_allowed(
                self._publisher,
                grant,
                [record for _, record in missing],
                ticket,
                tokens=[index for index, _ in missing],
            )
        await ticket.done
        return ticket

    async def _finish(self, name: str, attempt: KeptRequest, ticket: Ticket) -> web.Response:
        """Keep the answer, unless a retry may get a better one."""
        failure = common_failure(ticket)
        again = any(isinstance(result, ErrorBody) and result.error_code >= 500 for result in ticket.results)
        if again:
            self._release(name, attempt)
        if failure is not None:
            status, body = failure.error_code, encode(failure)
        else:
            status, body = 200, encode_results(ticket.results)
        if not again:
            await self._write(name, msgspec.structs.replace(attempt, status=status, body=body.decode()))
        if failure is not None:
            raise error_of(failure)
        return control_answer(body, status)

    def _release(self, name: str, attempt: KeptRequest) -> None:
        """End the lease of this attempt, so that the next one need not wait."""
        self._table.write(name, msgspec.structs.replace(attempt, lease_ms=0), None)

    async def _write(self, name: str, kept: KeptRequest) -> None:
        written = PendingWrite()
        self._table.write(name, kept, written)
        result = await written.done
        if result.outcome is not Outcome.STORED:
            raise busy("The request's key could not be stored; try again with the same key")


def request_key(request: web.BaseRequest) -> str | None:
    """Return the key of a request, None if it has none.

    The field is a string of structured fields (RFC 8941 section 3.3.3), or bare text as most clients send it.

    Raises:
        RestError: 400 if the field is not valid.
    """
    if KEY_FIELD not in request.headers:
        return None
    field, *others = request.headers.getall(KEY_FIELD)
    if others:
        raise RestError(400, f"Validation error on: {KEY_FIELD} is given more than once")
    key = field[1:-1] if len(field) > 1 and field[0] == field[-1] == '"' else field
    if not 0 < len(key) <= LONGEST_KEY:
        raise RestError(400, f"Validation error on: {KEY_FIELD} has 1 to {LONGEST_KEY} characters")
    return key


def _name(call: Call, key: str) -> str:
    """Return the name under which a key is kept: a hash of key, tenant, client, method and path."""
    request, identity = call.request, call.grant.identity
    parts = [identity.name, request.method, request.raw_path, key]
    if identity.tenant is not None:
        parts.append(identity.tenant)
    text = "\0".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _client(call: Call) -> str:
    return hashlib.sha256(call.connection.share.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _in_progress(retry_after_s: int) -> RestError:
    return RestError(
        409,
        "A request with this Idempotency-Key is in progress",
        headers=(("Retry-After", str(retry_after_s)),),
    )


SCAN_S: Final = 15.0  # the longest time of a scan; after it the client gets 503 and may retry


async def find_records(
    kafka: Mapping[str, Any],
    lookup: Lookup,
    spawn: Spawn,
    records: Sequence[Record],
    *,
    scan: Mapping[int, int],
    name: str,
) -> dict[int, Stored]:
    """Find the records of an earlier attempt, from the offsets in `scan` to the current end of the topic.

    The records have `name` and their index in the header `gw.request`. Any Kafka client can write that header. So a
    record counts only if it equals the request's record at that index: then no data is lost, whoever wrote it.

    Returns:
        By index in the request, the partition and offset of each stored record.

    Raises:
        RestError: 503 if it takes too long.
    """
    stored: dict[int, Stored] = {}
    prefix = name.encode() + b"/"

    def collect(record: Received) -> None:
        for header, value in record.headers:
            if header == GW_REQUEST and value is not None and value.startswith(prefix):
                index = _index(value[len(prefix) :], len(records))
                if index is not None and _is_same(record, records[index]):
                    stored.setdefault(index, Stored(record.partition, record.offset))

    topic = records[0].topic
    try:
        async with asyncio.timeout(SCAN_S):
            ranges = {TopicPartition(topic, number): start for number, start in scan.items()}
            await scan_log(kafka, lookup, spawn, ranges, collect)
    except TimeoutError as error:
        raise busy("The records stored before could not be read; try again") from error
    return stored


def _index(text: bytes, count: int) -> int | None:
    """Parse the index of a record in a request of `count` records; None if it is not valid."""
    if not text.isdigit() or len(text) > len(str(count)):
        return None
    index = int(text)
    return index if index < count else None


def _is_same(stored: Received, record: Record) -> bool:
    return (
        stored.key == record.key
        and stored.value == record.value
        and (record.partition is None or record.partition == stored.partition)
    )
