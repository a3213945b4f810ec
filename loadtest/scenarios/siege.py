"""`python -m loadtest.scenarios.siege`: what an unauthenticated client can do to others.

A flood of wrong passwords from one address (127.0.0.2) while another client logs in; then endless request heads. Prints
the seconds of the valid login, the answers to the flood, and the gateway's resident memory. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import tempfile
import time
from pathlib import Path
from typing import Final

from pwdlib.hashers.argon2 import Argon2Hasher

from loadtest.beside import beside
from loadtest.clients.mqtt_wire import connect_packet
from loadtest.gateway import GatewayProcess, process_resident

STRANGER: Final = "127.0.0.2"
PATIENCE_S: Final = 120.0
SETTLE_S: Final = 5.0
FIELD_BYTES: Final = 16_000
MEBIBYTE: Final = 1 << 20


async def log_in(address: tuple[str, int], password: str, local: str = "127.0.0.1") -> int:
    """Connect as `ann` with a password, and return CONNACK's reason code."""
    reader, writer = await asyncio.open_connection(*address, local_addr=(local, 0))
    try:
        writer.write(connect_packet(f"siege-{password}", "ann", password))
        return (await reader.readexactly(4))[3]
    finally:
        writer.close()


async def flood(address: tuple[str, int], attempts: int) -> tuple[float, dict[int, int]]:
    """Return the seconds of a valid login amid `attempts` wrong ones, and their answers so far."""
    answers: collections.Counter[int] = collections.Counter()

    async def attempt(number: int) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            answers[await log_in(address, f"wrong-{number}", STRANGER)] += 1

    async with beside(*map(attempt, range(attempts))):
        await asyncio.sleep(0.5)
        began = time.perf_counter()
        async with asyncio.timeout(PATIENCE_S):
            code = await log_in(address, "right")
        took = time.perf_counter() - began
        if code:
            raise SystemExit(f"the right password was answered 0x{code:02X}")
    return took, dict(answers)


async def heads(gateway: GatewayProcess, count: int, fields: int) -> list[int]:
    """Return resident MiB before, with and after `count` endless request heads."""
    sizes = [process_resident(gateway.pid)]
    writers = []
    for _ in range(count):
        _, writer = await asyncio.open_connection(*gateway.address("http"))
        writer.write(b"GET /topics HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        writer.writelines(b"X-%d: %b\r\n" % (number, b"x" * FIELD_BYTES) for number in range(fields))
        writers.append(writer)
    await asyncio.sleep(SETTLE_S)
    sizes.append(process_resident(gateway.pid))
    for writer in writers:
        writer.close()
    await asyncio.sleep(SETTLE_S)
    sizes.append(process_resident(gateway.pid))
    return [size // MEBIBYTE for size in sizes]


async def main() -> None:
    """Run both, on a new gateway."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", help="Kafka, HOST:PORT; default: the embedded one")
    parser.add_argument("--attempts", type=int, default=300)
    parser.add_argument("--heads", type=int, default=200)
    parser.add_argument("--fields", type=int, default=95)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        passwords = path / "passwords"
        passwords.write_text(f"ann:{Argon2Hasher().hash('right')}\n")
        settings = {"TRIVIUM_SECURITY__ALLOW_ANONYMOUS": "false", "TRIVIUM_SECURITY__PASSWORD_FILE": str(passwords)}
        gateway = GatewayProcess(path, given.bootstrap, environment=settings)
        await gateway.start()
        try:
            took, answers = await flood(gateway.address("mqtt"), given.attempts)
            print(f"a valid login amid {given.attempts} wrong ones: {took:.2f} s; their answers so far: {answers}")
            before, during, after = await heads(gateway, given.heads, given.fields)
            print(f"{given.heads} endless heads: {before} MiB resident before, {during} with them, {after} after")
        finally:
            await gateway.stop()


if __name__ == "__main__":
    asyncio.run(main())
