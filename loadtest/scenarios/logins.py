"""What first logins cost the gateway, by kind.

Every one is a new MQTT connection of another client, which ends after CONNACK. TLS sessions are not resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from loadtest.beside import in_turn
from loadtest.clients.crowd.logins import Files, Login, log_in
from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.gateway import GatewayProcess, process_cpu

FLEET: Final = 100_000


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        logins: of each fast kind.
        slow: logins with Argon2id.
    """

    logins: int = 10_000
    slow: int = 200


async def logins(stand: Stand, plan: Plan) -> None:
    """Measure each kind of login, with and without TLS."""
    files = Files(stand.directory, plan.logins, plan.slow)

    async def measure(gateway: GatewayProcess, what: str, make: Callable[[int], Login], count: int) -> None:
        before, began = process_cpu(gateway.pid), time.perf_counter()
        await in_turn(range(count), lambda number: log_in(gateway.address("mqtt"), make(number)))
        spent = process_cpu(gateway.pid) - before
        stand.row(**{
            "": what, "number": count, "CPU s": spent, "CPU ms each": spent / count * 1e3,
            f"{FLEET:,}: s": spent / count * FLEET, "took s": time.perf_counter() - began,
        })  # fmt: skip

    async with stand.gateway(files.settings(tls=False), "plain") as gateway:
        await measure(gateway, "anonymous", files.anonymous, plan.logins)
        await measure(gateway, "Argon2id, 64 MiB", files.argon2, plan.slow)
        await measure(gateway, "device secret", files.device, plan.logins)
        await measure(gateway, "SCRAM-SHA-256", files.scram, plan.logins)
        await measure(gateway, "token, ES256", files.bearer, plan.logins)
    async with stand.gateway(files.settings(tls=True), "tls") as gateway:
        await measure(gateway, "device secret, TLS", files.device_with_tls, plan.logins)
        await measure(gateway, "certificate, TLS", files.certificate, plan.logins)


SCENARIOS = (Scenario("logins", "measure the gateway's CPU time of each kind of login", Plan(), logins),)
