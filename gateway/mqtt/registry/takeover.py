"""Taking sessions over from other gateways: claims, the order of records, and sessions of dead gateways.

The protocol is modelled in docs/spec/SessionTakeover.tla; docs/adr/0074-session-ownership.md says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

import msgspec

from gateway.kafka.contracts import Refused
from gateway.mqtt.registry.crash_recovery import CrashRecovery
from gateway.mqtt.registry.heartbeats import Gateways
from gateway.mqtt.registry.wills import due_at
from gateway.mqtt.session.lifecycle import Event
from gateway.mqtt.state.records import InflightHead, InflightRecord, SessionRecord, decode
from gateway.mqtt.state.store import SessionStore
from mapping.outcomes import Outcome


class Unanswered(Refused):
    """A live gateway has not answered: its messages may still reach the log, so the log's contents are uncertain."""

    def __init__(self) -> None:
        super().__init__(Outcome.BUSY, "another gateway may have messages of the session in flight to Kafka")


class Claim:
    """A CONNECT's request to all gateways that may have messages of the session in flight."""

    def __init__(self, waiting: Iterable[str]) -> None:
        self.waiting = set(waiting)  # gateways that have not answered
        self.is_read = False  # our record was read back, so its order among records of the same epoch is known
        self.clean = True  # no asked gateway is dead
        # true when all gateways have answered or are dead, false when another gateway was faster
        self.over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def answered(self, gateway: str) -> None:
        """Note that a gateway has nothing in flight; what it wrote before our record was read back does not count."""
        if self.is_read:
            self.waiting.discard(gateway)

    def check(self, is_alive: Callable[[str], bool], *, handing_over: bool) -> None:
        """Check whether the claim is complete; `handing_over`: this gateway has messages in flight itself."""
        if self.over.done() or not self.is_read or handing_over:
            return
        dead = {gateway for gateway in self.waiting if not is_alive(gateway)}
        if dead == self.waiting:
            self.clean = not dead
            self.over.set_result(True)

    def lose(self) -> None:
        """End the claim: another gateway has the session."""
        if not self.over.done():
            self.over.set_result(False)


def others(record: SessionRecord, owner: str) -> tuple[str, ...]:
    """Return the gateways, except `owner`, that may have messages in flight according to the session's record."""
    return tuple(sorted({record.owner, *record.predecessors} - {owner, ""}))


def is_released(record: SessionRecord, inflight: InflightHead | None) -> bool:
    """Whether the session's owner has released it without a claim, and no other gateway may have messages in flight.

    A session without an owner, whose record no gateway has written, is released too.
    """
    released = inflight is not None and (inflight.released_by, inflight.epoch) == (record.owner, record.epoch)
    return not record.predecessors and (released or not record.owner)


def merge_claims(record: SessionRecord, known: SessionRecord | None) -> SessionRecord:
    """Return another gateway's record with the predecessors that its writer did not know added."""
    if known is None or not record.predecessors:
        return record
    asked = {*record.predecessors, *others(known, record.owner)}
    return msgspec.structs.replace(record, predecessors=tuple(sorted(asked)))


def classify(record: SessionRecord | None, epoch: int | None, owner: str, *, ours: bool, is_read: bool) -> Event:
    """Classify another gateway's record: the higher epoch wins, of equal epochs the later in the log.

    `record` is None for a deletion. `owner` is this gateway. `epoch` is that of the session known here, or None.
    `ours`: this gateway wrote the known record. `is_read`: it was read back, so `record` is behind it in the log.
    """
    if record is None:
        return Event.DELETED
    if epoch is not None and (record.epoch < epoch or (record.epoch == epoch and not is_read)):
        return Event.OUTDATED if record.epoch < epoch else Event.RIVAL
    claims = record.gone_at is None and record.predecessors
    return Event.CLAIMED if claims and (ours or owner in record.predecessors) else Event.MOVED


async def find_abandoned(
    store: SessionStore,
    live: Collection[str],  # client ids of sessions with an object here
    gateways: Gateways,
    takes_over: Callable[[str], bool],  # whether this gateway takes over an owner's sessions
    recovery: CrashRecovery,
) -> list[tuple[str, SessionRecord]]:
    """Find the sessions of dead owners, and recover their QoS 2 messages from the log.

    The log is not scanned for a session with messages possibly in flight at a live gateway: its CONNECT does both.
    """
    unclear: dict[str, InflightRecord] = {}
    sessions: list[tuple[str, bytes, bytes | None, SessionRecord]] = []
    for client_id, value in store.records.items():
        if client_id in live or b'"owner":"' + gateways.owner.encode() in value:
            continue
        record = decode(SessionRecord, value)
        if record is not None and record.owner != gateways.owner and takes_over(record.owner):
            stored = store.inflight.get(client_id)
            sessions.append((client_id, value, stored, record))
            inflight = decode(InflightRecord, stored)
            asked = any(map(gateways.is_alive, others(record, gateways.owner)))
            if inflight is not None and inflight.scan_from and not asked:
                unclear[client_id] = inflight
    if unclear:
        unclear = await recovery.recover(unclear)
    abandoned = []
    for client_id, value, stored, record in sessions:
        # During a long scan the client may have reconnected, here or elsewhere.
        if client_id in live or store.records.get(client_id) is not value:
            continue
        accounted = unclear.get(client_id)
        if accounted is not None and store.inflight.get(client_id) is stored:
            store.write_inflight(client_id, accounted)
        abandoned.append((client_id, record))
    return abandoned


def taken_over(
    record: SessionRecord, owner: str, now: int, *, clean: bool, predecessors: tuple[str, ...] = ()
) -> SessionRecord:
    """Return the record of a session that was taken over and has no connection.

    The epoch stays: a client that reconnected elsewhere meanwhile has a higher one. An open connection counts as ended
    at `now` (epoch ms). `clean`: the former gateway has written its last in-flight record. `predecessors` have not
    answered.
    """
    gone_at = record.gone_at if record.gone_at is not None else now
    will = record.will
    if will is not None and will.due is None:
        will = msgspec.structs.replace(will, due=due_at(will, record.expiry, gone_at))
    unclean = record.unclean or (record.gone_at is None and not clean)
    return msgspec.structs.replace(
        record, owner=owner, gone_at=gone_at, will=will, unclean=unclean, predecessors=predecessors
    )
