"""Heartbeats of the gateways that share this Kafka, to find out which of them are dead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from gateway.mqtt.state.records import GatewayRecord
from gateway.runtime.identity import GatewayIdentity

log = structlog.get_logger(__name__)

HEARTBEAT_S: Final = 5.0  # interval between heartbeats
SILENT_S: Final = 15.0  # a gateway is dead after three missing heartbeats
FROZEN_S: Final = SILENT_S - 2 * HEARTBEAT_S  # a longer freeze may have let others declare this gateway dead


class Gateways:
    """This gateway's heartbeat, and those received from the others."""

    def __init__(self, identity: GatewayIdentity, clock: Callable[[], float], wall_clock: Callable[[], int]) -> None:
        """`clock` returns monotonic seconds, `wall_clock` epoch milliseconds."""
        self.name = identity.name
        self.owner = f"{identity.name}/{identity.incarnation}"  # written into this process's sessions
        self.changed = True  # a gateway may have stopped since the last `mark_dead`
        self._incarnation = identity.incarnation
        self._clock = clock
        self._wall_clock = wall_clock
        self._last_beats: dict[str, tuple[str, float]] = {}  # gateway id -> incarnation, time of receipt
        self._started = clock()
        self._loaded = False

    def heartbeat(self) -> GatewayRecord:
        """Return this gateway's heartbeat."""
        return GatewayRecord(self._incarnation, self._wall_clock())

    def loaded(self) -> None:
        """Note that the topic is read: heartbeats from now on are new, and a live gateway sends one in `SILENT_S`."""
        self._loaded = True
        self._started = self._clock()

    def apply(self, name: str, beat: GatewayRecord | None) -> None:
        """Note a heartbeat of another gateway; None means that it has stopped."""
        if name == self.name:
            return  # from our former process
        if beat is None:
            self._last_beats.pop(name, None)
            self.changed = True
        elif self._loaded or self._wall_clock() - beat.at < SILENT_S * 1000:
            self._last_beats[name] = (beat.incarnation, self._clock())

    def is_alive(self, owner: str) -> bool:
        """Whether the gateway process named `owner` is alive."""
        if owner == self.owner:
            return True
        name, _, incarnation = owner.rpartition("/")
        if name == self.name:
            return False  # we are its successor
        beat = self._last_beats.get(name)
        return beat is not None and beat[0] == incarnation and self._clock() - beat[1] < SILENT_S

    @property
    def is_alone(self) -> bool:
        """Whether no other gateway is known."""
        return not self._last_beats

    def is_predecessor(self, owner: str) -> bool:
        """Whether `owner` is a former process of this gateway, before a restart."""
        return owner != self.owner and owner.rpartition("/")[0] == self.name

    def takes_over(self, owner: str) -> bool:
        """Whether to take over from `owner`: our former process, or a dead gateway if ours is the lowest live name."""
        if self.is_alive(owner):
            return False
        if self.is_predecessor(owner):
            return True
        now = self._clock()
        others = {name for name, (_, when) in self._last_beats.items() if now - when < SILENT_S}
        # If the dead gateway was restarted, its new process takes over.
        return owner.rpartition("/")[0] not in others and all(self.name <= name for name in others)

    def is_dead(self, owner: str) -> bool:
        """Whether a process is dead; for other gateways known only after each live one must have sent a heartbeat."""
        long_enough = self._loaded and self._clock() - self._started >= SILENT_S
        return self.is_predecessor(owner) or (long_enough and not self.is_alive(owner))

    def mark_dead(self) -> bool:
        """Forget silent gateways; return whether there may be sessions without an owner."""
        now = self._clock()
        for name, (_, when) in list(self._last_beats.items()):
            if now - when > SILENT_S:
                del self._last_beats[name]
                self.changed = True
                log.warning("no more heartbeats from a gateway", gateway=name)
        if not self.changed or now - self._started < SILENT_S:
            return False
        self.changed = False
        return True
