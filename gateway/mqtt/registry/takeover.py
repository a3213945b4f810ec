"""Sessions that other gateways have, or had: who is asked for them, and what becomes of their records.

The protocol is modelled in docs/spec/SessionTakeover.tla; docs/adr/0043-take-over-names-its-predecessors.md says why.
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
from gateway.mqtt.state.records import InflightHead, InflightRecord, SessionRecord, decode_inflight, decode_session
from gateway.mqtt.state.store import SessionStore
from mapping.outcomes import Outcome


class Unanswered(Refused):
    """A living gateway has not answered: its message may still come to the log, so nobody can say what is there."""

    def __init__(self) -> None:
        super().__init__(Outcome.BUSY, "a message of the session may be on its way to Kafka elsewhere")


class Claim:
    """A CONNECT's question to every gateway that may have a message of the session on its way to Kafka."""

    def __init__(self, waiting: Iterable[str]) -> None:
        self.waiting = set(waiting)  # who has not answered
        self.is_read = False  # our record was read back: of another with the same epoch it is known which is the later
        self.clean = True  # nobody was left out because it is dead
        # done, with true, when everybody has answered or is dead; with false, when somebody else was faster
        self.over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def answered(self, gateway: str) -> None:
        """A gateway has nothing on the way; what it said before our record was not an answer to that."""
        if self.is_read:
            self.waiting.discard(gateway)

    def look(self, is_alive: Callable[[str], bool], *, handing_over: bool) -> None:
        """See whether it is over; `handing_over`: we have a message of it on the way ourselves."""
        if self.over.done() or not self.is_read or handing_over:
            return
        dead = {gateway for gateway in self.waiting if not is_alive(gateway)}
        if dead == self.waiting:
            self.clean = not dead
            self.over.set_result(True)

    def lose(self) -> None:
        """Somebody else has the session."""
        if not self.over.done():
            self.over.set_result(False)


def others(record: SessionRecord, owner: str) -> tuple[str, ...]:
    """Who may have a message of a session on its way to Kafka, by its record, beside `owner`."""
    return tuple(sorted({record.owner, *record.predecessors} - {owner, ""}))


def is_released(record: SessionRecord, inflight: InflightHead | None) -> bool:
    """Whether the owner of a session has released it unasked, and nobody else may have a message of it on the way."""
    return (
        inflight is not None
        and not record.predecessors
        and inflight.released_by == record.owner != ""
        and inflight.epoch == record.epoch
    )


def followed(record: SessionRecord, known: SessionRecord | None) -> SessionRecord:
    """Another gateway's record, as it is kept: one that says whom to ask may not have heard of everybody who is."""
    if known is None or not record.predecessors:
        return record
    asked = {*record.predecessors, *others(known, record.owner)}
    return msgspec.structs.replace(record, predecessors=tuple(sorted(asked)))


def judge(record: SessionRecord | None, epoch: int | None, owner: str, *, ours: bool, is_read: bool) -> Event:
    """What another gateway's record means: the higher epoch is right, of equals the later in the log.

    `record` None is a deletion, `owner` we. `epoch` is of the session as it is known here; None: not at all. `ours`:
    what is known is of us. `is_read`: it was read in the table, so that `record` lies behind it.
    """
    if record is None:
        return Event.DELETED
    if epoch is not None and (record.epoch < epoch or (record.epoch == epoch and not is_read)):
        return Event.OUTDATED if record.epoch < epoch else Event.RIVAL
    claims = record.gone_at is None and record.predecessors
    return Event.CLAIMED if claims and (ours or owner in record.predecessors) else Event.MOVED


async def find_orphans(
    store: SessionStore,  # all records
    live: Collection[str],  # client ids of sessions that are here
    gateways: Gateways,  # who is alive
    takes_over: Callable[[str], bool],  # whether the sessions of an owner are to be taken
    recovery: CrashRecovery,  # looks into the log
) -> list[tuple[str, SessionRecord]]:
    """The sessions of owners that are gone, after their QoS 2 messages were looked for in the log.

    Not those of which a living gateway may have a message on the way: the CONNECT asks it, and looks then.
    """
    unclear: dict[str, InflightRecord] = {}
    found: list[tuple[str, bytes, bytes | None, SessionRecord]] = []
    for client_id, value in store.records.items():
        if client_id in live or b'"owner":"' + gateways.owner.encode() in value:
            continue
        record = decode_session(value)
        if record is not None and record.owner != gateways.owner and takes_over(record.owner):
            stored = store.inflight.get(client_id)
            found.append((client_id, value, stored, record))
            inflight = decode_inflight(stored)
            asked = any(map(gateways.is_alive, others(record, gateways.owner)))
            if inflight is not None and inflight.scan_from and not asked:
                unclear[client_id] = inflight
    if unclear:
        unclear = await recovery.recover(unclear)
    orphans = []
    for client_id, value, stored, record in found:
        # Where it took its time the client may be back, here or elsewhere.
        if client_id in live or store.records.get(client_id) is not value:
            continue
        accounted = unclear.get(client_id)
        if accounted is not None and store.inflight.get(client_id) is stored:
            store.write_inflight(client_id, accounted)
        orphans.append((client_id, record))
    return orphans


def taken_over(
    record: SessionRecord, owner: str, now: int, *, clean: bool, predecessors: tuple[str, ...] = ()
) -> SessionRecord:
    """The record of a session that is ours now, without a connection.

    The epoch stays: a client that came back at another gateway meanwhile has a higher one. The connection, if there
    was one, has ended by `now` (epoch ms). `clean`: its former gateway has told all. `predecessors` have not answered.
    """
    gone_at = record.gone_at if record.gone_at is not None else now
    will = record.will
    if will is not None and will.due is None:
        will = msgspec.structs.replace(will, due=due_at(will, record.expiry, gone_at))
    unclean = record.unclean or (record.gone_at is None and not clean)
    return msgspec.structs.replace(
        record, owner=owner, gone_at=gone_at, will=will, unclean=unclean, predecessors=predecessors
    )
