"""A change of subscriptions that was not stored has no acknowledgement, even if the session is left only later."""

from __future__ import annotations

import types
from typing import Any

from gateway.kafka.contracts import Refused
from gateway.mqtt.connection.subscribing import unsubscribe
from mapping.outcomes import Outcome
from protocols.mqtt.packets import Unsubscribe
from protocols.mqtt.reasons import ReasonCode


async def test_after_a_freeze_the_session_is_left_later() -> None:
    ends: list[tuple[ReasonCode, str]] = []
    answers: list[Any] = []

    async def save(session: Any) -> None:
        raise Refused(Outcome.BUSY, "no answer")

    grant = types.SimpleNamespace(names=types.SimpleNamespace(filter=str))
    # while the fence is shut, `disconnect` does not detach the session (`Client._leave`)
    client: Any = types.SimpleNamespace(grant=grant, disconnect=lambda *end: ends.append(end))
    session: Any = types.SimpleNamespace(client=client, kept=True)
    connection: Any = types.SimpleNamespace(send_unsuback=lambda *answer: answers.append(answer))
    services: Any = types.SimpleNamespace(sessions=types.SimpleNamespace(save=save))
    await unsubscribe(client, session, connection, services, Unsubscribe(1, ()))
    assert ends == [(ReasonCode.SERVER_BUSY, "no answer")]
    assert not answers
