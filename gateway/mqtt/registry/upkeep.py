"""Background work for sessions: positions, heartbeats, deadlines, takeover from dead gateways; and their shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from gateway.kafka.contracts import Refused
from gateway.mqtt.registry.crash_recovery import CrashRecovery
from gateway.mqtt.registry.heartbeats import FROZEN_S, HEARTBEAT_S
from gateway.mqtt.registry.session_registry import TOPIC, Sessions
from gateway.mqtt.registry.takeover import find_abandoned
from gateway.mqtt.session.lifecycle import Event
from gateway.mqtt.session.session import Session
from gateway.runtime.fence import Fence
from gateway.runtime.spawn import keep_running, run_all

log = structlog.get_logger(__name__)

TICK_S: Final = 1.0  # interval for writing positions
ROUND_S: Final = 60.0  # the same for sessions without deliveries
CLOSING_S: Final = 3.0


class Upkeep:
    """The background work for the sessions of a process."""

    def __init__(
        self,
        sessions: Sessions,
        recovery: CrashRecovery,  # finds QoS 2 messages that a dead gateway stored
        ready: asyncio.Event,  # set here when the sessions of this gateway's former process are taken over
        read_to_end: Callable[[], Awaitable[None]],  # waits until the table of sessions is read to its end
        fence: Fence,  # shuts after a freeze; opened here
        *,
        # called when a gateway may be dead, after its sessions are taken over
        owners_died: Callable[[], None] = lambda: None,
    ) -> None:
        self._sessions = sessions
        self._gateways = sessions.gateways
        self._store = sessions.parts.store
        self._touched = sessions.parts.deliveries.touched
        self._recovery = recovery
        self._ready = ready
        self._read_to_end = read_to_end
        self._fence = fence
        self._owners_died = owners_died
        self._served = False  # `ready` was set before the freeze
        fence.listen(self._frozen)
        self._round_of: list[Session] = []

    async def run(self, loaded: asyncio.Event) -> None:
        """Run until the gateway stops, as soon as all session records are `loaded`."""
        await loaded.wait()
        self._gateways.loaded()
        self._fence.guard(FROZEN_S, TOPIC)
        parts = (self._send_heartbeats, self._tick, self._take_over, self._catch_up)
        # Each is restarted separately: without heartbeats other gateways would take our sessions over.
        await run_all(*(keep_running(part, "sessions") for part in parts))

    async def _tick(self) -> None:
        await self._ready.wait()
        while True:
            await self._wait_for_fence()
            self._round()
            self._save_positions()
            self._sessions.keep_deadlines()
            await asyncio.sleep(TICK_S)

    async def _send_heartbeats(self) -> None:
        """Write heartbeats, independently of all other work."""
        while not self._store.stopped:
            self._store.put_heartbeat(self._gateways.name, self._gateways.heartbeat())
            await asyncio.sleep(HEARTBEAT_S)

    async def _take_over(self) -> None:
        """Take over the sessions of our former process, and then those of silent gateways."""
        if not self._ready.is_set():
            await self._take_over_from(self._gateways.is_predecessor)
            self._owners_died()
            self._ready.set()
        while True:
            await self._wait_for_fence()
            if self._gateways.mark_dead():
                await self._take_over_from(self._gateways.takes_over)
                self._owners_died()
            await asyncio.sleep(TICK_S)

    async def _wait_for_fence(self) -> None:
        """Wait until the fence is open; check for a freeze first, which may have happened after our timer fired."""
        self._fence.now()
        while not self._fence.is_open:
            await self._fence.wait_open()
            self._fence.now()

    def _frozen(self) -> None:
        """Suspend sessions after a freeze: other gateways may have declared this one dead, or be dead themselves."""
        self._served |= self._ready.is_set()
        self._ready.clear()
        log.warning("this process was frozen for seconds; sessions wait until newer records are read")

    async def _catch_up(self) -> None:
        """After a freeze, read the table to its end before sessions are served or gateways declared dead.

        Our heartbeat is stored first: a gateway that claims a session later has read it before its own claim.
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

    async def _take_over_from(self, takes_over: Callable[[str], bool]) -> None:
        """Take over the sessions of dead owners; their connections count as ended now."""
        sessions = self._sessions
        abandoned = await find_abandoned(self._store, sessions.live, self._gateways, takes_over, self._recovery)
        for client_id, record in abandoned:
            sessions.take_over(client_id, record, Event.OWNER_DIED)

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
        """Write the positions of sessions without deliveries, and drop the start offsets of idle ones.

        Each session has its turn once in `ROUND_S`, spread over that time.
        """
        live = self._sessions.live
        if not self._round_of:
            self._round_of = list(live.values())
        for _ in range(min(len(self._round_of), 1 + int(len(live) * TICK_S / ROUND_S))):
            session = self._round_of.pop()
            if session.journal is None or session.client is None:
                continue
            quiet = session.inbound_qos2 is not None and session.inbound_qos2.drop_idle_offsets()
            if quiet or session.subscriptions.by_filter:
                session.journal.save()

    async def stop(self) -> None:
        """Write the records of all sessions; connections were closed before."""
        self._fence.stop_guarding()
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
