"""CONNECT: finds, creates or takes over the session of a client id."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final
from weakref import WeakValueDictionary

from gateway.kafka.contracts import Refused, in_time
from gateway.mqtt.registry.crash_recovery import CrashRecovery
from gateway.mqtt.registry.session_registry import Sessions
from gateway.mqtt.registry.takeover import Unanswered
from gateway.mqtt.session.lifecycle import SessionState
from gateway.mqtt.session.session import Session
from gateway.mqtt.state.records import NEVER, InflightRecord, PendingWill, SessionRecord, decode
from mapping.outcomes import Outcome

SCAN_S: Final = 7.0  # limit for reading the log while a CONNECT waits
RELEASE_S: Final = 3.0  # limit for other gateways to release a session
READY_S: Final = 7.0  # limit for a CONNECT to wait until the state is loaded


class Opening:
    """Opens sessions for connections, one CONNECT per client id at a time."""

    def __init__(
        self,
        sessions: Sessions,
        recovery: CrashRecovery,  # finds QoS 2 messages that a dead gateway stored
        *,
        wall_clock: Callable[[], int],  # epoch milliseconds
        new_session_id: Callable[[], str],  # returns unique names
        follow: Callable[[str], Awaitable[None]],  # waits until all stored records of a client id were read
        # returns the principal connected elsewhere with a client id that has no session record, or None
        elsewhere: Callable[[str], str | None] = lambda client_id: None,
    ) -> None:
        # set once the sessions are loaded and those of this gateway's former process taken over; CONNECTs wait for it
        self.ready = asyncio.Event()
        self.is_closed = False  # the gateway is stopping: CONNECTs are refused
        self._sessions = sessions
        self._store = sessions.parts.store
        self._recovery = recovery
        self._wall_clock = wall_clock
        self._new_session_id = new_session_id
        self._follow = follow
        self._elsewhere = elsewhere
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def open(
        self, client_id: str, principal: str, *, clean_start: bool, expiry: int, will: PendingWill | None
    ) -> tuple[Session, bool]:
        """Give a client id's session to a new connection, and close a former connection [MQTT-3.1.4-3].

        A session of another principal is neither given away nor ended. `clean_start` discards an existing session
        [MQTT-3.1.2-4]. `expiry` is the Session Expiry Interval in seconds.

        Returns:
            The session, prepared but not attached, and whether it existed before [MQTT-3.2.2-2].

        Raises:
            Refused: DENIED if the session belongs to another principal. Otherwise Kafka does not answer or refuses to
                store it, or another gateway may have messages of it in flight.
        """
        if not self.ready.is_set():
            try:
                async with asyncio.timeout(READY_S):
                    await self.ready.wait()
            except TimeoutError:
                raise Refused(Outcome.BUSY, "the sessions are not loaded from Kafka yet") from None
        sessions = self._sessions
        async with self._locks.setdefault(client_id, asyncio.Lock()):
            if (
                client_id not in sessions.live
                and not sessions.gateways.is_alone
                and (expiry or will or not clean_start)
            ):
                await in_time(self._follow(client_id), SCAN_S)
            self._check_owner(client_id, principal)
            former = sessions.live.get(client_id)
            if former is not None and former.client is not None:
                sessions.takeovers += 1
                former.client.taken_over()  # detaches the session
            epoch = 0  # above 0 if other gateways know a former session
            sessions.take_released(client_id)
            if sessions.must_claim(client_id):
                epoch = await self._claim(client_id, clean_start=clean_start)
            session = None if clean_start else await self._find(client_id)
            present = session is not None
            if session is None:
                known = sessions.live.get(client_id) or sessions.record(client_id)
                if sessions.state(client_id) is not SessionState.ABSENT:
                    sessions.end(client_id)
                session = Session(client_id, principal, self._new_session_id(), sessions.parts, kept=expiry > 0)
                session.epoch = known.epoch if known is not None else epoch
            await self._prepare(session, expiry, will, present=present)
            return session, present

    def _check_owner(self, client_id: str, principal: str) -> None:
        """Refuse a client id whose session belongs to another principal."""
        session = self._sessions.live.get(client_id)
        owner = session.principal if session is not None else self._elsewhere(client_id)
        if session is None:
            record = self._sessions.record(client_id)
            if record is not None and not self._is_over(record):
                owner = record.principal
        if owner is not None and owner != principal:
            raise Refused(Outcome.DENIED, "the client id belongs to another principal")

    def _is_over(self, record: SessionRecord) -> bool:
        if record.gone_at is None or record.expiry == NEVER:
            return record.gone_at is None and record.expiry == 0 and not self._sessions.gateways.is_alive(record.owner)
        return record.gone_at + 1000 * record.expiry <= self._wall_clock()

    async def _claim(self, client_id: str, *, clean_start: bool) -> int:
        """Ask the gateways that may have messages in flight; with `clean_start` their answers are not needed.

        Returns:
            The epoch of the claim.
        """
        sessions = self._sessions
        former = sessions.record(client_id)
        assert former is not None
        try:
            # If the session has ended meanwhile, nothing has to be claimed.
            if not await sessions.claim(client_id, RELEASE_S) and sessions.state(client_id) is not SessionState.ABSENT:
                raise _taken()
        except Unanswered:
            if not clean_start:
                raise
        return former.epoch + 1

    async def _find(self, client_id: str) -> Session | None:
        """Return the session from memory or from its records; None if there is none, or it ends during a log scan."""
        sessions = self._sessions
        session = sessions.live.get(client_id)
        if session is not None and session.inbound_qos2 is not None and session.inbound_qos2.has_uncertain:
            await in_time(self._recovery.confirm(session.inbound_qos2), SCAN_S)
            session = sessions.live.get(client_id)
            if session is None and sessions.state(client_id) not in {SessionState.AWAY, SessionState.ABSENT}:
                raise _taken()
        if session is not None:
            return session
        known = sessions.record(client_id)
        while (record := sessions.record(client_id)) is not None and known is not None and not self._is_over(record):
            if (record.session_id, record.epoch, record.owner) != (known.session_id, known.epoch, known.owner):
                raise _taken()
            stored = self._store.inflight.get(client_id)
            inflight = decode(InflightRecord, stored)
            if inflight is not None and inflight.scan_from:
                inflight = (await in_time(self._recovery.recover({client_id: inflight}), SCAN_S))[client_id]
                if sessions.record(client_id) != record or self._store.inflight.get(client_id) is not stored:
                    continue  # the records changed while the log was read
            session = Session(client_id, record.principal, record.session_id, sessions.parts, kept=True)
            session.restore(record, inflight)
            return session
        return None

    async def _prepare(self, session: Session, expiry: int, will: PendingWill | None, *, present: bool) -> None:
        """Prepare a session for a connection and store its records; on failure restore its former state."""
        sessions, client_id = self._sessions, session.client_id
        before = session.expiry, session.will, session.gone_at
        sessions.enter(session)
        try:
            await session.prepare()
            if sessions.live.get(client_id) is session:
                session.expiry, session.will = expiry, will
                if session.kept or will is not None:
                    session.epoch += 1
                    await sessions.save(session, claimed=True)
            if sessions.live.get(client_id) is not session:
                raise _taken()
        except BaseException:
            session.expiry, session.will, session.gone_at = before
            sessions.fail(session, present=present)
            raise
        sessions.ready(session)


def _taken() -> Refused:
    return Refused(Outcome.BUSY, "another connection uses this client id")
