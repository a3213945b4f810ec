"""The records of `__trivium_sessions` in memory, and writing them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from gateway.kafka.contracts import Owner, Refused, Result
from gateway.kafka.state import PendingWrite, StateTopic
from gateway.mqtt.state.counted_records import CountedRecords, SessionLimits
from gateway.mqtt.state.records import (
    GATEWAY,
    INFLIGHT,
    RELEASE,
    SESSION,
    SHARE,
    GatewayRecord,
    InflightRecord,
    SessionRecord,
    ShareRecord,
    decode,
    encode,
)
from gateway.mqtt.state.share_table import ShareTable
from mapping.outcomes import Outcome
from mapping.record import GW_OWNER, Received, text_of
from protocols.mqtt.topics import is_valid_filter, is_valid_name

log = structlog.get_logger(__name__)

AGAIN_S: Final = 1.0  # delay before a refused write is repeated


class SessionStore(Owner):
    """Holds the last known records of all sessions, and writes them to Kafka."""

    def __init__(self, owner: str, limits: SessionLimits = SessionLimits()) -> None:  # noqa: B008 - immutable
        """`owner` names this process in the header of every record; `limits` apply to what clients ask for."""
        self.owner = owner
        self.leaving = False  # the gateway is stopping: the last in-flight record of a session releases it
        self.records = CountedRecords(limits)  # client id -> session record, of all gateways
        self.inflight: dict[str, bytes] = {}  # client id -> in-flight record
        self.stopped = False  # refused writes are no longer repeated
        self.invalid = 0  # records that were ignored
        self._mark = ((GW_OWNER, owner.encode()),)
        self.shares = ShareTable()
        self._tables: dict[str, dict[str, bytes]] = {
            SESSION: self.records, INFLIGHT: self.inflight, RELEASE: {}, SHARE: self.shares.records,
        }  # fmt: skip
        self._table: StateTopic  # set by `bind`

    def bind(self, table: StateTopic) -> None:
        """Set the table to write to."""
        self._table = table

    def read(self, record: Received) -> tuple[str, str] | None:
        """Return a record's kind, and the client id, gateway or shared subscription that it is of.

        Returns None for an invalid record, which is counted: any authorized Kafka client may have written it. A
        tombstone is valid if its key is.
        """
        kind, slash, name = (text_of(record.key) or "").partition("/")
        kind += slash
        check = _CHECKS.get(kind)
        if check is not None and (record.value is None or self.is_own(record) or check(record.value)):
            return kind, name
        self.invalid += 1
        if self.invalid == 1:
            log.warning(
                "ignoring an invalid record in the sessions topic, and others like it",
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
            )
        return None

    def is_own(self, record: Received) -> bool:
        """Whether this process wrote a record."""
        return bool(record.headers) and record.headers[0] == self._mark[0]

    def writer_of(self, record: Received) -> str:
        """Return the gateway process that wrote a record, or "" if unknown."""
        name, value = record.headers[0] if record.headers else ("", None)
        return (value or b"").decode("utf-8", "replace") if name == GW_OWNER else ""

    def put(self, kind: str, client_id: str, value: bytes | None, owner: Owner | None = None) -> None:
        """Write a record; without an owner the write is repeated until Kafka stores it."""
        key = client_id.encode()
        self._table.write(
            kind.encode() + key, value, self._mark, owner=owner or self, token=(kind, client_id), partition_key=key
        )

    def settle(self, tokens: Sequence[tuple[str, str]], offsets: Sequence[int], result: Result) -> None:
        """Take Kafka's result, and repeat a refused write (contract: `gateway.kafka.contracts.Owner`).

        A record that is too large is not repeated: after a crash the session is what the older record has.
        """
        if result.outcome is Outcome.TOO_LARGE:
            log.error("sessions are too large to be stored", sessions=len(tokens), reason=result.reason)
        elif result.outcome is not Outcome.STORED and not self.stopped:
            log.warning("sessions are not stored, trying again", sessions=len(tokens), reason=result.reason)
            asyncio.get_running_loop().call_later(AGAIN_S, self._put_again, tokens)

    def _put_again(self, tokens: Sequence[tuple[str, str]]) -> None:
        """Write the current versions of records."""
        for kind, client_id in tokens:
            if not self.stopped:
                self.put(kind, client_id, self._tables[kind].get(client_id))

    def put_all(self, partition: int) -> None:
        """Write all records of a partition."""
        for kind, records in ((SESSION, self.records), (INFLIGHT, self.inflight), (SHARE, self.shares.records)):
            for client_id, value in records.items():
                if self._table.partition_of(client_id.encode()) == partition:
                    self.put(kind, client_id, value)

    def put_heartbeat(self, name: str, beat: GatewayRecord | None, owner: Owner | None = None) -> None:
        """Write our heartbeat, or None when this gateway stops, without waiting for the result."""
        self._table.write((GATEWAY + name).encode(), encode(beat) if beat else None, self._mark, owner=owner)

    async def save_heartbeat(self, name: str, beat: GatewayRecord) -> None:
        """Write our heartbeat and wait until it is stored; raise Refused if Kafka does not store it."""
        written = PendingWrite()
        self.put_heartbeat(name, beat, written)
        await _wait_stored(written)

    def release(self, client_id: str) -> None:
        """Answer a claim: nothing of the session is in flight here."""
        self.put(RELEASE, client_id, None)

    def put_share(self, name: str, value: bytes | None) -> None:
        """Write the record of a shared subscription, until Kafka has stored it."""
        self.put(SHARE, name, value)

    def write_inflight(self, client_id: str, record: InflightRecord, owner: Owner | None = None) -> None:
        """Write a session's in-flight record; `owner` gets the result."""
        value = self.inflight[client_id] = encode(record)
        self.put(INFLIGHT, client_id, value, owner)

    def write_session(self, client_id: str, record: SessionRecord, owner: Owner | None = None) -> None:
        """Write a session's record; `owner` gets the result."""
        value = self.records[client_id] = encode(record)
        self.put(SESSION, client_id, value, owner)

    async def save(self, client_id: str, record: SessionRecord, inflight: InflightRecord | None) -> None:
        """Write both records of a client's session and wait until they are stored.

        Raises:
            Refused: FULL, and nothing is written: too many sessions are stored. Else Kafka does not store them.
        """
        self.records.check(client_id, record.principal, encode(record))
        writes = [PendingWrite()]
        if inflight is not None:  # first: a subscription without an offset would start at the log's beginning
            writes.append(PendingWrite())
            self.write_inflight(client_id, inflight, writes[1])
        self.write_session(client_id, record, writes[0])
        for written in writes:
            await _wait_stored(written)


async def _wait_stored(written: PendingWrite) -> None:
    result = await written.done
    if result.outcome is not Outcome.STORED:
        raise Refused(result.outcome, result.reason)


def _is_session(value: bytes) -> bool:
    record = decode(SessionRecord, value)
    return (
        record is not None
        and (record.will is None or is_valid_name(record.will.will.topic))
        and all(is_valid_filter(subscription.options.topic_filter) for subscription in record.subscriptions)
    )


def _is_inflight(value: bytes) -> bool:
    record = decode(InflightRecord, value)
    return (
        record is not None
        and all(is_valid_filter(pending.topic_filter) for pending in record.pending_retained)
        and all(not inflight.name or is_valid_name(inflight.name) for inflight in record.messages)
    )


_CHECKS: Final[dict[str, Callable[[bytes], bool]]] = {
    SESSION: _is_session,
    INFLIGHT: _is_inflight,
    GATEWAY: lambda value: decode(GatewayRecord, value) is not None,
    SHARE: lambda value: decode(ShareRecord, value) is not None,
    RELEASE: lambda value: False,  # only tombstones are valid
}
"""Checks of a record's value, beyond types and ranges, which decoding checks."""
