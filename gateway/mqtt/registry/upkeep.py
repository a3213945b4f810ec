"""What time brings to sessions: positions, heartbeats, deadlines, gateways that fell silent; and the stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from gateway.fence import Fence
from gateway.kafka.contracts import Refused
from gateway.mqtt.registry.crash_recovery import CrashRecovery
from gateway.mqtt.registry.heartbeats import FROZEN_S, HEARTBEAT_S
from gateway.mqtt.registry.session_registry import TOPIC, Sessions
from gateway.mqtt.registry.takeover import find_orphans
from gateway.mqtt.session.lifecycle import Event
from gateway.mqtt.session.session import Session
from gateway.spawn import keep_on, together

log = structlog.get_logger(__name__)

TICK_S: Final = 1.0  # positions are written that often
ROUND_S: Final = 60.0  # positions of sessions that got nothing
CLOSING_S: Final = 3.0


class Upkeep:
    """The background work for the sessions of a process."""

    def __init__(
        self,
        sessions: Sessions,  # of this process
        recovery: CrashRecovery,  # finds in the log what a dead gateway stored for QoS 2
        ready: asyncio.Event,  # set when the sessions of this gateway's former process are taken over
        read_to_end: Callable[[], Awaitable[None]],  # waits until all that gateways have stored of sessions is known
        fence: Fence,  # shut after a freeze; opened here
        *,
        bury: Callable[[], None] = lambda: None,  # told when a gateway may be dead, behind its sessions
    ) -> None:
        """Nothing runs before `run`."""
        self._sessions = sessions
        self._gateways = sessions.gateways
        self._store = sessions.parts.store
        self._touched = sessions.parts.deliveries.touched
        self._recovery = recovery
        self._ready = ready
        self._read_to_end = read_to_end
        self._fence = fence
        self._bury = bury
        self._served = False  # before a freeze
        fence.listen(self._frozen)
        self._round_of: list[Session] = []

    async def run(self, loaded: asyncio.Event) -> None:
        """Work until the gateway stops, from when the records of all sessions are `loaded`."""
        await loaded.wait()
        self._gateways.loaded()
        self._fence.guard(FROZEN_S, TOPIC)
        parts = (self._send_heartbeats, self._tick, self._take_over, self._catch_up)
        # Each is tried again by itself: without heartbeats other gateways would take our sessions away.
        await together(*(keep_on(part, "sessions") for part in parts))

    async def _tick(self) -> None:
        await self._ready.wait()
        while True:
            await self._awake()
            self._round()
            self._save_positions()
            self._sessions.keep_deadlines()
            await asyncio.sleep(TICK_S)

    async def _send_heartbeats(self) -> None:
        """Write heartbeats, whatever else takes its time."""
        while not self._store.stopped:
            self._store.put_heartbeat(self._gateways.name, self._gateways.heartbeat())
            await asyncio.sleep(HEARTBEAT_S)

    async def _take_over(self) -> None:
        """Take over the sessions of our former process, and then of gateways that fell silent."""
        if not self._ready.is_set():
            await self._take_orphans(self._gateways.is_predecessor)
            self._bury()
            self._ready.set()
        while True:
            await self._awake()
            if self._gateways.mark_dead():
                await self._take_orphans(self._gateways.takes_over)
                self._bury()
            await asyncio.sleep(TICK_S)

    async def _awake(self) -> None:
        """Wait until the fence is open. The process may have been stopped since the timer that woke us: look anew."""
        self._fence.now()
        while not self._fence.is_open:
            await self._fence.passed()
            self._fence.now()

    def _frozen(self) -> None:
        """This process has not run for so long that others may have called it dead, nor knows who of them is alive."""
        self._served |= self._ready.is_set()
        self._ready.clear()
        log.warning("this process was stopped for seconds; sessions wait until what was written meanwhile is read")

    async def _catch_up(self) -> None:
        """After a freeze: read to the end before anybody gets a session, or anything of one, or is called dead.

        Our heartbeat is stored first: who calls us dead later has read it, when it reads its claim back.
        """
        while True:
            await self._fence.is_shut.wait()
            freezes = self._fence.freezes
            try:
                await self._store.save_heartbeat(self._gateways.name, self._gateways.heartbeat())
                await self._read_to_end()
            except Refused:
                await asyncio.sleep(TICK_S)
                continue
            if freezes != self._fence.freezes:
                continue
            if self._served:
                self._served = False
                self._ready.set()
            self._fence.open()

    async def _take_orphans(self, takes_over: Callable[[str], bool]) -> None:
        """Take over the sessions of owners that are gone: their clients are gone since now."""
        sessions = self._sessions
        orphans = await find_orphans(self._store, sessions.live, self._gateways, takes_over, self._recovery)
        for client_id, record in orphans:
            sessions.take_over(client_id, record, Event.ORPHANED)

    def _save_positions(self) -> None:
        for journal in self._touched:
            journal.save()
        self._touched.clear()
        for session in list(self._sessions.saving):
            assert session.journal is not None
            if session.is_stored:
                if session.journal.dirty:
                    session.journal.save()
                else:
                    self._sessions.saved(session)
            else:
                session.journal.dirty = True

    def _round(self) -> None:
        """Sessions that got nothing for long still move on with the log; idle ones give up their start offsets.

        Each has its turn once in `ROUND_S`, not all at once.
        """
        live = self._sessions.live
        if not self._round_of:
            self._round_of = list(live.values())
        for _ in range(min(len(self._round_of), 1 + int(len(live) * TICK_S / ROUND_S))):
            session = self._round_of.pop()
            if session.journal is None or session.client is None:
                continue
            quiet = session.inbound_qos2 is not None and session.inbound_qos2.rest()
            if quiet or session.subscriptions.by_filter:
                session.journal.save()

    async def stop(self) -> None:
        """Write what is left of every session; connections were closed before."""
        self._fence.unguard()
        sessions = self._sessions
        for session in list(sessions.live.values()):
            if session.client is not None:
                sessions.leave(session, with_will=True)
        try:
            async with asyncio.timeout(CLOSING_S):
                while sessions.saving:
                    self._save_positions()
                    await asyncio.sleep(0.01)
        except TimeoutError:
            log.warning("not all sessions were written", sessions=len(sessions.saving))
        self._store.stopped = True
        if self._ready.is_set():
            self._store.put_heartbeat(self._gateways.name, None)
