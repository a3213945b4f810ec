"""What the presence topic is told of an MQTT client: that it is connected, and how its connection ended."""

from __future__ import annotations

from typing import Final

from gateway.mqtt.session.client_port import ClientPort
from gateway.mqtt.session.session import Session
from gateway.presence.ledger import Present
from gateway.presence.presence import Presence
from gateway.presence.records import CLIENT, DRAIN, MQTT, SERVER, TAKEOVER, TIMEOUT, By, Ended, SessionKept
from protocols.mqtt.reasons import ReasonCode

_BY: Final[dict[int, By]] = {
    ReasonCode.KEEP_ALIVE_TIMEOUT: TIMEOUT,
    ReasonCode.SESSION_TAKEN_OVER: TAKEOVER,
    ReasonCode.SERVER_SHUTTING_DOWN: DRAIN,
    ReasonCode.USE_ANOTHER_SERVER: DRAIN,
}


def tell_online(presence: Presence, client: ClientPort, session: Session, address: str, now: int) -> None:
    """CONNACK was sent, `now` in epoch milliseconds.

    Where a session has records (ADR 0043) these decide which of two connections it has; else the presence topic does.
    """
    stored = session.kept or session.will is not None
    presence.online(
        _key(client),
        client,
        Present(
            client=client.client_id,
            principal=session.principal,
            protocol=MQTT,
            address=address,
            since=now,
            session=SessionKept(session.kept, session.expiry),
            yields=None if stored else client.taken_over,
        ),
    )


def tell_offline(presence: Presence, client: ClientPort, code: int | None, text: str) -> None:
    """The connection has ended: by a reason code of ours, with our words; by the client's; or its socket is gone."""
    if code is None:
        ended = Ended(CLIENT, text="the connection was lost")
    elif text:
        ended = Ended(_BY.get(code, SERVER), int(code), text)
    else:
        ended = Ended(CLIENT, int(code))
    presence.offline(_key(client), client, ended)


def _key(client: ClientPort) -> str:
    return f"{MQTT}/{client.client_id}"
