"""Which gateways share this Kafka, and which of them are dead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from gateway.identity import GatewayIdentity
from gateway.mqtt.state.records import GatewayRecord

log = structlog.get_logger(__name__)

HEARTBEAT_S: Final = 5.0  # between two heartbeats
SILENT_S: Final = 15.0  # three are missing
FROZEN_S: Final = SILENT_S - 2 * HEARTBEAT_S  # who has not run for longer may have been called dead


class Gateways:
    """Heartbeats: ours is written every `HEARTBEAT_S`, those of the others are noted as they come."""

    def __init__(self, identity: GatewayIdentity, clock: Callable[[], float], wall_clock: Callable[[], int]) -> None:
        """No other gateway is known before `apply`. `clock`: monotonic seconds; `wall_clock`: epoch milliseconds."""
        self.name = identity.name
        self.owner = f"{identity.name}/{identity.incarnation}"  # what this process writes into the sessions that it has
        self.changed = True  # since the last `mark_dead` one may have gone
        self._incarnation = identity.incarnation
        self._clock = clock
        self._wall_clock = wall_clock
        self._last_beats: dict[str, tuple[str, float]] = {}  # gateway id -> incarnation, when
        self._began = clock()
        self._loaded = False

    def heartbeat(self) -> GatewayRecord:
        """Our heartbeat."""
        return GatewayRecord(self._incarnation, self._wall_clock())

    def loaded(self) -> None:
        """From now on heartbeats are new when they come; and who is alive will send one within `SILENT_S`."""
        self._loaded = True
        self._began = self._clock()

    def apply(self, name: str, beat: GatewayRecord | None) -> None:
        """A heartbeat of another gateway; None: it has stopped."""
        if name == self.name:
            return  # of our predecessor
        if beat is None:
            self._last_beats.pop(name, None)
            self.changed = True
        elif self._loaded or self._wall_clock() - beat.at < SILENT_S * 1000:
            self._last_beats[name] = (beat.incarnation, self._clock())

    def is_alive(self, owner: str) -> bool:
        """Whether the gateway process that wrote `owner` into a session lives."""
        if owner == self.owner:
            return True
        name, _, incarnation = owner.rpartition("/")
        if name == self.name:
            return False  # we are its successor
        beat = self._last_beats.get(name)
        return beat is not None and beat[0] == incarnation and self._clock() - beat[1] < SILENT_S

    @property
    def is_alone(self) -> bool:
        """Whether no other gateway has sent a heartbeat."""
        return not self._last_beats

    def is_predecessor(self, owner: str) -> bool:
        """Whether `owner` was this gateway before it was started again."""
        return owner != self.owner and owner.rpartition("/")[0] == self.name

    def takes_over(self, owner: str) -> bool:
        """Whether we care for what a gateway left: our predecessor's, and as the first of those alive any other's."""
        if self.is_alive(owner):
            return False
        if self.is_predecessor(owner):
            return True
        now = self._clock()
        others = {name for name, (_, when) in self._last_beats.items() if now - when < SILENT_S}
        return owner.rpartition("/")[0] not in others and all(self.name <= name for name in others)  # or its successor

    def is_dead(self, owner: str) -> bool:
        """Whether a process is gone; of others than our former one not before everybody was heard of who lives."""
        long_enough = self._loaded and self._clock() - self._began >= SILENT_S
        return self.is_predecessor(owner) or (long_enough and not self.is_alive(owner))

    def mark_dead(self) -> bool:
        """Forget who fell silent; whether there may be sessions that nobody has."""
        now = self._clock()
        for name, (_, when) in list(self._last_beats.items()):
            if now - when > SILENT_S:
                del self._last_beats[name]
                self.changed = True
                log.warning("a gateway fell silent", gateway=name)
        if not self.changed or now - self._began < SILENT_S:
            return False
        self.changed = False
        return True
