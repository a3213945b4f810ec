"""Sessions of gateways that are gone: what of them is stored, and what becomes of their records."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from gateway.mqtt.registry.crash_recovery import CrashRecovery
from gateway.mqtt.registry.wills import due_at
from gateway.mqtt.state.records import InflightRecord, SessionRecord, decode_inflight, decode_session
from gateway.mqtt.state.store import SessionStore


async def find_orphans(
    store: SessionStore, live: Collection[str], takes_over: Callable[[str], bool], recovery: CrashRecovery, owner: str
) -> list[tuple[str, SessionRecord]]:
    """The sessions of owners that are gone, after their QoS 2 messages were looked for in the log.

    Args:
        store: all records.
        live: client ids of sessions that are here.
        takes_over: whether the sessions of an owner are to be taken.
        recovery: looks into the log.
        owner: we.
    """
    unclear: dict[str, InflightRecord] = {}
    found: list[tuple[str, bytes, bytes | None, SessionRecord]] = []
    for client_id, value in store.records.items():
        if client_id in live or owner.encode() in value:
            continue
        record = decode_session(value)
        if record is not None and record.owner != owner and takes_over(record.owner):
            stored = store.inflight.get(client_id)
            found.append((client_id, value, stored, record))
            inflight = decode_inflight(stored)
            if inflight is not None and inflight.scan_from:
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


def taken_over(record: SessionRecord, owner: str, now: int, *, clean: bool) -> SessionRecord:
    """The record of a session that is ours now, without a connection.

    The epoch stays: a client that came back at another gateway meanwhile has a higher one.

    Args:
        record: as it was.
        owner: we.
        now: epoch milliseconds; the connection, if there was one, has ended by now.
        clean: its former gateway has told all.
    """
    gone_at = record.gone_at if record.gone_at is not None else now
    will = record.will
    if will is not None and will.due is None:
        will = msgspec.structs.replace(will, due=due_at(will, record.expiry, gone_at))
    unclean = record.unclean or (record.gone_at is None and not clean)
    return msgspec.structs.replace(record, owner=owner, gone_at=gone_at, will=will, unclean=unclean)
