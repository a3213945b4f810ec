"""What logins cost the gateway, and what an unauthenticated client can do to others.

`logins`: CPU time of first logins, by kind; every one is a new MQTT connection of another client, which ends after
CONNACK. TLS sessions are not resumed. `siege`: a flood of wrong passwords from one address (127.0.0.2) while another
client logs in; then endless request heads and half of a TLS handshake on many connections, and the memory that they
take. Linux only.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import trustme
from pwdlib.hashers.argon2 import Argon2Hasher

from loadtest.beside import beside, in_turn
from loadtest.clients.crowd.logins import Files, Login, log_in, write_certificate
from loadtest.clients.mqtt_wire import connect_packet
from loadtest.clients.talk import MqttTalk
from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand, mebibytes
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


class Siege(NamedTuple):
    """Parameters.

    Attributes:
        attempts: wrong passwords.
        patience: limit of the valid login amid them, in seconds.
        sockets: connections that begin something and never end it.
        fields: header fields of an endless request.
        settle: seconds before a measurement, and for the gateway to let go.
    """

    attempts: int = 300
    patience: float = 30.0
    sockets: int = 200
    fields: int = 95
    settle: float = 15.0


STRANGER: Final = "127.0.0.2"
FIELD_BYTES: Final = 16_000
HALF_HELLO: Final = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"r" * 400
HASH_MIB: Final = 64  # of a wrong password that may still be checked


async def siege(stand: Stand, plan: Siege) -> None:
    """Log in amid a flood; hold many connections in mid-handshake."""
    (stand.directory / "passwords").write_text(f"ann:{Argon2Hasher().hash('right')}\n")
    settings = {
        "TRIVIUM_SECURITY__ALLOW_ANONYMOUS": "false",
        "TRIVIUM_SECURITY__PASSWORD_FILE": str(stand.directory / "passwords"),
    }
    async with stand.gateway(settings) as gateway:
        await _flood(stand, gateway, plan)
        head = b"GET /topics HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        head += b"".join(b"X-%d: %b\r\n" % (number, b"x" * FIELD_BYTES) for number in range(plan.fields))
        await _held(stand, gateway, plan, "endless request heads", protocol="http", said=head)
    write_certificate(trustme.CA(), stand.directory)
    pem = str(stand.directory / "server.pem")
    settings = {"TRIVIUM_SECURITY__TLS_CERT": pem, "TRIVIUM_SECURITY__TLS_KEY": pem}
    async with stand.gateway(settings, "tls") as gateway:
        for protocol in ("mqtt", "http"):
            await _held(stand, gateway, plan, f"half a TLS handshake, {protocol}", protocol=protocol, said=HALF_HELLO)


async def _flood(stand: Stand, gateway: GatewayProcess, plan: Siege) -> None:
    answers: collections.Counter[str] = collections.Counter()

    async def attempt(number: int) -> None:
        hello = connect_packet(f"siege-{number}", "ann", f"wrong-{number}")
        try:
            await MqttTalk.open(gateway.address("mqtt"), hello, local_addr=(STRANGER, 0))
        except OSError as error:
            answers[str(error)] += 1
        else:
            stand.problems.append("a wrong password was accepted")

    async with beside(*map(attempt, range(plan.attempts))):
        await asyncio.sleep(0.5)
        began = time.perf_counter()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(plan.patience):
                (await MqttTalk.open(gateway.address("mqtt"), connect_packet("ann", "ann", "right"))).drop()
        took = time.perf_counter() - began
    stand.check(took < plan.patience, f"the right password was not accepted within {plan.patience:g} s")
    stand.row(
        **{"": f"a right login beside {plan.attempts} wrong ones", "s": round(took, 2), "answers": str(dict(answers))}
    )


async def _held(stand: Stand, gateway: GatewayProcess, plan: Siege, what: str, *, protocol: str, said: bytes) -> None:
    """Say something unfinished on many connections, twice; the second time may not take more than the first."""
    sizes, writers = [mebibytes(gateway.pid)], list[asyncio.StreamWriter]()

    async def begin(_number: int) -> None:
        _, writer = await asyncio.open_connection(*gateway.address(protocol))
        writer.write(said)
        writers.append(writer)

    for _ in range(2):
        await in_turn(range(plan.sockets), begin)
        await asyncio.sleep(plan.settle / 5)
        sizes.append(mebibytes(gateway.pid))
        for one in writers:
            one.transport.abort()
        writers.clear()
        await asyncio.sleep(plan.settle)
    stand.row(**{"": what, "sockets": plan.sockets, "MiB before": sizes[0], "with them": sizes[1], "again": sizes[2]})
    stand.check(sizes[2] < 1.3 * sizes[1] + HASH_MIB, f"{what}: {sizes[1]} MiB, then {sizes[2]}")


SCENARIOS = (
    Scenario("logins", "measure the gateway's CPU time of each kind of login", Plan(), logins),
    Scenario("siege", "what an unauthenticated client can do to others", Siege(), siege),
)
