"""Reports to the presence topic that an MQTT client is connected, and how its connection ended."""

from __future__ import annotations

from typing import Final

from gateway.mqtt.session.client_port import ClientPort
from gateway.mqtt.session.session import Session
from gateway.views.presence import MQTT, By, Ended, PresenceReports, Present, SessionKept
from protocols.mqtt.reasons import ReasonCode

_BY: Final[dict[int, By]] = {
    ReasonCode.KEEP_ALIVE_TIMEOUT: "timeout",
    ReasonCode.SESSION_TAKEN_OVER: "takeover",
    ReasonCode.SERVER_SHUTTING_DOWN: "drain",
    ReasonCode.USE_ANOTHER_SERVER: "drain",
}


def report_online(presence: PresenceReports, client: ClientPort, session: Session, address: str, now: int) -> None:
    """Report a client as online after CONNACK; `now` is in epoch milliseconds.

    If the session has records (ADR 0074), they decide which of two connections keeps it; otherwise the presence topic.
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
            on_takeover=None if stored else client.taken_over,
        ),
    )


def report_offline(presence: PresenceReports, client: ClientPort, code: int | None, text: str) -> None:
    """Report the end of a connection; `code` is the gateway's with `text`, the client's without; None: it was lost."""
    if code is None:
        ended = Ended("client", text="the connection was lost")
    elif text:
        ended = Ended(_BY.get(code, "server"), int(code), text)
    else:
        ended = Ended("client", int(code))
    presence.offline(_key(client), client, ended)


def _key(client: ClientPort) -> str:
    return f"{MQTT}/{client.client_id}"
