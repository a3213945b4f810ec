"""Clients that use one new topic after the other, and report each result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import aiohttp

from loadtest.clients.amqp_wire import ATTACH, DETACH, TRUE, ZERO, attach_receiver, attach_sender, frame, performative
from loadtest.clients.mqtt_wire import connect_packet, publish_packet
from loadtest.clients.talk import PUBACK, AmqpTalk, MqttTalk, code_of
from loadtest.gateway import GatewayProcess

PASSWORD: Final = "secret"
CLOSE: Final = frame(performative(DETACH, ZERO, TRUE))
Answered = Callable[[str], bool]
"""Called with each result: "" if a topic could be used, else the error; returns False to stop."""
Name = Callable[[], str]


async def _by_mqtt(gateway: GatewayProcess, user: str, name: Name, answered: Answered) -> None:
    """Publish at QoS 1 to new first levels."""
    talk = await MqttTalk.open(gateway.address("mqtt"), connect_packet(name(), user, PASSWORD))
    more = True
    while more:
        (body,) = await talk.ask([publish_packet(f"{name()}/x", b"x", 1, 1)], PUBACK)
        more = answered(f"0x{code:02x}" if (code := code_of(body)) else "")
    talk.drop()


async def _by_http(gateway: GatewayProcess, user: str, name: Name, answered: Answered) -> None:
    """Produce one record to each topic."""
    headers = {"Content-Type": "application/vnd.kafka.json.v2+json"}
    base, login = f"http://{gateway.addresses['http']}", aiohttp.BasicAuth(user, PASSWORD)
    async with aiohttp.ClientSession(base, auth=login, headers=headers) as http:
        more = True
        while more:
            async with http.post(f"/topics/{name()}", json={"records": [{"value": 1}]}) as answer:
                more = answered("" if answer.status == 200 else str(answer.status))


def _by_amqp(attach: Callable[[str, str, str], bytes], terminus: int) -> Callable[..., Awaitable[None]]:
    """Return a client that attaches one link after the other; a refused one has no `terminus`, and is detached."""

    async def make(gateway: GatewayProcess, user: str, name: Name, answered: Answered) -> None:
        talk = await AmqpTalk.open(gateway.address("amqp"), name(), user, PASSWORD)
        more = True
        while more:
            topic = name()
            (fields,) = await talk.ask([attach(topic, "me", topic)], ATTACH)
            refused = fields[terminus] is None
            (said,) = await talk.take(DETACH) if refused else await talk.ask([CLOSE], DETACH)
            if refused:
                talk.writer.write(CLOSE)
            errors = [field[1][0].decode() for field in said if isinstance(field, tuple)]
            more = answered(errors[0] if errors else "")
        talk.drop()

    return make


MAKERS: Final[Mapping[str, Callable[..., Awaitable[None]]]] = {
    "mqtt": _by_mqtt,
    "amqp sender": _by_amqp(attach_sender, 6),
    "amqp receiver": _by_amqp(attach_receiver, 5),
    "http": _by_http,
}
