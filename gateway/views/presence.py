"""What the protocols report of connected clients (ADR 0083). The reports' topic is an optional part."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Annotated, Final, Literal, Protocol

import msgspec

MQTT: Final = "mqtt"  # NAME is the client id
AMQP: Final = "amqp"  # NAME is the container-id
HTTP: Final = "http"  # NAME is `consumer/GROUP/INSTANCE`, or `stream/PRINCIPAL` for event streams and WebSockets

By = Literal["client", "server", "timeout", "takeover", "death", "drain"]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]  # exact in JSON


class SessionKept(msgspec.Struct, frozen=True):
    """Whether an MQTT client's session outlives the connection."""

    kept: bool = False
    expiry: Count = 0  # Session Expiry Interval in seconds


class Ended(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reason why a client is offline."""

    by: By  # the side that ended the connection, or the cause; `death`: its gateway died
    code: int | str | None = None  # MQTT reason code or AMQP error condition; None if there was none
    text: str = ""


class Present(msgspec.Struct, frozen=True):
    """A connection of this gateway."""

    client: str
    principal: str
    protocol: str
    address: str
    since: int  # epoch milliseconds
    session: SessionKept = SessionKept()
    # closes the connection if the key's client connects elsewhere; None: a key may have several connections, or
    # session records decide (ADR 0074)
    on_takeover: Callable[[], None] | None = None


class PresenceReports(Protocol):
    """Takes the reports, and follows those of other gateways."""

    topic: str  # in Kafka

    def online(self, key: str, connection: Hashable, present: Present) -> None:
        """Report a client as connected; `key` is `PROTOCOL/NAME`."""

    def offline(self, key: str, connection: Hashable, ended: Ended) -> None:
        """Report the end of a connection; does nothing if another gateway's record has caused it."""

    def principal_elsewhere(self, key: str) -> str | None:
        """Return the principal connected under a key at another live gateway, or None."""
        ...

    def report_dead(self) -> None:
        """Report the clients of gateways that have died as offline."""

    async def run(self) -> None:
        """Write and clean up until cancelled."""

    async def stop(self) -> None:
        """Write the remaining states; connections were closed before."""

    def statistics(self) -> msgspec.Struct:
        """Return the counts for the metrics."""
        ...
